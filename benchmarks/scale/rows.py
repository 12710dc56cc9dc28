"""Rows of the scale benchmark, simulated before anything is served, and the rates at which they are served."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from itertools import repeat
from typing import NamedTuple

from benchmarks.figures.claims import lengthened, more_than, nominal
from benchmarks.scale import live as scale_live
from benchmarks.scale.live import DEVICE, MODEL, PER_HOST, bounds, requests, simulator
from trinity.costs.cluster import Cluster
from trinity.errors import TraceTooShort
from trinity.planner.candidates import PAPER_METHODS
from trinity.planner.hardware import Hardware
from trinity.planner.problem import GoodputCriterion, PlanningProblem
from trinity.planner.race import race
from trinity.simulation.simulator import Simulator
from trinity.traces.goodput import LEAST_REQUESTS, LEAST_TTFTS, goodput, measure_point
from trinity.traces.goodput import RATE_STEP as GOODPUT_STEP

WORKLOADS = ("POPE", "MME", "TextVQA", "VizWiz", "TextCaps")  # from few tokens to many
LIVE_TTFTS = 3.0  # TTFT bounds that a live trace lasts: one of 10 takes the CPU that is here three times as long
BELOW, ABOVE = 0.92, 1.10  # times the simulated goodput: the two rates that are tried first
STEP = ABOVE / BELOW  # between two rates that are tried live
FARTHEST = 4  # steps away from the first, where a search gives up
SPARE = 1.02  # times the shortest trace that has an answer, at the rate above the simulated goodput
MORE = 1.1  # times as many requests as are needed do no harm
BUSY_S, EVENT_S, TOKEN_S = 0.016, 5e-5, 1.6e-5  # CPU seconds: of a second that an instance works, an event, a token
Found = tuple[str, str, bool]  # name, placement, stage-level batching


class Sizes(NamedTuple):
    """Sizes: instances, and the length of live traces."""

    instances: int = 32
    least_requests: int = LEAST_REQUESTS
    least_ttfts: float = LIVE_TTFTS
    workloads: tuple[str, ...] = WORKLOADS


class Row(NamedTuple):
    """A compared row: a method's best ratio, or a baseline. Rates in requests/s of the device's time.

    ``rate``: simulated goodput of the ``asked`` requests that are served live; ``steady``: of a trace as long as a
    goodput asks for. ``cpu_s``: seconds of CPU time that emulating a request is expected to take. ``expected``: the
    simulated attainment at the rates of steps 0 and 1.
    """

    name: str
    placement: str
    scheduled: bool
    rate: float
    asked: int
    steady: float = 0.0
    cpu_s: float = 0.0
    expected: tuple[dict[str, float], ...] = ()


# ---------------------------------------------------------------- before anything is served


def baselines(instances: int) -> list[Found]:
    """The paper's own for 32 instances (TriInfer 5.2, 5.3)."""
    if instances < 32:
        return [("EPDServe's", "1E1P2D", True), ("without stage-level batching", f"{instances}EPD", False)]
    return [
        ("EPDServe's", "4E8P20D", True),
        ("DistServe's", "12EP20D", True),
        ("vLLM's: no stage-level batching", "32EPD", False),
        ("even E+P+D", "11E11P10D", True),
    ]


def planned(dataset: str, sizes: Sizes, pool: Executor) -> list[Row]:
    """Every method's best ratio and the baselines, with their simulated goodput."""
    best = pool.submit(best_ratios, dataset, sizes).result()
    found = [*((f"best {method}", placement, True) for method, placement in best.items()), *baselines(sizes.instances)]
    return list(pool.map(simulated, repeat(dataset), found, repeat(sizes)))


def best_ratios(dataset: str, sizes: Sizes) -> dict[str, str]:
    """Of each method, as the planner races them on other requests of the dataset."""
    cluster = Cluster.of(DEVICE, sizes.instances, per_host=min(PER_HOST, sizes.instances))
    hardware = Hardware(MODEL, cluster, None, {}, {})
    question = GoodputCriterion(
        bounds(dataset), least_requests=sizes.least_requests, least_ttfts=min(3.0, sizes.least_ttfts)
    )

    def search(count: int) -> dict[str, str]:
        trace = scale_live.requests(dataset, count, seed=1)
        case = PlanningProblem(hardware, trace, question, None)
        entries = case.bound_deployments(hardware.names)
        methods = sorted(
            {each.deployment.method for each in entries}, key=lambda each: (each not in PAPER_METHODS, each)
        )
        try:
            raced = {
                method: race(case.trials, [each for each in entries if each.deployment.method == method])
                for method in methods
            }
        except TraceTooShort as error:
            raise more_than(trace, error) from error
        return {method: str(found[0].entry.deployment) for method, found in raced.items()}

    return lengthened(search, 4 * sizes.least_requests)


