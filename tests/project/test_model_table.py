"""The table of models: written and read back alike, each type bounded, and a sample of its rows true."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import transformers

from support.any_model.media_checkpoint import multimodal_types
from support.any_model.trials import (
    CHECKED,
    LISTED,
    NOT_SERVED,
    Row,
    count_processors,
    list_work,
    shorten,
    try_media,
)
from tools import model_table
from tools.model_table import PAGE, read_rows, run_bounded, write_page
from trinity.preprocess.checkpoint.model_types import STREAMS

ROWS = [
    Row("glm4v", CHECKED, "image, text"),
    Row("idefics2", NOT_SERVED, "prompt ids: 87 tokens, and 88 by its own"),
    Row("llava", LISTED, "image, text"),
    Row("opt", CHECKED, "text"),
]


def test_a_page_has_its_head_counts_and_reads_back() -> None:
    page = write_page(ROWS, 3, 2, "5.23.0")
    assert "2 of 3 multimodal types have a processor of images or audio that loads without torchvision" in page
    assert "2 of 3 serve: 1 listed, 1 by self-check; 1 are refused" in page
    assert "1 of 1 serve: 0 listed, 1 by self-check; 0 are refused" in page
    assert list(read_rows(page)) == ROWS


def test_an_error_becomes_a_cell() -> None:
    said = shorten(ValueError("a | b\n<image> in /tmp/x/model.safetensors " + "z" * 300))
    assert "|" not in said.replace("\\|", "")
    assert "/tmp/" not in said
    assert "<" not in said
    assert len(said) == 200
    (row,) = read_rows(write_page([Row("x", NOT_SERVED, said)], 1, 0, "5"))
    assert row.said == said


def sleep_long(model_type: str, folder: Path) -> Row:
    time.sleep(600)
    return Row(model_type, CHECKED)


def take_much(model_type: str, folder: Path) -> Row:
    return Row(model_type, CHECKED, str(len(bytearray(1 << 40))))


def fail(model_type: str, folder: Path) -> Row:
    raise ValueError("this type does not work")


def test_a_type_is_bounded_in_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_table, "MOST_SECONDS", 0.2)
    (slow,) = run_bounded([("slow", sleep_long)])
    assert "its process ended with" in slow.said
    monkeypatch.setattr(model_table, "MOST_SECONDS", 60)
    big, bad = run_bounded([("big", take_much), ("bad", fail)], 2)
    assert "MemoryError" in big.said
    assert bad == Row("bad", NOT_SERVED, "ValueError: this type does not work")


def test_the_page_in_docs_has_every_type_and_counts_its_own_rows() -> None:
    pytest.importorskip("torchaudio", reason="the page counts three processors that need torchaudio")
    pytest.importorskip("mistral_common", reason="the page counts one processor that needs mistral-common")
    page = PAGE.read_text(encoding="utf-8")
    assert f"transformers {transformers.__version__}" in page, "run make models"
    rows, media, (processors, types) = list(read_rows(page)), multimodal_types(), count_processors()
    assert types == len(media)
    assert [row.model_type for row in rows] == [name for name, _ in list_work()]
    assert page == write_page(rows, len(media), processors, transformers.__version__)
    serving = [row.outcome != NOT_SERVED for row in rows]
    assert sum(serving[: len(media)]) >= 67, "fewer than before; the aim is 75"
    assert sum(serving[len(media) :]) >= 100
    assert not [row.model_type for row in rows if row.outcome == NOT_SERVED and not row.said], "a reason each"


LISTED_ROWS = {"qwen2_audio": "audio, text", "qwen3_omni_moe_thinker": "image, audio, text"}


@pytest.mark.parametrize("name", ["qwen2_audio", pytest.param("qwen3_omni_moe_thinker", marks=pytest.mark.slow)])
def test_a_listed_type_is_built_and_loaded_and_names_what_it_takes(name: str, tmp_path: Path) -> None:
    assert try_media(name, tmp_path / "model") == Row(name, LISTED, LISTED_ROWS[name])
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", STREAMS)
def test_a_type_that_listens_as_it_writes_is_refused_by_that_reason(name: str, tmp_path: Path) -> None:
    row = try_media(name, tmp_path / "model")
    assert row.outcome == NOT_SERVED
    assert "realtime audio is not served" in row.said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vipllava", "mistral3", "idefics2", "blip", "opt"])
def test_rows_say_what_is(name: str) -> None:
    tried = dict(list_work())[name]
    (row,) = run_bounded([(name, tried)])
    assert row.outcome == (NOT_SERVED if name == "blip" else CHECKED)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("diffusion_gemma", "text model: DiffusionGemmaForBlockDiffusion does not generate token by token"),
        ("evolla", "processor: EvollaProcessor has protein_tokenizer, tokenizer, and none of them reads images"),
    ],
)
def test_a_type_that_is_no_model_of_images_and_tokens_is_refused_by_that_reason(
    name: str, reason: str, tmp_path: Path
) -> None:
    assert try_media(name, tmp_path / "model") == Row(name, NOT_SERVED, reason)
