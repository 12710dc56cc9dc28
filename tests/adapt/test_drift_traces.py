"""Shifts in recorded traffic: how many a day has, how soon one is found, and that calm traffic has none."""

from __future__ import annotations

import math

import pytest

from benchmarks.planning import watch as bench
from benchmarks.planning.watch import (
    PLACEMENT,
    QWEN,
    day,
    found_in,
    hour,
    hourly,
    proposed,
    served,
    spacing,
    stretch,
)
from benchmarks.setting import Setting
from support.thinned import thinned
from trinity import traces
from trinity.adapt.drift import DriftDetector
from trinity.adapt.replanner import Replanner


@pytest.mark.slow
def test_the_day_as_recorded_which_is_served() -> None:
    assert served(day()) > 0.99
    found = proposed(Replanner(DriftDetector(hourly()), PLACEMENT), day())
    assert 1 <= len(found) <= 20  # of 144 spells of ten minutes
    assert spacing(found) >= 600


@pytest.mark.slow
def test_the_benchmark_states_its_predicates_and_they_hold() -> None:
    result = bench.run(Setting(quick=True))
    assert [aim.met for aim in result.aims] == [True] * 4
    assert result.values["calm"] == {"hours": 1, "alarms": 0}
    assert result.values["bursts"] == {"seeds": 3, "alarms": 0}
    assert min(result.values["in time"].values()) > 0.95
    assert len(result.values["days"]["as recorded, 0.57 requests/s"]) <= 20  # with no cooldown to hold them back
    assert {len(seconds) for seconds in result.values["delays"].values()} == {3}
    assert len(result.values["thin"]) == 3
    assert "image share x 10" in result.text()


@pytest.mark.slow
def test_the_day_at_its_full_rate() -> None:
    full = traces.densify(day(), 1 / bench.THINNED, seed=1)
    found = proposed(Replanner(DriftDetector(hourly()), PLACEMENT, cooldown_s=0), full)
    assert 1 <= len(found) <= 20
    assert spacing(found) >= 600


@pytest.mark.parametrize("seed", thinned(range(100, 105), (100).__eq__))
def test_a_doubled_output_length_is_found_in_two_minutes_or_so(seed: int) -> None:
    rows, shifted_s, _ = stretch(seed, hour())
    seconds, alarms, shift = found_in(rows, shifted_s, bench.doubled, hourly())
    assert seconds <= 180
    assert alarms == 0
    assert shift is not None
    assert shift.stage == "D"
    assert abs(shift.since_s - shifted_s) < 60
    assert 1.4 < shift.factor < 4  # the demand of a few ticks is a coarse figure


@pytest.mark.parametrize("seed", thinned(range(100, 105), (100).__eq__))
def test_a_tenfold_image_share_is_found_within_two_minutes(seed: int) -> None:
    rows, shifted_s, noise = stretch(seed, hour())
    seconds, alarms, shift = found_in(rows, shifted_s, bench.tenfold(noise), hourly())
    assert seconds <= 120
    assert alarms == 0
    assert shift is not None
    assert shift.stage in "EP"  # both rise
    assert shift.after["E"] > 2 * shift.before["E"]  # with the tick in which it came


def test_what_does_not_shift_is_not_found() -> None:
    rows, shifted_s, _ = stretch(100, hour())
    assert found_in(rows, shifted_s, lambda row, after: row, hourly()) == (math.inf, 0, None)


@pytest.mark.slow
def test_hours_of_calm_traffic_have_no_shift() -> None:
    """In bursts as the hour's, drawn anew; and Poisson arrivals of another dataset. Two hours each."""
    bursty = traces.resample(hour(), 74_000, seed=4)
    poisson = traces.synthesise("TextVQA", 36_000, visual_tokens=QWEN.visual_tokens, rate=5, seed=4)
    for trace in (bursty, poisson):
        watch = DriftDetector(hourly())
        assert trace[-1].timestamp > 1.9 * 3_600_000
        assert [shift for row in trace for shift in watch.feed(row)] == []
