"""The benchmark of free-threaded builds: one round on a tiny model, and which interpreter has its lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving import free_threaded
from benchmarks.serving.free_threaded import WAYS, row, server_of
from support.checkpoint_files import checkpoint
from trinity.bench.measure import Burst


@pytest.mark.parametrize(("way", "lock"), [("threads, lock", "1"), ("threads, no lock", "0"), ("processes", "1")])
def test_only_a_free_threaded_build_is_told(way: str, lock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other refuses to start with PYTHON_GIL=0."""
    monkeypatch.setattr(free_threaded, "FREE_THREADED", True)
    assert server_of(way, "EP+D", "float32", Path("model"))._environment()["PYTHON_GIL"] == lock
    monkeypatch.setattr(free_threaded, "FREE_THREADED", False)
    monkeypatch.delenv("PYTHON_GIL", raising=False)
    assert "PYTHON_GIL" not in server_of(way, "EP+D", "float32", Path("model"))._environment()


def test_ways_are_hosted_as_their_names_say() -> None:
    hosting = [server_of(way, "EP+D", "float32", Path("model")).engine.options["hosting"] for way in WAYS]
    assert hosting == ["thread", "thread", "process"]


def test_a_ratio_is_of_pairs() -> None:
    one = [Burst(requests=4, cpu_s=2.0, wall_s=wall, foreign=0.0) for wall in (1.0, 2.0, 4.0)]
    two = [Burst(requests=4, cpu_s=1.0, wall_s=wall, foreign=0.1) for wall in (0.5, 1.0, 1.0)]
    assert row("EP+D", "float32", "x", two, one)[1:] == ["4.00", "4.00", "2.00 (2.00 to 4.00)", "10%"]


@pytest.mark.slow
@pytest.mark.timeout(900)  # eight servers start
async def test_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    await free_threaded.everything(checkpoint("llava"), rounds=1, placements=["EP+D"])
    said = capsys.readouterr().out
    assert "EP+D, bfloat16, processes" in said
    assert "'trinity 1E1P1D': 2" in said
