"""Recorded traces before planning: idle gaps, outputs that were cut short, and requests that the model never takes."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from support.planner_options import planner_options
from trinity.costs.model_shape import MODELS
from trinity.errors import TraceError
from trinity.planner import HybridPlanner, SearchConfig
from trinity.planner.trace_repair import leave_out_gaps, prepare_recorded
from trinity.simulation import compiled_engine
from trinity.traces import synthesise
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow

LLAVA = MODELS["llava-1.5-7b"]
BASE = synthesise("TextCaps", 400, visual_tokens=lambda width, height: 576, rate=8, seed=11)
needs_twin = pytest.mark.skipif(bool(compiled_engine.why_unavailable()), reason="no compiled twin")


def planner(**options: Any) -> HybridPlanner:
    usual: dict[str, Any] = {"seeds": 0, "least_requests": 250}
    return HybridPlanner(LLAVA, SLO(1.0, 0.08), instances=3, **planner_options(usual | options))


def later(rows: Trace, seconds: float) -> list[TraceRow]:
    return [row.request_at(row.timestamp + 1000 * seconds) for row in rows]


def at(*seconds: float) -> Trace:
    return Trace(TraceRow(timestamp=1000 * each, input_length=5, output_length=2) for each in seconds)


# ---------------------------------------------------------------- idle gaps


def test_a_pause_shrinks_to_a_usual_gap() -> None:
    made, left = leave_out_gaps(at(*range(50), *range(3600, 3650)))
    stamps = [row.timestamp / 1000 for row in made]
    assert left == pytest.approx(3550)
    assert stamps == pytest.approx(list(range(100)))


@pytest.mark.parametrize(
    "seconds",
    [
        [],
        [5.0],
        [0, 3600],
        [300.0 * n for n in range(40)],  # slow, and no pause
        [0, 1, 2, 3, 60],  # under a minute
        [0, 0, 0, 7200, 7200],  # all at once, twice: there is no usual gap
    ],
)
def test_what_is_no_pause_stays(seconds: list[float]) -> None:
    trace = at(*seconds)
    assert leave_out_gaps(trace) == (trace, 0.0)


def test_bursts_and_slow_poisson_traffic_have_no_pause() -> None:
    noise = random.Random(4)
    for mean in (0.01, 1.0, 30.0, 1000.0):
        now, seconds = 0.0, []
        for _ in range(3000):
            now += noise.expovariate(1 / mean)
            seconds.append(now)
        assert leave_out_gaps(at(*seconds))[1] == 0.0


def draw_bursts(noise: random.Random, spread: float) -> tuple[list[float], float, int]:
    """Draw bursts with pauses of 1 to 1 + ``spread`` hours: the time of each arrival, the sum of pauses, their number.

    Times in seconds.
    """
    now, idle, seconds, bursts, mean = 0.0, 0.0, [], noise.randint(2, 60), noise.choice((0.01, 0.07, 1.0))
    for burst in range(bursts):
        for _ in range(noise.randint(2, 25)):
            seconds.append(now)
            now += noise.uniform(0.5, 1.5) * mean
        now = seconds[-1] + (pause := 3600 * (1 + noise.uniform(0, spread)) if burst < bursts - 1 else 0.0)
        idle += pause
    return seconds, idle, bursts - 1


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 30.0])
def test_pauses_of_about_one_length_or_of_many_do_not_hide_one_another(spread: float) -> None:
    """Hourly bursts of fewer than 20 requests kept all of their pauses, and their goodput fell by 2,000."""
    for seed in range(40):
        noise = random.Random(seed)
        seconds, idle, count = draw_bursts(noise, spread)
        usual = (seconds[-1] - idle) / (len(seconds) - 1 - count)
        made, left = leave_out_gaps(at(*seconds))
        assert left == pytest.approx(idle - count * usual), seed
        assert made[-1].timestamp / 1000 == pytest.approx(usual * (len(seconds) - 1)), seed
        assert max(b.timestamp - a.timestamp for a, b in pairwise(made)) <= 1501, seed


def test_pauses_that_are_kept_are_said() -> None:
    """Three batches, each at one instant: nothing tells a usual gap, and one of the two pauses alone was shortened."""
    batches = at(*(second for second in (0.0, 3600.0, 9000.0) for _ in range(50)))
    made = prepare_recorded(batches, LLAVA, 0.9)
    assert sorted({row.timestamp for row in made.trace}) == [0.0, 3.6e6, 9e6]
    (note,) = made.notes
    assert note.startswith("Gaps of more than 60 s take 100% of the trace's time and were kept")
    mixed = at(*(3600.0 * hour + second for hour in range(40) for second in ((0, 0.5) if hour % 2 else (0,))))
    assert leave_out_gaps(mixed)[1] == 0.0, "a third of the gaps alone is short"
    assert len(prepare_recorded(mixed, LLAVA, 0.9).notes) == 1


def test_slow_traffic_has_no_note() -> None:
    noise = random.Random(7)
    for mean in (1.0, 30.0, 60.0, 200.0, 1000.0, 10_000.0):
        now, seconds = 0.0, []
        for _ in range(1000):
            now += noise.expovariate(1 / mean)
            seconds.append(now)
        assert prepare_recorded(at(*seconds), LLAVA, 0.9).notes == (), mean


@needs_twin
@pytest.mark.parametrize("case", ["a row an hour later", "twice with half an hour between", "a day before"])
def test_a_pause_changes_neither_choice_nor_goodput_and_is_said(case: str) -> None:
    """An hour without requests divided the goodput by seventeen, and another placement was chosen."""
    traces = {
        "a row an hour later": [*BASE, *later(Trace([BASE[0]]), 3600)],
        "twice with half an hour between": [*BASE, *later(BASE, 1850)],
        "a day before": [BASE[0].request_at(0), *later(BASE, 86_400)],
    }
    usual, seen = planner().plan(BASE), planner().plan(Trace(traces[case]))
    assert seen.placement == usual.placement
    assert seen.best.goodput["guard"] == pytest.approx(usual.best.goodput["guard"], rel=0.1)
    assert "Idle gaps of" in seen.explain()
    assert "Idle gaps of" not in usual.explain()


# ---------------------------------------------------------------- requests that are cut short or never taken


@needs_twin
def test_refused_rows_are_planned_for_with_whole_outputs_and_it_is_said() -> None:
    refused = [
        TraceRow(
            timestamp=row.timestamp,
            input_length=row.input_length,
            text_length=row.text_length,
            images=row.images,
            output_length=0 if n % 3 else row.output_length,
            finish_reason="refused" if n % 3 else "length",
        )
        for n, row in enumerate(BASE)
    ]
    usual, seen = planner().plan(BASE), planner().plan(Trace(refused))
    assert "266 of 400 requests were cancelled, refused or failed" in seen.explain()
    assert seen.best.goodput["guard"] == pytest.approx(usual.best.goodput["guard"], rel=0.2)


def beyond(every: int) -> Trace:
    """The trace with every n-th prompt beyond the context of 4,096 tokens."""
    return Trace(
        TraceRow(timestamp=row.timestamp, input_length=5000, text_length=5000, output_length=row.output_length)
        if n % every == 0
        else row
        for n, row in enumerate(BASE)
    )


@needs_twin
def test_requests_beyond_the_context_are_told_where_they_decide() -> None:
    plan = planner().plan(beyond(8))
    assert not plan.met
    assert "50 of 400 requests (12.5%) can never be served by llava-1.5-7b" in plan.explain()
    assert "context of 4,096 tokens" in plan.explain()
    assert "no placement meets the SLO on this trace" in plan.explain()


def test_where_they_are_few_they_are_counted_and_do_not_decide() -> None:
    (note,) = prepare_recorded(beyond(20), LLAVA, 0.9).notes
    assert note.startswith("20 of 400 requests (5.0%)")
    assert "no placement" not in note


def few_and_idle(every: int) -> Trace:
    """200 requests, each ``every``-th beyond the context, and an hour without any: idle for nine tenths of the time."""
    rows = [TraceRow(timestamp=1000 * n, input_length=100 if n % every else 5000, output_length=5) for n in range(100)]
    return Trace([*rows, *(row.request_at(row.timestamp + 3.6e6) for row in rows)])


@pytest.mark.parametrize(
    ("every", "share", "decides"),
    [
        (10, 0.95, True),
        (10, 0.9, False),  # exactly as many as may be late
        (10, 0.5, False),
        (20, 0.95, False),
        (5, 0.8, False),
        (5, 0.81, True),
        (10, None, False),  # no rate has to hold
    ],
)
def test_the_verdict_is_that_of_the_trials_beside_idle_gaps(every: int, share: float | None, decides: bool) -> None:
    idle, refused = prepare_recorded(few_and_idle(every), LLAVA, share).notes
    assert idle.startswith("Idle gaps of")
    assert ("no placement meets the SLO" in refused) == decides
    if decides and share:
        assert f"more than the {100 * (1 - share):.0f}% that may be late" in refused


@needs_twin
@pytest.mark.parametrize(
    ("objective", "decides"), [("goodput", True), ("throughput", False), ("effective_throughput", False)]
)
def test_only_a_goodput_is_decided_by_requests_that_are_never_taken(objective: Any, decides: bool) -> None:
    rows = [
        TraceRow(timestamp=100.0 * n, input_length=100 if n % 5 else 5000, output_length=20) for n in range(500)
    ]  # a fifth
    slo = None if objective == "throughput" else SLO(2.0, 0.05)
    search = SearchConfig(seeds=0, least_requests=100)
    plan = HybridPlanner(LLAVA, slo, instances=1, objective=objective, search=search).plan(Trace(rows))
    assert plan.met != decides
    assert ("no placement meets the SLO" in plan.explain()) == decides


def test_a_model_of_text_alone_says_so_of_a_trace_of_images() -> None:
    text = MODELS["llava-1.5-7b"].__class__(name="text", language=LLAVA.language, vocabulary=32_000)
    images = Trace(
        TraceRow(timestamp=n, input_length=600, output_length=4, images=[TraceImage(tokens=576)]) for n in range(300)
    )
    with pytest.raises(TraceError, match="text can serve none of the trace's 300 requests: they are with images"):
        HybridPlanner(text, SLO(1.0, 0.1), instances=2).plan(images)
