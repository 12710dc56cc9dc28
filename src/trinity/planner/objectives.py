"""Objectives that one replay of each candidate answers: throughput without an SLO, effective throughput per device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trinity.planner.candidates import Deployment
from trinity.planner.problem import Case
from trinity.planner.search import Entry, Found, ranked
from trinity.simulation.simulator import Replay
from trinity.traces.goodput import RequestOutcome
from trinity.traces.trace import COMPLETE, SLO, SLORule, Trace

Scored = Callable[[Replay, Deployment], float]


def at_once(trace: Trace) -> Trace:
    """The same requests, all there from the start."""
    return Trace(row.request_at(0.0) for row in trace.by_arrival())


def throughput(replay: Replay, deployment: Deployment) -> float:
    """Requests served to their end, a second."""
    done = sum(each.finish_reason in COMPLETE for each in replay.outcomes)
    return done / replay.duration_s if replay.duration_s else 0.0


def effective(slo: SLO, rule: SLORule) -> Scored:
    """Tokens a second and device of the requests that are in time (EPD-Serve table 5)."""

    def scored(replay: Replay, deployment: Deployment) -> float:
        tokens = sum(_tokens(each) for each in replay.outcomes if slo.is_met(each, rule))
        return tokens / replay.duration_s / len(deployment.devices) if replay.duration_s else 0.0

    return scored


def _tokens(outcome: RequestOutcome) -> int:
    return 1 + len(outcome.itl_s)


def replayed(
    case: Case,
    offered: Trace,
    entries: Iterable[Entry],
    score: Scored,
    ceiling: Callable[[Entry], float],
    *,
    every: bool,
    known: Iterable[Found] = (),
) -> list[Found]:
    """One replay of each, best first; unless ``every``, none of one that cannot beat the best so far.

    ``ceiling``: a score that the entry cannot exceed.
    """
    found = list(known)
    done = {each.entry.deployment for each in found if each.exact}
    best = max((each.score for each in found if each.exact), default=0.0)
    for entry in entries:
        if entry.deployment in done:
            continue
        if not every and ceiling(entry) <= best:
            found.append(Found(entry, False, None, entry.upper))
            continue
        case.trials.tell(f"{entry.deployment}")
        simulator = case.hardware.screening(entry.deployment, case.asked.slo)
        value = score(simulator.replay(offered, entry.deployment.placement), entry.deployment)
        found.append(Found(entry, True, None, entry.upper, value))
        best = max(best, value)
    return ranked(found)
