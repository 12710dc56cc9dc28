"""Encoder layers as a row of kernels give what they give by themselves, and where they would not are left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel

from support.checkpoint_files import checkpoint
from support.known_classes import attend_without_kernel
from support.stage_driver import picture, processor_of
from trinity.memory import native
from trinity.request import Request
from trinity.stages.kernels import encoder_layers
from trinity.stages.kernels.encoder_layers import _FusedEncoderLayer, fuse_encoder_elementwise, fuse_encoder_layers
from trinity.stages.kernels.fused_elementwise import fuse_elementwise
from trinity.stages.models import load_model

DTYPES = [torch.float32, torch.bfloat16]
if not encoder_layers.has_encoder_kernels():
    pytest.skip(f"no kernels of encoders in the extension: {native.describe()}", allow_module_level=True)


@pytest.fixture(autouse=True)
def attended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this processor has no attention for a dtype, layers are swapped all the same, around torch's."""
    attend_without_kernel(monkeypatch)


SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
}
CONFIGS = [
    CLIPVisionConfig(**SIZES),
    CLIPVisionConfig(**SIZES, hidden_act="gelu"),
    SiglipVisionConfig(**SIZES, vision_use_head=False),
]


def fused_model(config: Any, dtype: torch.dtype, **more: Any) -> Any:
    """Random, fused, not lean; with weights and biases that show."""
    torch.manual_seed(0)
    kind: Any = CLIPVisionModel if isinstance(config, CLIPVisionConfig) else SiglipVisionModel
    config = copy.deepcopy(config)
    config._attn_implementation = "sdpa"
    model = kind(config).to(dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5))
    fuse_encoder_elementwise(model)
    fuse_elementwise(model)
    return model


def layers_of(model: Any) -> Any:
    return next(each for each in model.modules() if isinstance(each, nn.ModuleList))


def states_of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, 48, generator=torch.Generator().manual_seed(1)).to(dtype)


def check(found: Tensor, wanted: Tensor) -> None:
    near = 1e-5 if wanted.dtype == torch.float32 else 1.6e-2
    assert found.dtype == wanted.dtype
    assert (found.float() - wanted.float()).abs().max() <= near * wanted.float().abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.model_type} {config.hidden_act}")
def test_layers_give_what_they_gave(config: Any, dtype: torch.dtype) -> None:
    model = fused_model(config, dtype)
    plain = copy.deepcopy(model)
    assert fuse_encoder_layers(model) == 2
    assert fuse_encoder_layers(model) == 0, "once is enough"
    for shape in ((1, 17), (3, 17), (2, 1), (1, 64)):
        states = states_of(dtype, *shape)
        kept = states.clone()
        for layer, own in zip(layers_of(model), layers_of(plain), strict=True):
            assert isinstance(layer, type(own))
            check(layer(states, None), own(states, None))
            assert torch.equal(states, kept), "what a layer is given may be a hidden state that is asked for"
    pixels = torch.rand(2, 3, 32, 32)
    asked = {"pixel_values": pixels, "output_hidden_states": True}
    for found, wanted in zip(model(**asked).hidden_states, plain(**asked).hidden_states, strict=True):
        check(found, wanted)


