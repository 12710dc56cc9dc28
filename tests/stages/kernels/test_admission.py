"""Layers are admitted to kernels by what they are: a mutant of any known class is refused, by source and by probe.

Nothing here depends on the processor's instruction sets: what is swapped runs by whatever kernels there are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    CwmConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Qwen2_5_VLTextConfig,
    Qwen2Config,
    Qwen2VLTextConfig,
    SeedOssConfig,
    SiglipVisionConfig,
    SiglipVisionModel,
    SmolLM3Config,
)
from transformers.models.llama import modeling_llama
from transformers.models.ministral3.modeling_ministral3 import Ministral3Attention

from support.known_classes import attend_without_kernel, declare_known, packs
from support.mutant_layers import LAYERS, clip, clip_small, far_factor, mutate, row_factor
from support.swapped_models import count, layers_of, swap, text_model, vision_model
from trinity.memory import native
from trinity.stages.kernels import admission, fused_elementwise, linear
from trinity.stages.kernels.admission import is_known
from trinity.stages.kernels.decoder_layers import FusedDecoderLayer, TwoPassLayer, skip_unsampled_rows
from trinity.stages.kernels.encoder_layers import _FusedEncoderLayer, has_encoder_kernels
from trinity.stages.kernels.fused_elementwise import fuse_elementwise
from trinity.stages.kernels.known_sources import LayerPart

if not fused_elementwise.has_fused_kernels() or not has_encoder_kernels() or not packs(torch.float32):
    pytest.skip(f"nothing to be admitted to: {native.describe()}", allow_module_level=True)

TEXT: list[Callable[..., Any]] = [
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    CwmConfig,
    MinistralConfig,
    SeedOssConfig,
    SmolLM3Config,
    Qwen2VLTextConfig,
    Qwen2_5_VLTextConfig,
]
VISION: list[tuple[Any, Any]] = [(CLIPVisionModel, CLIPVisionConfig), (SiglipVisionModel, SiglipVisionConfig)]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "is_packing_faster", packs)
    attend_without_kernel(monkeypatch)
    admission._say_unknown.cache_clear()


# ---------------------------------------------------------------- what is known


@pytest.mark.parametrize("config", TEXT, ids=lambda config: config.__name__)
def test_known_decoder_layers_are_swapped(config: Any) -> None:
    model = swap(text_model(config))
    assert count(model, FusedDecoderLayer) == 2
    assert count(model, fused_elementwise.FusedRmsNorm) == 5


@pytest.mark.parametrize(("kind", "config"), VISION, ids=("clip", "siglip"))
def test_known_encoder_layers_are_swapped(kind: Any, config: Any) -> None:
    assert count(swap(vision_model(kind, config)), _FusedEncoderLayer) == 2


def test_ministral_3_is_known_to_be_another(caplog: pytest.LogCaptureFixture) -> None:
    assert not is_known(LayerPart.DECODER_ATTENTION, Ministral3Attention)
    assert not is_known(LayerPart.DECODER_ATTENTION, Ministral3Attention)
    said = [each.message for each in caplog.records if "Ministral3Attention" in each.message]
    assert len(said) == 1, "once for each class"
    assert "keeps its own code" in said[0]


# ---------------------------------------------------------------- mutants of every known class


@pytest.mark.parametrize("declared", [False, True], ids=("source", "probe"))
@pytest.mark.parametrize("part", LAYERS, ids=lambda part: part.name)
@pytest.mark.parametrize("change", [far_factor, clip])
@pytest.mark.parametrize("config", TEXT, ids=lambda config: config.__name__)
def test_a_mutant_of_a_decoder_layer_is_refused(
    config: Any, change: Any, part: LayerPart, declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its source; and, if somebody had declared it known, by the probe."""
    if declared and change is clip and part is LayerPart.DECODER_ATTENTION:
        change = clip_small
    model = text_model(config)
    layer = model.layers[0]
    mutant = mutate(LAYERS[part](layer), change)
    if declared:
        declare_known(monkeypatch, part, mutant)
    swap(model)
    assert not isinstance(layer, FusedDecoderLayer)
    assert isinstance(model.layers[1], FusedDecoderLayer), "the other is as it was"


ENCODER_LAYERS = {
    LayerPart.ENCODER_LAYER: lambda layer: layer,
    LayerPart.ENCODER_ATTENTION: lambda layer: layer.self_attn,
    LayerPart.ENCODER_MLP: lambda layer: layer.mlp,
}


