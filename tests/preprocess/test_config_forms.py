"""Values of another type of JSON than this library's code reads of a config: a typed error, at each door."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from trinity import commands
from trinity.errors import ConfigError
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.processor import RequestProcessor
from trinity.stages.models import load_model

DOORS: dict[str, Callable[[Path], Any]] = {
    "config": read_config,
    "processor": RequestProcessor,
    "weights": lambda directory: load_model(directory, "PD"),
}


def change(folder: Path, model: str, name: str, value: Any) -> Path:
    directory = Path(shutil.copytree(checkpoint(model), folder / "copy"))
    fields = json.loads((directory / "config.json").read_text())
    inner = fields.get("text_config", fields)
    *above, last = name.split(".")
    for each in above:
        inner = inner.setdefault(each, {})
    inner[last] = value
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("value", [[], {}, 5, True, ["default"]], ids=repr)
@pytest.mark.parametrize("model", ["llama", "qwen2_vl"])
def test_a_rope_type_that_is_no_text(model: str, value: Any, door: str, tmp_path: Path) -> None:
    directory = change(tmp_path, model, "rope_parameters.rope_type", value)
    with pytest.raises(ConfigError, match=r"rope_parameters.rope_type is a text, got .*; mend config.json"):
        DOORS[door](directory)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rope_parameters.full_attention.rope_type", {}, "a text"),
        ("rope_parameters", [], "an object of JSON"),
        ("rope_scaling", "linear", "an object of JSON"),
        ("rope_scaling.type", [], "a text"),
        ("rope_parameters.mrope_section", 3, "a list of whole numbers"),
        ("rope_parameters.mrope_section", [1, "2", 3], "a list of whole numbers"),
        ("rope_parameters.mrope_section", [True, 1, 1], "a list of whole numbers"),
        ("layer_types", {"full_attention": 1}, "a list of texts"),
        ("layer_types", [["full_attention"]], "a list of texts"),
        ("layer_types", "full_attention", "a list of texts"),
        ("layers_block_type", [{}], "a list of texts"),
    ],
)
def test_what_the_library_reads_has_one_form(name: str, value: Any, said: str, tmp_path: Path) -> None:
    directory = change(tmp_path, "llama", name, value)
    for open_door in DOORS.values():
        with pytest.raises(ConfigError, match=f"{name} is {said}, got"):
            open_door(directory)


@pytest.mark.parametrize("name", ["layer_types", "rope_scaling", "layers_block_type"])
def test_nothing_is_of_any_form(name: str, tmp_path: Path) -> None:
    read_config(change(tmp_path, "llama", name, None))


def test_trinity_check_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = change(tmp_path, "any-vipllava", "rope_parameters.rope_type", [])
    assert commands.main(["check", str(directory)]) == 2
    found = capsys.readouterr()
    assert "rope_type is a text" in found.err
    assert found.err.count("\n") == 1
