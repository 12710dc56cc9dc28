"""The benchmark of scale: which rates it tries, what it keeps, what it shows of them."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import live as scale_live
from benchmarks.scale import rows as scale_rows
from benchmarks.scale import scale
from benchmarks.scale import tables as scale_tables
from benchmarks.scale.live import LIMITS, Task, bounds, paced, passed, pipeline
from benchmarks.scale.rows import Row, bracket, rate_at, wanted
from benchmarks.scale.scale import SMALL, Board, Crew, Job, Kept
from benchmarks.scale.tables import Line, Workload, aims, differs, tabled
from benchmarks.setting import Setting
from trinity.pipeline import Pipeline

ROW = Row("best EPD", "2EPD", True, 20.0, 50, steady=18.0, cpu_s=0.004)
CALM = dict.fromkeys(LIMITS, 0.0)

# ---------------------------------------------------------------- which rates


@pytest.mark.parametrize(
    ("known", "next_ones"),
    [
        ({}, [0, 1]),
        ({0: True}, [1]),
        ({1: False}, [0]),
        ({0: True, 1: False}, []),
        ({0: True, 1: True}, [2]),
        ({0: False, 1: False}, [-1]),
        ({0: False, 1: False, -1: True}, []),
        ({0: False, 1: True}, [-1]),  # what holds above one that does not is no lower limit
        ({-2: True, 1: False}, [-1]),
        (dict.fromkeys(range(5), True), []),  # far enough
        (dict.fromkeys(range(-4, 2), False), []),
    ],
)
def test_rates_are_tried_until_the_limit_is_between_neighbours(known: dict[int, bool], next_ones: list[int]) -> None:
    assert wanted(known) == next_ones


def test_the_bracket_is_below_the_lowest_rate_that_does_not_hold() -> None:
    assert bracket({0: True, 1: False, 2: True}) == (0, 1)
    assert bracket({}) == (None, None)
    low, high = rate_at(ROW, 0), rate_at(ROW, 1)
    assert (low / ROW.rate, high / ROW.rate) == pytest.approx((scale_rows.BELOW, scale_rows.ABOVE))
    assert high / low == pytest.approx(scale_rows.STEP) == pytest.approx(low / rate_at(ROW, -1))


# ---------------------------------------------------------------- records and what is missing


def record(step: int, holds: bool, late: tuple[str, ...] = (), row: Row = ROW) -> dict[str, Any]:
    task = Task("POPE", row.placement, row.scheduled, row.asked, rate_at(row, step), 1)
    share = 0.95 if holds else 0.5
    return {
        "step": step,
        "task": list(task),
        "holds": holds,
        "late": list(late),
        "signs": {**CALM, "cpu": 0.2},
        "cpu_s": 0.1,
        "attainment": {"guard": share},
        "simulated": {"guard": share - 0.01},
        "latency": {"TTFT p50": 0.1 + 0.001 * step},
        "failed": 0,
        "exact": True,
        **dict.fromkeys(("pulls", "verified", "blocks", "bytes"), 10),
    }


def board(kept: Kept, *rows: Row) -> Board:
    kept.add("rows", "POPE", {"rows": [list(row) for row in rows or (ROW,)]})
    with ThreadPoolExecutor(1) as pool:
        return Board("POPE", kept, SMALL, pool)


def test_what_is_missing_follows_from_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    made = board(Kept(path, SMALL), ROW, Row("none", "1E1PD", True, 0.0, 50))
    assert made.next() == [(ROW, 0), (ROW, 1)], "a goodput of 0 has no rates"
    made.kept.add("replay", "POPE", record(0, True))
    assert made.next() == [(ROW, 1)]
    again = board(Kept(path, SMALL))
    assert again.next() == [(ROW, 1)]
    again.kept.add("replay", "POPE", record(1, False))
    assert again.next() == []
    assert Kept(path, SMALL._replace(instances=5)).records == [], "of other sizes"
    line = again.shown().lines[0]
    assert (line.low, line.high, line.agrees) == (rate_at(ROW, 0), rate_at(ROW, 1), True)


def test_records_of_other_code_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "src" / "trinity" / "core").mkdir(parents=True)
    file = tmp_path / "src" / "trinity" / "core" / "steps.py"
    file.write_text("a = 1")
    before = scale.sources(tmp_path)
    assert scale.sources(tmp_path) == before
    file.write_text("a = 2")
    assert scale.sources(tmp_path) != before


def test_a_saturated_rate_judges_nothing_and_is_tried_twice_in_a_run(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    made = board(Kept(path, SMALL))
    made.kept.add("replay", "POPE", record(1, False))
    for left in ([(ROW, 0)], []):
        made.kept.add("replay", "POPE", record(0, False, late=("cpu",)))
        assert made.next() == left
    line = made.shown().lines[0]
    assert line.agrees is None
    assert "18 (cpu)" in line.cells()
    assert line.cells()[-1] == "open: the CPU was saturated at 18"
    assert board(Kept(path, SMALL)).next() == [(ROW, 0)], "another run may find the machine at rest"


def test_dilation_leaves_each_replay_room_and_grows_where_the_cpu_was_saturated() -> None:
    slow, fast = ROW, ROW._replace(rate=400.0)
    made = board(Kept(None, SMALL), slow, fast)
    assert made.dilation(slow) == scale.DILATIONS[0]
    times, needed = made.dilation(fast), rate_at(fast, 1) * fast.cpu_s / scale.ALONE
    assert scale.DILATIONS[0] < times < scale.DILATIONS[1]
    assert times - 1 < needed <= times
    made.kept.add("replay", "POPE", record(0, False, late=("loop",)))
    assert made.dilation(slow) == scale.DILATIONS[0] + 1
    for _ in range(9):
        made.kept.add("replay", "POPE", record(0, False, late=("loop",)))
    assert made.dilation(slow) == scale.DILATIONS[1]
    assert made.cpu_s(slow) == 0.1 / ROW.asked, "as measured, once it was"
    made.earlier = len(made.kept.of("replay", "POPE"))
    assert made.dilation(slow) == scale.DILATIONS[0], "the machine of a former run was another"


def test_every_row_of_every_workload_comes_before_any_is_tried_further() -> None:
    kept, pool = Kept(None, SMALL), ThreadPoolExecutor(1)
    other = ROW._replace(name="even", placement="1E1PD")
    boards = []
    for dataset in ("POPE", "MME"):
        kept.add("rows", dataset, {"rows": [list(ROW), list(other)]})
        boards.append(Board(dataset, kept, SMALL, pool))
    pool.shutdown()

    def order() -> list[tuple[str, str, int]]:
        return [(board.dataset, row.name, step) for board, row, step in scale.missing(boards)]

    first = [("POPE", "best EPD", 0), ("POPE", "best EPD", 1), ("MME", "best EPD", 0), ("MME", "best EPD", 1)]
    assert order()[:4] == first
    kept.add("replay", "POPE", record(0, False))
    assert order()[0] == LOWER, "of a row that has one yet"
    kept.add("replay", "POPE", record(1, False))
    assert order() == [*first[2:], *((each, "even", step) for each in ("POPE", "MME") for step in (0, 1)), LOWER]


LOWER = ("POPE", "best EPD", -1)


def test_the_budget_is_what_the_missing_replays_take() -> None:
    made = board(Kept(None, SMALL))
    tasks = [made.task(ROW, step) for step in (0, 1)]
    seconds = [scale.seconds_of(task) for task in tasks]
    for task, each in zip(tasks, seconds, strict=True):
        assert each == scale.START_S + task.dilation * (50 / task.rate + scale.drain_s(task))
        assert scale.sending_s(task) < each
    said = scale.budget([made], 15.0)
    assert said.startswith(f"2 replays are missing, of {min(seconds):.0f} to {max(seconds):.0f} s each; they take 0 s")
    assert said.endswith("of 15.0")
    heavy = board(Kept(None, SMALL), ROW._replace(cpu_s=6.0))
    assert "600 s of CPU time" in scale.budget([heavy], 15.0)
    made.kept.add("replay", "POPE", record(0, True))
    made.kept.add("replay", "POPE", record(1, False))
    assert scale.budget([made], 15.0).startswith("0 replays")


@pytest.mark.parametrize(
    ("replays", "why"),
    [
        ([], "no time was left for 18, 22"),
        ([record(0, True)], "no time was left for 22"),
        ([record(0, True), record(1, False, late=("loop",))], "the CPU was saturated at 22"),
        ([record(step, True) for step in range(5)], "every rate that was tried does"),
        ([record(step, False) for step in range(-4, 2)], "no rate that was tried does"),
        ([record(0, True), record(1, False)], ""),
    ],
)
def test_a_row_that_is_open_says_why(replays: list[dict[str, Any]], why: str) -> None:
    made = board(Kept(None, SMALL))
    for each in replays:
        made.kept.add("replay", "POPE", each)
    assert made.why(ROW) == why
    assert made.why(ROW._replace(rate=0.0)) == "no rate holds in simulation"


def test_other_dilations_are_made_once() -> None:
    even = ROW._replace(name="even", rate=9.0)
    made = board(Kept(None, SMALL), ROW, even, Row("none", "1E1PD", True, 0.0, 50))
    tasks = [job.given[0] for job in scale.dilations(made)]
    assert [task.dilation for task in tasks] == [*scale.COMPARED]
    assert {task.rate for task in tasks} == {0.8 * 9.0}
    made.kept.add("dilation", "POPE", {"task": list(tasks[1])})
    assert [job.given[0].dilation for job in scale.dilations(made)] == [*scale.COMPARED[:1], *scale.COMPARED[2:]]


def test_signs_of_a_saturated_cpu() -> None:
    assert passed(CALM) == []
    assert passed({name: limit * 1.01 for name, limit in LIMITS.items()}) == list(LIMITS)


def job(load: float, seconds: float, call: Any, sending: float = 1000.0) -> Job:
    return Job("replay", load, seconds, sending, call, ())


def test_a_crew_takes_no_more_than_there_is_room_and_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "LOOK_S", 0.01)
    crew = Crew(time.monotonic() + 100)
    crew.pool.shutdown()
    release: Future[dict[str, Any]] = Future()
    found: list[Any] = []
    with ThreadPoolExecutor(2) as pool:
        crew.pool = pool  # type: ignore[assignment]
        assert not crew.offer(job(0.1, 200, dict), found.append), "it would end too late"
        assert crew.offer(job(9.0, 1, release.result), found.append), "what is alone may take all"
        assert not crew.offer(job(0.1, 1, dict), found.append)
        crew.settle()
        assert (len(crew.running), found) == (1, []), "none has ended"
        release.set_result({"late": ["machine"]})
        room = crew.room
        while crew.running:
            crew.settle()
        assert crew.room == max(scale.LEAST_LOAD * (os.cpu_count() or 1), scale.LESS * room), "it was too much"
        assert crew.offer(job(0.1, 1, dict), found.append)
        while crew.running:
            crew.settle()
    assert found == [{"late": ["machine"]}, {}]


def test_a_replay_whose_requests_are_sent_leaves_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew(time.monotonic() + 100)
    crew.pool.shutdown()
    release: Future[dict[str, Any]] = Future()
    with ThreadPoolExecutor(2) as pool:
        crew.pool = pool  # type: ignore[assignment]
        assert crew.offer(job(crew.room, 50, release.result, sending=0.0), print)
        assert crew.offer(job(crew.room / 2, 50, release.result), print)
        assert not crew.offer(job(crew.room / 2, 50, dict), print)
        release.set_result({})


def test_the_collector_of_garbage_rests_during_a_replay() -> None:
    with scale_live.uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


# ---------------------------------------------------------------- what is shown


def shown(*lines: Line, dilations: tuple[dict[str, Any], ...] = ()) -> Workload:
    full = {"requests": 20, "bytes": 2**30, "gb_s": 7.0, "pulls": 40, "verified": 40}
    return Workload("POPE", list(lines), full, list(dilations))


def line(*rates: float, replays: list[dict[str, Any]], name: str = "best EPD", placement: str = "2EPD") -> Line:
    simulated, low, high = rates
    return Line(name, placement, 15.0, simulated, 50, low, high, 3, replays)


def test_tables_name_the_emulation_and_aims_judge_what_is_bracketed() -> None:
    ours = line(20.0, 19.1, 21.0, replays=[record(0, True), record(1, False)])
    theirs = line(12.0, 12.6, 13.9, replays=[record(0, True)], name="EPDServe's", placement="1E1PD")
    result = tabled([shown(ours, theirs)], SMALL, ["so much was left."])
    assert result.method.startswith("EMULATION: 4 instances")
    assert "last 0.2, of every row" in result.method
    assert result.notes == ["so much was left."]
    assert "2048 times (KV)" in result.method
    assert "roofline" in result.method
    assert result.tables[0].rows[0][2:6] == ["15.0", "20.0", "19.1", "21.0"]
    assert result.tables[0].header[8] == "dilation"
    assert result.tables[0].rows[0][8] == "3"
    assert [row[-1] for row in result.tables[0].rows] == ["agrees", "differs"]
    verdicts = [aim.met for aim in result.aims]
    assert verdicts == [False, True, True, True]
    assert "2EPD 19, 1E1PD 13" in result.aims[-1].measured


def test_nothing_is_judged_before_anything_was_replayed() -> None:
    nothing = Workload("POPE", [Line("best EPD", "2EPD", 18.0, 20.0, 50, None, None, 3, [])], None, [])
    assert [aim.met for aim in aims([], [nothing])] == [None, None, None]


@pytest.mark.parametrize("wrong", [{"failed": 1}, {"exact": False}, {"verified": 9}])
def test_a_block_that_was_not_verified_falls_short(wrong: dict[str, Any]) -> None:
    made = line(20.0, 19.1, 21.0, replays=[{**record(0, True), **wrong}])
    assert aims([shown(made)], [shown(made)])[2].met is False


def test_dilations_are_compared_with_the_least_and_only_valid_ones() -> None:
    def at(dilation: int, seconds: float, late: tuple[str, ...] = ()) -> dict[str, Any]:
        made = record(0, True, late)
        made["task"][5], made["latency"] = dilation, {"TTFT p50": seconds}
        return made

    assert differs([at(1, 0.1), at(2, 0.103), at(4, 0.2, ("cpu",))]) == pytest.approx(0.03)
    assert differs([at(1, 0.1), at(2, 0.1, ("cpu",))]) is None
    table = scale_tables.dilated(shown(dilations=(at(1, 0.1), at(2, 0.11))))
    assert [row[1] for row in table.rows] == ["100 (+0.0%)", "110 (+10.0%)"]


def test_without_time_nothing_is_planned_and_what_is_kept_is_shown(tmp_path: Path) -> None:
    assert scale.run(Setting(quick=True, minutes=0, kept=tmp_path)).values == {}
    made = board(Kept(tmp_path / "scale-replays.jsonl", SMALL))
    made.kept.add("replay", "POPE", record(0, True))
    result = scale.run(Setting(quick=True, minutes=0, kept=tmp_path))
    assert result.tables[0].rows[0][4] == "18.4"


def test_a_row_knows_what_the_simulator_expects_at_the_rates_around_its_goodput() -> None:
    row = scale_rows.simulated("POPE", ("even", "1E2P1D", True), SMALL)
    assert row.rate > 0
    assert row.steady > 0
    assert 1e-4 < row.cpu_s < 0.1
    assert [len(row.expected), row.asked] == [2, max(60, row.asked)]
    assert row.expected == tuple(scale_rows.expected(row, step, "POPE") for step in (0, 1))
    assert row.asked >= SMALL.least_ttfts * bounds("POPE").ttft * rate_at(row, 1)


@pytest.mark.slow
def test_it_runs_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    result = scale.run(Setting(quick=True, minutes=4, kept=tmp_path))
    replays = [each for each in Kept(tmp_path / "scale-replays.jsonl", SMALL).records if each["kind"] == "replay"]
    assert replays
    assert all(each["exact"] and each["verified"] == each["pulls"] for each in replays)
    assert result.tables
    assert scale.run(Setting(quick=True, minutes=0, kept=tmp_path)).tables


def test_a_pipeline_of_the_benchmark_says_that_it_is_emulated() -> None:
    assert isinstance(pipeline(Task("POPE", "1EPD", True, 1, 1.0, 1)), Pipeline)
    assert str(paced(2.0)).startswith("emulation of llava-1.5-7b (stages wait: a roofline of H20 slowed 2 times")