@pytest.mark.parametrize("declared", [False, True], ids=("source", "probe"))
@pytest.mark.parametrize("part", ENCODER_LAYERS, ids=lambda part: part.name)
@pytest.mark.parametrize("change", [row_factor, clip])
@pytest.mark.parametrize(("kind", "config"), VISION, ids=("clip", "siglip"))
def test_a_mutant_of_an_encoder_layer_is_refused(
    kind: Any, config: Any, change: Any, part: LayerPart, declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if declared and change is clip and part is not LayerPart.ENCODER_LAYER:
        change = clip_small
    model = vision_model(kind, config)
    layer = layers_of(model)[0]
    mutant = mutate(ENCODER_LAYERS[part](layer), change)
    if declared:
        declare_known(monkeypatch, part, mutant)
    swap(model)
    assert [isinstance(each, _FusedEncoderLayer) for each in layers_of(model)] == [False, True]


@pytest.mark.parametrize("declared", [False, True], ids=("source", "probe"))
@pytest.mark.parametrize("eps", [1e-5, 1e-7])
def test_another_epsilon_is_refused(eps: float, declared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherRMSNorm(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            given = copy.copy(self)
            given.variance_epsilon = eps
            return modeling_llama.LlamaRMSNorm.forward(given, hidden_states)

    if declared:
        declare_known(monkeypatch, LayerPart.RMS_NORM, OtherRMSNorm)
    norm = OtherRMSNorm(64, 1e-6).requires_grad_(False)
    fuse_elementwise(norm)
    assert type(norm) is OtherRMSNorm


@pytest.mark.parametrize("declared", [False, True], ids=("source", "probe"))
def test_a_clipped_gate_is_refused(declared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clipped(nn.SiLU):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.clamp(max=7.0))

    if declared:
        declare_known(monkeypatch, LayerPart.SILU, Clipped)
    model = text_model()
    model.layers[0].mlp.act_fn = Clipped()
    swap(model)
    assert [isinstance(each.mlp, fused_elementwise.FusedGatedMlp) for each in model.layers] == [False, True]


@pytest.mark.parametrize("declared", [False, True], ids=("source", "probe"))
@pytest.mark.parametrize("change", [lambda made: made * 1.01, lambda made: made.clamp(-0.1, 0.1)])
def test_another_rotary_embedding_is_refused(
    change: Callable[[Tensor], Tensor], declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = modeling_llama.apply_rotary_pos_emb

    def mutant(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        turned = own(q, k, cos, sin, unsqueeze_dim)
        return change(turned[0]), turned[1]

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", mutant)
    if declared:
        declare_known(monkeypatch, LayerPart.ROTARY, mutant)
        declare_known(monkeypatch, LayerPart.DECODER_ATTENTION, modeling_llama.LlamaAttention)
    model = swap(text_model())
    assert not count(model, FusedDecoderLayer)
    assert model.layers[0].self_attn.forward.__globals__["apply_rotary_pos_emb"] is mutant


# ---------------------------------------------------------------- the last layer in two passes


def mixes_rows(given: tuple[Any, ...], named: dict[str, Any], made: Tensor) -> Tensor:
    return made + made.cumsum(-2) * 0.01


@pytest.mark.parametrize("declared", [False, True], ids=("source", "probe"))
@pytest.mark.parametrize("change", [row_factor, mixes_rows])
def test_a_last_layer_that_mixes_rows_is_refused(change: Any, declared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model()
    assert skip_unsampled_rows(text_model(), 0)
    for part, module in {LayerPart.SPLIT_LAYER: model.layers[-1], LayerPart.EACH_ROW: model.layers[-1].mlp}.items():
        kind = type(module)
        mutant = mutate(module, change)
        if declared:
            declare_known(monkeypatch, part, mutant)
        assert not skip_unsampled_rows(model, 0)
        assert not isinstance(model.layers[-1], TwoPassLayer)
        module.__class__ = kind


def test_a_text_model_that_does_more_behind_its_last_layer_is_refused() -> None:
    model = text_model()
    kind: Any = type(model)

    class Mutant(kind):  # type: ignore[misc]
        def forward(self, *given: Any, **named: Any) -> Any:
            found = super().forward(*given, **named)
            found.last_hidden_state = found.last_hidden_state.flip(1)
            return found

    model.__class__ = Mutant
    assert not skip_unsampled_rows(model, 0)
