"""Scores candidates by one replay each: throughput without an SLO, effective throughput per device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trinity.planner.candidates import Deployment
from trinity.planner.plan import Objective
from trinity.planner.problem import PlanningProblem
from trinity.planner.search import BoundedCandidate, SearchResult, rank_results
from trinity.simulation.simulator import Replay
from trinity.traces.goodput import RequestOutcome
from trinity.traces.trace import COMPLETE, SLO, SLORule, Trace

MAX_WAITING, WAITING_EACH = 1024, 64  # a pipeline's default; for each instance where there are many
UNBOUNDED = 10**9  # offline, all requests wait at once
ReplayScorer = Callable[[Replay, Deployment], float]


def choose_waiting(objective: Objective, instances: int) -> int:
    """Return the requests without a token that a pipeline of this many instances should take in."""
    return UNBOUNDED if objective == "throughput" else max(MAX_WAITING, WAITING_EACH * instances)


def offer_at_once(trace: Trace) -> Trace:
    """Return the same requests, all of them there from the start."""
    return Trace(row.request_at(0.0) for row in trace.by_arrival())


def score_throughput(replay: Replay, deployment: Deployment) -> float:
    """Score a replay by requests/s served to their end."""
    done = sum(each.finish_reason in COMPLETE for each in replay.outcomes)
    return done / replay.duration_s if replay.duration_s else 0.0


def score_effective_throughput(slo: SLO, rule: SLORule) -> ReplayScorer:
    """Score replays by tokens/s and device of the requests that are in time (EPD-Serve table 5)."""

    def score(replay: Replay, deployment: Deployment) -> float:
        tokens = sum(_tokens(each) for each in replay.outcomes if slo.is_met(each, rule))
        return tokens / replay.duration_s / len(deployment.devices) if replay.duration_s else 0.0

    return score


def _tokens(outcome: RequestOutcome) -> int:
    return 1 + len(outcome.itl_s)


def search_by_replay(
    case: PlanningProblem,
    offered: Trace,
    entries: Iterable[BoundedCandidate],
    score: ReplayScorer,
    ceiling: Callable[[BoundedCandidate], float],
    *,
    every: bool,
    known: Iterable[SearchResult] = (),
) -> list[SearchResult]:
    """Replay each once, best first; unless ``every``, skip those that cannot beat the best so far.

    ``ceiling``: a score that the entry cannot exceed.
    """
    found = list(known)
    done = {each.entry.deployment for each in found if each.exact}
    best = max((each.score for each in found if each.exact), default=0.0)
    for entry in entries:
        if entry.deployment in done:
            continue
        if not every and ceiling(entry) <= best:
            found.append(SearchResult(entry, False, None, entry.upper))
            continue
        case.trials.tell(f"{entry.deployment}")
        simulator = case.hardware.search_simulator(entry.deployment, case.asked.slo)
        value = score(simulator.replay(offered, entry.deployment.placement), entry.deployment)
        found.append(SearchResult(entry, True, None, entry.upper, value))
        best = max(best, value)
    return rank_results(found)
