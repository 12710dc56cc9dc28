"""CPU time of the host for a step with prefill chunks on a GPU: python -m benchmarks.steps.prefill_steps

A model of 32 layers, so narrow that its numbers cost nothing, runs on the CPU as it does on a GPU: each layer as nine
launches, those of Triton through its own launcher up to the call of CUDA, the products as the memory that they write.
Left out are CUDA's calls: ``LAUNCH_S`` is an assumption for each launch, ``PRODUCT_S`` for what a product takes besides
(the choice of a kernel), ``REPLAY_S`` for the replay of a whole step. The device's time is that of LLaVA-1.5-7B on an
H200 (``benchmarks.gpu.predictions``).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu import predictions
from benchmarks.gpu.model import folder
from tools.kernel_table import FakeDriver
from trinity.costs.model_config import read_model_shape
from trinity.costs.step_cost import Roofline
from trinity.memory.block_memory import BlockMemory
from trinity.stages.attention.gpu.triton import TritonAttention
from trinity.stages.attention.interface import PAGED_ATTENTION, AttentionParams, register_attention
from trinity.stages.batch import Chunk, Decodes
from trinity.stages.gpu.prefill_graphs import PrefillGraphs
from trinity.stages.kernels.decoder_layers import FusedDecoderLayer, TwoPassLayer
from trinity.stages.kernels.gpu import device_layers
from trinity.stages.kernels.swaps import put_before
from trinity.stages.language import LanguageStage, StepRows
from trinity.stages.models import LoadedModel
from trinity.stages.models.checks import set_attention
from trinity.stages.models.registry import find_adapter

STEPS = ((0, 64), (0, 128), (0, 256), (0, 512), (0, 1024), (32, 128))  # decodes, tokens of a chunk
CONTEXT, BLOCK_ROWS, BLOCKS = 1024, 16, 300
LAYERS, WIDTH, PRODUCTS = 32, 16, 4 * 32 + 1
LAUNCH_S, PRODUCT_S, REPLAY_S = (2e-6, 4e-6), (3e-6, 5e-6), (0.05e-3, 0.2e-3)


class HostTimes(NamedTuple):
    """Medians of thread CPU time (s) to launch a step eagerly and by its recording (None: it has none)."""

    eager_s: float
    launches: int
    recorded_s: float | None


class UnlaunchedKernel:
    """What Triton has compiled, as far as its launcher asks."""

    function = packed_metadata = None
    launches = 0

    def launch_metadata(self, *given: Any) -> None:
        """Return nothing, as where no hook asks."""

    def run(self, *given: Any) -> None:
        UnlaunchedKernel.launches += 1


def _compile_nothing(kernel: Any, key: str, signature: Any, device: int, *given: Any) -> UnlaunchedKernel:
    made = kernel.device_caches[device][0][key] = UnlaunchedKernel()
    return made


@contextmanager
def no_device() -> Iterator[None]:
    """Run Triton's launches up to CUDA's, and of products what is around them."""
    driver.set_active(FakeDriver(90))
    with (
        patch.object(JITFunction, "_do_compile", _compile_nothing),
        patch.object(device_layers, "linear", lambda rows, weight, bias: rows.new_empty((len(rows), len(weight)))),
        torch.inference_mode(),
    ):
        yield


class ReadyStep:
    """In place of CUDA graphs: takes a step's inputs, and has its logits."""

    def call(self, key: Any, run: object, inputs: Sequence[Tensor], kind: str | None = None) -> Sequence[Tensor]:
        inputs[0].clone().copy_(inputs[0])
        return [torch.empty((key[1].sequences, 8))]


