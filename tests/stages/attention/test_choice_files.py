"""What a start keeps of its measurement of attention: nothing for want of memory, and no other files are touched."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from trinity.stages.attention import backends, measurement
from trinity.stages.attention.backends import BACKENDS, BackendSpec, choose_backends
from trinity.stages.attention.choice import (
    MOST_CHOICES,
    CacheKind,
    MeasuredChoice,
    StepChoice,
    choice_path,
    keep_choice,
    make_choice_key,
    read_choice,
)
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.attention.torch_reference import TorchAttention

KIND = CacheKind((2, 2, 2, 16, 8), torch.float32, torch.device("cpu"), 4)
SMALL = (measurement.StepCase("decode 2", 2, 20), measurement.StepCase("chunk of 9 with 1 decode", 1, 20, 9, 4))


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has measured nothing, an empty cache folder, and steps that take milliseconds."""
    begin_anew(monkeypatch)
    monkeypatch.setenv("TRINITY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(measurement.STEP_CASES, "cpu", SMALL)


def begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_known", {})


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.*"))


class Hungry(TorchAttention):
    """``short`` of memory where there is more than the probe's."""

    short = True

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        if self.short and len(cache) > 11:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().attend(rows, cache, qkv, params)


def test_want_of_memory_for_a_moment_decides_nothing_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BackendSpec(lambda kind: None, lambda kind: Hungry())
    line = {"hungry": spec, "torch": BACKENDS["torch"], "more": BACKENDS["torch"]}
    monkeypatch.setattr(backends, "BACKENDS", line)
    choose_backends("fastest", KIND)
    assert kept(tmp_path) == []
    monkeypatch.setattr(Hungry, "short", False)
    begin_anew(monkeypatch)
    choose_backends("fastest", KIND)
    (file,) = kept(tmp_path)
    times = msgspec.json.decode(file.read_bytes(), type=MeasuredChoice).times
    assert all("hungry" in each for each in times.values())


def test_nothing_is_kept_where_nothing_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_runs", lambda *given: False)
    choose_backends("fastest", KIND)
    assert kept(tmp_path) == []


def test_a_file_of_somebody_else_in_the_folder_stays(tmp_path: Path) -> None:
    key = make_choice_key(KIND, ["native", "torch"])
    folder = choice_path(key).parent
    folder.mkdir(parents=True)
    names = [f"{number}.txt" for number in range(MOST_CHOICES + 3)]
    for name in names:
        (folder / name).write_text("mine")
    assert keep_choice(key, StepChoice("torch", "torch"), {})
    assert all((folder / name).exists() for name in names)


def test_a_user_without_a_home_keeps_nothing_and_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run under a number that no user has."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TRINITY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    key = make_choice_key(KIND, ["native", "torch"])
    assert read_choice(key) is None
    assert not keep_choice(key, StepChoice("torch", "torch"), {})
