"""Ids of special tokens out of the files beside a tokenizer, whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trinity.errors import ConfigError
from trinity.preprocess.checkpoint.internvl_format import read_token_ids


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_both_files_count_and_the_newer_goes_first(tmp_path: Path) -> None:
    described = {"added_tokens_decoder": {"7": {"content": "<a>"}, "8": {"content": "<b>"}}}
    write(tmp_path, tokenizer_config=described, added_tokens={"<b>": 3, "<c>": 9})
    assert read_token_ids(tmp_path) == {"<a>": 7, "<b>": 8, "<c>": 9}
    assert read_token_ids(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    "described",
    [
        [],
        {"x": {"content": "<a>"}},
        {"1": 5},
        {"1": {"content": 5}},
        {"9" * 5000: {"content": "<a>"}},
        {"-1": {"content": "a"}},
    ],
)
def test_what_names_no_token_is_passed_over(described: Any, tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"added_tokens_decoder": described}, added_tokens={"<z>": "1", "<y>": True})
    assert read_token_ids(tmp_path) == {}


@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 100_000])
def test_a_broken_file_is_a_typed_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"added_tokens\.json"):
        read_token_ids(write(tmp_path, added_tokens=text))
