"""Files of a checkpoint's folder that are none, or too large, and indexes that name files elsewhere: a typed error."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from support.checkpoint_files import checkpoint
from trinity import commands
from trinity.errors import ConfigError
from trinity.preprocess.checkpoint.config_file import check_directory, read_config
from trinity.preprocess.checkpoint.model_files import MOST_CONFIG_BYTES, MOST_INDEX_BYTES, MOST_TEXT_BYTES
from trinity.preprocess.processor import RequestProcessor
from trinity.stages.models import load_model

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
DOORS: dict[str, Callable[[Path], Any]] = {
    "directory": check_directory,
    "config": read_config,
    "processor": RequestProcessor,
    "weights": lambda directory: load_model(directory, "PD"),
    "part": lambda directory: load_model(directory, "D"),
}


def copy(folder: Path, name: str = "llama") -> Path:
    return Path(shutil.copytree(checkpoint(name), folder / "copy"))


def split(directory: Path) -> dict[str, str]:
    """Split the weights into two files and an index; returns the index's map."""
    weights = load_file(directory / "model.safetensors")
    names = sorted(weights)
    shards = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for shard in set(shards.values()):
        held = {name: weights[name] for name in names if shards[name] == shard}
        save_file(held, directory / shard, metadata={"format": "pt"})
    (directory / "model.safetensors").unlink()
    write_index(directory, shards)
    return shards


def write_index(directory: Path, shards: Any, name: str = INDEXES[0]) -> None:
    (directory / name).write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def make_long(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.truncate(size)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": make_socket,
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("door", DOORS)
def test_each_door_refuses_weights_that_are_no_file(door: str, kind: str, tmp_path: Path) -> None:
    directory = copy(tmp_path)
    split(directory)
    (directory / "part-1.safetensors").unlink()
    NO_FILES[kind](directory / "part-1.safetensors")
    with pytest.raises(ConfigError, match=f"part-1.safetensors' is {kind} and no file.*take it out"):
        DOORS[door](directory)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "generation_config.json", "chat_template.jinja", "merges.txt", "model.safetensors"]
)
def test_a_pipe_of_any_name_is_refused(name: str, tmp_path: Path) -> None:
    directory = copy(tmp_path)
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(ConfigError, match=f"{name}' is a pipe"):
        check_directory(directory)


@pytest.mark.parametrize(
    ("name", "most", "kind"),
    [
        ("config.json", MOST_CONFIG_BYTES, "config"),
        ("generation_config.json", MOST_CONFIG_BYTES, "config"),
        ("preprocessor_config.json", MOST_CONFIG_BYTES, "config"),
        ("chat_template.jinja", MOST_CONFIG_BYTES, "config"),
        ("additional_chat_templates/tools.jinja", MOST_CONFIG_BYTES, "config"),
        ("conversation.py", MOST_CONFIG_BYTES, "config"),
        ("tokenizer_config.json", MOST_TEXT_BYTES, "tokenizer"),
        ("tokenizer.json", MOST_TEXT_BYTES, "tokenizer"),
        ("added_tokens.json", MOST_TEXT_BYTES, "tokenizer"),
        ("merges.txt", MOST_TEXT_BYTES, "tokenizer"),
        ("tokenizer.model", MOST_TEXT_BYTES, "tokenizer"),
        ("model.safetensors.index.json", MOST_INDEX_BYTES, "index of weights"),
    ],
)
def test_a_file_that_is_too_large_for_its_name_is_not_read(name: str, most: int, kind: str, tmp_path: Path) -> None:
    directory = copy(tmp_path)
    (directory / name).parent.mkdir(exist_ok=True)
    make_long(directory / name, most)
    check_directory(directory)
    make_long(directory / name, most + 1)
    with pytest.raises(ConfigError, match=f"is larger than {most:,} bytes: no {kind} is"):
        check_directory(directory)
    with pytest.raises(ConfigError, match=f"no {kind} is"):
        RequestProcessor(directory)


def test_the_folder_of_a_given_processor_is_checked_too(tmp_path: Path) -> None:
    directory = copy(tmp_path, "llava")
    make_long(directory / "preprocessor_config.json", MOST_CONFIG_BYTES + 1)
    with pytest.raises(ConfigError, match="no config is"):
        RequestProcessor(checkpoint("llava"), processor=directory)


