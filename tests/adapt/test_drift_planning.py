"""Watching with the planner that serves: a shift of the shipped traffic, planned for on what came since."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from benchmarks.planning.watch import BOUND, QWEN, hour, hourly, longer
from trinity.adapt.drift import DriftDetector
from trinity.adapt.proposals import iter_proposals
from trinity.adapt.replanner import Replanner
from trinity.planner import HybridPlanner, Plan, SearchConfig
from trinity.simulation import compiled_engine
from trinity.traces.trace import Trace, TraceRow

SHIFTED_S = 600.0


async def shifted() -> AsyncIterator[TraceRow]:
    """A quarter of an hour in the middle of which outputs become twice as long."""
    for row in hour().window(0, 900):
        yield longer(row) if row.timestamp >= 1000 * SHIFTED_S else row


@pytest.mark.slow
async def test_a_shift_is_planned_for_and_the_proposal_is_the_plans_best() -> None:
    if compiled_engine.why_unavailable():
        pytest.skip(compiled_engine.why_unavailable())
    planner = HybridPlanner(QWEN, BOUND, instances=3, search=SearchConfig(strategy="exhaustive", seeds=0))
    made: list[tuple[Trace, Plan]] = []

    def plan(trace: Trace, present: str) -> Plan:
        made.append((trace, planner.plan(trace, present)))
        return made[-1][1]

    replanner = Replanner(DriftDetector(hourly()), "2EP1D")
    found = [proposal async for proposal in iter_proposals(shifted(), replanner, plan)]
    (shift,) = replanner.shifts
    assert shift.stage == "D"
    assert SHIFTED_S <= shift.at_s <= SHIFTED_S + 120
    assert replanner.error is None
    ((trace, answer),) = made
    assert len(trace) == 4000
    usual, since = hour().statistics().output_tokens, trace.statistics().output_tokens
    assert usual is not None
    assert since is not None
    assert since["mean"] == pytest.approx(2 * usual["mean"], rel=0.35)
    present = next(each for each in answer.candidates if each.placement == "2EP1D")
    assert present.exact
    (proposal,) = found
    assert proposal.placement == answer.best.placement != "2EP1D"
    assert present.score is not None
    assert answer.best.score is not None
    assert proposal.gain == answer.best.score / present.score >= 1.1
