"""Models with latent attention cache one row per token and layer, and give what ``generate()`` gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.known_classes import packs
from support.mixed_batches import PROMPTS, VOCABULARY, Batch, check_mixed
from support.text_models import make_prompt
from support.text_oracle import check_text
from trinity.stages.attention.interface import PAGED_ATTENTION
from trinity.stages.kernels import linear
from trinity.stages.kernels.linear import PackedLinear
from trinity.stages.models import load_model
from trinity.testing.any_text_checkpoint import build_any_text

LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
SOON = ("deepseek_v3",)
RANK, ROPE = 24, 8


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_is_packing_faster", packs)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in LATENT]
)
def test_tokens_and_logits_over_latent_rows(model_type: str, tmp_path: Path) -> None:
    directory = build_any_text(model_type, tmp_path)
    check_text(directory, make_prompt(75, VOCABULARY))
    model = load_model(directory, "PD", dtype="float32")
    layers = model.adapter.text_config.num_hidden_layers
    assert model.kv_shape(16).shape == (layers, 1, 1, 16, RANK + ROPE)
    assert model.kv_shape(16).block_bytes == layers * 16 * (RANK + ROPE) * 4


def test_half_precision_passes_its_check_and_packing_leaves_the_projection(tmp_path: Path) -> None:
    model = load_model(build_any_text("deepseek_v3", tmp_path), "PD", dtype="bfloat16", packed=True)
    attention = model.language.model.layers[0].self_attn
    assert not isinstance(attention.kv_b_proj, PackedLinear)
    assert attention.kv_b_proj.weight.device.type == "cpu"
    assert isinstance(attention.o_proj, PackedLinear) or not packs(torch.bfloat16)
    assert model.language.config._attn_implementation == PAGED_ATTENTION


@pytest.mark.parametrize("model_type", ["deepseek_v3", pytest.param("longcat_flash", marks=pytest.mark.slow)])
def test_requests_of_a_batch_do_not_touch_each_other(model_type: str, tmp_path: Path) -> None:
    model = load_model(build_any_text(model_type, tmp_path), "PD", dtype="float32")
    check_mixed(model)


def test_latent_rows_that_are_zeroed_change_what_follows(tmp_path: Path) -> None:
    """The control: decodes read the prompt from its latent rows and from nowhere else."""
    model = load_model(build_any_text("deepseek_v3", tmp_path), "PD", dtype="float32")
    kept, wiped = (Batch(model, {"b": PROMPTS["b"]}) for _ in range(2))
    for batch in (kept, wiped):
        batch.step(("b", 0, 61))
    wiped.pool.memory.tensor.zero_()
    for batch in (kept, wiped):
        for _ in range(4):
            batch.step(decodes=("b",))
    chosen = [[int(each.argmax()) for each in batch.logits["b"]] for batch in (kept, wiped)]
    assert chosen[0][0] == chosen[1][0]
    assert chosen[0] != chosen[1]
