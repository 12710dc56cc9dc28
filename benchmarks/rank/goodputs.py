"""The goodput of every placement in a case of the benchmark of ranks, on both traces: what its choices are judged by.

A case plans on one tenth of a trace and is judged on the held-out rest, whose requests come from another seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.paper_devices import paper_device
from benchmarks.rank.ranking import Setup
from trinity import traces
from trinity.costs.model_shape import get_model_shape
from trinity.errors import TraceTooShort
from trinity.planner.hardware import Hardware, cluster_of
from trinity.planner.problem import GoodputCriterion, PlanningProblem
from trinity.planner.resample import DrawnTrace, plan_on_long_enough
from trinity.planner.search import BoundedCandidate, search_all
from trinity.planner.trials import Trials, rate_of, step_of
from trinity.traces import resample
from trinity.traces.goodput import LEAST_REQUESTS, LEAST_TTFTS
from trinity.traces.trace import Trace

INSTANCES = 8
PLAN_SEED, HELD_SEED = 1, 2
HELD_REQUESTS = 9 * LEAST_REQUESTS  # of which a ninth is what is planned on
FARTHEST = 256  # steps of 2 %, at which a search downwards gives up
SPARE = 1.3  # times the shortest trace that has an answer
Record = dict[str, Any]


class OutOfTimeError(Exception):
    """The benchmark's minutes are over."""


class Sizes(NamedTuple):
    """Sizes of a case: instances, requests of the held-out trace at least, and how long traces must be."""

    instances: int = INSTANCES
    held: int = HELD_REQUESTS
    least_requests: int = LEAST_REQUESTS
    least_ttfts: float = LEAST_TTFTS


SMALL = Sizes(3, 240, 120, 0.3)


def case_of(setup: Setup, sizes: Sizes, trace: Trace, until: float = math.inf) -> PlanningProblem:
    """Problem whose replays raise ``OutOfTimeError`` when ``time.monotonic()`` passes ``until``."""

    def tell(*_: object) -> None:
        if time.monotonic() > until:
            raise OutOfTimeError

    cluster = cluster_of(paper_device(setup.device), sizes.instances)
    hardware = Hardware(get_model_shape(setup.model), cluster, None, {}, {})
    asked = GoodputCriterion(setup.slo, least_requests=sizes.least_requests, least_ttfts=sizes.least_ttfts)
    return PlanningProblem(hardware, trace, asked, tell)


def searched_case(setup: Setup, sizes: Sizes, until: float) -> Record:
    """Every placement's goodput on both traces, and how long these are. Raises ``OutOfTimeError`` as ``case_of``."""
    began = time.monotonic()
    early, late = traces.read_shipped("servegen-image-1h").split(0.1)
    count = requests_needed(setup, sizes, case_of(setup, sizes, requests(setup, sizes.held, early, PLAN_SEED)))
    seen = requests(setup, max(sizes.least_requests, math.ceil(count / 9)), early, PLAN_SEED)
    plan = plan_on_long_enough(
        DrawnTrace(seen, ()), PLAN_SEED, True, lambda drawn: goodputs(case_of(setup, sizes, drawn.trace, until))
    )
    held, rates = held_out(
        lambda n: case_of(setup, sizes, requests(setup, n, late, HELD_SEED), until), count, plan["plan"]
    )
    sized = {"seen": len(seen), "held": held}
    return {"setup": list(setup), **plan, "held": rates, "requests": sized, "seconds": time.monotonic() - began}


def planning_trace(setup: Setup, record: Record) -> Trace:
    """The trace that a record's case was planned on."""
    early, _ = traces.read_shipped("servegen-image-1h").split(0.1)
    seen = requests(setup, record["requests"]["seen"], early, PLAN_SEED)
    count = record["planned_on"]
    return seen if len(seen) == count else resample(seen, count, seed=PLAN_SEED)


def requests(setup: Setup, count: int, arrivals: Trace, seed: int) -> Trace:
    rule = get_model_shape(setup.model).visual_tokens
    return traces.synthesise(setup.dataset, count, visual_tokens=rule, arrivals=arrivals, seed=seed)


def requests_needed(setup: Setup, sizes: Sizes, case: PlanningProblem) -> int:
    """So that the best placement's requests take the TTFT bounds that a trace must last, by its nominal rate."""
    best = max(entry.nominal for entry in case.bound_deployments(case.hardware.names))
    return max(sizes.held, math.ceil(SPARE * sizes.least_ttfts * setup.slo.ttft * best))


def goodputs(case: PlanningProblem) -> Record:
    """Of every placement on the planning trace, each searched as if nothing else had been asked."""
    found = search_all(case.trials, case.bound_deployments(case.hardware.names))
    rates = {str(each.entry.deployment): each.rate for each in found}
    return {"plan": rates, "planned_on": len(case.trace), "exhaustive_runs": case.trials.runs}


def held_out(
    made: Callable[[int], PlanningProblem], count: int, seen: Mapping[str, float]
) -> tuple[int, dict[str, float]]:
    """(requests, goodput of every placement) of a trace with an upper limit for each; ``seen``: on another trace."""
    while True:
        case = made(count)
        try:
            entries = case.bound_deployments(case.hardware.names)
            return count, {
                str(each.deployment): near(case.trials, each, seen[str(each.deployment)]) for each in entries
            }
        except TraceTooShort as error:
            span = (case.trace[-1].timestamp - case.trace[0].timestamp) / 1000
            count = math.ceil(SPARE * count * max(1.0, error.needed_s / span))


def near(trials: Trials, entry: BoundedCandidate, rate: float) -> float:
    """Goodput, looked for around a rate that another trace gave: some four replays in place of seven."""
    if not rate:
        step = trials.limit(entry.deployment, entry.guess)
        return 0.0 if step is None else rate_of(step)
    low, stride = step_of(rate), 1
    if trials.holds(entry.deployment, low):
        while trials.holds(entry.deployment, low + stride):
            low, stride = low + stride, 2 * stride
    else:
        while not trials.holds(entry.deployment, low - stride):
            low, stride = low - stride, 2 * stride
            if stride > FARTHEST:
                return 0.0
        low -= stride
    high = low + stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if trials.holds(entry.deployment, middle) else (low, middle)
    return rate_of(low)
