"""Folders of other formats are named for what they are, wherever a model is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trinity.costs.model_config import read_model_shape
from trinity.errors import ConfigError
from trinity.preprocess.checkpoint.config_file import check_directory


def folder_of(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).write_text("{}")
    return tmp_path


def explain(path: Path) -> list[str]:
    said = []
    for look in (check_directory, read_model_shape):
        with pytest.raises(ConfigError) as error:
            look(path)
        said.append(str(error.value))
    return said


def test_gguf_is_named_as_a_folder_and_as_a_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama-Q4_K_M.gguf", "mmproj-F16.gguf")
    for said in explain(folder) + explain(folder / "mmproj-F16.gguf"):
        assert ".gguf' is GGUF" in said
        assert "give the folder of safetensors" in said
        assert "no config.json" not in said


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base" + "x" * 100_000}))
    for said in explain(folder):
        assert "has an adapter (LoRA) and no model" in said
        assert "merge it into its base model, 'org/base" in said
        assert len(said) < 700 + len(str(folder))


@pytest.mark.parametrize("content", ["{}", "[]", "null", "{", '{"base_model_name_or_path": 3}', "[" * 10_000])
def test_an_adapter_without_a_base_is_named_all_the_same(tmp_path: Path, content: str) -> None:
    folder = folder_of(tmp_path)
    (folder / "adapter_config.json").write_text(content)
    for said in explain(folder):
        assert "merge it into its base model with merge_and_unload() of peft" in said


def test_params_json_is_the_makers_own_format(tmp_path: Path) -> None:
    for said in explain(folder_of(tmp_path, "params.json", "consolidated.safetensors", "tekken.json")):
        assert "original format of Llama or Mistral (params.json without config.json)" in said
        assert "convert" in said


def test_what_is_none_of_these_is_as_before(tmp_path: Path) -> None:
    assert all("has no config.json; give the directory" in said for said in explain(folder_of(tmp_path, "notes.txt")))
    assert all("does not exist; give" in said for said in explain(tmp_path / "none"))
    assert "is a file; give" in explain(tmp_path / "notes.txt")[0]
