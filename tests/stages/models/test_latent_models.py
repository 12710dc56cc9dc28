"""Models with latent attention cache one row per token and layer, and give what ``generate()`` gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.any_model.text_checkpoint import build_any_text
from support.known_classes import packs
from support.mixed_batches import PROMPTS, VOCABULARY, Batch, check_mixed
from support.text_models import make_prompt
from support.text_oracle import check_text
from trinity.stages.attention.interface import PAGED_ATTENTION
from trinity.stages.kernels import linear
from trinity.stages.kernels.linear import PackedLinear
from trinity.stages.models import indexers, load_model

INDEXED = ("deepseek_v32", "axk2", "glm_moe_dsa")  # whose indexers choose 16 tokens
LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu", *INDEXED)
SOON = ("deepseek_v3", "deepseek_v32")
RANK, ROPE, INDEX = 24, 8, 16


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "is_packing_faster", packs)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in LATENT]
)
def test_tokens_and_logits_over_latent_rows(model_type: str, tmp_path: Path) -> None:
    directory = build_any_text(model_type, tmp_path)
    check_text(directory, make_prompt(75, VOCABULARY))
    model = load_model(directory, "PD", dtype="float32")
    layers = model.adapter.text_config.num_hidden_layers
    width = RANK + ROPE + INDEX * (model_type in INDEXED)
    assert model.kv_shape(16).shape == (layers, 1, 1, 16, width)
    assert model.kv_shape(16).block_bytes == layers * 16 * width * 4


def test_half_precision_passes_its_check_and_packing_leaves_the_projection(tmp_path: Path) -> None:
    model = load_model(build_any_text("deepseek_v3", tmp_path), "PD", dtype="bfloat16", packed=True)
    attention = model.language.model.layers[0].self_attn
    assert not isinstance(attention.kv_b_proj, PackedLinear)
    assert attention.kv_b_proj.weight.device.type == "cpu"
    assert isinstance(attention.o_proj, PackedLinear) or not packs(torch.bfloat16)
    assert model.language.config._attn_implementation == PAGED_ATTENTION


@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", "deepseek_v32", pytest.param("longcat_flash", marks=pytest.mark.slow)]
)
def test_requests_of_a_batch_do_not_touch_each_other(model_type: str, tmp_path: Path) -> None:
    model = load_model(build_any_text(model_type, tmp_path), "PD", dtype="float32")
    check_mixed(model)


@pytest.mark.parametrize(("name", "zeroed"), [("deepseek_v3", slice(None)), ("deepseek_v32", slice(-INDEX, None))])
def test_latent_rows_or_index_keys_that_are_zeroed_change_what_follows(
    name: str, zeroed: slice, tmp_path: Path
) -> None:
    """The control: decodes read the prompt from its rows and from nowhere else, and choose tokens by their keys."""
    model = load_model(build_any_text(name, tmp_path), "PD", dtype="float32")
    kept, wiped = (Batch(model, {"b": PROMPTS["b"]}) for _ in range(2))
    for batch in (kept, wiped):
        batch.step(("b", 0, 61))
    wiped.pool.memory.tensor[..., zeroed] = 0
    for batch in (kept, wiped):
        for _ in range(4):
            batch.step(decodes=("b",))
    chosen = [[int(each.argmax()) for each in batch.logits["b"]] for batch in (kept, wiped)]
    assert chosen[0][0] == chosen[1][0]
    assert chosen[0] != chosen[1]


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_prompt_in_small_chunks_chooses_what_the_whole_does(rows: int, tmp_path: Path) -> None:
    """Chunks end where fewer tokens are there than an indexer chooses, and where more are."""
    model = load_model(build_any_text("deepseek_v32", tmp_path), "PD", dtype="float32")
    whole, parts = (Batch(model, {"c": PROMPTS["c"]}) for _ in range(2))
    whole.step(("c", 0, 38))
    for start in range(0, 38, rows):
        parts.step(("c", start, min(rows, 38 - start)))
    (exact,), (found,) = whole.logits["c"], parts.logits["c"]
    assert (found - exact).abs().max() < 1e-4 * exact.abs().max()


def test_the_check_at_load_keeps_kernels_beside_indexers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Through kernels indexers chose as many as they may, and without them six: kernels were dropped for it."""
    load_model(build_any_text("deepseek_v32", tmp_path), "PD", dtype="float32")
    assert "runs without kernels" not in caplog.text


def test_pieces_of_a_chunk_choose_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(build_any_text("deepseek_v32", tmp_path), "PD", dtype="float32")
    found = []
    for most in (indexers.SCORE_BYTES, 40_000):  # of one row and token: 128 bytes
        monkeypatch.setattr(indexers, "SCORE_BYTES", most)
        batch = Batch(model, PROMPTS)
        batch.step(("a", 0, 9), ("b", 0, 61), ("c", 0, 38))
        batch.step(decodes=("a", "b", "c"))
        found.append(torch.cat([each[-1] for each in batch.logits.values()]))
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[0].abs().max()
