"""Claims of the papers as predicates that are stated before anything runs, and what they are checked with.

A claim is a direction (this is above that, a ratio grows), never an absolute figure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from benchmarks.paper_devices import SAID
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import ModelShape, get_model_shape
from trinity.costs.step_cost import Roofline
from trinity.errors import TraceTooShort
from trinity.placement import Placement
from trinity.planner.bounds import Bounds, Kind
from trinity.planner.candidates import Deployment
from trinity.simulation.simulator import Replay, Simulator
from trinity.traces.goodput import LEAST_REQUESTS, LEAST_TTFTS, RATE_TOLERANCE, RequestOutcome, goodput
from trinity.traces.trace import SLO, SLORule, Trace, TraceImage, TraceRow

Found = TypeVar("Found")
Traces = Callable[[int], Trace]  # so many requests
SPARE = 1.3  # times the shortest trace that has an answer


class Claim(NamedTuple):
    """``says``: the predicate. ``paper``: its figures there. ``because``: why ours does not show it, where so.

    ``engine``: what is assumed to run the steps, as the paper's engine did.
    """

    figure: str
    says: str
    paper: str
    because: str = ""
    engine: str = SAID


class Shown(NamedTuple):
    """Result of a claim."""

    claim: Claim
    ours: str
    holds: bool

    @property
    def verdict(self) -> str:
        return "PASS" if self.holds else "FAIL"


class Scale(NamedTuple):
    """Sizes of the simulation: full, or small to see that everything runs."""

    quick: bool = False

    def requests(self, count: int) -> int:
        return 60 if self.quick else count

    @property
    def least_requests(self) -> int:
        return 30 if self.quick else LEAST_REQUESTS

    @property
    def least_ttfts(self) -> float:
        return 0.05 if self.quick else LEAST_TTFTS

    def few(self, choices: Sequence[Found]) -> Sequence[Found]:
        return choices[:1] if self.quick else choices


def lengthened(search: Callable[[int], Found], count: int) -> Found:
    """What ``search`` finds on so many requests, or on as many more as it asks for by ``TraceTooShort``."""
    while True:
        try:
            return search(count)
        except TooFewError as error:
            count = error.count


class TooFewError(Exception):
    """A trace was too short; ``count`` requests should do."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


def more_than(trace: Trace, error: TraceTooShort) -> TooFewError:
    """Count the requests like a trace's that last as long as an error demands."""
    span = (trace[-1].timestamp - trace[0].timestamp) / 1000
    return TooFewError(math.ceil(SPARE * len(trace) * max(1.0, error.needed_s / span)))


def goodput_of(
    model: str | ModelShape,
    placement: str,
    slo: SLO,
    traces_of: Traces,
    *,
    cluster: Cluster,
    scale: Scale,
    rule: SLORule = "guard",
    **options: Any,
) -> float:
    """Requests a second that a placement serves in time; 0 where none. ``options`` are the simulator's."""
    simulator = Simulator(model, slo, cluster=cluster.arrange_for(placement), **options)

    def search(count: int) -> float:
        trace = traces_of(count)
        try:
            return goodput(
                simulator.serve(placement),
                trace,
                slo,
                rule=rule,
                bound=nominal(simulator, placement, trace),
                least_requests=scale.least_requests,
                least_ttfts=scale.least_ttfts,
            ).rate
        except TraceTooShort as error:
            raise more_than(trace, error) from error

    return lengthened(search, scale.requests(2000))


def nominal(simulator: Simulator, placement: str, trace: Trace) -> float:
    """Requests a second at the budgets: where a search may begin."""
    devices = simulator.cluster.devices
    kinds = {
        each.name: Kind.of(each, Roofline(model=simulator.model, device=each), simulator.config.memory_share)
        for each in devices
    }
    bounds = Bounds(trace, simulator.slo, simulator.model, kinds)
    names = tuple(each.name for each in devices)
    return bounds.nominal(Deployment.of(Placement.parse(placement), names))


def replayed(
    model: str | ModelShape,
    placement: str,
    slo: SLO,
    trace: Trace,
    *,
    cluster: Cluster,
    record: bool = False,
    **options: Any,
) -> Replay:
    """One replay, with instances laid over the hosts. ``options`` are the simulator's."""
    simulator = Simulator(model, slo, cluster=cluster.arrange_for(placement), **options)
    return simulator.replay(trace, placement, record=record)


def asked(
    count: int,
    *,
    model: str | ModelShape,
    images: int,
    size: tuple[int, int],
    text: int,
    output: int,
    rate: float | None,
    seed: int = 0,
) -> Trace:
    """Equal requests of ``images`` images of a size in pixels, as a Poisson process; without a rate all at once."""
    noise = random.Random(seed)
    tokens = (model if isinstance(model, ModelShape) else get_model_shape(model)).visual_tokens(*size)
    gaps = (0.0 if rate is None else noise.expovariate(rate) for _ in range(count))
    return Trace(
        TraceRow(
            timestamp=1000 * at,
            input_length=text + images * tokens,
            output_length=output,
            text_length=text,
            images=[TraceImage(width=size[0], height=size[1], tokens=tokens) for _ in range(images)],
        )
        for at in accumulate(gaps)
    )


# ---------------------------------------------------------------- figures of outcomes


def mean(values: Sequence[float]) -> float:
    """inf of nothing: what never came is later than anything."""
    return math.fsum(values) / len(values) if values else math.inf


def above(one: float, other: float) -> bool:
    """Test whether a goodput is higher by more than the 2 % that a search leaves open."""
    return one > (1 + RATE_TOLERANCE) * other


def mean_ttft(outcomes: Sequence[RequestOutcome]) -> float:
    """Seconds, of the requests that got a token."""
    return mean([each.ttft_s for each in outcomes if each.ttft_s is not None])


def mean_gap(outcomes: Sequence[RequestOutcome]) -> float:
    """Seconds between two tokens, over all gaps (TriInfer's average TBT)."""
    return mean([gap for each in outcomes for gap in each.itl_s])


def mean_tpot(outcomes: Sequence[RequestOutcome]) -> float:
    """Seconds a token of a request, over the requests (EPDServe's and EPD-Serve's TPOT)."""
    return mean([mean(each.itl_s) for each in outcomes if each.itl_s])


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the least; equal ones share the mean of their places."""
    ordered = sorted(values)
    return [(2 * ordered.index(value) + ordered.count(value) + 1) / 2 for value in values]


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's; 0 where one of them is constant."""
    a, b = ranks(one), ranks(other)
    middle = (len(a) + 1) / 2
    both = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))
    return both / spread if spread else 0.0


def listed(values: Mapping[str, float], form: str = ".3g", unit: str = "") -> str:
    """ "4EP4D 1.2 s, 8EPD 1.5 s"."""
    return ", ".join(f"{name} {value:{form}}{unit}" for name, value in values.items())