@pytest.mark.parametrize("name", ["weights.gguf", "optimizer.pt", "original.bin", "video.mp4", "logs.zip"])
def test_other_files_may_be_of_any_size(name: str, tmp_path: Path) -> None:
    directory = copy(tmp_path)
    make_long(directory / name, 1 << 40)
    check_directory(directory)


STRAY = ["/dev/zero", "../part-1.safetensors", "sub/part-1.safetensors", "", ".", "..", "part-1.bin", "a\0.safetensors"]


@pytest.mark.parametrize("entry", [*STRAY, 5, None, [], {}, True, ["part-1.safetensors"]], ids=repr)
@pytest.mark.parametrize("door", ["config", "processor", "weights", "part"])
def test_an_index_names_files_beside_it_and_nothing_else(door: str, entry: Any, tmp_path: Path) -> None:
    directory = copy(tmp_path)
    shards = split(directory)
    strange = min(shards)
    write_index(directory, {**shards, strange: entry})
    with pytest.raises(ConfigError, match=f"index.json' has '{strange}' in .*not the name of a .safetensors file.*put"):
        DOORS[door](directory)


@pytest.mark.parametrize("entry", ["/dev/zero", "part-1.safetensors"])
def test_an_index_of_pickles_is_held_to_the_same(entry: str, tmp_path: Path) -> None:
    directory = copy(tmp_path)
    (directory / "model.safetensors").unlink()
    write_index(directory, {"a": entry}, INDEXES[1])
    with pytest.raises(ConfigError, match=r"not the name of a \.bin file"):
        load_model(directory, "PD")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', "[" * 100_000], ids=lambda text: text[:20])
def test_an_index_without_a_map_is_refused(content: str, tmp_path: Path) -> None:
    directory = copy(tmp_path)
    split(directory)
    (directory / INDEXES[0]).write_text(content)
    with pytest.raises(ConfigError, match="is the checkpoint complete"):
        read_config(directory)


def test_an_index_that_nobody_follows_may_say_anything(tmp_path: Path) -> None:
    """transformers takes the whole file where there is one, and safetensors before pickles."""
    directory = copy(tmp_path)
    for name in INDEXES:
        write_index(directory, {"a": "/dev/zero"}, name)
    load_model(directory, "PD")


@pytest.mark.parametrize("named", ["../other.safetensors", "/dev/zero", "a/b.safetensors.index.json", 5, [], ""])
def test_weights_that_the_config_names_lie_in_the_folder(named: Any, tmp_path: Path) -> None:
    directory = copy(tmp_path)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "transformers_weights": named}))
    with pytest.raises(ConfigError, match=r"transformers_weights=.*not the name of a file in that directory; name one"):
        load_model(directory, "PD")


def test_an_index_that_the_config_names_is_checked(tmp_path: Path) -> None:
    directory = copy(tmp_path)
    split(directory)
    named = "own.safetensors.index.json"
    (directory / INDEXES[0]).rename(directory / named)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "transformers_weights": named}))
    load_model(directory, "PD")
    write_index(directory, {"a": "/dev/zero"}, named)
    with pytest.raises(ConfigError, match=r"not the name of a \.safetensors file"):
        load_model(directory, "PD")


def test_trinity_check_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = copy(tmp_path)
    split(directory)
    write_index(directory, {"a": "/dev/zero"})
    assert commands.main(["check", str(directory)]) == 2
    found = capsys.readouterr()
    assert "which is not the name of a .safetensors file" in found.err
    assert found.err.count("\n") == 1


def test_a_snapshot_of_links_loads_as_hugging_faces_cache_has_it(tmp_path: Path) -> None:
    """Split and whole: each name is a link to a file of the folder ``blobs``, whose name is a hash."""
    directory = copy(tmp_path)
    split(directory)
    snapshot, blobs = tmp_path / "snapshots" / "0123", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(directory.iterdir())):
        shutil.move(path, blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    (snapshot / "README.md").symlink_to("../../blobs/gone")
    RequestProcessor(snapshot)
    load_model(snapshot, "PD")
