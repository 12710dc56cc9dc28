"""Layers that somebody altered are not the ones that were read, and nothing of what was altered is passed by."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from support.known_classes import attend_without_kernel, packs
from support.swapped_models import count, swap, text_model, vision_model
from trinity.memory import native
from trinity.stages.kernels import admission, fused_elementwise, linear
from trinity.stages.kernels.admission import is_known, is_known_module
from trinity.stages.kernels.decoder_layers import FusedDecoderLayer, skip_unsampled_rows
from trinity.stages.kernels.encoder_layers import _FusedEncoderLayer, has_encoder_kernels
from trinity.stages.kernels.known_sources import LayerPart
from trinity.stages.kernels.swaps import find_own_class, without_swaps

if not fused_elementwise.has_fused_kernels() or not has_encoder_kernels() or not packs(torch.float32):
    pytest.skip(f"nothing to be admitted to: {native.describe()}", allow_module_level=True)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "is_packing_faster", packs)
    attend_without_kernel(monkeypatch)
    admission._say_unknown.cache_clear()


def test_a_function_patched_within_transformers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x)
    assert not count(swap(text_model()), FusedDecoderLayer)


def test_a_patched_forward_is_seen_behind_the_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """``functools.wraps`` gives it the source that ``inspect`` shows."""
    own = modeling_llama.LlamaAttention.forward

    @functools.wraps(own)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        made, weights = own(self, *given, **named)
        return made * 1.5, weights

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    assert not is_known(LayerPart.DECODER_ATTENTION, modeling_llama.LlamaAttention)
    assert not count(swap(text_model()), FusedDecoderLayer)


@pytest.fixture
def doubled() -> Iterator[Callable[[], None]]:
    """Registers an attention function of somebody's own under the name of torch's."""
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def double(*given: Any, **named: Any) -> tuple[Tensor, None]:
        made, _ = own(*given, **named)
        return made * 2, None

    yield lambda: AttentionInterface.register("sdpa", double)
    AttentionInterface.register("sdpa", own)


@torch.inference_mode()
@pytest.mark.parametrize("late", [False, True], ids=("before", "after"))
def test_another_attention_function_is_not_passed_by(late: bool, doubled: Callable[[], None]) -> None:
    pixels, model = torch.randn(1, 3, 32, 32), vision_model()
    plain = copy.deepcopy(model)
    if not late:
        doubled()
    assert count(swap(model), _FusedEncoderLayer) == (2 if late else 0)
    doubled()
    torch.testing.assert_close(model(pixels).last_hidden_state, plain(pixels).last_hidden_state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("place", ["", "self_attn", "mlp", "input_layernorm", "mlp.act_fn"])
def test_a_module_with_a_forward_of_its_own_is_left_alone(place: str) -> None:
    model = text_model()
    module = model.layers[0].get_submodule(place)
    own = module.forward
    module.forward = MethodType(lambda self, *given, **named: own(*given, **named), module)
    swap(model)
    assert [isinstance(each, FusedDecoderLayer) for each in model.layers] == [False, True]


def test_a_subclass_that_changes_nothing_is_the_same_layer() -> None:
    model = text_model()
    for layer in model.layers:
        layer.__class__ = type("Mine", (type(layer),), {})
    assert count(swap(model), FusedDecoderLayer) == 2


def test_a_subclass_with_another_call_is_not() -> None:
    model = text_model()
    attention = model.layers[0].self_attn
    attention.__class__ = type("Mine", (type(attention),), {"__call__": lambda self, *given, **named: None})
    assert not is_known_module(LayerPart.DECODER_ATTENTION, attention)


def test_code_without_a_source_is_not_known() -> None:
    space: dict[str, Any] = {}
    exec("def forward(self, x):\n    return x\n", space)
    assert not is_known(LayerPart.RMS_NORM, type("Made", (nn.Module,), {"forward": space["forward"]}))
    assert not is_known(LayerPart.ROTARY, torch.add)
    assert not is_known(LayerPart.ROTARY, functools.partial(modeling_llama.apply_rotary_pos_emb))


def test_classes_come_back_for_a_while() -> None:
    model = text_model()
    assert skip_unsampled_rows(model, 0)
    before = [type(each) for each in model.modules()]
    swap(model)
    swapped = [type(each) for each in model.modules()]
    with without_swaps(model) as number:
        inside = [type(each) for each in model.modules()]
        assert number == sum(one is not other for one, other in zip(inside, swapped, strict=True))
    assert [type(each) for each in model.modules()] == swapped
    own = [find_own_class(each) for each in model.modules()]
    packed = [kind is linear.PackedLinear for kind in swapped]
    assert all(one is other for one, other, keep in zip(inside, own, packed, strict=True) if not keep)
    assert own == [nn.Linear if kind is nn.Linear else kind for kind in own]
    assert before[0] is inside[0]


def test_a_new_release_says_once_what_runs_slower(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "KNOWN_SOURCES", {part: {} for part in LayerPart})
    with caplog.at_level(logging.WARNING, "trinity"):
        assert not count(swap(text_model()), fused_elementwise.FusedModule)
        swap(text_model())
    said = [each.getMessage().split()[0] for each in caplog.records]
    assert len(said) == len(set(said))
    assert "transformers.models.llama.modeling_llama.LlamaRMSNorm" in said


class Scaling(modeling_llama.LlamaAttention):
    """A scale that is looked up anew, and may be another one, at every call."""

    @property
    def scaling(self) -> float:  # type: ignore[override]
        return 0.25

    @scaling.setter
    def scaling(self, value: float) -> None:
        pass


def test_an_attribute_that_became_a_property_is_seen() -> None:
    assert not is_known(LayerPart.DECODER_ATTENTION, Scaling)


def test_a_descriptor_in_place_of_a_forward_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_llama.LlamaMLP.forward
    other = functools.partialmethod(lambda self, factor, x: own(self, x) * factor, 1.5)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", other)
    assert not is_known(LayerPart.GATED_MLP, modeling_llama.LlamaMLP)


def test_another_default_of_a_function_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.apply_rotary_pos_emb, "__defaults__", (2,))
    assert not is_known(LayerPart.ROTARY, modeling_llama.apply_rotary_pos_emb)


def test_a_wrapped_projection_keeps_its_layer() -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.further = base, nn.Linear(base.in_features, base.out_features)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.base(x) + self.further(x)
            return found

    model = text_model()
    model.layers[0].self_attn.q_proj = Adapted(model.layers[0].self_attn.q_proj)
    assert [isinstance(each, FusedDecoderLayer) for each in swap(model).layers] == [False, True]
