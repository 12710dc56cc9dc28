"""Shifts in recorded traffic: how many a day has, how soon one is found, and that calm traffic has none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise

import msgspec
import pytest

from trinity import traces
from trinity.cost import DEVICES, Roofline
from trinity.demand import Demand, load
from trinity.model_shapes import model
from trinity.trace import SLO, Trace, TraceRow
from trinity.watch import Proposal, Redeploy, Shift, Watch

LOAD = 0.6
BOUND = SLO(ttft=2.0, tbt=0.08)
QWEN = model("qwen2-vl-7b")


@cache
def hour() -> Trace:
    return traces.shipped("servegen-image-1h")


@cache
def day() -> Trace:
    return traces.shipped("servegen-image-24h")


def at_load(trace: Trace, placement: str) -> Demand:
    """On a device so much slower than an H100, or faster, that the trace's mean demand is ``LOAD`` of the placement."""
    h100 = DEVICES["H100"]
    fast = Demand.under(Roofline(model=QWEN, device=h100), BOUND)
    factor = load(fast.rate(trace), placement) / LOAD
    slow = msgspec.structs.replace(
        h100,
        flops=h100.flops * factor,
        bandwidth=h100.bandwidth * factor,
        pass_s=h100.pass_s / factor,
        row_s=h100.row_s / factor,
    )
    return msgspec.structs.replace(fast, cost=Roofline(model=QWEN, device=slow))


@cache
def hourly() -> Demand:
    return at_load(hour(), "1E3P4D")


class Other:
    """A plan that always proposes something else: the most proposals that there can be."""

    placement, score, candidates = "8EPD", None, ()

    @property
    def best(self) -> Other:
        return self


def proposed(redeploy: Redeploy, rows: Iterable[TraceRow]) -> list[Proposal]:
    found = []
    for row in rows:
        if redeploy.feed(row) is not None:
            found.append(redeploy.planned(Other()))
    return [proposal for proposal in found if proposal is not None]


def spacing(found: list[Proposal]) -> float:
    return min((later.at_s - sooner.at_s for sooner, later in pairwise(found)), default=float("inf"))


def test_the_day_as_recorded_at_60_percent_load() -> None:
    demand = at_load(day(), "1E3P4D")
    assert load(demand.rate(day()), "1E3P4D") == pytest.approx(LOAD)
    redeploy = Redeploy(Watch(demand), "1E3P4D")
    found = proposed(redeploy, day())
    assert 1 <= len(found) <= 20  # of 144 spells of ten minutes
    assert spacing(found) >= 600
    loose = Redeploy(Watch(demand), "1E3P4D", cooldown_s=0)
    assert len(proposed(loose, day())) <= 20  # the cooldown is not what holds them back


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_day_at_its_full_rate(seed: int) -> None:
    full = traces.denser(day(), 1 / 0.06, seed=seed)
    redeploy = Redeploy(Watch(at_load(full, "1EPD")), "1EPD", cooldown_s=0)
    found = proposed(redeploy, full)
    assert 1 <= len(found) <= 20
    assert spacing(found) >= 600


def longer(row: TraceRow) -> TraceRow:
    changed = row.asked(row.timestamp)
    changed.output_length *= 2
    return changed


def without_images(row: TraceRow) -> TraceRow:
    changed = row.asked(row.timestamp)
    changed.images, changed.input_length = [], row.text_tokens
    return changed


def delay(rows: list[TraceRow], shifted_s: float, change: Callable[[TraceRow, bool], TraceRow]) -> tuple[float, Shift]:
    """Seconds from the change to the first shift found, which no false one precedes."""
    watch = Watch(hourly())
    for row in rows:
        after = row.timestamp / 1000 >= shifted_s
        for shift in watch.feed(change(row, after)):
            assert after, f"a false alarm: {shift}"
            return shift.at_s - shifted_s, shift
    raise AssertionError("not found")


def stretch(seed: int) -> tuple[list[TraceRow], float, random.Random]:
    """Twenty minutes of the hour, and a moment in them."""
    noise = random.Random(seed)
    start = noise.uniform(0, 2300)
    return list(hour().window(start, start + 1200)), noise.uniform(400, 1000), noise


@pytest.mark.parametrize("seed", range(6))
def test_a_doubled_output_length_is_found_within_two_minutes(seed: int) -> None:
    rows, shifted_s, _ = stretch(seed)
    seconds, shift = delay(rows, shifted_s, lambda row, after: longer(row) if after else row)
    assert seconds <= 120
    assert shift.stage == "D"
    assert abs(shift.since_s - shifted_s) < 60
    assert shift.factor == pytest.approx(2, rel=0.4)


@pytest.mark.parametrize("seed", range(6))
def test_a_tenfold_image_share_is_found_within_two_minutes(seed: int) -> None:
    rows, shifted_s, noise = stretch(seed)
    seconds, shift = delay(
        rows, shifted_s, lambda row, after: row if after or noise.random() < 0.1 else without_images(row)
    )
    assert seconds <= 120
    assert shift.stage in "EP"  # both rise
    assert shift.after["E"] > 4 * shift.before["E"]


def test_hours_of_calm_traffic_have_no_shift() -> None:
    """In bursts as the hour's, drawn anew; and Poisson arrivals of another dataset. Two hours each."""
    bursty = traces.resampled(hour(), 74_000, seed=4)
    poisson = traces.synthesise("TextVQA", 36_000, visual_tokens=QWEN.visual_tokens, rate=5, seed=4)
    for trace in (bursty, poisson):
        watch = Watch(hourly())
        assert trace[-1].timestamp > 1.9 * 3_600_000
        assert [shift for row in trace for shift in watch.feed(row)] == []
