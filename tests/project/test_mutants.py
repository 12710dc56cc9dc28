"""`make mutants`: what is counted as killed, and which survivors are named."""

from __future__ import annotations

import pytest

from tools import mutants

RESULTS = """
    trinity.core.instance.steps.x__fill__mutmut_1: killed
    trinity.core.instance.steps.x__fill__mutmut_2: survived
    trinity.core.block_pool.xǁBlockPoolǁfits__mutmut_10: timeout
    trinity.core.block_pool.xǁBlockPoolǁ__init____mutmut_3: no tests
    trinity.core.block_pool.x_media_keys__mutmut_3: not checked
    trinity.placement.xǁPlacementǁparse__mutmut_1: killed
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trinity.core.instance.steps.x__fill__mutmut_12", "core.instance.steps._fill 12"),
        ("trinity.core.instance.steps.x_pump__mutmut_1", "core.instance.steps.pump 1"),
        ("trinity.core.block_pool.xǁBlockPoolǁfits__mutmut_7", "core.block_pool.BlockPool.fits 7"),
        ("trinity.core.block_pool.xǁFreeRunsǁ__init____mutmut_7", "core.block_pool.FreeRuns.__init__ 7"),
        ("trinity.core.block_pool.xǁFreeRunsǁ_best__mutmut_7", "core.block_pool.FreeRuns._best 7"),
    ],
)
def test_names_are_read_as_in_the_source(name: str, expected: str) -> None:
    assert mutants.pretty(name) == expected


def test_results_are_counted_by_module() -> None:
    found = mutants.statuses(RESULTS)
    assert len(found) == 5
    assert mutants.by_module(found) == [
        *(("core.block_pool", 1, 2), ("core.instance.steps", 1, 2)),
        *(("placement", 1, 1), ("all", 3, 5)),
    ]
    assert [mutants.pretty(name) for name in mutants.survivors(found)] == [
        "core.instance.steps._fill 2",
        "core.block_pool.BlockPool.__init__ 3",
    ]


def test_every_survivor_needs_a_reason_and_nine_in_ten_must_die() -> None:
    found = {f"trinity.core.block_pool.x_f__mutmut_{number}": "killed" for number in range(9)}
    found["trinity.core.block_pool.x_f__mutmut_9"] = "survived"
    diffs = {"trinity.core.block_pool.x_f__mutmut_8": "return 2", "trinity.core.block_pool.x_f__mutmut_9": "return 3"}
    lines, good = mutants.report(found, diffs, [mutants.Reason("core.block_pool.*", "return")])
    assert good
    assert lines[-1].split() == ["all", "9/10", "90.0", "%"]
    lines, good = mutants.report(found, diffs, [mutants.Reason("core.block_pool.f", "return 2")])
    assert not good
    assert lines[-2] == "survives without a reason in docs/mutants.md: core.block_pool.f 9: return 3"
    assert lines[-1] == "explains nothing any more: core.block_pool.f return 2"
    found["trinity.core.block_pool.x_f__mutmut_8"] = "no tests"
    lines, good = mutants.report(found, diffs, [mutants.Reason("core.block_pool.f", "return")])
    assert not good
    assert lines[-1] == "fewer than 90 % are killed"


def test_reasons_are_read_from_the_document() -> None:
    text = "# x\n- `core.steps.*` `strict=`: both are as long.\n- `pool.f` `a <= b`: the same at equality.\n- none\n"
    assert mutants.reasons(text) == [mutants.Reason("core.steps.*", "strict="), mutants.Reason("pool.f", "a <= b")]


@pytest.mark.parametrize(
    ("reason", "covered"),
    [
        (mutants.Reason("core.instance.steps._fill", "strict="), True),
        (mutants.Reason("core.*", "strict="), True),
        (mutants.Reason("core.instance.steps", "strict="), False),
        (mutants.Reason("core.instance.steps._fill", "other"), False),
    ],
)
def test_a_reason_covers_a_function_and_a_line(reason: mutants.Reason, covered: bool) -> None:
    assert reason.covers("trinity.core.instance.steps.x__fill__mutmut_12", "zip(a, b, strict=None)") is covered


def test_the_changed_line_of_a_mutant() -> None:
    diff = "# name: survived\n--- a.py\n+++ a.py\n@@ -1,3 +1,3 @@\n same\n-    old(1)\n+    new(2)\n same\n"
    assert mutants.changed_line(diff) == "new(2)"
    assert mutants.changed_line(diff.replace("+    new(2)\n", "")) == "without old(1)"
