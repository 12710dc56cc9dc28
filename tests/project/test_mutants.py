"""`make mutants`: what is counted as killed, and which survivors are named."""

from __future__ import annotations

import tomllib
from pathlib import Path

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


def test_a_share_that_is_recorded_needs_no_reasons_but_must_not_fall() -> None:
    found = {f"trinity.core.frontend.x_f__mutmut_{number}": "killed" for number in range(80)}
    found |= {f"trinity.core.frontend.x_f__mutmut_{number}": "survived" for number in range(80, 100)}
    found["trinity.core.scheduler.x_f__mutmut_1"] = "killed"
    lines, good = mutants.report(found, {}, [], [mutants.Share("core.frontend*", 330, 400)])
    assert good, "82.5 % of 400 and 80 % of 100 differ by less than chance"
    assert lines[-1] == "core.frontend*: 80.0 % are killed, 82.5 % before"
    lines, good = mutants.report(found, {}, [], [mutants.Share("core.frontend*", 380, 400)])
    assert not good
    assert lines[-1] == "core.frontend*: 80.0 % are killed, 95.0 % before: that is less"
    found["trinity.core.scheduler.x_f__mutmut_1"] = "survived"
    diffs = {"trinity.core.scheduler.x_f__mutmut_1": "return 2"}
    lines, good = mutants.report(found, diffs, [], [mutants.Share("core.frontend*", 330, 400)])
    assert not good, "others need a reason and nine killed of ten, as before"
    assert lines[-1] == "fewer than 90 % are killed"


def test_shares_are_read_from_the_document() -> None:
    text = "| of | killed |\n|---|---|\n| `core.frontend*` | 352/400 | 88.0 % |\n| `remote.*` | 9/10 |\n| a | 1/2 |\n"
    assert mutants.shares(text) == [mutants.Share("core.frontend*", 352, 400), mutants.Share("remote.*", 9, 10)]


def test_a_part_of_the_mutants_says_nothing_of_other_reasons() -> None:
    found = {"trinity.core.block_pool.x_f__mutmut_1": "killed"}
    lines, good = mutants.report(found, {}, [mutants.Reason("core.steps.f", "a")], whole=False)
    assert good
    assert len(lines) == 2


def test_a_draw_is_the_same_each_time_and_after_functions_have_moved() -> None:
    names = [
        name
        for number in range(1, 300)
        for name in (f"trinity.core.a.xǁOldǁ_start__mutmut_{number}", f"trinity.core.a.x_end__mutmut_{number}")
    ]
    drawn = mutants.draw(names, ["*=100"], 36)
    assert len(drawn) == len(set(drawn)) == 100
    assert mutants.draw(reversed(names), ["*=100"], 36) == drawn
    assert mutants.draw(names, ["*=100"], 37) != drawn
    assert mutants.draw(names, ["*=40"], 36) == drawn[:40], "a smaller one is its beginning"
    assert 30 < sum("_start" in name for name in drawn) < 70
    moved = mutants.draw([name.replace("a.xǁOldǁ", "b.xǁNewǁ") for name in names], ["*=100"], 36)
    assert {mutants.pretty(name).rpartition(".")[2] for name in moved} == {
        mutants.pretty(name).rpartition(".")[2] for name in drawn
    }
    assert set(mutants.draw(names[:9], ["*=100"], 36)) == set(names[:9]), "fewer than asked for are all drawn"
    of_two = mutants.draw(names, ["*_start*=10", "*x_end*=20"], 36)
    assert (sum("_start" in name for name in of_two), len(of_two)) == (10, 30)


def test_mutants_that_were_not_run_can_be_drawn() -> None:
    assert len(mutants.unchecked(RESULTS)) == 6
    assert mutants.unchecked(RESULTS)[4] == "trinity.core.block_pool.x_media_keys__mutmut_3"


def test_what_mutants_are_made_of_and_run_by_is_there() -> None:
    root = Path(mutants.__file__).parent.parent
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]
    named = [*settings["pytest_add_cli_args_test_selection"], *mutants.LONG_TESTS, *settings["do_not_mutate"]]
    paths = [each.removeprefix("--deselect=").partition("::")[0] for each in named]
    gone = [each for each in paths if not each.startswith("-") and not (root / each).exists()]
    assert not gone, "moved or removed: name them anew"
    assert [each for each in settings["only_mutate"] if not list(root.glob(each))] == []
