"""Rows that count as they arrive: running ones with the outputs expected of them, refused ones, what became of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from support.steady_traffic import FLAT, row, steady
from support.thinned import thinned
from trinity.adapt.arrivals import ArrivalBook
from trinity.adapt.drift import DemandShift, DriftDetector
from trinity.adapt.replanner import Replanner
from trinity.traces.survival import RUNNING
from trinity.traces.trace import Trace, TraceRow

SPEED = 2.0  # tokens a second of each request


def heard(arrivals: list[tuple[float, int]], until: float, every: float = 5.0) -> Iterator[TraceRow]:
    """What a poll of a pipeline tells: every ``every`` seconds of each request what it has so far, or that it ended."""
    ends = [(at, out, at + out / SPEED) for at, out in arrivals]
    for poll in range(1, round(until / every) + 1):
        now = poll * every
        for at, out, end in ends:
            name = f"{at}"
            if now - every < end <= now:
                yield row(at, out, request_id=name, finish_reason="stop", latency_s=now - at)
            elif at <= now < end:
                sofar = int((now - at) * SPEED)
                yield row(at, sofar, request_id=name, finish_reason=RUNNING, latency_s=now - at)


def drawn(start: float, end: float, mean: float, noise: random.Random) -> list[tuple[float, int]]:
    """Five requests a second with geometric outputs."""
    return [(start + n / 5, 1 + int(noise.expovariate(1 / mean))) for n in range(round((end - start) * 5))]


def shifts(rows: Iterator[TraceRow]) -> list[DemandShift]:
    watch = DriftDetector(FLAT)
    return [shift for each in rows for shift in watch.feed(each)]


def test_a_request_counts_once_and_as_what_became_of_it() -> None:
    book = ArrivalBook()
    assert book.add(row(0, 3, request_id="a", finish_reason=RUNNING), 1) is not None
    assert book.add(row(0, 5, request_id="a", finish_reason=RUNNING), 2) is None
    assert book.add(row(0, 9, request_id="a", finish_reason="stop"), 3) is None
    assert book.add(row(4, 7, request_id="a", finish_reason="stop"), 5) is not None  # the id is in use again
    assert [each.output_length for each in book.expected_since(0)] == [9, 7]
    assert [each.output_length for each in book.expected_since(2)] == [7]
    assert book.count_since(0) == len(book) == 2


def test_what_is_planned_on_has_expected_outputs_and_no_measurements() -> None:
    book = ArrivalBook()
    for at, out in ((0, 10), (1, 30), (2, 50)):
        book.add(row(at, out, finish_reason="stop", latency_s=1.0), at)
    book.add(row(3, 20, request_id="r", finish_reason=RUNNING, latency_s=9.0), 4)
    book.add(row(4, 0, finish_reason="refused"), 5)
    book.add(row(1.5, 20, finish_reason="cancelled", max_tokens=25), 6)
    trace = book.expected_since(0)
    assert isinstance(trace, Trace)
    # 10, 30 and 50 ended, two went on beyond 20: of five one ends at 10, of those beyond half at 30 and half at 50
    assert [(each.timestamp, each.output_length) for each in trace] == [
        (0, 10), (1000, 30), (1500, 25), (2000, 50), (3000, 40), (4000, 34)
    ]  # fmt: skip
    assert {(each.finish_reason, each.latency_s) for each in trace} == {("", None)}


@pytest.mark.parametrize("seed", thinned(range(3), (0).__eq__))
def test_calm_traffic_has_no_shift_though_long_outputs_end_long_after_short_ones(seed: int) -> None:
    """Outputs of 100 s on the mean: of what came in the last minute, few have ended."""
    arrivals = drawn(0, 1200, 200, random.Random(seed))
    assert shifts(heard(arrivals, 1200)) == []


@pytest.mark.parametrize("seed", thinned(range(3), (0).__eq__))
def test_longer_outputs_are_found_before_they_have_ended(seed: int) -> None:
    """From 20 s to 100 s on the mean, and found within two minutes: by what ended so far they are not twice as long."""
    noise = random.Random(seed)
    arrivals = [*drawn(0, 600, 40, noise), *drawn(600, 760, 200, noise)]
    found = shifts(heard(arrivals, 760))
    assert [shift.stage for shift in found] == ["D"]
    assert found[0].at_s <= 720
    assert abs(found[0].since_s - 600) <= 30
    assert found[0].factor == pytest.approx(5, rel=0.35)
    ended = [out for at, out in arrivals if at >= 600 and at + out / SPEED <= found[0].at_s]
    assert sum(ended) / len(ended) < 80


@pytest.mark.parametrize("seed", thinned(range(2), (0).__eq__))
def test_after_a_shift_outputs_are_expected_by_what_came_since_alone(seed: int) -> None:
    """Else short outputs of before would tell what becomes of the long ones that run: a shift back that is none."""
    noise = random.Random(seed)
    arrivals = [*drawn(0, 300, 40, noise), *drawn(300, 1100, 200, noise)]
    assert len(shifts(heard(arrivals, 1100))) == 1


def test_what_is_planned_on_after_a_shift_has_the_new_mean() -> None:
    noise = random.Random(4)
    arrivals = [*drawn(0, 600, 40, noise), *drawn(600, 760, 200, noise)]
    replanner = Replanner(DriftDetector(FLAT), "1P1D", requests=500)
    (trace,) = [found for each in heard(arrivals, 760) if (found := replanner.feed(each)) is not None]
    assert sum(each.output_length for each in trace) / len(trace) == pytest.approx(200, rel=0.25)


def test_refused_requests_are_demand_too() -> None:
    """Of twice the requests every second one is refused: what is served stays the same."""
    rows = [*steady(0, 300), *steady(300, 420)]
    refused = [row(300.5 + n, 0, finish_reason="refused") for n in range(120)]
    found = shifts(iter(sorted([*rows, *refused], key=lambda each: each.timestamp)))
    assert [shift.since_s for shift in found] == [300]
    assert found[0].after == pytest.approx({"E": 0, "P": 0.2, "D": 2}, rel=0.1)
    assert shifts(iter(rows)) == []


def test_a_running_request_counts_in_the_tick_of_its_arrival() -> None:
    watch = DriftDetector(FLAT, tick_s=10)
    for at in range(0, 40, 10):
        watch.feed(row(at, 1, request_id=f"{at}", finish_reason=RUNNING), at_s=at)
    watch.feed(row(14, 1, tokens=900, request_id="late", finish_reason=RUNNING), at_s=31)
    watch.feed(row(15, 1, tokens=700), at_s=32)  # ended, and heard of now: it counts now
    watch.advance(40)
    assert [round(tick.seconds["P"], 3) for tick in watch._ticks] == [0.1, 1.0, 0.1, 0.8]


def test_work_is_bounded_where_requests_never_end() -> None:
    watch = DriftDetector(FLAT)
    for at in range(0, 2000, 2):
        watch.feed(row(at, 5, request_id=f"{at}", finish_reason=RUNNING), at_s=at)
    assert watch.advance(2010) == []
    assert sum(len(tick.expecting) for tick in watch._ticks) <= 160
    assert len(watch._ticks) - watch._tested <= 31
    assert math.isfinite(sum(tick.seconds["D"] for tick in watch._ticks))
