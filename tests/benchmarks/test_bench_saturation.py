"""The benchmark of saturation: where a stage saturates, what is measured in which order, its picture, that it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.setting import Setting
from benchmarks.steps import saturation
from support.checkpoint_files import checkpoint
from support.figure_contents import axes, legend, lines, words

CURVES: saturation.Curves = {
    "E": {"float32": {1: 0.2, 2: 0.4}, "bfloat16": {1: 0.1, 2: 0.1}},
    "P": {"float32": {1: 0.01, 64: 0.064, 256: 0.256}, "bfloat16": {}},
    "D": {"float32": {1: 0.01, 8: 0.02}, "bfloat16": {1: 0.01}},
}


def test_a_stage_saturates_where_more_only_takes_longer() -> None:
    assert saturation.knee(CURVES["E"]["float32"]) == 1
    assert saturation.knee(CURVES["E"]["bfloat16"]) == 2
    assert saturation.knee(CURVES["P"]["float32"]) == 64
    found = saturation.result(CURVES, "m")
    assert found.tables[0].rows[2] == ["Prefill, float32", "64 tokens", "64.0", "1000", "10.0x"]
    assert len(found.tables[0].rows) == 5, "what was not measured has no row"
    assert found.tables[2].rows[1] == ["64", "64.0", "1000", "-", "-"]
    assert found.values["cost"]["bfloat16"] == {"media": [[1, 0.1], [2, 0.1]], "prefill": [], "decodes": [[1, 0.01]]}


def test_the_picture_has_a_panel_for_each_stage_and_a_curve_for_each_dtype() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'trinity-epd[plot]'")
    from trinity.report.plots.costs import plot_saturation as drawing

    picture = drawing(CURVES, "A note.")
    assert [axes(picture, place).get_title() for place in range(3)] == ["Encode", "Prefill", "Decode"]
    shown: Any = [lines(axes(picture, place)) for place in range(6)]
    assert shown[0]["bfloat16"] == ([1, 2], pytest.approx([10, 20]))
    assert shown[4]["float32"] == ([1, 64, 256], pytest.approx([10, 64, 256]))
    assert legend(axes(picture)) == ["float32", "bfloat16"]
    assert "A note." in words(picture)
    assert "No stage was measured." in words(drawing({"E": {}}))


def test_no_step_begins_after_the_time_and_every_stage_comes_before_a_larger_batch() -> None:
    class Probing:
        def __init__(self) -> None:
            self.log: list[tuple[str, int]] = []

        def encode(self, images: int) -> float:
            self.log.append(("E", images))
            return 0.1

        def prefill(self, tokens: int) -> float:
            self.log.append(("P", tokens))
            return 0.2

        def decode(self, rows: int, context: int) -> float:
            self.log.append(("D", rows))
            return 0.3

    probe: Any = Probing()
    counts = {"E": (1, 2), "P": (1, 16, 64), "D": (1,)}
    found = saturation.measure(probe, counts, 640, time.monotonic() + 60)
    assert found == {"E": {1: 0.1, 2: 0.1}, "P": {1: 0.2, 16: 0.2, 64: 0.2}, "D": {1: 0.3}}
    order = list(dict.fromkeys(probe.log))
    assert order == [("E", 1), ("P", 1), ("D", 1), ("E", 2), ("P", 16), ("P", 64)]
    assert saturation.measure(probe, counts, 640, time.monotonic() - 1) == {"E": {}, "P": {}, "D": {}}


@pytest.mark.slow
def test_saturation_runs_and_leaves_its_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'trinity-epd[plot]'")
    made = saturation.run(Setting(quick=True, checkpoint=checkpoint, kept=tmp_path))
    assert all(len(cells) == len(table.header) for table in made.tables for cells in table.rows)
    assert [list(each) for each in made.values["seconds"].values()] == [["float32", "bfloat16"]] * 3
    assert (tmp_path / "saturation.svg").read_bytes().startswith(b"<?xml")
