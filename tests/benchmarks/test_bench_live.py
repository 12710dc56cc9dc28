"""Live benchmarks of ways to place and batch: what figures are made of, what is compared with what, that they run."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import setting
from benchmarks.report import Result
from benchmarks.serving import ablation, dual_stream, live, stalls
from benchmarks.serving.live import Rounds, Way, attained, goodput, in_turns, placed, seen, span, traffic
from benchmarks.setting import Setting
from support.checkpoint_files import checkpoint
from trinity.core.scheduler import BatchRules
from trinity.costs.budgets import StepCost
from trinity.costs.step_cost import CostTables
from trinity.errors import ConfigError
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.placement import Placement
from trinity.traces.trace import SLO, Trace, TraceRow

QUICK = Setting(quick=True, checkpoint=checkpoint)
BOUND = SLO(ttft=1.0, tbt=0.1)


def row(at: float = 0.0, ttft: float = 0.5, gaps: Sequence[float] = (0.05, 0.05), reason: str = "length") -> TraceRow:
    return TraceRow(
        timestamp=1000 * at,
        input_length=10,
        output_length=1 + len(gaps),
        ttft_s=ttft,
        itl_s=list(gaps),
        latency_s=ttft + math.fsum(gaps),
        finish_reason=reason,
        late_s=0.001,
    )


LATE = row(ttft=2.0)
STALLED = row(gaps=(0.05,) * 19 + (0.5,))  # one gap in twenty: in time by the 90 % rule alone
FAILED = row(reason="error")


# ---------------------------------------------------------------- what is asked for


def test_requests_differ_in_images_and_come_as_recorded() -> None:
    asked = list(traffic(7, 576, 24, images=3))
    assert [len(each.images) for each in asked] == [1, 2, 3, 1, 2, 3, 1]
    assert [each.input_length - each.visual_tokens for each in asked] == [40] * 7
    assert {each.output_length for each in asked} == {24}
    assert not any(image.content for each in asked for image in each.images), "equal images would be in caches"
    times = [each.timestamp for each in asked]
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_instances_take_turns_on_the_cores() -> None:
    known = live.cores()
    made = placed("2E2P2D")
    assert [each.roles for each in made] == ["E", "E", "P", "P", "D", "D"]
    assert [each.cores for each in made] == [(known[at % len(known)],) for at in range(6)]
    assert not any(each.image_cache or each.prefix_cache for each in made)


# ---------------------------------------------------------------- what came of it


def test_figures_count_all_rounds_and_every_failure() -> None:
    found = seen([Trace([row(), row(1.0)]), Trace([row(gaps=(0.3, 0.01)), FAILED])], BOUND)
    assert (found["requests"], found["failed"], found["late_s"]) == (4, 1, 0.001)
    assert found["gap_max_s"] == 0.3
    assert found["gap_p50_s"] == 0.05
    assert found["ttft_p99_s"] == 0.5
    assert found["attained_p90"] == found["attained_p99"] == 0.5
    assert found["tokens_per_s"] == pytest.approx(9 / (1.6 + 0.81))
    assert found["requests_per_s"] == pytest.approx(3 / (1.6 + 0.81))


def test_nothing_done_has_no_percentiles() -> None:
    found = seen([Trace([FAILED])])
    assert math.isnan(found["gap_p99_s"])
    assert math.isnan(found["ttft_p50_s"])
    assert found["requests_per_s"] == 0


def test_a_span_ends_with_the_last_token() -> None:
    assert span(Trace([row(2.0), row(3.0)])) == pytest.approx(1.0 + 0.6)


def test_one_stall_in_twenty_gaps_passes_the_papers_rule_only() -> None:
    rounds = [Trace([STALLED, row(), LATE, FAILED])]
    assert attained(rounds, BOUND, "p90") == 0.5
    assert attained(rounds, BOUND, "p99") == 0.25


def ladder(*shares: float, name: str = "a") -> Rounds:
    """Ten requests at each rate 1, 2, ..., so many of them in time."""
    return {
        (name, float(place)): [Trace([row()] * round(10 * share) + [LATE] * round(10 - 10 * share))]
        for place, share in enumerate(shares, 1)
    }


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        ((1.0, 0.9, 0.9), (3.0, False)),
        ((1.0, 0.8), (1.5, True)),
        ((0.9, 0.1), (1.0, True)),
        ((0.8, 1.0), (0.0, True)),
        ((1.0, 0.5, 1.0), (1.2, True)),
    ],
)
def test_goodput_is_where_the_line_falls_below_nine_tenths(
    shares: tuple[float, ...], wanted: tuple[float, bool]
) -> None:
    assert goodput(ladder(*shares), "a", BOUND, "p90") == pytest.approx(wanted)


async def test_ways_take_turns_at_every_rate_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[Any, float | None]] = []

    class Idle:
        def __init__(self, name: str) -> None:
            self.name = name
            self.processes: dict[str, Any] = {}

    async def served(pipe: Any, trace: Trace, rate: float | None = None) -> Trace:
        log.append((pipe.name, rate))
        return trace

    monkeypatch.setattr(live, "served", served)
    pipes: Any = {"a": Idle("a"), "b": Idle("b")}
    asked = Trace([row()])
    found, foreign = await in_turns(pipes, asked, (rate for rate in (1.0, 2.0)), 2, time.monotonic() + 60)
    assert log == [("a", 1.0), ("b", 1.0), ("a", 2.0), ("b", 2.0)] * 2
    assert {cell: len(rounds) for cell, rounds in found.items()} == dict.fromkeys(found, 2)
    assert 0 <= foreign <= 1
    assert await in_turns(pipes, asked, [1.0], 2, time.monotonic() - 1) == ({}, 0.0)


BURNING = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"
BELOW = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURNING!r}])"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system does not say what processes have used")
def test_the_time_of_children_s_children_is_our_own_while_they_run_and_afterwards() -> None:
    before = setting._own_seconds()
    with subprocess.Popen([sys.executable, "-c", BELOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        running = setting._own_seconds()
    assert running - before > 0.2, "0.3 s, in ticks"
    assert setting._own_seconds() >= running


# ---------------------------------------------------------------- stalls


def test_stalls_are_compared_with_whole_prompts_and_all_images() -> None:
    known = stalls.ways(576, stalls.CHUNKS, stalls.IMAGES)
    assert len({each.name for each in known}) == len(known) == 9
    assert known[0].name == "EPD, whole prompts, any number of images"
    assert known[0].rules == BatchRules(chunked=False, limit_encodes=False)
    by_name = {each.name: each for each in known}
    chosen = by_name["EPD, chunks of 128, 2 images"]
    assert chosen.budgets is not None
    assert (chosen.rules, chosen.budgets.token_budget, chosen.budgets.image_budget) == (BatchRules(), 128, 2 * 576)
    assert [each.name for each in known if each.name.startswith("EP+D")] == [
        "EP+D, whole prompts, any number of images",
        "EP+D, chunks of 128, 1 image",
    ]


def test_what_bounds_do_is_said_beside_what_they_cost() -> None:
    found: Rounds = {
        ("EPD, whole prompts, any number of images", 1.0): [Trace([row(gaps=(0.4, 0.4))])],
        ("EPD, chunks of 128, 1 image", 1.0): [Trace([row(gaps=(0.1, 0.1))])],
        ("EP+D, whole prompts, any number of images", 1.0): [Trace([row()])],
    }
    facts = {
        "rest": (0.1, 0.01),
        "capacity": 2.0,
        "exact": "Exact.",
        "count": 1,
        "rate": 1.0,
        "foreign": 0.0,
        "cells": 3,
    }
    made = stalls.result(found, facts, "m")
    assert made.tables[0].rows[0][:5] == [next(iter(found))[0], "400", "400", "400", "400"]
    assert made.notes == [
        "EPD: the 99th percentile of TBT with chunks of 128, 1 image is 0.25 times that with whole prompts, any number "
        "of images, throughput 1.86 times."
    ]
    assert stalls.result(found, {**facts, "foreign": 0.5}, "m").notes[0].startswith("Others took more than")


# ---------------------------------------------------------------- dual stream


def test_a_lane_has_a_core_and_the_sequential_instance_both() -> None:
    if len(live.cores()) < 2:
        pytest.skip("this process may use one core only")
    both = tuple(live.cores()[:2])
    sequential, dual, apart, apart_dual = dual_stream.ways()
    assert [(each.threads, each.lanes, each.cores) for each in (*sequential.instances, *dual.instances)] == [
        (2, ("joint",), both),
        (1, ("vision", "language"), both),
    ]
    for way in (apart, apart_dual):
        assert [(each.roles, each.cores) for each in way.instances] == [("EP", both), ("D", both[1:])]


def test_dual_stream_is_a_ratio_to_sequential_at_the_same_rate() -> None:
    found: Rounds = {
        ("EPD, sequential", 1.0): [Trace([row(ttft=0.5, gaps=(0.1, 0.1))])],
        ("EPD, dual stream", 1.0): [Trace([row(ttft=0.25, gaps=(0.05, 0.05))])],
        ("EPD, dual stream", 2.0): [Trace([row()])],
    }
    burst = {"EPD, sequential": 2.0, "EPD, dual stream": 2.5}
    rates = {8: {"sequential": (4.0, 100.0), "parallel": (6.0, 110.0)}}
    facts = {
        "rates": rates,
        "burst": burst,
        "rest": dict.fromkeys(burst, (0.1, 0.01)),
        "exact": "",
        "count": 1,
        "foreign": 0.0,
        "cells": 3,
    }
    made = dual_stream.result(found, facts, "m")
    assert made.tables[0].rows == [["8", "4.00", "6.00", "1.50", "100.00", "110.00", "1.10"]]
    assert made.notes == [
        "EPD: dual stream does 1.25 times the requests a second of sequential in a burst.",
        "EPD at 1.00 requests a second, dual stream to sequential: median TTFT 0.50 times, median TBT 0.50, its 99th "
        "percentile 0.50, tokens a second 2.00.",
    ]
    assert made.tables[0].rows == [["8", "4.00", "6.00", "1.50", "100.00", "110.00", "1.10"]]


# ---------------------------------------------------------------- ablation


def test_each_ablation_takes_one_thing_away() -> None:
    full, unbounded, unbatched = ablation.variants("EP+D", placed("EP+D"))
    assert (full.rules, full.budgets) == (BatchRules(), None), "searched by the pipeline under its SLO"
    assert (unbounded.rules.policy, unbounded.rules.chunked, unbounded.rules.limit_encodes) == ("alg1", False, False)
    assert unbatched.rules.policy == "prefill_first"
    assert full.instances == unbounded.instances == unbatched.instances
    names = [each.name for each in ablation.real_ways()]
    assert len(set(names)) == len(names) == 8
    assert {name.partition(", ")[0] for name in names} == {"2EPD", "EP+D", "ED+P", "PD+E", "E+P+D"}


def test_budgets_are_searched_for_each_instance_by_its_roles() -> None:
    cost = StepCost.from_samples(decodes={1: 0.01, 64: 0.05}, prefill={1: 0.01, 1024: 0.5}, media={576: 0.1, 2304: 0.4})
    tables = CostTables(model="m", device="d", dtype="t", source="test", costs=((1, cost),))
    full, unbounded, _ = ablation.variants("EP+D", placed("EP+D"))
    first, second = ablation.budgeted(full, tables, SLO(1.0, 0.05), 576).instances
    assert first.rules is not None
    assert second.rules is not None
    for found, limit, rows in (
        (first, 0.5, (0, first.rules.token_budget, 0)),
        (second, 0.05, (second.rules.token_budget, 0, 0)),
    ):
        assert tables.seconds(*rows) <= limit, found
    assert first.rules.image_budget % 576 == 0
    assert ablation.budgeted(unbounded, tables, SLO(1.0, 0.05), 576) is unbounded


def test_the_emulated_ones_are_the_chosen_and_as_many_of_each() -> None:
    ways = ablation.paced_ways("3ED3P")
    assert [each.name for each in ways][3:] == ["2E2P2D, Algorithm 1", "2E2P2D, no stage-level batching"]
    for way in ways:
        assert len(way.instances) == ablation.INSTANCES
        named = Placement.parse(way.name.partition(", ")[0])
        assert [each.roles for each in way.instances] == [roles for _, roles in named.instances()]


def test_emulated_rounds_fit_the_time_that_is_left() -> None:
    rates = [share * 14.0 for share in ablation.LADDER]
    for seconds in (120.0, 200.0):
        count = ablation.fitting(seconds, rates)
        taken = ablation.END_S + sum(count / rate + ablation.END_S for rate in rates)
        assert seconds - sum(1 / rate for rate in rates) < taken <= seconds
    assert ablation.fitting(1.0, rates) == ablation.LEAST


@pytest.mark.slow
def test_emulated_ways_are_served_side_by_side_rate_after_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "ProcessPoolExecutor", lambda count, **_: ThreadPoolExecutor(count))
    ways = ablation.paced_ways("3ED3P")[1:4:2]
    found, foreign = ablation.side_by_side(ways, [20.0], 4, time.monotonic() + 60)
    assert list(found) == [(way.name, 20.0) for way in ways]
    assert [len(rounds[0]) for rounds in found.values()] == [4, 4]
    assert all(row.finish_reason == "length" for rounds in found.values() for row in rounds[0])
    assert 0 <= foreign <= 1
    assert ablation.side_by_side(ways, [20.0], 4, time.monotonic()) == ({}, 0.0), "no time is left"


def test_the_best_is_compared_with_what_lacks_one_thing() -> None:
    best, other = "EP+D, Algorithm 1", "2EPD, Algorithm 1"
    found = {
        **ladder(1.0, 1.0, name=best),
        **ladder(1.0, 0.8, name="EP+D, no budgets"),
        **ladder(0.5, name=other),
        **ladder(1.0, name="2EPD, no budgets"),
    }
    facts: dict[str, Any] = {"count": 10, "exact": "", "plan": "3ED3P", "simulated": 9.0, "cells": 8}
    each = ablation.Seen(BOUND, (1.0, 2.0), found, facts=facts)
    assert ablation.compared("m", each) == [
        "m, 99 % rule: EP+D, Algorithm 1 has 1.33 times the goodput of EP+D, no budgets.",
        "m, 99 % rule: 2EPD, Algorithm 1 has none.",
    ]
    made = ablation.result({"m": each, "emulated": each}, "m")
    assert made.tables[0].rows[0][:3] == [best, ">= 2.00", ">= 2.00"]
    assert made.tables[1].rows[1] == ["EP+D, no budgets", "100% / 100%", "80% / 80%"]
    assert made.tables[1].rows[2][-1] == "-", "what the time did not reach"
    assert made.notes[0] == "m: 2 of 8 rounds were not reached in the minutes given: give --minutes more."
    json.dumps(made.values)


# ---------------------------------------------------------------- they run


async def test_a_way_that_cannot_be_is_refused_before_anything_is_measured() -> None:
    wrong = Way("wrong", (Instance("EPD", cores=(1 << 20,)),))
    with pytest.raises(ConfigError, match="asks for core"):
        async with live.opened(ablation.PACED, [wrong]):
            pytest.fail("started")


def check(made: Result, name: str) -> None:
    assert made.name == name
    assert all(len(cells) == len(table.header) for table in made.tables for cells in table.rows)
    assert made.text()
    json.dumps(made.values)


@pytest.mark.slow
@pytest.mark.parametrize("module", [stalls, dual_stream, ablation], ids=lambda module: str(module.__name__))
def test_they_run_and_tokens_are_exact(module: Any) -> None:
    if module is dual_stream and len(live.cores()) < 2:
        pytest.skip("this process may use one core only")
    made = module.run(QUICK)
    check(made, module.__name__.rpartition(".")[2])
    assert "the tokens of every way are those of generate()" in made.method


def test_nothing_is_left_of_ways_that_were_opened() -> None:
    async def once() -> list[Pipeline]:
        async with live.opened(ablation.PACED, ablation.paced_ways("3ED3P")[:1]) as pipes:
            return list(pipes.values())

    (pipe,) = asyncio.run(once())
    assert all(host.core.idle() for host in pipe.hosts.values())
