"""Decoder layers as a row of kernels give what they give by themselves, and where they would not are left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModel, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from support.known_classes import packs
from trinity.errors import UnsupportedModel
from trinity.memory import native
from trinity.stages.attention.interface import (
    PAGED_ATTENTION,
    AttentionParams,
    PagedBatch,
    PagedRows,
    StopAfterWrite,
    register_attention,
)
from trinity.stages.kernels import decoder_layers, fused_elementwise, linear, native_linear
from trinity.stages.kernels import decoder_layers as module
from trinity.stages.kernels.decoder_layers import (
    DecoderAttentionProbe,
    FusedDecoderLayer,
    fuse_decoder_layers,
)
from trinity.stages.kernels.fused_elementwise import fuse_elementwise
from trinity.stages.kernels.linear import pack_weights
from trinity.stages.kernels.native_linear import NativeLinear, use_native_products
from trinity.stages.kernels.probes import make_empty_rows

DTYPES = [each for each in (torch.float32, torch.bfloat16) if packs(each)]
if not DTYPES or not fused_elementwise.has_fused_kernels():
    pytest.skip(f"no elementwise kernels, or oneDNN packs nothing here: {native.describe()}", allow_module_level=True)

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 32,
}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_linear, "is_native_faster", lambda dtype: False)
    monkeypatch.setattr(linear, "is_packing_faster", packs)
    monkeypatch.setattr(linear, "_is_gemm_faster", lambda dtype: True)


def model_of(config: Any, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Random, packed and fused, as a decode instance has it."""
    register_attention()
    torch.manual_seed(0)
    found = AutoModel.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for name, parameter in found.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    found.set_attn_implementation(PAGED_ATTENTION)
    use_native_products(found)
    pack_weights(found)
    fuse_elementwise(found)
    return found


def asked_of(layer: Any, count: int, dtype: torch.dtype, backend: Any, seed: int = 3) -> tuple[Tensor, dict[str, Any]]:
    made = [
        torch.randn(1, count, size, generator=torch.Generator().manual_seed(seed + number)).to(dtype)
        for number, size in enumerate((SIZES["hidden_size"], SIZES["head_dim"], SIZES["head_dim"]))
    ]
    cache = torch.empty((1, 2, 2, SIZES["num_key_value_heads"], 1, SIZES["head_dim"]), device="meta")
    named = {"position_embeddings": (made[1], made[2]), "attention_mask": None, "use_cache": False}
    return made[0], {**named, "trinity_batch": PagedBatch(make_empty_rows(), cache, backend)}


CONFIGS = [
    LlamaConfig(**SIZES),
    LlamaConfig(**SIZES, attention_bias=True),
    MistralConfig(**SIZES, sliding_window=9),
    Qwen2Config(**{name: value for name, value in SIZES.items() if name != "head_dim"}),
]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_a_layer_gives_what_it_gives_by_itself(config: Any, dtype: torch.dtype) -> None:
    model = model_of(config, dtype)
    plain = [(type(layer), layer) for layer in model.layers]
    assert fuse_decoder_layers(model) == 2
    for kind, layer in plain:
        assert isinstance(layer, FusedDecoderLayer)
        assert isinstance(layer, kind)
        for count in (1, 8, 32, 33, 70):
            mine, theirs = DecoderAttentionProbe(), DecoderAttentionProbe()
            rows, named = asked_of(layer, count, dtype, mine)
            found = layer(rows, **named)
            _, named = asked_of(layer, count, dtype, theirs)
            wanted = kind.forward(layer, rows, **named)
            near = 1e-5 if dtype == torch.float32 else 2e-2
            largest = float(wanted.abs().max())
            torch.testing.assert_close(found, wanted, rtol=0, atol=near * largest)
            assert mine.params == theirs.params
            assert isinstance(mine.params, AttentionParams)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_plain_weights_are_parts_of_it_too(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native_linear.has_native_product(dtype):
        pytest.skip(f"no products with plain weights on this processor: {native.describe()}")
    monkeypatch.setattr(native_linear, "is_native_faster", lambda dtype: True)
    model = model_of(LlamaConfig(**SIZES), dtype)
    kind, layer = type(model.layers[0]), model.layers[0]
    assert isinstance(layer.mlp.gate_proj, NativeLinear)
    assert fuse_decoder_layers(model) == 2
    for count in (1, 40):
        rows, named = asked_of(layer, count, dtype, DecoderAttentionProbe())
        found = layer(rows, **named)
        wanted = kind.forward(layer, rows, **named)
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2 * float(wanted.abs().max()))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_batches_go_through_in_pieces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_ROWS", 20)
    assert [(each.start, each.stop) for each in module._pieces(70)] == [(0, 32), (32, 64), (64, 70)]
    assert [(each.start, each.stop) for each in module._pieces(20)] == [(0, 20)]
    model = model_of(LlamaConfig(**SIZES), dtype)
    kind = type(model.layers[0])
    fuse_decoder_layers(model)
    rows, named = asked_of(model.layers[0], 70, dtype, DecoderAttentionProbe())
    kept = rows.clone()
    wanted = kind.forward(model.layers[0], rows, **named)
    found = model.layers[0](rows, **named)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, rtol=0, atol=near * float(wanted.abs().max()))
    assert torch.equal(rows, kept), "what a layer is given is its caller's"


