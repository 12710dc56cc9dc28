"""The benchmark of ranks: ranks, bands and regret by hand, cases in their order, what is kept, and that it runs."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.rank import goodputs as rank_goodputs
from benchmarks.rank import rank, ranking
from benchmarks.rank import sources as rank_sources
from benchmarks.rank import tables as rank_tables
from benchmarks.rank.goodputs import SMALL
from benchmarks.rank.ranking import Setup, drawn
from benchmarks.report import Result
from benchmarks.setting import Setting
from trinity.errors import TraceTooShort
from trinity.planner.candidates import ALL_METHODS, PAPER_METHODS, list_placements
from trinity.planner.search import BoundedCandidate
from trinity.traces.trace import SLO

RATES = {"8EPD": 10.2, "4EP4D": 10.0, "1E3P4D": 10.0, "4ED4P": 8.0, "6PD2E": 10.5, "7EP1D": 0.0}


# ---------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("chosen", "strict", "band", "lost"),
    [
        ("6PD2E", 1, 1, 0.0),
        ("8EPD", 2, 2, 0.3 / 10.5),
        ("4EP4D", 3, 2, 0.5 / 10.5),  # 10.2 is 2 % above 10.0, and no more
        ("1E3P4D", 3, 2, 0.5 / 10.5),  # equal ones share a rank
        ("4ED4P", 5, 5, 2.5 / 10.5),
        ("7EP1D", 6, 6, 1.0),
    ],
)
def test_rank_band_and_regret(chosen: str, strict: int, band: int, lost: float) -> None:
    assert ranking.rank(RATES, chosen) == strict
    assert ranking.rank(RATES, chosen, ranking.BAND) == band
    assert ranking.regret(RATES, chosen) == pytest.approx(lost)


def test_one_step_of_the_planners_grid_lies_within_the_band_and_two_do_not() -> None:
    grid = {"8EPD": 1.02**341, "4EP4D": 1.02**340, "4ED4P": 1.02**339}
    assert [ranking.rank(grid, name, ranking.BAND) for name in grid] == [1, 1, 2]


def test_where_nothing_is_served_nothing_is_lost() -> None:
    assert ranking.regret({"8EPD": 0.0, "4EP4D": 0.0}, "8EPD") == 0.0
    assert ranking.mean([]) == 0.0


def test_the_papers_space_has_35_of_the_43_placements() -> None:
    rates = {str(each): 1.0 for each in list_placements(8, ALL_METHODS)}
    assert len(rates) == 43
    assert set(ranking.in_paper(rates)) == {str(each) for each in list_placements(8, PAPER_METHODS)}
    assert len(ranking.in_paper(rates)) == 35


def test_a_choice_is_judged_on_both_traces() -> None:
    held = {**RATES, "4EP4D": 12.0}
    found = ranking.judged(RATES, held, "8EPD", 17)
    assert tuple(found) == pytest.approx((2, 2, 0.3 / 10.5, 3, 3, 0.15, 17))


# ---------------------------------------------------------------- cases


def test_every_case_is_there_once_and_the_first_15_have_every_pair() -> None:
    order = drawn(0)
    assert len(order) == len(set(order)) == 3 * 5 * 2 * 6
    assert len({each[:2] for each in order[:15]}) == 15
    assert max(Counter(each[:2] for each in order[:40]).values()) == 3
    assert order == drawn(0) != drawn(1)


def test_bounds_are_those_of_the_papers_and_tighter_ones() -> None:
    own, *tighter = (ranking.slo_of("qwen2-vl-7b", "POPE", each) for each in ranking.SETTINGS)
    assert own == SLO(8.0, 0.10)
    assert ranking.slo_of("qwen2-vl-7b", "MME", ranking.SETTINGS[0]) == SLO(8.0, 0.60)
    assert ranking.slo_of("llava-1.5-7b", "TextCaps", ranking.SETTINGS[0]) == SLO(4.0, 0.08)
    assert ranking.slo_of("llava-next-7b", "TextCaps", ranking.SETTINGS[0]) == SLO(8.0, 0.30)
    assert all(each.ttft < own.ttft or each.tbt < own.tbt for each in tighter)
    assert len({(each.ttft, each.tbt) for each in (own, *tighter)}) == 6


class Limited:
    """Trials whose deployments hold up to a step each; None: at no rate."""

    def __init__(self, limits: dict[str, int | None], short: bool = False) -> None:
        self.limits, self.short, self.asked = limits, short, 0

    def holds(self, deployment: str, step: int) -> bool:
        if self.short:
            raise TraceTooShort("too short", 20.0)
        self.asked += 1
        limit = self.limits[deployment]
        return limit is not None and step <= limit

    def limit(self, deployment: str, guess: float) -> int | None:
        self.asked += 100
        return self.limits[deployment]


def entry(name: str) -> BoundedCandidate:
    return BoundedCandidate(name, 100.0, 50.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("off", [*range(-9, 10), -60, 60])
def test_goodput_is_found_near_that_of_another_trace(off: int) -> None:
    trials = Limited({"8EPD": 200})
    assert rank_goodputs.near(trials, entry("8EPD"), 1.02 ** (200 + off)) == pytest.approx(1.02**200)  # type: ignore[arg-type]
    assert trials.asked <= 2 + 2 * math.log2(abs(off) + 1) + 2


def test_what_served_nothing_elsewhere_is_searched_from_its_bound() -> None:
    trials = Limited({"8EPD": 30, "4EP4D": None})
    assert rank_goodputs.near(trials, entry("8EPD"), 0.0) == pytest.approx(1.02**30)  # type: ignore[arg-type]
    assert rank_goodputs.near(trials, entry("4EP4D"), 0.0) == 0.0  # type: ignore[arg-type]
    assert trials.asked == 200
    assert rank_goodputs.near(trials, entry("4EP4D"), 5.0) == 0.0  # type: ignore[arg-type]


def test_a_held_out_trace_grows_until_it_has_an_answer() -> None:
    asked: list[int] = []

    def case_of(count: int) -> Any:
        asked.append(count)
        rows = [SimpleNamespace(timestamp=at) for at in (0.0, 10_000.0)]
        trials = Limited({"8EPD": 10}, short=count < 1500)
        hardware = SimpleNamespace(names=())
        return SimpleNamespace(
            trials=trials, trace=rows, hardware=hardware, bound_deployments=lambda names: [entry("8EPD")]
        )

    count, rates = rank_goodputs.held_out(case_of, 1000, {"8EPD": 1.0})
    assert count == 2600
    assert rates["8EPD"] == pytest.approx(1.02**10)
    assert asked == [1000, math.ceil(1.3 * 1000 * 2)]


def test_a_case_stops_when_the_time_is_over() -> None:
    with pytest.raises(rank_goodputs.OutOfTimeError):
        rank_goodputs.searched_case(drawn()[0], SMALL, time.monotonic())


def test_no_case_begins_when_the_time_is_over() -> None:
    assert list(rank.spread([(each, None) for each in drawn()[:2]], SMALL, time.monotonic())) == []


# ---------------------------------------------------------------- what is kept


def record(setup: Setup, chosen: str = "8EPD", runs: int = 20, **changed: Any) -> dict[str, Any]:
    picks = {"paper": ["4EP4D", 12], "race": [chosen, runs]}
    sized = {"seen": 10, "held": 90}
    made = {"setup": list(setup), "picks": picks, "plan": RATES, "held": RATES, "requests": sized, "seconds": 3.0}
    return {**made, **changed}


def test_records_are_kept_and_read_back_for_the_same_key(tmp_path: Path) -> None:
    path, (one, two, *_) = tmp_path / "new" / "cases.jsonl", drawn()
    kept = rank.Kept(path, "a")
    kept.add(record(one))
    kept.add(record(two))
    kept.add(record(two, "4EP4D"))
    assert [json.loads(line)["setup"] for line in path.read_text().splitlines()] == [list(one), list(two)]
    assert set(rank.Kept(path, "a").records) == {one, two}
    assert not rank.Kept(path, "b").records


def package(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / "src" / "trinity" / "/".join(name.split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)


def test_sources_are_what_is_imported_directly_or_not(tmp_path: Path) -> None:
    package(
        tmp_path,
        a="from trinity.deep import b\nimport os\n",
        deep__b="def later():\n    from trinity.c import thing\n",
        c="import trinity.d\n",
        d="from trinity import a\n",
        e="",
    )
    (tmp_path / "csrc" / "simulation").mkdir(parents=True)
    (tmp_path / "csrc" / "simulation" / "f.cpp").write_text("int x;")
    names = [path.name for path in rank_sources.behind(["trinity.a"], (), tmp_path)]
    assert names == ["a.py", "c.py", "d.py", "b.py", "f.cpp"]
    assert len(rank_sources.behind(["trinity.a"], ["trinity.c"], tmp_path)) == 3
    before = rank_sources.digest(rank_sources.behind(["trinity.a"], (), tmp_path))
    package(tmp_path, e="x = 1\n")
    assert rank_sources.digest(rank_sources.behind(["trinity.a"], (), tmp_path)) == before
    package(tmp_path, d="x = 1\n")
    assert rank_sources.digest(rank_sources.behind(["trinity.a"], (), tmp_path)) != before


@pytest.mark.slow
def test_goodputs_do_not_hang_on_the_race_and_choices_do() -> None:
    searching = {path.name for path in rank_sources.behind(rank.SEARCH, rank.CHOICE)}
    assert {"trials.py", "bounds.py", "simulator.py", "goodput.py", "scheduler.py", "world.hpp"} <= searching
    assert not {"race.py", "hybrid.py", "pipeline.py"} & searching
    choosing = {path.name for path in rank_sources.behind((*rank.SEARCH, *rank.CHOICE))}
    assert choosing - searching == {"race.py"}
    assert rank.keys(SMALL) != rank.keys(rank.Sizes())


@pytest.mark.slow
def test_a_run_goes_on_from_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[rank.Job]] = []

    def spread(jobs: list[rank.Job], sizes: rank.Sizes, until: float) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        asked.append(jobs)
        both = record(jobs[0][0])
        picks = both.pop("picks")
        return [(both, {"setup": both["setup"], "picks": picks})]

    monkeypatch.setattr(rank, "spread", spread)
    setting = Setting(kept=tmp_path, minutes=1.0)
    rank.run(setting)
    result = rank.run(setting)
    assert [len(each) for each in asked] == [180, 179]
    assert result.values["cases"][1]["setup"] == list(drawn()[1])
    assert "2 of 180 cases" in result.notes[0]
    assert f"about {178 * 3 / 2 / 60:.0f} minutes" in result.notes[0]
    searching, _ = rank.keys(rank.Sizes())
    monkeypatch.setattr(rank, "keys", lambda sizes: (searching, "another race"))
    rank.run(setting)
    assert [job[0] for job in asked[2] if job[1] is not None] == drawn()[:2], "goodputs are known"
    assert len(asked[2]) == 180


# ---------------------------------------------------------------- tables and aims


def result_of(records: list[dict[str, Any]], processes: int | None = 2) -> Result:
    made = Result("rank", "title", "method")
    rank_tables.tabled(made, records, 180, processes)
    return made


def test_tables_have_means_and_worsts_of_the_strategies() -> None:
    one, two, *_ = drawn()
    made = result_of([record(one, "6PD2E", 20), record(two, "8EPD", 31)])
    rows = {row[0]: row[1:] for row in made.tables[0].rows}
    assert rows["race, mean"] == ["1.50", "1.50", "1.50", "1.50", "1.43%", "1.43%", "25.5"]
    assert rows["race, worst"] == ["2.00", "2.00", "2.00", "2.00", "2.86%", "2.86%", "31.0"]
    assert rows["exhaustive, worst"] == ["1.00", "1.00", "1.00", "1.00", "0.00%", "0.00%", "0.0"]
    assert rows["paper, mean"] == ["3.00", "2.00", "3.00", "2.00", "4.76%", "4.76%", "12.0"]
    assert [aim.met for aim in made.aims] == [False, False, False, True, False]
    assert made.aims[4].measured == "median 26, worst 31"


def test_aims_are_met_where_the_race_finds_the_best() -> None:
    made = result_of([record(each, "6PD2E", 30) for each in drawn()[:3]])
    assert [aim.met for aim in made.aims] == [True] * 5
    assert [aim.met for aim in result_of([record(drawn()[0])], None).aims] == [None] * 5


def test_algorithm_2_stands_beside_table_3_among_the_papers_placements() -> None:
    setup = Setup("llava-1.5-7b", "TextVQA", "H20", ranking.SETTINGS[0])
    rows = {row[0]: row for row in result_of([record(setup)]).tables[1].rows}
    assert rows["TextVQA"] == ["TextVQA", "1.98", "-", "1.43", "1.00 (worst 1, n 1)", "1.64", "-"]
    assert rows["MME"] == ["MME", "1.70", "-", "1.42", "-", "1.64", "-"]


def test_cases_that_nothing_serves_do_not_count() -> None:
    one, two, *_ = drawn()
    nothing = dict.fromkeys(RATES, 0.0)
    made = result_of([record(one, "6PD2E"), record(two, held=nothing)])
    assert "In 1 cases no placement" in made.notes[1]
    assert "1 cases" in made.tables[0].title
    assert not result_of([record(two, plan=nothing)]).tables


def test_a_case_that_trinity_refuses_is_told_and_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise TraceTooShort("too short", 7.0)

    monkeypatch.setattr(rank, "searched_case", refuses)
    refused, choice = rank.tried((drawn()[1], None), SMALL, math.inf)
    assert choice == refused
    assert rank.tried((drawn()[1], refused), SMALL, math.inf) == (refused, refused)
    monkeypatch.setattr(rank, "choices", refuses)
    goodputs = record(drawn()[1])
    assert rank.tried((drawn()[1], goodputs), SMALL, math.inf) == (goodputs, refused)
    made = result_of([record(drawn()[0], "6PD2E"), refused])
    assert "1 refused" in made.notes[0]
    assert "TraceTooShort: too short" in made.notes[0]
    assert "1 of 180 cases" in made.notes[1]
    assert "1 cases" in made.tables[0].title


def test_where_the_race_lost_most_comes_first() -> None:
    worse = record(drawn()[1], "4ED4P")
    rows = result_of([record(drawn()[0], "6PD2E"), worse]).tables[2].rows
    assert rows[0][1:] == ["4ED4P 8", "4EP4D 10", "6PD2E 10.5", "23.8%", "23.8%"]


def test_it_runs() -> None:
    result = rank.run(Setting(quick=True))
    assert len(result.values["cases"]) == 2
    for each in result.values["cases"]:
        assert len(each["plan"]) == len(each["held"]) == 8  # 2 + 2 + 1 of the paper's at N = 3, PD+E twice, 3 x EPD
        assert each["picks"]["race"][0] in each["plan"]
        assert 0 < each["picks"]["race"][1] < each["exhaustive_runs"]
        assert each["picks"]["paper"][1] > 0
        assert ranking.regret(each["plan"], each["picks"]["race"][0]) == 0
        assert each["plan"][each["picks"]["race"][0]] > 0
    assert "open: race" in result.text()
