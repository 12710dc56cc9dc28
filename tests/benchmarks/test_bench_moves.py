"""The benchmark of decodes that move: what its figures are made of, and that it runs."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

from benchmarks.setting import Setting
from benchmarks.transfers import moves
from support.checkpoint_files import checkpoint
from trinity.request import Output


def pulled(seconds: float, source: str = "D0", kind: str = "kv") -> dict[str, Any]:
    return {"kind": kind, "source": source, "seconds": seconds, "bytes": 64_000_000}


def moved(beside_s: float = 0.004, pull_s: float = 0.03) -> moves.Moved:
    """Twenty tokens of 20 ms each; behind the fifth and the tenth it moves, in the gap after the next."""
    gaps = [0.02] * 20
    for at in (5, 10):
        gaps[at + 1] += pull_s + beside_s
    transfers = [pulled(9.0, "EP0"), pulled(9.0, "D0", "image"), pulled(pull_s), pulled(pull_s, "D1")]
    output = Output(request_id="r", token_ids=[], text="", finish_reason="length", transfers=transfers)
    return moves.Moved([0.0, *accumulate(gaps)], [5, 10], [0.05, 0.07], output)


def test_a_pause_is_what_a_gap_has_more_than_others() -> None:
    found = moved()
    assert found.step_s == pytest.approx(0.02)
    assert found.pauses_s == pytest.approx([0.034, 0.034])
    assert moves.beside_s(found) == pytest.approx(0.004)


def test_what_came_from_the_prefill_instance_is_no_move() -> None:
    assert [each["source"] for each in moved().pulls] == ["D0", "D1"]


def test_a_row_says_all_of_it() -> None:
    row = moves.row("threads", "inproc", 1024, moved())
    assert row == ["threads", "inproc", "1024", "64", "2", "34.0", "34.0", "30.0", "0.0", "4.0", "60.0"]
    assert len(row) == len(moves.HEADER)


@pytest.mark.parametrize(("beside_s", "met"), [(0.009, True), (0.011, False)])
def test_the_aim_is_for_what_is_no_pull(beside_s: float, met: bool) -> None:
    result = moves.result({("processes", "shm", 1024): moved(beside_s)}, ["ucx: not here"], {})
    assert [aim.met for aim in result.aims] == [met]
    assert "ucx: not here" in result.notes


def test_other_transports_stand_beside_it_and_a_busy_machine_is_told() -> None:
    loud = moved()
    loud.foreign = 0.9
    result = moves.result({("processes", "nixl", 1024): loud}, [], {})
    assert result.aims == []
    assert "processes nixl 1024" in result.notes[0]


@pytest.mark.parametrize(("pause_s", "met"), [(0.016, True), (0.018, False)])
def test_full_blocks_ahead_are_compared_with_stop_and_copy(pause_s: float, met: bool) -> None:
    key = ("processes", "nixl", 1024)
    result = moves.result({key: moved()}, [], {key: moves.Ahead([pause_s] * 3, [0.2] * 3)})
    assert [aim.met for aim in result.aims] == [met]
    (row,) = result.tables[1].rows
    assert row[3:] == ["3", f"{pause_s * 1e3:.1f}", f"{pause_s * 1e3:.1f}", "34.0", f"{pause_s / 0.034:.0%}", "200.0"]
    assert len(row) == len(moves.AHEAD_HEADER)


@pytest.mark.slow
def test_it_runs() -> None:
    result = moves.run(Setting(quick=True, checkpoint=checkpoint))
    assert len(result.tables[1].rows) >= 1, "both, unless a request ends before its move"
    assert [row[:3] for row in result.tables[0].rows] == [["threads", "inproc", "64"], ["processes", "shm", "64"]]
    assert all(int(row[4]) >= 1 for row in result.tables[0].rows)
    assert set(result.values) == {"threads inproc 64", "processes shm 64"}