@torch.inference_mode()
def test_states_of_the_layer_before_are_written_over() -> None:
    model = model_of(LlamaConfig(**SIZES))
    kind = type(model.layers[0])
    fuse_decoder_layers(model)
    rows, named = asked_of(model.layers[0], 40, torch.float32, DecoderAttentionProbe())
    wanted = kind.forward(model.layers[1], kind.forward(model.layers[0], rows, **named), **named)
    first = model.layers[0](rows, **named)
    second = model.layers[1](first, **named)
    assert second.data_ptr() == first.data_ptr()
    torch.testing.assert_close(second, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@torch.inference_mode()
def test_what_is_not_as_at_load_goes_the_layers_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(LlamaConfig(**SIZES))
    fuse_decoder_layers(model)
    layer, ran = model.layers[0], []
    own = module.PackedLayerPlan.run
    monkeypatch.setattr(module.PackedLayerPlan, "run", lambda *given: ran.append(1) or own(*given))  # type: ignore[func-returns-value]
    rows, named = asked_of(layer, 4, torch.float32, DecoderAttentionProbe())
    layer(rows, **named)
    assert len(ran) == 1
    gaps = torch.cat((rows, rows), -1)[..., : SIZES["hidden_size"]]
    layer(gaps, **named)
    batch = named["trinity_batch"]
    layer(rows, **named | {"trinity_batch": replace(batch, half="read", backend=Halved())})
    layer(rows, **named | {"position_embeddings": tuple(each[:, :1] for each in named["position_embeddings"])})
    assert len(ran) == 1


class Halved(DecoderAttentionProbe):
    """Attention in two halves, of which each is shown."""

    def __init__(self) -> None:
        self.written: list[Tensor] = []

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        self.written += [key.clone(), value.clone(), torch.tensor(layer)]

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        self.params = params
        return query * 0.5


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [[39], [3, 39], []])
def test_the_last_layer_runs_over_sampled_rows_alone(dtype: torch.dtype, last: list[int]) -> None:
    model = model_of(LlamaConfig(**SIZES), dtype)
    assert decoder_layers.skip_unsampled_rows(model, 0)
    layer, kind = model.layers[1], type(model.layers[1])
    assert fuse_decoder_layers(model) == 2
    found, shown = [], []
    for forward in (type(layer).forward, kind.forward):
        backend = Halved()
        rows, named = asked_of(layer, 40, dtype, backend)
        named["trinity_batch"] = replace(
            named["trinity_batch"], sampled=make_empty_rows(), last=torch.tensor(last).long()
        )
        if last:
            found.append(forward(layer, rows, **named))
        else:
            with pytest.raises(StopAfterWrite):
                forward(layer, rows, **named)
        shown.append(backend)
    near = 1e-5 if dtype == torch.float32 else 2e-2
    mine, theirs = shown
    assert len(mine.written) == len(theirs.written) == 3
    for one, other in zip([*mine.written, *found[:1]], [*theirs.written, *found[1:]], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=near * float(other.abs().max()))
    assert mine.params == theirs.params


