"""Decoder layers as nine kernels of a GPU give what they give by themselves, in Triton's interpreter on a CPU."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

if torch.cuda.is_available():
    pytest.skip("these models are on the CPU; test_device_layers_on_gpu.py has a GPU's", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, at the imports below
pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen2VLTextConfig

from support.checkpoint_files import checkpoint
from support.device_layers import count_decode_step, load_for_device
from support.known_classes import declare_known
from support.language_stage import PROMPT, Solo, work
from support.mutant_layers import LAYERS, clip, far_factor, mutate
from support.stage_driver import Driver, generated, processed
from support.swapped_models import SIZES, text_model
from trinity.stages.attention.gpu.triton import TritonAttention
from trinity.stages.attention.interface import ChunkRows, PagedBatch, PagedRows, StopAfterWrite
from trinity.stages.attention.layer_progress import LayerProgressAttention
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.kernels.decoder_layers import DecoderAttentionProbe, FusedDecoderLayer, skip_unsampled_rows
from trinity.stages.kernels.gpu import device_elementwise
from trinity.stages.kernels.gpu import device_layers as module
from trinity.stages.kernels.gpu.device_elementwise import GateActivation
from trinity.stages.kernels.gpu.device_layers import find_activation, fuse_device_layers
from trinity.stages.kernels.known_sources import LayerPart
from trinity.stages.kernels.probes import make_empty_rows, make_noise
from trinity.stages.kernels.swaps import without_swaps
from trinity.stages.models import loader

GELU: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "attention_bias": True, "mlp_bias": True}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": LlamaConfig,
    "biases and gelu": partial(LlamaConfig, **GELU),
    "mistral": partial(MistralConfig, sliding_window=9),
    "qwen2": Qwen2Config,
    "qwen2_vl": partial(Qwen2VLTextConfig, bos_token_id=1, eos_token_id=2),
}


def plain_model(config: Callable[..., Any] = LlamaConfig, layers: int = 2) -> Any:
    model = text_model(lambda **sizes: config(**{**sizes, "num_hidden_layers": layers}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(scope="module")
def fused() -> Any:
    """Two layers, the last of them in two passes."""
    model = plain_model()
    assert skip_unsampled_rows(model, 0)
    assert fuse_device_layers(model) == 2
    return model


def asked_of(count: int, backend: Any) -> tuple[Tensor, dict[str, Any]]:
    rows, cosine, sine = (
        make_noise(count, size, torch.float32, seed) for seed, size in enumerate((SIZES["hidden_size"], 16, 16))
    )
    cache = torch.empty((1, 2, 2, 2, 1, 16), device="meta")
    named = {"position_embeddings": (cosine, sine), "attention_mask": None, "use_cache": False}
    return rows, {**named, "trinity_batch": PagedBatch(make_empty_rows(), cache, backend)}


@torch.inference_mode()
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_layer_gives_what_it_gives_by_itself(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = plain_model(config, 1)
    with caplog.at_level(logging.INFO):
        assert fuse_device_layers(model) == 1
    assert caplog.messages == ["1 of 1 decoder layers on cpu run by Triton kernels"]
    (layer,) = model.layers
    for count in (1, 9):
        rows, named = asked_of(count, DecoderAttentionProbe())
        found = layer(rows, **named)
        with without_swaps(model):
            wanted = layer(rows, **named)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert named["trinity_batch"].backend.params == layer.plan.params


def test_merged_weights_are_held_once(fused: Any) -> None:
    plain = plain_model()
    for layer in fused.layers:
        held = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
        assert len({each.weight.untyped_storage().data_ptr() for each in held}) == 1
        both = [layer.mlp.gate_proj, layer.mlp.up_proj]
        assert len({each.weight.untyped_storage().data_ptr() for each in both}) == 1
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in layer.parameters()}
        assert sum(storages.values()) == sum(each.nbytes for each in layer.parameters())
    found, wanted = fused.state_dict(), plain.state_dict()
    assert list(found) == list(wanted), "nothing is named or saved otherwise"
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not any(each.is_inference() for each in found.values())


# ---------------------------------------------------------------- admission


MUTANTS = [(far_factor, declared, part) for declared in (False, True) for part in LAYERS]


@pytest.mark.parametrize(("change", "declared", "part"), [*MUTANTS, (clip, True, LayerPart.GATED_MLP)])
def test_a_mutant_of_a_decoder_layer_is_refused(
    change: Any, declared: bool, part: LayerPart, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By its source; and, if somebody had declared it known, by the probe. The log says how many are left."""
    model = plain_model(layers=1)
    mutant = mutate(LAYERS[part](model.layers[0]), change)
    if declared:
        declare_known(monkeypatch, part, mutant)
    assert fuse_device_layers(model) == 0
    assert not isinstance(model.layers[0], FusedDecoderLayer)
    assert "0 of 1 decoder layers on cpu run by Triton kernels" in caplog.messages


