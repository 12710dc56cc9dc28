"""Outputs four times as long on a placement that cannot serve them, known only as a live pipeline would know them."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import msgspec
import pytest

from benchmarks.planning.watch import BOUND, QWEN, hour
from support.live_rows import iter_live_rows
from trinity import traces
from trinity.adapt.apply_guard import ApplyGuard
from trinity.adapt.drift import DriftDetector
from trinity.adapt.replanner import Replanner
from trinity.costs.demand import Demand
from trinity.planner import HybridPlanner, Plan, SearchConfig
from trinity.planner.hardware import choose_cluster
from trinity.simulation import compiled_engine
from trinity.simulation.simulator import Simulator
from trinity.traces.trace import Trace, TraceRow, attainment

SHIFTED_S, WITHIN_S, WATCHED_S = 200.0, 120.0, 130.0
RATE, PRESENT = 62.0, "2E4P2D"  # 60 % of what it serves: the best of the traffic before
CLUSTER = choose_cluster(None, "H100", 8, "eager")


@cache
def planner() -> HybridPlanner:
    return HybridPlanner(QWEN, BOUND, cluster=CLUSTER, search=SearchConfig(seeds=0))


def longer(row: TraceRow) -> TraceRow:
    return msgspec.structs.replace(row, output_length=4 * row.output_length)


def score(plan: Plan, placement: str) -> float:
    found = next(each.score for each in plan.candidates if each.placement == placement)
    assert found is not None
    return found


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_the_proposal_serves_the_true_traffic_nearly_as_well_as_the_best(seed: int) -> None:
    if compiled_engine.why_unavailable():
        pytest.skip(compiled_engine.why_unavailable())
    drawn = traces.resample(hour(), round(RATE * (SHIFTED_S + WATCHED_S)), rate=RATE, seed=seed)
    served = Trace(longer(row) if row.timestamp >= 1000 * SHIFTED_S else row for row in drawn)
    simulator = Simulator(QWEN, BOUND, cluster=CLUSTER)
    outcomes = simulator.replay(served, PRESENT).outcomes
    before = [each for row, each in zip(served, outcomes, strict=True) if row.timestamp < 1000 * (SHIFTED_S - 20)]
    assert attainment(before, BOUND, "guard") > 0.99
    assert attainment(outcomes[len(before) :], BOUND, "guard") < 0.4  # saturated

    replanner = Replanner(DriftDetector(Demand.for_slo(simulator.cost_of(0), BOUND)), PRESENT)
    seen = None
    for row in iter_live_rows(served, outcomes, 5.0, SHIFTED_S + WATCHED_S):
        if (seen := replanner.feed(row)) is not None:
            break
    assert seen is not None
    (shift,) = replanner.shifts
    assert shift.stage == "D"
    assert SHIFTED_S < shift.at_s <= SHIFTED_S + WITHIN_S
    true = [longer(row) for row in traces.resample(hour(), 6000, seed=seed)]
    ended = [
        row.output_length
        for row, each in zip(served, outcomes, strict=True)
        if row.timestamp >= 1000 * SHIFTED_S
        and each.ttft_s is not None
        and row.timestamp / 1000 + each.ttft_s + sum(each.itl_s) <= shift.at_s
    ]
    mean = fmean(row.output_length for row in true)
    assert fmean(row.output_length for row in seen) > fmean(ended)
    assert fmean(row.output_length for row in seen) == pytest.approx(mean, rel=0.25)

    proposal = replanner.propose(planner().plan(seen, PRESENT))
    assert proposal is not None
    assert proposal.gain > 1.5
    guard = ApplyGuard()
    assert guard.offer(proposal, replanner.watch.now) is None
    decision = guard.look(replanner.watch.now, PRESENT)
    assert decision is not None
    assert decision.verdict == "applies"
    truth = planner().plan(Trace(true), proposal.placement)
    best = truth.best.score
    assert best is not None
    assert score(truth, proposal.placement) >= 0.9 * best
    assert score(planner().plan(Trace(true), PRESENT), PRESENT) < 0.6 * best