@torch.inference_mode()
def test_the_last_layer_may_be_both(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(LlamaConfig(**SIZES))
    assert decoder_layers.skip_unsampled_rows(model, 0)
    kind = type(model.layers[1])
    assert fuse_decoder_layers(model) == 2
    assert isinstance(model.layers[1], decoder_layers.TwoPassLayer)
    many, named = asked_of(model.layers[1], 40, torch.float32, DecoderAttentionProbe())
    wanted = kind.forward(model.layers[1], many, **named)
    torch.testing.assert_close(model.layers[1](many, **named), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    assert fuse_decoder_layers(model) == 0, "once"


class Scaled(nn.Module):
    """What hides behind a name that is known: a layer that does something more."""

    def forward(self, hidden_states: Tensor, **named: Any) -> Any:
        return super().forward(hidden_states, **named) * 1.01  # type: ignore[misc]


@pytest.mark.parametrize("spoil", ["scaled", "raises", "norms", "further", "plain"])
def test_what_computes_otherwise_is_left_alone(spoil: str) -> None:
    if spoil == "norms":
        assert fuse_decoder_layers(model_of(Qwen3Config(**SIZES))) == 0, "of queries and keys"
        return
    model = model_of(LlamaConfig(**SIZES))
    layer = model.layers[0]
    kind: Any = type(layer)
    if spoil == "scaled":
        layer.__class__ = type("Layer", (Scaled, kind), {})
    elif spoil == "raises":
        layer.__class__ = type("Layer", (kind,), {"forward": lambda self: None})
    elif spoil == "further":
        layer.further = nn.Linear(2, 2)
    else:
        layer.mlp.up_proj.__class__ = nn.Linear
    kept = type(layer)
    assert fuse_decoder_layers(model) == 1
    assert type(layer) is kept


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which calls went through kernels."""
    ran: list[str] = []
    own = module.PackedLayerPlan.run
    monkeypatch.setattr(module.PackedLayerPlan, "run", lambda *given: ran.append("fused") or own(*given))  # type: ignore[func-returns-value]
    return ran


@torch.inference_mode()
@pytest.mark.parametrize("inner", ["self_attn", "mlp", "input_layernorm", "mlp.act_fn", "self_attn.q_proj"])
def test_a_hook_within_a_layer_is_not_passed_by(inner: str, ways: list[str]) -> None:
    model, called = model_of(LlamaConfig(**SIZES)), list[str]()
    fuse_decoder_layers(model)
    ways.clear()  # the probe's
    rows, named = asked_of(model.layers[0], 8, torch.float32, DecoderAttentionProbe())
    handle = model.layers[0].get_submodule(inner).register_forward_hook(lambda *given: called.append(inner))
    model.layers[0](rows, **named)
    assert (ways, called) == ([], [inner])
    handle.remove()
    model.layers[0](rows, **named)
    assert (ways, called) == (["fused"], [inner])


@torch.inference_mode()
def test_a_hook_of_every_module_is_not_passed_by(ways: list[str]) -> None:
    model = model_of(LlamaConfig(**SIZES))
    fuse_decoder_layers(model)
    ways.clear()  # the probe's
    rows, named = asked_of(model.layers[0], 8, torch.float32, DecoderAttentionProbe())
    with register_module_forward_hook(lambda *given: None):
        model.layers[0](rows, **named)
    assert ways == []


@torch.inference_mode()
@pytest.mark.parametrize(
    "more",
    [{"attention_mask": torch.zeros(1, 1, 8, 8)}, {"return_dict": True}, {"use_cache": True}],
    ids=("mask", "unknown", "cache"),
)
def test_a_keyword_that_was_not_there_at_load_is_not_ignored(more: dict[str, Any], ways: list[str]) -> None:
    model = model_of(LlamaConfig(**SIZES))
    fuse_decoder_layers(model)
    ways.clear()  # the probe's
    rows, named = asked_of(model.layers[0], 8, torch.float32, DecoderAttentionProbe())
    model.layers[0](rows, **named | more)
    assert ways == []


@torch.inference_mode()
def test_a_keyword_that_nobody_knows_is_refused_by_attention(ways: list[str]) -> None:
    model = model_of(LlamaConfig(**SIZES))
    fuse_decoder_layers(model)
    ways.clear()  # the probe's
    rows, named = asked_of(model.layers[0], 8, torch.float32, DecoderAttentionProbe())
    with pytest.raises(UnsupportedModel, match="further"):
        model.layers[0](rows, **named, further=1)
    assert ways == []
