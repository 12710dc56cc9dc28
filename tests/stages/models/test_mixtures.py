"""Mixtures of experts: a request's logits do not depend on who is in its batch, by any of transformers' ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.any_model.text_checkpoint import build_any_text
from support.mixed_batches import PROMPTS, Batch, check_mixed, run_alone
from trinity.stages.models import load_model

_NAMES = """
afmoe aria_text axk1 cohere2_moe dbrx deepseek_v2 dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite
gpt_oss granitemoe granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 jetmoe kolibri1 laguna longcat_flash mellum
mimo_v2_flash minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe solar_open
"""
MIXTURES = tuple(_NAMES.split())
SOON = ("qwen3_moe",)
WAYS = ("eager", "batched_mm", "grouped_mm")
WITHIN = 2e-5  # of the largest logit: sums of float32 in another order


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in MIXTURES]
)
def test_requests_of_a_mixture_do_not_touch_each_other(model_type: str, tmp_path: Path) -> None:
    check_mixed(load_model(build_any_text(model_type, tmp_path), "PD", dtype="float32"), WITHIN)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_no_way_of_running_experts_depends_on_the_batch(model_type: str, way: str, tmp_path: Path) -> None:
    model = load_model(build_any_text(model_type, tmp_path), "PD", dtype="float32")
    model.language.set_experts_implementation(way)
    check_mixed(model, WITHIN)


def test_a_router_that_looks_at_its_batch_shows(tmp_path: Path) -> None:
    """The control: rows that are normed by the rest of their batch go to other experts."""
    model = load_model(build_any_text("mixtral", tmp_path), "PD", dtype="float32")
    for layer in model.language.model.layers:
        layer.mlp.gate.register_forward_pre_hook(lambda gate, given: (given[0] - given[0].mean(0, keepdim=True),))
    with pytest.raises(AssertionError):
        check_mixed(model, WITHIN)


def test_ties_between_experts_are_broken_alike_in_every_batch(tmp_path: Path) -> None:
    model = load_model(build_any_text("mixtral", tmp_path), "PD", dtype="float32")
    with torch.no_grad():
        for layer in model.language.model.layers:
            layer.mlp.gate.weight.zero_()
    check_mixed(model, WITHIN)


def test_rows_that_nobody_samples_change_nothing(tmp_path: Path) -> None:
    model = load_model(build_any_text("qwen3_moe", tmp_path), "PD", dtype="float32")
    batch = Batch(model, PROMPTS)
    batch.step(("b", 0, 50), ("c", 0, 38))
    batch.step(("b", 50, 11), ("a", 0, 9), decodes=("c",))
    for name, outputs in (("a", 1), ("b", 1), ("c", 2)):
        for found, single in zip(batch.logits[name], run_alone(model, name, outputs), strict=True):
            assert float((found - single).abs().max()) < WITHIN * float(single.abs().max())