class Clipped(nn.SiLU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.clamp(max=7.0))


@pytest.mark.parametrize("declared", [False, True], ids=("source", "probe"))
def test_a_clipped_gate_is_refused(declared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if declared:
        declare_known(monkeypatch, LayerPart.SILU, Clipped)
    model = plain_model(layers=1)
    model.layers[0].mlp.act_fn = Clipped()
    assert fuse_device_layers(model) == 0


def test_activations_that_the_kernel_has() -> None:
    from transformers.activations import ACT2FN

    wanted = {
        **{"silu": GateActivation.SILU, "gelu": GateActivation.GELU, "gelu_pytorch_tanh": GateActivation.GELU_TANH},
        **{"gelu_new": None, "relu": None},  # which round after each operator, or compute otherwise
    }
    assert {name: find_activation(ACT2FN[name]) for name in wanted} == wanted


@torch.inference_mode()
@pytest.mark.parametrize("inner", ["self_attn", "mlp.act_fn", "self_attn.q_proj"])
def test_a_hook_within_a_layer_is_not_passed_by(inner: str, fused: Any) -> None:
    layer, called = fused.layers[0], list[str]()
    rows, named = asked_of(3, DecoderAttentionProbe())
    wanted = layer(rows, **named)
    handle = layer.get_submodule(inner).register_forward_hook(lambda *given: called.append(inner))
    torch.testing.assert_close(layer(rows, **named), wanted, rtol=1e-5, atol=1e-5)
    handle.remove()
    assert called == [inner]


# ---------------------------------------------------------------- between layers


@torch.inference_mode()
def test_a_norm_is_taken_along_only_where_nothing_is_between(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = list[int]()
    own = device_elementwise.launch_norm
    monkeypatch.setattr(module, "launch_norm", lambda rows, norm: norms.append(len(rows)) or own(rows, norm))  # type: ignore[func-returns-value]
    first, second = fused.layers

    def run(between: Callable[[Tensor], Tensor] = lambda made: made) -> Tensor:
        norms.clear()
        rows, named = asked_of(3, DecoderAttentionProbe())
        made: Tensor = second(between(first(rows, **named)), **named)
        with without_swaps(fused):
            wanted = second(between(first(rows, **named)), **named)
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
        return made

    run()
    assert norms == [3], "of the first layer alone"
    run(lambda made: made + 1.0)
    assert norms == [3, 3]
    handle = first.register_forward_hook(lambda layer, given, made: made.mul_(2.0))
    run()
    assert norms == [3, 3], "a hook may change what a layer gave, in place"
    handle.remove()
    run()
    assert norms == [3]


# ---------------------------------------------------------------- whole models


@pytest.mark.parametrize("backend", [partial(TritonAttention, 1), TorchAttention], ids=("triton", "torch"))
def test_tokens_and_logits_are_the_same(backend: Any) -> None:
    """A prompt, the last layer in two passes, then decodes; a backend that writes by itself gives the same."""
    plain, ours = Solo(), Solo(backend=backend())
    ours.model = ours.stage.model = load_for_device(checkpoint("llama"))
    assert ours.serve(work(), 4) == plain.serve(work(), 4)
    assert all((ours.seen[at] - plain.seen[at]).abs().max() < 1e-4 for at in plain.seen)


@pytest.mark.parametrize("name", [pytest.param("llava", marks=pytest.mark.slow), "qwen2_vl"])
def test_a_request_with_images_equals_generate(name: str) -> None:
    """One stage in chunks of 40 tokens, beside transformers' own ``generate()``; M-RoPE's three axes too."""
    driver = Driver(name, split=False, chunk=40)
    driver.prefill.model, driver.prefill._backend = load_for_device(checkpoint(name)), TritonAttention(1)
    driver.add(processed(name, 1))
    (served,) = driver.served.values()
    while len(served.tokens) < 4:
        driver.run_once()
    wanted = generated(name, 1)
    assert served.tokens == wanted.ids[:4]
    for at, logits in served.logits.items():
        torch.testing.assert_close(logits, wanted.logits[at], rtol=0, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "writes"), [(torch.float32, 0), (torch.float16, 1)])
def test_a_cache_of_another_dtype_is_written_by_its_backend(dtype: torch.dtype, writes: int, fused: Any) -> None:
    """Who stores keys and values in fewer bits knows how they are rounded."""
    written: list[torch.dtype] = []

    class Rounding(DecoderAttentionProbe):
        reads_chunks = True

        def attend(self, rows: PagedRows, cache: Tensor, qkv: Any, params: Any) -> Tensor:
            written.append(cache.dtype)
            return super().attend(rows, cache, qkv, params)

        def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: Any) -> Tensor:
            return query

    rows, named = asked_of(3, Rounding())
    at = torch.arange(3)
    places = PagedRows(at * 0, at, np.empty((0, 0), np.int64), np.empty(0, np.int64))
    cache = torch.zeros((1, 2, 2, 2, 16, 16), dtype=dtype)
    fused.layers[0](rows, **named | {"trinity_batch": PagedBatch(places, cache, Rounding())})
    assert len(written) == writes
    assert bool(cache.any()) is not bool(writes)