def simulated(dataset: str, found: Found, sizes: Sizes) -> Row:
    """Its goodput, on as many requests as it takes to see a rate above it."""
    name, placement, scheduled = found
    engine, slo = simulator(dataset, placement, scheduled), bounds(dataset)
    search = partial(_searched, engine, placement, dataset, sizes)
    rate, asked = lengthened(lambda count: search(count, ttfts=sizes.least_ttfts / 4), 2 * sizes.least_requests)
    for _ in range(3):  # the rate is that of the very requests that are served live, and those are no more than needed
        needed = max(sizes.least_requests, math.ceil(SPARE * sizes.least_ttfts * slo.ttft * rate * ABOVE))
        if needed <= asked <= MORE * needed:
            break
        rate, asked = lengthened(partial(search, bound=rate or None), needed)
    row = Row(name, placement, scheduled, rate, asked)
    if not rate:
        return row
    long = max(sizes.least_ttfts, LEAST_TTFTS if sizes.instances >= 32 else 0.0)
    needed = math.ceil(SPARE * long * slo.ttft * rate)
    steady, _ = lengthened(partial(search, bound=rate, ttfts=long), max(sizes.least_requests, needed))
    ahead = tuple(expected(row, step, dataset) for step in (0, 1))
    return row._replace(steady=steady, cpu_s=emulating_s(engine, row, dataset), expected=ahead)


def _searched(
    engine: Simulator,
    placement: str,
    dataset: str,
    sizes: Sizes,
    count: int,
    bound: float | None = None,
    ttfts: float | None = None,
) -> tuple[float, int]:
    """Goodput of ``count`` requests, and how many they are."""
    trace = requests(dataset, count)
    try:
        rate = goodput(
            engine.serve(placement),
            trace,
            bounds(dataset),
            bound=bound or nominal(engine, placement, trace),
            least_requests=sizes.least_requests,
            least_ttfts=ttfts or sizes.least_ttfts,
            step=1.1 if bound else GOODPUT_STEP,
        ).rate
    except TraceTooShort as error:
        raise more_than(trace, error) from error
    return rate, count


def expected(row: Row, step: int, dataset: str) -> dict[str, float]:
    """The simulated attainment of the same requests at the same rate."""
    engine = simulator(dataset, row.placement, row.scheduled)
    seen = measure_point(engine.serve(row.placement), requests(dataset, row.asked), bounds(dataset), rate_at(row, step))
    return {**seen.attainment, "completed": seen.completed}


def emulating_s(engine: Simulator, row: Row, dataset: str) -> float:
    """CPU seconds of a request: by its instances' work (steps are of about equal length), the events of its cores, and
    its tokens. The figures are of replays on this machine, which they tell to 30 %."""
    trace = requests(dataset, row.asked).scale(rate=row.rate)
    seen = engine.replay(trace, row.placement)
    busy = math.fsum(seconds for stages in seen.busy_s.values() for seconds in stages.values())
    tokens = sum(each.output_length for each in trace)
    return (BUSY_S * busy + EVENT_S * seen.events + TOKEN_S * tokens) / row.asked


# ---------------------------------------------------------------- which rates


def rate_at(row: Row, step: int) -> float:
    """Step 0 is the rate below the simulated goodput, step 1 the one above it."""
    return row.rate * BELOW * STEP**step


def wanted(known: Mapping[int, bool]) -> list[int]:
    """Steps to be tried next, by which of those that are known hold; none where the limit is bracketed."""
    if not known:
        return [0, 1]
    lower, upper = bracket(known)
    if lower is None:
        step = min(known) - 1
    elif upper is None:
        step = max(known) + 1
    else:
        return [lower + 1] if upper - lower > 1 else []
    return [step] if abs(step) <= FARTHEST else []


def bracket(known: Mapping[int, bool]) -> tuple[int | None, int | None]:
    """(the highest step that holds below all that do not, the lowest that does not)."""
    upper = min((step for step, holds in known.items() if not holds), default=None)
    lower = max((step for step, holds in known.items() if holds and (upper is None or step < upper)), default=None)
    return lower, upper