def seen(layer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each call goes."""
    ways: list[str] = []
    plain, whole = layer.plan.run, type(layer).unfused_forward

    def run(states: Tensor) -> Any:
        ways.append("lean")
        return plain(states)

    def own(self: Any, *given: Any, **named: Any) -> Any:
        ways.append("own")
        return whole(self, *given, **named)

    monkeypatch.setattr(layer.plan, "run", run)
    monkeypatch.setattr(type(layer), "unfused_forward", own)
    return ways


@torch.inference_mode()
def test_what_is_not_understood_goes_the_layers_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = DTYPES[0]
    model = fused_model(CONFIGS[0], dtype)
    plain = copy.deepcopy(model)
    fuse_encoder_layers(model)
    layer, own = layers_of(model)[0], layers_of(plain)[0]
    ways = seen(layer, monkeypatch)
    states, mask = states_of(dtype, 2, 9), torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    check(layer(states, mask), own(states, mask))
    check(layer(states, attention_mask=mask), own(states, attention_mask=mask))
    gaps = states_of(dtype, 4, 9)[::2]
    check(layer(gaps, None), own(gaps, None))
    assert ways == ["own"] * 3
    check(layer(states, None, further=None, output_hidden_states=-2), own(states, None))
    assert ways[3:] == ["lean"]
    layer.self_attn.config._attn_implementation = "eager"
    check(layer(states, None), own(states, None))
    assert ways[4:] == ["own"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spoilt", ["norm", "causal", "dropout", "part", "layer", "attention", "mlp"])
def test_what_computes_otherwise_is_left_alone(
    spoilt: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fused_model(CONFIGS[0], dtype)
    for layer in layers_of(model):
        _spoil(layer, spoilt)
    assert fuse_encoder_layers(model) == 0
    assert not any(isinstance(layer, _FusedEncoderLayer) for layer in layers_of(model))
    assert all("forward" not in vars(layer.self_attn) for layer in layers_of(model))


def _spoil(layer: Any, how: str) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    kinds = type(layer), type(attention), type(mlp)
    others: dict[str, tuple[Any, Any, Any]] = {
        "norm": (layer.layer_norm2, nn.LayerNorm, lambda self, rows: nn.LayerNorm.forward(self, rows) * 2),
        "layer": (layer, kinds[0], lambda self, *given: kinds[0].forward(self, *given) * 1.5),
        "attention": (attention, kinds[1], lambda self, **named: (kinds[1].forward(self, **named)[0] + 1, None)),
        "mlp": (mlp, kinds[2], lambda self, rows: kinds[2].forward(self, -rows)),
    }
    if how in others:
        module, kind, forward = others[how]
        module.__class__ = type("Other", (kind,), {"forward": forward})
    elif how == "causal":
        attention.is_causal = True
    elif how == "dropout":
        attention.training, attention.dropout = True, 0.5
    else:
        mlp.further = nn.Dropout()


@torch.inference_mode()
def test_the_scale_is_the_one_that_the_layer_asks_for() -> None:
    model = fused_model(CONFIGS[0], DTYPES[0])
    for layer in layers_of(model):
        layer.self_attn.scale = 2.5
    plain = copy.deepcopy(model)
    assert fuse_encoder_layers(model) == 2
    assert layers_of(model)[0].plan.scale == 2.5
    states = states_of(DTYPES[0], 1, 9)
    check(layers_of(model)[0](states, None), layers_of(plain)[0](states, None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_still_modules(dtype: torch.dtype) -> None:
    model, called = fused_model(CONFIGS[0], dtype), list[str]()
    fuse_encoder_layers(model)
    for name, each in layers_of(model)[0].named_modules():
        if isinstance(each, nn.Linear):
            each.register_forward_hook(lambda module, given, made, name=name: called.append(name))
    with torch.inference_mode():
        layers_of(model)[0](states_of(dtype, 1, 9), None)
    assert [name.split(".")[-1] for name in called] == ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 24, 37, 1100])
def test_float32_products_get_whole_blocks_of_rows(dtype: torch.dtype, rows: int) -> None:
    model, shapes = fused_model(CONFIGS[0], dtype), list[int]()
    plain = copy.deepcopy(model)
    fuse_encoder_layers(model)
    layers_of(model)[0].mlp.fc1.register_forward_hook(lambda module, given, made: shapes.append(len(made)))
    states = states_of(dtype, 1, rows)
    check(layers_of(model)[0](states, None), layers_of(plain)[0](states, None))
    assert shapes == [{1: 12, 37: 48}.get(rows, rows) if dtype == torch.float32 else rows]


@pytest.mark.parametrize(("name", "layers"), [("llava", 1), ("llava_onevision", 1), ("idefics3", 1), ("gemma3", 1)])
def test_loaded_encoders_use_them(name: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = processor_of(name).process(Request("<image>", images=[picture(0, 60, 80)]))
    model, counts = load_model(checkpoint(name), "E", dtype=DTYPES[0]), [span.tokens for span in made.work.media]
    found = [each for each in model.vision.modules() if isinstance(each, _FusedEncoderLayer)]
    assert len(found) >= layers
    ways = [seen(layer, monkeypatch) for layer in found[:1]]
    model.encode("image", made.inputs, counts)
    assert set(ways[0]) == {"lean"}


@torch.inference_mode()
@pytest.mark.parametrize("inner", ["self_attn", "mlp", "layer_norm1", "mlp.activation_fn"])
def test_a_hook_within_a_layer_is_not_passed_by(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, called = fused_model(CONFIGS[0], DTYPES[0]), list[str]()
    fuse_encoder_layers(model)
    layer = layers_of(model)[0]
    ways, states = seen(layer, monkeypatch), states_of(DTYPES[0], 1, 9)
    layer.get_submodule(inner).register_forward_hook(lambda *given: called.append(inner))
    layer(states, None)
    assert (ways, called) == (["own"], [inner])


@torch.inference_mode()
def test_transformers_own_recording_of_states_keeps_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hooks stay on layers and attention for good, once hidden states were asked for."""
    model = fused_model(CONFIGS[0], DTYPES[0])
    fuse_encoder_layers(model)
    model(torch.rand(1, 3, 32, 32), output_hidden_states=True)
    assert any(each._forward_hooks for each in model.modules())
    ways = seen(layers_of(model)[0], monkeypatch)
    found = model(torch.rand(1, 3, 32, 32), output_hidden_states=True)
    assert len(found.hidden_states) == 3
    assert ways == ["lean"]
