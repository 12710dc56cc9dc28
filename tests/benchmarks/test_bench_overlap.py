"""The benchmark of transfers that overlap: what its figures are made of, and that it runs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.setting import Setting
from benchmarks.transfers import overlap
from support.checkpoint_files import checkpoint
from trinity.core.transfers import KvMode
from trinity.request import Output


def output(ratio: float = 1.0, ttft: float = 1.0, spans: dict[str, float] | None = None) -> Output:
    image = {"kind": "image", "bytes": 2_000_000, "seconds": 0.2}
    kv = {
        "kind": "kv",
        "bytes": 5,
        "seconds": 0.1,
        "pulls": 3,
        "group": 4,
        "busy_s": 0.1,
        "exposed_s": 0.1 * (1 - ratio),
    }
    return Output(
        request_id="r",
        token_ids=[1, 2, 3],
        text="",
        finish_reason="length",
        ttft_s=ttft,
        itl_s=[0.5, 0.1],
        spans={"prefill": 0.7, **(spans or {})},
        transfers=[image, {**kv, "overlap": ratio}, {"kind": "kv", "bytes": 0, "outcome": "cached"}],
    )


def found(ratio: float = 1.0) -> overlap.Found:
    modes: dict[tuple[str, int, KvMode], overlap.Served] = {
        (compute, 1024, mode): overlap.Served([output(ratio if mode == "grouped" else 0.0)])
        for compute in ("real", "emulated")
        for mode in overlap.MODES
    }
    features = {(100, prefetch): overlap.Served([output()]) for prefetch in (False, True)}
    combinations = {
        name: overlap.Served([output(ttft=1.0 + number)]) for number, (name, _) in enumerate(overlap.COMBINATIONS)
    }
    return overlap.Found(modes, features, combinations)


@pytest.mark.parametrize(("ratio", "met"), [(0.99, True), (0.97, False)])
def test_the_aim_is_for_emulated_compute_and_the_real_figure_stands_beside_it(ratio: float, met: bool) -> None:
    aims = overlap.result(found(ratio)).aims
    assert [aim.met for aim in aims] == [met, None]
    assert "emulated" in aims[0].what
    assert "real" in aims[1].what


def test_rows_of_kv_say_what_moved_and_when_tokens_came() -> None:
    row = overlap.kv_row("real", 1024, "grouped", overlap.Served([output(0.75)]))
    assert row == ["real", "1024", "grouped", "3", "4", "100.0", "25.0", "75.0%", "700.0", "1000.0", "1500.0"]
    assert len(row) == len(overlap.KV_HEADER)


@pytest.mark.parametrize(
    ("spans", "exposed"),
    [({"ep_migration": 0.5}, 0.2), ({"ep_migration": 0.05}, 0.05), ({"ep_migration": 0.5, "prefill_queue": 0.1}, 0.0)],
)
def test_features_are_exposed_where_prefill_waited_for_nothing_else(spans: dict[str, float], exposed: float) -> None:
    assert overlap.exposed_s(output(spans=spans)) == pytest.approx(exposed)


def test_combinations_are_compared_with_neither() -> None:
    rows = overlap.combined_rows(found().combinations)
    assert [row[0] for row in rows] == ["neither", "feature prefetch", "grouped KV", "both"]
    assert [row[2] for row in rows] == ["+0.0%", "+100.0%", "+200.0%", "+300.0%"]


def test_every_figure_is_kept_as_a_number() -> None:
    held: dict[str, Any] = overlap.result(found()).values
    assert len(held) == 6 + 2 + 4
    assert all(each["ttft_s"] for each in held.values())


@pytest.mark.slow
def test_it_runs() -> None:
    result = overlap.run(Setting(quick=True, checkpoint=checkpoint))
    assert [len(table.rows) for table in result.tables] == [6, 1, 4]
    assert "aim" in result.text()
