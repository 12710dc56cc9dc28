"""Compiles the kernels of device layers for GPUs that need not be there, and counts the variants that serving asks for.

Run by test_device_compile.py in a process of its own, without Triton's interpreter. Prints lines of words: ``variants``
asked for as the layers are swapped and in steps after that; for each variant and capability its kernel, registers,
spilled bytes and shared memory.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from transformers import LlamaConfig, LlamaModel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from support.device_layers import KERNELS, launches_told
from trinity.stages.attention.gpu.triton import TritonAttention
from trinity.stages.attention.interface import PAGED_ATTENTION, PagedBatch, register_attention
from trinity.stages.batch import Chunk, Decodes, RaggedBatch, build_batch
from trinity.stages.gpu.decode_state import make_static_rows
from trinity.stages.kernels import decoder_layers
from trinity.stages.kernels.decoder_layers import skip_unsampled_rows
from trinity.stages.kernels.gpu import device_layers, triton_elementwise

OWN = KERNELS[triton_elementwise]
HEIGHT, STEPS = 16, 300
Variant = tuple[Any, ...]


class Variants:
    """Launches by what Triton would compile anew for: types, alignments and sizes of arguments, constants, options."""

    def __init__(self, capability: int = 90) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.backend = make_backend(self.target)
        self.found: dict[str, Variant] = {}

    def note(self, kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if kernel.fn.__name__ not in OWN:
            return
        bind = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        bound, specialization, options = bind(*given, **named)
        self.found.setdefault(
            f"{kernel.fn.__name__} {specialization} {options}", (kernel, bound, specialization, named)
        )

    def compile_all(self, capability: int) -> Iterator[tuple[str, Any]]:
        target = GPUTarget("cuda", capability, 32)
        backend = make_backend(target)
        for kernel, bound, specialization, named in self.found.values():
            options = {name: value for name, value in named.items() if name not in bound}
            packed, signature, constants, attributes = kernel._pack_args(
                backend, options, bound, specialization, options
            )
            source = ASTSource(kernel, signature, constants, attributes)
            yield kernel.fn.__name__, triton.compile(source, target=target, options=packed.__dict__)


def layered_model(layers: int = 2) -> Any:
    """As wide as LLaVA-1.5-7B's, in bfloat16, with an inner width that costs less."""
    register_attention()
    make_config: Any = LlamaConfig
    config = make_config(
        **{"hidden_size": 4096, "intermediate_size": 1376, "num_hidden_layers": layers, "vocab_size": 64},
        **{"num_attention_heads": 32, "num_key_value_heads": 32, "pad_token_id": 0},
    )
    with torch.device("meta"):
        model: Any = LlamaModel(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu").eval().requires_grad_(False)
    model.set_attn_implementation(PAGED_ATTENTION)
    assert skip_unsampled_rows(model, 0)
    return model


def make_batches(rng: random.Random) -> Iterator[RaggedBatch]:
    """Prefill chunks and decodes of all sizes, eagerly; and decodes as graphs have them, at every size."""
    for _ in range(STEPS):
        count = rng.choice([0, 0, 1, 3, 7, 16, 33])
        lengths = np.sort(np.array([rng.randint(1, 60) for _ in range(count)], dtype=np.int64))
        tables = np.zeros((count, 4), dtype=np.int64)
        decodes = Decodes(lengths, lengths, lengths, tables)
        ids = [np.arange(rng.randint(1, 50)) for _ in range(rng.choice([0, 1, 1, 2]) if count else 1)]
        chunks = [Chunk(each, each, 0, np.zeros(4, np.int64), needs_logits=rng.random() < 0.5) for each in ids]
        yield build_batch(decodes, chunks, HEIGHT, 1, torch.device("cpu"))
    for size in (1, 2, 3, 4, 8, 12, 16):
        columns = torch.zeros((6, size), dtype=torch.long)
        rows = make_static_rows(columns[2], columns[3], torch.zeros((size, 4), dtype=torch.long), columns[4], HEIGHT)
        yield RaggedBatch(columns[0], columns[1][None], rows, None)


@torch.inference_mode()
def count_variants(found: Variants) -> tuple[int, int]:
    """Return the numbers of variants after load, and of those that serving adds."""
    modules: list[Any] = [decoder_layers, device_layers]
    for module in modules:
        module.is_close = lambda *given: True  # nothing is computed
    modules[1].linear = lambda rows, weight, bias: rows.new_empty((len(rows), len(weight)))
    with launches_told(found.note):
        model = layered_model()
        assert device_layers.fuse_device_layers(model) == 2
        loaded = len(found.found)
        for layers in (3, 7):
            kv = torch.zeros((1, layers, 2, 32, HEIGHT, 128), dtype=torch.bfloat16)
            for batch in make_batches(random.Random(layers)):
                embeds = torch.empty((1, len(batch.ids), 4096), dtype=torch.bfloat16)
                paged = PagedBatch(batch.rows, kv, TritonAttention(132), batch.sampled, batch.last)
                try:
                    model(inputs_embeds=embeds, position_ids=batch.position_ids, use_cache=False, trinity_batch=paged)
                except Exception as error:
                    if type(error).__name__ != "StopAfterWrite":
                        raise
    return loaded, len(found.found) - loaded


def read_usage(done: Any) -> tuple[int, int]:
    """Return registers and spilled bytes of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said.stdout)
    assert match is not None, said.stdout
    return int(match[1]), int(match[2]) + int(match[3])


def main(capabilities: list[int]) -> None:
    found = Variants()
    print("variants", *count_variants(found))
    for capability in capabilities:
        for name, done in found.compile_all(capability):
            print(name, capability, *read_usage(done), done.metadata.shared)


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
