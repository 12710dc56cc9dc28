"""Goodput against queues whose answer is known in closed form; failures, instability and traces too short."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.errors import ConfigError, TraceTooShort, UnknownName
from trinity.traces.goodput import (
    Goodput,
    RatePoint,
    RequestOutcome,
    completed_share,
    falls_behind,
    goodput,
    measure_point,
    search_goodput,
    steady_state_s,
)
from trinity.traces.trace import SLO, SLO_RULES, SLORule, Trace, TraceRow

LOOSE = SLO(ttft=2.0, tbt=1.0)


def evenly(count: int, rate: float = 1.0) -> Trace:
    return Trace(TraceRow(timestamp=1000 * n / rate, input_length=1, output_length=1) for n in range(count))


class Queue:
    """One server, first come first served, ``service_s`` for each request; ``gaps`` follow at its own pace."""

    def __init__(self, service_s: float, gaps: Sequence[float] = ()) -> None:
        self.service_s, self.gaps, self.runs = service_s, tuple(gaps), 0

    def __call__(self, trace: Trace) -> list[RequestOutcome]:
        self.runs += 1
        arrivals = [row.timestamp / 1000 for row in trace]
        ends = accumulate(arrivals, lambda end, at: max(end, at) + self.service_s, initial=-math.inf)
        return [RequestOutcome(end - at, self.gaps) for at, end in zip(arrivals, list(ends)[1:], strict=True)]


def limit(count: int, service_s: float, ttft: float, share: float = 0.9) -> float:
    """Rate at which request n = share * count of an even stream waits just up to ttft: n (s - 1/r) + s = ttft."""
    return 1 / (service_s - (ttft - service_s) / (share * count))


# ---------------------------------------------------------------- one rate


def test_below_its_rate_a_queue_is_never_late() -> None:
    point = measure_point(Queue(0.1), evenly(100), LOOSE, rate=9)
    assert point.rate == pytest.approx(9)
    assert point.duration_s == pytest.approx(11)
    assert point.attainment == dict.fromkeys(SLO_RULES, 1.0)
    assert point.completed == pytest.approx(1)


def test_above_its_rate_waits_grow_by_the_same_each_time() -> None:
    point = measure_point(Queue(0.1), evenly(1000), LOOSE, rate=20)
    # Request n waits 0.05 n and is served in 0.1: in time up to n = 37 (1.95 s), not at n = 38 (2.0 s is not < 2.0 s).
    assert point.attainment["p90"] == pytest.approx(0.038, abs=0.001)
    assert point.completed == pytest.approx(0.5)
    assert not point.stable


def test_failures_count_against() -> None:
    def serve(trace: Trace) -> list[RequestOutcome]:
        return [RequestOutcome(0.1, finish_reason="error" if n % 5 == 0 else "stop") for n in range(len(trace))]

    point = measure_point(serve, evenly(100), LOOSE)
    assert set(point.attainment.values()) == {0.8}
    assert point.completed == pytest.approx(0.8, abs=0.02)


def test_a_request_without_a_first_token_is_not_in_time() -> None:
    assert measure_point(lambda trace: [RequestOutcome(None)] * len(trace), evenly(10), LOOSE).attainment["p90"] == 0


def test_every_request_needs_an_outcome() -> None:
    for answers in (9, 11, 0):
        with pytest.raises(ConfigError, match=f"answered {answers} of 10"):
            measure_point(lambda trace, answers=answers: [RequestOutcome(0.1)] * answers, evenly(10), LOOSE)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arrivals", "latencies", "expected"),
    [
        (range(11), [1] * 11, 1.0),
        (range(11), range(11), 0.5),  # each takes a second more than the one before it
        (range(11), [1] * 10 + [1000], 1.0),  # one long answer at the end
        ([0] * 11, [1] * 11, 1.0),  # all at once: nothing to keep up with
        ([], [], 1.0),
    ],
)
def test_completions_by_hand(arrivals: Sequence[float], latencies: Sequence[float], expected: float) -> None:
    assert completed_share(list(arrivals), [RequestOutcome(each) for each in latencies]) == pytest.approx(expected)


def test_what_never_ends_is_not_completed() -> None:
    assert completed_share([0, 1, 2], [RequestOutcome(1, (), "error")] * 3) == 0
    assert completed_share([0, 0], [RequestOutcome(1), RequestOutcome(None)]) == 0


# ---------------------------------------------------------------- goodput


@pytest.mark.parametrize("bound", [None, 10.0, 11.0, 40.0, 0.5])
def test_the_papers_rule_finds_the_rate_of_the_formula(bound: float | None) -> None:
    found = goodput(Queue(0.1), evenly(2000), LOOSE, rule="p90", stable=False, bound=bound)
    expected = limit(2000, 0.1, 2.0)
    assert expected / 1.021 < found.rate <= expected
    assert all(point.attainment["p90"] >= 0.9 for point in found.points if point.rate <= found.rate * 1.0001)
    assert min(point.rate for point in found.points if point.attainment["p90"] < 0.9) <= found.rate * 1.021


def test_a_stable_goodput_is_never_above_what_completes() -> None:
    slack = SLO(ttft=30.0, tbt=1.0)  # the queue may grow for so long, so that the paper's rule lets 12 req/s pass
    paper = goodput(Queue(0.1), evenly(2000), slack, rule="p90", stable=False, least_ttfts=1)
    guarded = goodput(Queue(0.1), evenly(8000), slack, least_ttfts=1)  # 30 s missing of more than 600 are within 5 %
    assert paper.rate > 11.5
    assert 10 / 0.95 / 1.021 < guarded.rate <= 10 / 0.95 * 1.001


def test_long_outputs_in_time_are_no_instability_of_a_short_trace() -> None:
    """No queue at all; every other output takes 9 of the 12 s that it may. A trace must last 140 s for that to tell."""
    rows = [TraceRow(timestamp=1000.0 * n, input_length=1, output_length=101 if n % 2 else 1) for n in range(1000)]
    trace, slo = Trace(rows), SLO(ttft=2.0, tbt=0.1)
    assert steady_state_s(trace, slo) == pytest.approx(140)

    def serve(gap_s: float) -> Callable[[Trace], list[RequestOutcome]]:
        return lambda offered: [RequestOutcome(0.1, [gap_s] * (row.output_length - 1)) for row in offered]

    with pytest.raises(TraceTooShort, match="no upper limit"):  # all that is asked of it is in time
        goodput(serve(0.09), trace, slo)
    point = measure_point(serve(0.09), trace, slo, 1000 / 30)
    assert not point.stable
    assert not falls_behind(point, "p90", 0.9, 140)
    starved = RatePoint(rate=30, duration_s=30, attainment={"guard": 0.5, "p90": 1.0, "tpot": 0.5}, completed=0.7)
    assert falls_behind(starved, "p90", 0.9, 140), "an end that nothing bounds"
    assert not falls_behind(starved, "tpot", 0.4, 140), "its mean bounds it"


def test_from_a_bound_that_is_near_it_takes_seven_runs() -> None:
    queue = Queue(0.1)
    found = goodput(queue, evenly(2000), LOOSE, bound=10.0)
    assert queue.runs == len(found.points) <= 7


def test_rates_are_tried_as_stated() -> None:
    found = goodput(Queue(0.1), evenly(2000), LOOSE, bound=5.0)
    assert [point.rate for point in found.points][:4] == pytest.approx([4.5 * 1.25**n for n in range(4)])
    down = goodput(Queue(0.1), evenly(2000), LOOSE, bound=15.0)
    assert [point.rate for point in down.points][:2] == pytest.approx([13.5, 10.8])
    own = goodput(Queue(0.1), evenly(2000, rate=8), LOOSE)
    assert own.points[0].rate == pytest.approx(8)


def test_a_stall_that_the_tolerated_tenth_hides_is_seen_by_the_guard() -> None:
    stalled = Queue(0.1, [0.1] * 19 + [40.0])
    paper = goodput(stalled, evenly(2000), LOOSE, rule="p90")
    guarded = goodput(stalled, evenly(2000), LOOSE)
    assert paper.rate > 9
    assert guarded.rate == 0
    assert guarded.best_attainment == 0
    assert "none: 0.0% at best" in str(guarded)


def test_an_slo_that_nothing_meets_gives_zero_and_the_best_attainment() -> None:
    def serve(trace: Trace) -> list[RequestOutcome]:
        return [RequestOutcome(0.1 if n % 4 else 9.0) for n in range(len(trace))]

    found = goodput(serve, evenly(1000), LOOSE)
    assert (found.rate, found.best_attainment) == (0, 0.75)
    assert len(found.points) < 12
    with pytest.raises(TraceTooShort, match="no upper limit"):
        goodput(serve, evenly(1000), LOOSE, share=0.75, stable=False)


@pytest.mark.parametrize("rule", SLO_RULES)
def test_each_rule_can_be_searched_by(rule: SLORule) -> None:
    found = goodput(Queue(0.1, [0.5] * 10), evenly(1000), LOOSE, rule=rule, least_ttfts=1)
    assert found.rule == rule
    assert 9.8 / 1.021 < found.rate < 10.7


@settings(max_examples=15, deadline=None)
@given(st.floats(0.02, 0.5), st.floats(1.5, 30))
def test_a_faster_server_is_never_worse(service: float, bound: float) -> None:
    slow, fast = (
        goodput(Queue(each), evenly(1000), LOOSE, bound=bound, least_ttfts=1) for each in (service, service / 1.2)
    )
    assert fast.rate >= slow.rate / 1.021


# ---------------------------------------------------------------- too short


def test_fewer_than_a_thousand_requests_are_too_few_unless_one_says_so() -> None:
    with pytest.raises(TraceTooShort, match="999 requests") as caught:
        goodput(Queue(0.1), evenly(999, rate=4), LOOSE)
    assert caught.value.needed_s == pytest.approx(250)
    assert goodput(Queue(0.1), evenly(999, rate=4), LOOSE, least_requests=999).rate > 9


def test_without_an_upper_limit_there_is_no_answer() -> None:
    def instant(trace: Trace) -> list[RequestOutcome]:
        return [RequestOutcome(0.001)] * len(trace)

    with pytest.raises(TraceTooShort, match="no upper limit") as caught:
        goodput(instant, evenly(1000), LOOSE)
    assert caught.value.needed_s > 999


def test_a_search_without_a_limit_ends_however_little_is_asked_for() -> None:
    calls = 0

    def instant(trace: Trace) -> list[RequestOutcome]:
        nonlocal calls
        calls += 1
        return [RequestOutcome(1e-9)] * len(trace)

    with pytest.raises(TraceTooShort, match="no upper limit"):
        goodput(instant, evenly(1000), LOOSE, least_ttfts=1e-6)
    assert calls < 100


def test_the_length_that_the_error_asks_for_is_enough() -> None:
    queue, slo = Queue(0.1), SLO(ttft=30.0, tbt=1.0)
    with pytest.raises(TraceTooShort) as caught:
        goodput(queue, evenly(1000), slo, bound=10.0)
    assert goodput(queue, evenly(2 * int(caught.value.needed_s)), slo, bound=10.0).rate == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("trace", [Trace(), evenly(1), evenly(1500).scale(1e12).jitter(1e-12, 0).head(1)])
def test_a_trace_without_a_rate_is_too_short(trace: Trace) -> None:
    with pytest.raises(TraceTooShort, match="no rate"):
        goodput(Queue(0.1), trace, LOOSE)


@pytest.mark.parametrize(
    "options",
    [
        {"share": 0},
        {"share": 1.1},
        {"share": math.nan},
        {"bound": 0},
        {"bound": math.inf},
        {"least_requests": 1},
        {"least_ttfts": -1},
        {"least_ttfts": 0},
        {"step": 1},
        {"tolerance": 0},
        {"deepest": 0.5},
    ],
)
def test_options_without_meaning_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        goodput(Queue(0.1), evenly(1000), LOOSE, **options)
    with pytest.raises(UnknownName, match="guard"):
        goodput(Queue(0.1), evenly(1000), LOOSE, rule="p50")  # type: ignore[arg-type]


def test_a_goodput_shows_every_rule_beside_its_own() -> None:
    points = [(1.0, 1.0, 1.0), (2.0, 0.5, 0.8)]
    shown = Goodput(
        rate=1.0,
        rule="guard",
        share=0.9,
        stable=True,
        points=tuple(
            RatePoint(rate=rate, duration_s=9, attainment=dict.fromkeys(SLO_RULES, share), completed=done)
            for rate, share, done in points
        ),
    )
    text = str(shown)
    assert "goodput by guard: 1.000 requests/s" in text
    assert "0.80 unstable" in text
    assert all(rule in text for rule in SLO_RULES)
    assert "<td>50.0%</td>" in shown._repr_html_()


def test_a_search_is_driven_from_outside_by_the_same_code() -> None:
    queue = Queue(0.1)
    search = search_goodput(evenly(2000), LOOSE, {"bound": 10.0})
    offered: Trace | None = next(search)
    found = None
    while offered is not None:
        try:
            offered = search.send(queue(offered))
        except StopIteration as end:
            offered, found = None, end.value
    assert found == goodput(Queue(0.1), evenly(2000), LOOSE, bound=10.0)


def test_a_search_gives_up_as_deep_as_it_is_told() -> None:
    found = goodput(lambda trace: [RequestOutcome(9.0)] * len(trace), evenly(1000), LOOSE, step=2.0, deepest=5.0)
    assert [point.rate for point in found.points] == pytest.approx([1.0, 1 / 2, 1 / 8])


def test_a_coarser_search_takes_fewer_runs() -> None:
    queue = Queue(0.1)
    found = goodput(queue, evenly(2000), LOOSE, bound=10.0, step=1.1, tolerance=0.05)
    assert queue.runs == len(found.points) <= 4
    assert limit(2000, 0.1, 2.0) / 1.051 < found.rate <= limit(2000, 0.1, 2.0)
    assert found.points[1].rate == pytest.approx(1.1 * found.points[0].rate)
