"""Hub ids: found in a cache as huggingface_hub lays it out, downloaded where that is allowed, else said how to get."""

from __future__ import annotations

import asyncio
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from support.checkpoint_files import checkpoint
from trinity.commands.plan import make_planner
from trinity.costs.model_config import read_model_shape
from trinity.errors import ConfigError
from trinity.errors.hub_ids import locate_model
from trinity.pipeline import Pipeline
from trinity.request import Request
from trinity.traces.trace import SLO

COMMIT, OTHER = "a" * 40, "b" * 40
ID = "tiny-org/tiny.llama-1"


def cache_snapshot(cache: Path, source: Path, commit: str, revision: str | None) -> Path:
    """Put a checkpoint into a cache as the hub's client does: blobs, links to them by commit, and names of commits."""
    repository = cache / constants.REPO_ID_SEPARATOR.join(["models", *ID.split("/")])
    snapshot = repository / "snapshots" / commit
    (repository / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    for file in source.iterdir():
        blob = repository / "blobs" / f"{commit[:4]}-{file.name}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    if revision is not None:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in a directory of its own, where the program runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_the_layout_of_this_test_is_the_clients_own(cache: Path) -> None:
    snapshot = cache_snapshot(cache, checkpoint("llama"), COMMIT, "main")
    assert huggingface_hub.try_to_load_from_cache(ID, "config.json") == str(snapshot / "config.json")


def test_an_id_is_served_from_the_cache(cache: Path) -> None:
    async def serve() -> str:
        async with Pipeline(ID, "PD", dtype="float32") as pipe:
            return (await pipe.complete(Request("Hello", max_tokens=3))).finish_reason

    cache_snapshot(cache, checkpoint("llama"), COMMIT, "main")
    assert asyncio.run(serve()) == "length"
    asked = Namespace(model=ID, slo=SLO(2, 0.1), instances=2, device="H100", cost=None, objective="goodput", rate=None)
    assert make_planner(asked).model == read_model_shape(ID)
    assert ID in str(make_planner(asked).model.name)
    assert read_model_shape(ID).vocabulary == read_model_shape(checkpoint("llama")).vocabulary


def test_a_revision_is_pinned(cache: Path) -> None:
    first = cache_snapshot(cache, checkpoint("llama"), COMMIT, "main")
    second = cache_snapshot(cache, checkpoint("mistral"), OTHER, "v2")
    assert locate_model(ID) == locate_model(f"{ID}@{COMMIT}") == locate_model(f"{ID}@main") == first
    assert locate_model(f"{ID}@{OTHER}") == locate_model(f"{ID}@v2") == second
    with pytest.raises(ConfigError, match=f"run 'hf download {ID} --revision v3'"):
        locate_model(f"{ID}@v3")


def test_a_directory_of_that_name_is_meant_first(cache: Path) -> None:
    cache_snapshot(cache, checkpoint("llama"), COMMIT, "main")
    Path(ID).mkdir(parents=True)
    assert locate_model(ID) == Path(ID)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        Pipeline(ID)
    assert locate_model(Path("other/name")) == Path("other/name"), "a path is no id"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "name", ["a/b/c", "../x", "a/..", "/a/b", "./a", "a", "a/b@", "a/b@..", "a b/c", "a/b@x/../../y"]
)
def test_what_is_no_id_is_a_path(name: str) -> None:
    assert locate_model(name) == Path(name)
    with pytest.raises(ConfigError, match=r"does not exist|give the directory"):
        Pipeline(name)


@pytest.mark.usefixtures("cache")
def test_an_id_that_is_nowhere_says_what_to_do() -> None:
    said = (
        rf"'{ID}' does not exist, and no model of that id is in Hugging Face's cache.*hf download {ID}'.*download=True"
    )
    with pytest.raises(ConfigError, match=said):
        Pipeline(ID)
    with pytest.raises(ConfigError, match=said):
        read_model_shape(ID)


class Hub:
    """Stands in for the hub, which no test may reach: a download puts a checkpoint into the cache."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._cache, self._find = cache, huggingface_hub.snapshot_download
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self)

    def __call__(self, name: str, revision: Any = None, local_files_only: bool = False, **options: Any) -> str:
        if local_files_only:
            return str(self._find(name, revision=revision, local_files_only=True))
        self.asked.append((name, revision))
        patterns = set(options["allow_patterns"]) - {"conversation.py"}  # InternVL's chats, which are read as text
        assert not any(each.endswith((".py", ".bin", ".pt")) for each in patterns)
        return str(cache_snapshot(self._cache, checkpoint("llama"), OTHER, "main"))


def test_nothing_is_downloaded_unless_it_is_allowed_and_missing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(cache, monkeypatch)
    with pytest.raises(ConfigError):
        Pipeline(ID)
    assert hub.asked == []
    Pipeline(ID, download=True)
    assert hub.asked == [(ID, None)]
    Pipeline(ID, download=True)
    assert hub.asked == [(ID, None)], "it is in the cache now"


def test_a_cached_config_alone_is_no_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others fetch single files: a tokenizer's program, for instance."""
    hub, bare = Hub(cache, monkeypatch), cache.parent / "bare"
    bare.mkdir()
    shutil.copy(checkpoint("llama") / "config.json", bare)
    cache_snapshot(cache, bare, COMMIT, "main")
    locate_model(ID, download=True)
    assert hub.asked == [(ID, None)]


@pytest.mark.usefixtures("cache")
def test_a_download_that_fails_is_a_config_error() -> None:
    """By the real client, which HF_HUB_OFFLINE keeps from asking."""
    with pytest.raises(ConfigError, match=f"model '{ID}' cannot be downloaded.*check id, revision, HF_TOKEN"):
        Pipeline(ID, download=True)
