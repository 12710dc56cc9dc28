"""The self-check of unknown types runs far from position 0, and with kernels as well as without."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.ministral3 import modeling_ministral3

from support.known_classes import declare_known, packs
from support.text_models import ORIGINAL, build, generate, make_config, make_prompt, serve
from trinity.errors import UnsupportedModel
from trinity.stages.kernels import decoder_layers, fused_elementwise, linear
from trinity.stages.kernels.decoder_layers import _FusedDecoderLayer
from trinity.stages.kernels.known_sources import LayerPart
from trinity.stages.models import checks, load_model

kernels = pytest.mark.skipif(
    not fused_elementwise.has_fused_kernels() or not packs(torch.float32), reason="no kernels, or oneDNN packs nothing"
)


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_is_packing_faster", packs)


@pytest.fixture
def credulous(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: Ministral 3's layers are admitted, on a probe of the first five positions."""
    declare_known(monkeypatch, LayerPart.DECODER_ATTENTION, modeling_ministral3.Ministral3Attention)
    monkeypatch.setattr(decoder_layers, "place_rows", lambda config: (torch.arange(5), torch.ones(5)))


def count_fused(model: Any) -> int:
    return sum(isinstance(each, _FusedDecoderLayer) for each in model.language.modules())


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