@torch.inference_mode()
def test_layers_that_are_streamed_are_reported_and_the_same() -> None:
    """The backend then writes by itself, since somebody looks at each layer's keys and values."""
    plain, ours = Solo(), Solo(backend=TritonAttention(1))
    ours.model = ours.stage.model = load_for_device(checkpoint("llama"))
    reported: list[tuple[int, int]] = []
    own = ours.stage._backend
    layers = ours.pool.memory.shape.shape[0]
    backend = LayerProgressAttention(own, 1, layers, lambda first, end: reported.append((first, end)))
    ours.stage._backend = backend
    asked = work("a", PROMPT, 4)
    for solo in (plain, ours):
        solo.open(asked, blocks=(3, 5, 7))
        solo.fill(asked)
    backend.finish()
    assert reported == [(first, first + 1) for first in range(layers)]
    torch.testing.assert_close(ours.pool.memory.tensor, plain.pool.memory.tensor, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("last", [[2, 8], []])
def test_the_last_layer_runs_over_sampled_rows_alone(last: list[int], fused: Any) -> None:
    layer, shown = fused.layers[1], []
    for forward in (type(layer).forward, type(layer).unfused_forward):
        rows, named = asked_of(9, TorchAttention())
        cache = torch.zeros((2, 2, 2, 2, 16, 16))
        at = torch.arange(9)
        table = torch.tensor([1])
        places = PagedRows(
            at * 0 + 1, at, np.empty((0, 0), np.int64), np.empty(0, np.int64), (ChunkRows(0, 9, 0, table),)
        )
        chosen = torch.tensor(last, dtype=torch.long)
        ends = PagedRows(places.blocks[chosen], chosen, np.ones((len(last), 1), np.int64), np.array(last, np.int64) + 1)
        named["trinity_batch"] = PagedBatch(places, cache, TorchAttention(), ends, chosen)
        if last:
            shown.append((forward(layer, rows, **named), cache))
        else:
            with pytest.raises(StopAfterWrite):
                forward(layer, rows, **named)
            shown.append((rows[:, :0], cache))
    for mine, theirs in zip(*shown, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert shown[0][1].any()


# ---------------------------------------------------------------- what is launched


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_a_layer_is_nine_kernels_and_no_look_from_the_host(name: str) -> None:
    """In a decode step as a CUDA graph records it. transformers' own layer is some forty."""
    model = load_for_device(checkpoint(name))
    one, two = count_decode_step(model, 1), count_decode_step(model, 2)
    assert two - one == {"norm_row": 2, "linear": 4, "rotate_heads": 1, "attend_tile": 1, "gate_row": 1}
    with without_swaps(model.language):
        plain = count_decode_step(model, 2) - count_decode_step(model, 1)
    assert plain.total() > 35


# ---------------------------------------------------------------- at load


@pytest.mark.parametrize(
    ("name", "device", "swapped"), [("language", "cuda", 1), ("vision", "cuda", 0), ("language", "cpu", 0)]
)
def test_the_language_part_on_a_gpu_gets_these_layers(
    name: str, device: str, swapped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Part(nn.Module):
        def to(self, *given: Any, **named: Any) -> Any:
            return self

    shutil.copy(checkpoint("llava") / "config.json", tmp_path)
    asked: list[Any] = []
    monkeypatch.setattr(loader, "_load_part", lambda *given: Part())
    monkeypatch.setattr(module, "fuse_device_layers", asked.append)
    loader._part(tmp_path, name, torch.float32, torch.device(device), False, ())
    assert len(asked) == swapped
