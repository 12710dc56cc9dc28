"""Traffic that changes and changes back, and calm hours: bursts of a minute and a sine of ten move nothing."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from benchmarks.planning.watch import BOUND, QWEN, calm_alarms, hour, hourly, in_bursts
from trinity import traces
from trinity.adapt.apply_guard import ApplyGuard
from trinity.adapt.drift import DriftDetector
from trinity.adapt.replanner import Proposal, Replanner
from trinity.planner import HybridPlanner, SearchConfig
from trinity.planner.hardware import choose_cluster
from trinity.simulation import compiled_engine
from trinity.traces.trace import Trace, TraceRow

PERIOD_S, SWING = 600.0, 0.5
CLUSTER = choose_cluster(None, "H100", 8, "eager")


@pytest.mark.parametrize("times", [2, 6])
@pytest.mark.parametrize("seed", range(2))
def test_a_burst_of_a_minute_is_no_shift(seed: int, times: int) -> None:
    noise = random.Random(seed)
    start, at_s = noise.uniform(0, 2700), noise.uniform(300, 600)
    rows = hour().window(start, start + 900)
    assert shifts(in_bursts(rows, at_s, 60.0, times)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 3, 6, 10])
def test_bursts_of_a_minute_in_forty_seeds_are_no_shift(times: int) -> None:
    for seed in range(100, 140):
        noise = random.Random(seed)
        start, at_s = noise.uniform(0, 2700), noise.uniform(300, 600)
        assert shifts(in_bursts(hour().window(start, start + 900), at_s, 60.0, times)) == 0, seed


def test_ten_minutes_of_six_times_the_requests_are_one() -> None:
    assert shifts(in_bursts(hour().window(0, 900), 400, 600.0, 6)) == 1


def shifts(rows: Trace) -> int:
    watch = DriftDetector(hourly())
    return sum(len(watch.feed(row)) for row in rows)


def warped(at_s: float) -> float:
    """Time at which as many requests have come at a rate of 1 + SWING · sin as have at ``at_s`` at a rate of 1."""
    turn = 2 * math.pi / PERIOD_S
    low, high = 0.0, at_s + PERIOD_S
    for _ in range(50):
        middle = (low + high) / 2
        came = middle + SWING / turn * (1 - math.cos(turn * middle))
        low, high = (middle, high) if came < at_s else (low, middle)
    return low


def swinging(kind: str, seconds: float, seed: int) -> Trace:
    """The hour's requests, drawn anew, whose rate or whose outputs swing by half within ten minutes."""
    drawn = traces.resample(hour(), round(10 * seconds), seed=seed)
    if kind == "rate":
        return Trace(row.request_at(1000 * warped(row.timestamp / 1000)) for row in drawn)
    return Trace(longer(row, 1 + SWING * math.sin(2 * math.pi * row.timestamp / 1000 / PERIOD_S)) for row in drawn)


def longer(row: TraceRow, factor: float) -> TraceRow:
    return msgspec.structs.replace(row, output_length=max(1, round(factor * row.output_length)))


def applied(rows: Trace, present: str) -> tuple[list[Proposal], Replanner, ApplyGuard]:
    """Watch with the planner that serves; what the guard applies is what runs from then on. All proposals, too."""
    planner = HybridPlanner(QWEN, BOUND, cluster=CLUSTER, search=SearchConfig(seeds=0))
    replanner, guard, found = Replanner(DriftDetector(hourly()), present), ApplyGuard(), []
    for row in rows:
        if (seen := replanner.feed(row)) is not None:
            proposal = replanner.propose(planner.plan(seen, replanner.placement))
            if proposal is not None:
                found.append(proposal)
                guard.offer(proposal, replanner.watch.now)
        made = guard.look(replanner.watch.now, replanner.placement)
        if made is not None and made.verdict == "applies":
            replanner.set_placement(made.proposal.placement)
            guard.succeed(replanner.watch.now)
        elif made is not None and made.verdict == "planned again":
            replanner.plan_again()
    return found, replanner, guard


@pytest.mark.parametrize(
    ("kind", "seconds", "seed"),
    [
        pytest.param("rate", 1200, 0, marks=pytest.mark.slow),
        ("outputs", 1200, 0),
        *(pytest.param(kind, 3000, seed, marks=pytest.mark.slow) for kind in ("rate", "outputs") for seed in (1, 2, 3)),
    ],
)
def test_a_sine_of_ten_minutes_applies_at_most_one(kind: str, seconds: float, seed: int) -> None:
    """Its shifts are found and planned for. Of a rate no plan gains anything; of outputs those for a swing do not.

    That alone leaves one proposal at most, which the guard applies: it has nothing to hold back.
    """
    if compiled_engine.why_unavailable():
        pytest.skip(compiled_engine.why_unavailable())
    found, replanner, guard = applied(swinging(kind, seconds, seed), "2E4P2D")
    assert len(replanner.shifts) >= 2
    assert len(found) <= 1
    assert [each.verdict for each in guard.decisions] == ["applies", "applied"] * len(found)


def test_two_calm_hours_have_no_shift() -> None:
    assert calm_alarms(2, seed=3) == 0


@pytest.mark.slow
def test_twenty_calm_hours_have_no_shift() -> None:
    assert calm_alarms(20) == 0
