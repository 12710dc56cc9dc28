"""`make mutants`: what is counted as killed, and which survivors are named."""

from __future__ import annotations

import pytest

from tools import mutants

RESULTS = """
    trinity.core.steps.x__fill__mutmut_1: killed
    trinity.core.steps.x__fill__mutmut_2: survived
    trinity.blocks.xǁBlockPoolǁfits__mutmut_10: timeout
    trinity.blocks.xǁBlockPoolǁ__init____mutmut_3: no tests
    trinity.blocks.x_media_keys__mutmut_3: not checked
    trinity.placement.xǁPlacementǁparse__mutmut_1: killed
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trinity.core.steps.x__fill__mutmut_12", "core.steps._fill 12"),
        ("trinity.core.steps.x_pump__mutmut_1", "core.steps.pump 1"),
        ("trinity.blocks.xǁBlockPoolǁfits__mutmut_7", "blocks.BlockPool.fits 7"),
        ("trinity.blocks.xǁFreeRunsǁ__init____mutmut_7", "blocks.FreeRuns.__init__ 7"),
        ("trinity.blocks.xǁFreeRunsǁ_best__mutmut_7", "blocks.FreeRuns._best 7"),
    ],
)
def test_names_are_read_as_in_the_source(name: str, expected: str) -> None:
    assert mutants.pretty(name) == expected


def test_results_are_counted_by_module() -> None:
    found = mutants.statuses(RESULTS)
    assert len(found) == 5
    assert mutants.by_module(found) == [("blocks", 1, 2), ("core.steps", 1, 2), ("placement", 1, 1), ("all", 3, 5)]
    assert [mutants.pretty(name) for name in mutants.survivors(found)] == [
        "core.steps._fill 2",
        "blocks.BlockPool.__init__ 3",
    ]


def test_every_survivor_needs_a_reason_and_nine_in_ten_must_die() -> None:
    found = {f"trinity.blocks.x_f__mutmut_{number}": "killed" for number in range(9)}
    found["trinity.blocks.x_f__mutmut_9"] = "survived"
    lines, good = mutants.report(found, ["blocks.f 9"])
    assert good
    assert lines[-1].split() == ["all", "9/10", "90.0", "%"]
    lines, good = mutants.report(found, ["blocks.f 8"])
    assert not good
    assert lines[-1] == "survives without a reason in docs/mutants.md: blocks.f 9"
    found["trinity.blocks.x_f__mutmut_8"] = "no tests"
    lines, good = mutants.report(found, ["blocks.f 8", "blocks.f 9"])
    assert not good
    assert lines[-1] == "fewer than 90 % are killed"


def test_reasons_are_read_from_the_document() -> None:
    text = (
        "# x\n- `core.steps._fill 2`, `core.steps._fill 3`: they do nothing.\n- `blocks.FreeRuns.take 17`: nor this.\n"
    )
    assert mutants.explained(text) == {"core.steps._fill 2", "core.steps._fill 3", "blocks.FreeRuns.take 17"}
