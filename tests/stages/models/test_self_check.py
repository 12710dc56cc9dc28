"""The self-check of unknown types runs far from position 0, and with kernels as well as without."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.ministral3 import modeling_ministral3

from support.known_classes import declare_known, packs
from support.quantised import quantised, slow
from support.text_models import ORIGINAL, SERVED, build, generate, make_config, make_prompt, serve
from trinity.errors import UnsupportedModel
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.kernels import decoder_layers, fused_elementwise, linear
from trinity.stages.kernels.decoder_layers import FusedDecoderLayer
from trinity.stages.kernels.known_sources import LayerPart
from trinity.stages.kernels.swaps import without_swaps
from trinity.stages.models import LoadedModel, checks, float32_forward, load_model, registry
from trinity.stages.models.float32_forward import in_float32

SOON = ("gpt_oss", "mixtral")

kernels = pytest.mark.skipif(
    not fused_elementwise.has_fused_kernels() or not packs(torch.float32), reason="no kernels, or oneDNN packs nothing"
)


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "is_packing_faster", packs)


@pytest.fixture
def credulous(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: Ministral 3's layers are admitted, on a probe of the first five positions."""
    declare_known(monkeypatch, LayerPart.DECODER_ATTENTION, modeling_ministral3.Ministral3Attention)
    monkeypatch.setattr(decoder_layers, "place_rows", lambda config: (torch.arange(5), torch.ones(5)))


def count_fused(model: Any) -> int:
    return sum(isinstance(each, FusedDecoderLayer) for each in model.language.modules())


@kernels
@pytest.mark.usefixtures("credulous")
def test_kernels_that_are_wrong_far_away_are_taken_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = build(tmp_path, "ministral3")
    with caplog.at_level(logging.WARNING, "trinity"):
        model = load_model(directory, "PD", dtype="float32", packed=True)
    assert not count_fused(model)
    assert not fused_elementwise.count_fused(model.language)
    assert "'ministral3' (text model 'ministral3') runs without kernels" in caplog.text
    assert serve(directory, make_prompt()).tokens == generate(directory, make_prompt()).tokens


@kernels
@pytest.mark.usefixtures("credulous")
def test_the_control_kernels_stay_where_nobody_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trinity.stages.models import loader

    monkeypatch.setattr(loader, "self_check", lambda model: None)
    directory = build(tmp_path, "ministral3")
    assert count_fused(load_model(directory, "PD", dtype="float32", packed=True)) == 3
    assert serve(directory, make_prompt()).tokens != generate(directory, make_prompt()).tokens


def test_a_type_that_is_wrong_far_away_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its factor counts from the first row of a batch: a ragged batch of several requests has but one."""

    def scale(positions: Tensor, beta: float, length: int) -> Tensor:
        far = torch.floor((positions - positions[:, :1]) / length)
        return (1 + torch.log(1 + far))[:, None, :, None]

    monkeypatch.setattr(modeling_ministral3, "get_llama_4_attn_scale", scale)
    with pytest.raises(UnsupportedModel, match=r"'ministral3'.* through a paged cache its logits are [\d.]+ off"):
        load_model(build(tmp_path, "ministral3"), "PD", dtype="float32")


def make_wrong(**altered: Any) -> type[TorchAttention]:
    """Make an attention that multiplies queries, or the scale of its products, by a constant."""
    query, scale = altered.get("query", 1.0), altered.get("scale", 1.0)

    class Wrong(TorchAttention):
        def attend(self, rows: Any, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: Any) -> Tensor:
            changed = replace(params, scale=params.scale * scale)
            return super().attend(rows, cache, (qkv[0] * query, *qkv[1:]), changed)

    return Wrong


@pytest.mark.parametrize("altered", [{"query": 1.1}, {"query": 1.05}, {"scale": 0.95}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_attention_that_is_slightly_wrong_is_refused_in_every_dtype(
    dtype: str, altered: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(checks, "TorchAttention", make_wrong(**altered))
    with pytest.raises(UnsupportedModel, match=r"'olmo'.* through a paged cache its logits are [\d.e-]+ off"):
        load_model(build(tmp_path, "olmo"), "PD", dtype=dtype)
    assert "kernels" not in caplog.text, "the model is refused without them: they are not to blame"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_epsilon_within_the_paged_path_is_refused(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, own = build(tmp_path, "olmo2"), LoadedModel.forward

    def forward(model: LoadedModel, *given: Any) -> Tensor:
        model.language.model.norm.variance_epsilon = 0.02
        try:
            return own(model, *given)
        finally:
            model.language.model.norm.variance_epsilon = model.adapter.text_config.rms_norm_eps

    monkeypatch.setattr(LoadedModel, "forward", forward)
    with pytest.raises(UnsupportedModel, match=r"through a paged cache its logits are"):
        load_model(directory, "PD", dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_fault_of_half_precision_alone_is_refused(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Coarse(TorchAttention):
        def attend(self, rows: Any, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: Any) -> Tensor:
            factor = 1.0 if cache.dtype == torch.float32 else 1.5
            return super().attend(rows, cache, (qkv[0] * factor, *qkv[1:]), params)

    monkeypatch.setattr(checks, "TorchAttention", Coarse)
    with pytest.raises(UnsupportedModel, match=r"through a paged cache its logits are"):
        load_model(build(tmp_path, "olmo"), "PD", dtype=dtype)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in SERVED]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_text_type_passes_in_half_precision(
    model_type: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known types as well: the check may refuse no honest model."""
    monkeypatch.setattr(registry, "_TEXT_MODELS", frozenset())
    assert load_model(build(tmp_path, model_type), "PD", dtype=dtype).language.trinity_checked