def make_model() -> LoadedModel:
    """Make a narrow language model; its layers run as ``fuse_device_layers`` has them run on a GPU."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 32, "head_dim": WIDTH}
    config = LlamaConfig(
        **sizes, vocab_size=64, num_key_value_heads=32, num_hidden_layers=LAYERS, max_position_embeddings=4096
    )
    adapter, _ = find_adapter(config)
    register_attention()
    part: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    set_attention(part, adapter, PAGED_ATTENTION)
    with patch.object(device_layers, "_check_parts"), patch.object(device_layers.DeviceLayerPlan, "_check_mlp"):
        for number, layer in enumerate(part.model.layers):
            kind: Any = type(layer)
            if number == LAYERS - 1:
                kind = layer.__class__ = put_before(TwoPassLayer, kind)
            plan = device_layers.DeviceLayerPlan(layer, WIDTH)
            plan.params = AttentionParams(number, WIDTH**-0.5)
            layer.plan, layer.__class__ = plan, put_before(FusedDecoderLayer, kind, "unfused_forward")
    device_layers._link_layers(list(part.model.layers))
    return LoadedModel(Path(), "PD", config, adapter, torch.bfloat16, torch.device("cpu"), "", language=part)


def make_step(decodes: int, tokens: int) -> StepRows:
    """A chunk behind half of the context, beside decodes of the whole."""
    lengths = np.full(decodes, CONTEXT)
    tables = np.tile(np.arange(CONTEXT // BLOCK_ROWS), (decodes, 1))
    own = Decodes(lengths % 7, lengths - 1, lengths, tables, np.arange(decodes))
    at = np.arange(CONTEXT // 2, CONTEXT // 2 + tokens)
    chunk = Chunk(at % 64, at, CONTEXT // 2, np.arange(1 + (CONTEXT // 2 + tokens) // BLOCK_ROWS))
    return StepRows(own, [chunk], [], np.empty(0, dtype=np.int64), frozenset())


def measure_step(stage: LanguageStage, rows: StepRows, graphs: PrefillGraphs, repeats: int) -> HostTimes:
    """Measure a step; ways take turns."""
    spent: dict[bool, list[float]] = {True: [], False: []}
    launched: dict[bool, int] = {}
    for number in range(2 * (repeats + 2)):
        recorded = bool(number % 2)
        stage._prefill_graphs = graphs if recorded else None
        if recorded and graphs._find_size(len(rows.decodes.ids), rows.chunks) is None:
            continue
        UnlaunchedKernel.launches, began = 0, time.thread_time()
        stage._logits(rows, 0)
        spent[recorded].append(time.thread_time() - began)
        launched[recorded] = UnlaunchedKernel.launches
    by_graph = median(spent[True][2:]) if spent[True] else None
    return HostTimes(median(spent[False][2:]), launched[False] + PRODUCTS, by_graph)


def measure_steps(repeats: int = 15) -> dict[tuple[int, int], HostTimes]:
    """Measure ``STEPS``."""
    with no_device():
        model = make_model()
        memory = BlockMemory(model.kv_shape(BLOCK_ROWS), BLOCKS)
        backend = TritonAttention(processors=132, shared_bytes=227 << 10)
        stage = LanguageStage(model, memory, None, "PD", backend=backend)
        graphs = PrefillGraphs(model, memory.tensor, backend, cast(Any, ReadyStep()), stage._tokens)
        return {size: measure_step(stage, make_step(*size), graphs, repeats) for size in STEPS}


def table(found: dict[tuple[int, int], HostTimes]) -> list[str]:
    """Lines of Markdown: host beside device."""
    with tempfile.TemporaryDirectory() as scratch:
        shape = read_model_shape(folder(Path(scratch), tiny=False))
    limit = Roofline(model=shape, device=predictions.H200)
    lines = [
        "| step | limit of the device ms | eager host ms | launches | with CUDA's calls ms | by recording ms |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for (decodes, tokens), each in found.items():
        device = limit.at(decodes, tokens, 0, context=CONTEXT)
        low, high = ((each.eager_s + each.launches * LAUNCH_S[at] + PRODUCTS * PRODUCT_S[at]) * 1e3 for at in (0, 1))
        recorded = "eager" if each.recorded_s is None else f"{each.recorded_s * 1e3:.2f}"
        what = f"{decodes} decodes, {tokens:,} tokens" if decodes else f"{tokens:,} tokens"
        lines.append(
            f"| {what} | {device * 1e3:.2f} | {each.eager_s * 1e3:.2f} | {each.launches} "
            f"| {low:.1f} to {high:.1f} | {recorded} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(table(measure_steps())))