# ---------------------------------------------------------------- float32, module by module


@pytest.mark.parametrize(("dtype", "small"), [("bfloat16", 0), ("bfloat16", 1 << 19), ("float32", 0)])
def test_a_forward_in_float32_is_that_of_a_copy(
    dtype: str, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed model, whose weights are not where they were, and one of tied embeddings and experts of its own."""
    monkeypatch.setattr(float32_forward, "_SMALL", small)
    for name, fields in (("olmo", {"tie_word_embeddings": True}), ("gpt_oss", {}), ("gemma2", {})):
        directory = build(tmp_path / name, name, **fields)
        model = load_model(directory, "PD", dtype=dtype, packed=dtype == "float32").language
        before = {key: (id(value), value.dtype) for key, value in model.state_dict(keep_vars=True).items()}
        kinds = [type(each) for each in model.modules()]
        copy = load_copy(directory, dtype)
        ids = torch.tensor([make_prompt(20)])
        with torch.inference_mode(), without_swaps(model), in_float32(model):
            model.set_attn_implementation("eager")
            found = model(input_ids=ids, use_cache=False).logits
            assert torch.allclose(found, copy(input_ids=ids, use_cache=False).logits, atol=1e-4)
            assert found.dtype == torch.float32
        assert {key: (id(value), value.dtype) for key, value in model.state_dict(keep_vars=True).items()} == before
        assert [type(each) for each in model.modules()] == kinds
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def load_copy(directory: Path, dtype: str) -> Any:
    kind: Any = AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=getattr(torch, dtype), attn_implementation="eager")
    return model.float()


def test_weights_are_back_after_a_forward_that_fails(tmp_path: Path) -> None:
    model = load_model(build(tmp_path, "olmo"), "PD", dtype="bfloat16").language
    with pytest.raises((TypeError, AttributeError)), in_float32(model), torch.inference_mode():  # by its kernel
        model.model.layers[0].mlp.up_proj("no tensor")
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def test_prompts_begin_before_every_limit() -> None:
    config = make_config("ministral3", tiny=False)
    starts = checks._list_starts(config)
    assert starts[0] == 0
    assert starts[1] == config.max_position_embeddings - checks._LENGTH - 1
    for limit in (16_384, config.max_position_embeddings):
        assert any(start < limit <= start + checks._LENGTH + 1 for start in starts)
    assert len(starts) == len(set(starts)) <= checks._MOST_STARTS
    tiny = checks._list_starts(make_config("ministral3"))
    assert any(start < ORIGINAL <= start + checks._LENGTH for start in tiny)


@pytest.mark.parametrize("length", [None, 0, 24, 25])
def test_a_short_context_or_none_is_checked_from_its_beginning(length: int | None) -> None:
    starts = checks._list_starts(SimpleNamespace(max_position_embeddings=length))
    assert starts == ([0, 1] if length == 25 else [0])


# ---------------------------------------------------------------- layers that stay quantised, in half precision


SLOW = slow("awq", "gptq", "torchao-int8", "torchao-int8-rows")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["compressed-int8", "compressed-fp8", *SLOW])
def test_quantised_layers_are_checked_beyond_the_noise_of_their_dtype(name: str, dtype: str) -> None:
    """In bfloat16 transformers' own logits of FP8 layers are up to 0.3 off those of the same in float32."""
    checks.self_check(load_model(quantised(name), "PD", dtype=dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["compressed-int8", "compressed-fp8", *SLOW])
def test_attention_that_is_wrong_over_quantised_layers_is_refused(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(quantised(name), "PD", dtype=dtype)
    monkeypatch.setattr(checks, "TorchAttention", make_wrong(query=1.5))
    with pytest.raises(UnsupportedModel, match=r"through a paged cache its logits are [\d.e-]+ off"):
        checks.self_check(model)


def test_quantised_layers_that_take_no_float32_are_checked_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPTQModel's for CPUs, which keep the dtype of their first rows."""
    model = load_model(quantised("compressed-int8"), "PD", dtype="bfloat16")
    for layer in model.language.trinity_quantised:
        monkeypatch.setattr(layer, "forward", _refuse_float32(layer.forward))
    monkeypatch.setattr(checks, "_QUANTISED_TOLERANCE", 6e-2)  # where alone float32 would tell what is rounding
    checks.self_check(model)
    monkeypatch.setattr(checks, "TorchAttention", make_wrong(query=1.5))
    with pytest.raises(UnsupportedModel, match="through a paged cache"):
        checks.self_check(model)


def _refuse_float32(forward: Any) -> Any:
    def run(rows: Tensor) -> Tensor:
        if rows.dtype == torch.float32:
            raise ValueError("keep one dtype per layer")
        found: Tensor = forward(rows)
        return found

    return run
