"""Goodput: the highest rate of the same requests at which enough of them are in time (TriInfer 2.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from trinity.errors import ConfigError, TraceTooShort, UnknownName
from trinity.tables import Table, as_html, as_text
from trinity.traces.statistics import arrival_rate
from trinity.traces.trace import COMPLETE, RULES, SLO, Rule, Served, Trace

SHARE = 0.9  # of requests that must be in time
STABLE = 0.95  # of the offered rate that must be completed
STEP = 1.25  # between rates while the limit is not yet bracketed
TOLERANCE = 0.02  # of the rate, where bisection ends
LEAST_REQUESTS = 1000
LEAST_TTFTS = 10  # times the TTFT bound that a trace must last: shorter ones end before a queue has built up
DEEPEST = 4096.0  # times below the first rate tried, where a search that found nothing gives up
_START = 0.9  # of the bound, where a search begins


class Outcome(msgspec.Struct, frozen=True):
    """What became of one request: seconds to its first token, gaps between tokens, why it ended."""

    ttft_s: float | None
    itl_s: Sequence[float] = ()
    finish_reason: str = "length"


Times = Sequence[float] | npt.NDArray[np.float64]
Serve = Callable[[Trace], Sequence[Served]]  # one outcome for each row, in the trace's order
Holds = Generator[Trace, Sequence[Served], bool]
Searching = Generator[Trace, Sequence[Served], "Goodput"]  # asks for a trace to be served, is sent what came of it


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen at one rate (requests a second): attainment by rule, completions a second over arrivals a second.

    ``duration_s`` is how long the requests took to arrive; ``first`` is the share of them that were completed and had
    their first token in time, whatever became of the others (-1: not known). ``load``: the mean share of the time that
    the instances of each roles were at work, where the engine says so (``twin.load``).
    """

    rate: float
    duration_s: float
    attainment: dict[str, float]
    completed: float
    first: float = -1.0
    load: dict[str, float] = {}

    @property
    def stable(self) -> bool:
        """Whether the completions keep up with the arrivals."""
        return self.completed >= STABLE


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """The highest ``rate`` at which the rule held, in requests a second, and every ``point`` that was tried.

    0 where none did: ``best`` is the highest attainment then seen. The rule is that ``share`` of the requests are in
    time by ``rule`` and, where ``stable``, that completions keep up with arrivals (``piles_up``).
    """

    rate: float
    rule: str
    share: float
    stable: bool
    points: tuple[Point, ...]

    @property
    def best(self) -> float:
        """The highest attainment at any rate that was tried."""
        return max(point.attainment[self.rule] for point in self.points)

    def _table(self) -> Table:
        found = f"{self.rate:.3f} requests/s" if self.rate else f"none: {self.best:.1%} at best"
        rows = [
            (
                f"{point.rate:.3f} requests/s",
                *(f"{point.attainment[rule]:.1%}" for rule in RULES),
                f"{point.completed:.2f}" + ("" if point.stable else " unstable"),
            )
            for point in sorted(self.points, key=lambda point: point.rate)
        ]
        return Table((f"goodput by {self.rule}: {found}", *RULES, "completed/offered"), rows)

    def __str__(self) -> str:
        return as_text(self._table())

    def _repr_html_(self) -> str:
        return as_html(self._table())


def goodput(
    serve: Serve,
    trace: Trace,
    slo: SLO,
    *,
    rule: Rule = "guard",
    stable: bool = True,
    share: float = SHARE,
    bound: float | None = None,
    least_requests: int = LEAST_REQUESTS,
    least_ttfts: float = LEAST_TTFTS,
    step: float = STEP,
    tolerance: float = TOLERANCE,
    deepest: float = DEEPEST,
) -> Goodput:
    """Search the highest rate at which ``share`` of all requests, failed ones included, are in time.

    ``serve`` answers a trace with one outcome for each row: a simulator, a live pipeline, a formula. The same requests
    are served with their time stamps scaled: first at 0.9 of ``bound`` (requests a second that cannot be exceeded) or
    at the trace's own rate, then ``step`` times as fast or slow until the limit is bracketed, then by bisection to
    ``tolerance`` of the rate. Where nothing holds it gives up ``deepest`` times below the first rate.
    ``rule="p90", stable=False`` is the paper's rule, which a queue before decode can hide from.

    Raises ``TraceTooShort`` for fewer than ``least_requests``, and where all is in time although the requests come in
    less than ``least_ttfts`` times the TTFT bound: such a rate is no answer, and the error's ``needed_s`` says how
    long the trace must be at its own rate.
    """
    options = Options(rule=rule, stable=stable, share=share, bound=bound, least_requests=least_requests)
    options |= Options(least_ttfts=least_ttfts, step=step, tolerance=tolerance, deepest=deepest)
    search = searching(trace, slo, options)
    offered = next(search)
    while True:
        try:
            offered = search.send(serve(offered))
        except StopIteration as end:
            found: Goodput = end.value
            return found


class Options(TypedDict, total=False):
    """What ``goodput`` takes besides what serves, the trace and the SLO."""

    rule: Rule
    stable: bool
    share: float
    bound: float | None
    least_requests: int
    least_ttfts: float
    step: float
    tolerance: float
    deepest: float


def searching(trace: Trace, slo: SLO, options: Options) -> Searching:
    """The search of ``goodput`` for whoever serves in another way (asyncio): yields each trace that is to be served.

    It is sent the outcomes, one for each row in the trace's order, and returns the ``Goodput``. Raises as that does.
    """
    search = _Search(trace, slo, options)
    return (yield from search.run())


def measure(serve: Serve, trace: Trace, slo: SLO, rate: float | None = None) -> Point:
    """Serve a trace, at its own rate or scaled to ``rate``, and see how much was in time.

    ``serve`` may know a shorter way to the same: ``serve.point(trace, slo, rate)``, None where it does not.

    Raises ``ConfigError`` where ``serve`` does not answer every request, ``TraceError`` where the trace has no rate.
    """
    shorter: Shorter | None = getattr(serve, "point", None)
    known = None if shorter is None else shorter(trace, slo, rate)
    if known is not None:
        return known
    offered = trace if rate is None else trace.scaled(rate=rate)
    return point(offered, serve(offered), slo)


Shorter = Callable[[Trace, SLO, float | None], Point | None]


def point(offered: Trace, outcomes: Sequence[Served], slo: SLO) -> Point:
    """What ``measure`` says, of what was served already."""
    if len(outcomes) != len(offered):
        raise ConfigError(
            f"serve answered {len(outcomes)} of {len(offered)} requests; give an outcome for each, in the trace's "
            'order, also for one that failed (finish_reason "error")'
        )
    arrivals = [row.timestamp / 1000 for row in offered]
    times = sorted(arrivals)
    return Point(
        rate=arrival_rate(times) or math.inf,
        duration_s=times[-1] - times[0] if times else 0.0,
        attainment={rule: sum(slo.met(each, rule) for each in outcomes) / max(1, len(outcomes)) for rule in RULES},
        completed=completed_share(arrivals, outcomes),
        first=sum(_first_met(each, slo) for each in outcomes) / max(1, len(outcomes)),
    )


def _first_met(served: Served, slo: SLO) -> bool:
    return served.finish_reason in COMPLETE and served.ttft_s is not None and served.ttft_s < slo.ttft


def completed_share(arrivals: Sequence[float], outcomes: Sequence[Served]) -> float:
    """Completions a second over arrivals a second: below 0.95, work piles up.

    Both rates are taken between the first and the last tenth, so that neither an empty system at the start nor one
    long answer at the end counts; failures lower it. ``arrivals`` in s, in the order of ``outcomes``.
    """
    finishes = [
        at + each.ttft_s + math.fsum(each.itl_s)
        for at, each in zip(arrivals, outcomes, strict=True)
        if each.finish_reason in COMPLETE and each.ttft_s is not None
    ]
    return completions(arrivals, finishes)


def completions(arrivals: Times, finishes: Times) -> float:
    """``completed_share`` from the times at which requests arrived, and at which complete ones ended."""
    offered, done = _middle_rate(arrivals), _middle_rate(finishes)
    if not offered or math.isinf(offered):
        return 0.0 if len(finishes) < len(arrivals) else 1.0
    return done / offered


def _middle_rate(seconds: Times) -> float:
    """Events a second between the first and last tenth of them."""
    if len(seconds) < 2:
        return 0.0
    low = len(seconds) // 10
    high = len(seconds) - 1 - low
    ordered = np.partition(np.asarray(seconds, np.float64), (low, high))
    span = float(ordered[high] - ordered[low])
    return (high - low) / span if span > 0 else math.inf


def steady_s(trace: Trace, slo: SLO) -> float:
    """Seconds in which a trace must come for completions to keep up, though the last outputs end after its end: one
    that is just in time may then be missing."""
    gaps = sum(max(0, row.output_length - 1) for row in trace) / max(1, len(trace))
    return (slo.ttft + gaps * slo.tbt) / (1 - STABLE)


def piles_up(point: Point, rule: str, share: float, steady: float) -> bool:
    """Whether completions fall behind arrivals because work piles up.

    In a trace that comes in less than ``steady`` seconds (``steady_s``) long outputs that are still in time lower the
    rate of completions as well. Guard and mean TPOT bound the end of a request, so where enough keep one of them it
    decides alone; else it takes a longer trace.
    """
    bounded = rule == "tpot" or point.attainment["guard"] >= share
    return not point.stable and (point.duration_s >= steady or not bounded)


def own_rate(trace: Trace, least_requests: int = LEAST_REQUESTS) -> float:
    """Requests a second of a trace. Raises ``TraceTooShort`` where it has none, or fewer requests than that."""
    times = sorted(row.timestamp / 1000 for row in trace)
    rate = arrival_rate(times)
    if rate is None:
        raise TraceTooShort(f"{len(times)} requests that come at once have no rate: give a longer trace", math.inf)
    if len(times) < least_requests:
        needed = least_requests / rate
        raise TraceTooShort(
            f"a trace of {len(times):,} requests is too short: a goodput from fewer than {least_requests:,} is too "
            f"high by far, and ranks are wrong. It must last {needed:,.0f} s at its rate; record longer, or draw more "
            "requests like these (trinity.traces.resampled; a planner does with resample=True), or set least_requests",
            needed,
        )
    return rate


class _Search:
    def __init__(self, trace: Trace, slo: SLO, options: Options) -> None:
        self.trace, self.slo = trace, slo
        self.rule, self.stable = options.get("rule", "guard"), options.get("stable", True)
        self.share, self.bound = options.get("share", SHARE), options.get("bound")
        self.step, self.tolerance = options.get("step", STEP), options.get("tolerance", TOLERANCE)
        self.deepest = options.get("deepest", DEEPEST)
        least_requests, least_ttfts = options.get("least_requests", LEAST_REQUESTS), options.get("least_ttfts")
        self.least_ttfts = LEAST_TTFTS if least_ttfts is None else least_ttfts
        self._check(least_requests)
        self.points: list[Point] = []
        self.own, self.steady = own_rate(trace, least_requests), steady_s(trace, slo)

    def _check(self, least_requests: int) -> None:
        if self.rule not in RULES:
            raise UnknownName("SLO rule", self.rule, RULES)
        if not 0 < self.share <= 1:
            raise ConfigError(f"share must lie above 0 and at most at 1, got {self.share!r}")
        if self.bound is not None and not 0 < self.bound < math.inf:
            raise ConfigError(f"a bound must be a positive number of requests a second, got {self.bound!r}")
        least = self.least_ttfts
        if least_requests < 2 or not 0 < least < math.inf:  # at 0 a search without a limit would never end
            raise ConfigError(f"least_requests is at least 2, least_ttfts positive, got {least_requests} and {least}")
        if not (1 < self.step < math.inf and 0 < self.tolerance < math.inf and 1 <= self.deepest < math.inf):
            raise ConfigError(
                f"step is above 1, tolerance above 0 and deepest at least 1, got {self.step!r}, {self.tolerance!r} and "
                f"{self.deepest!r}"
            )

    @property
    def least_s(self) -> float:
        return self.least_ttfts * self.slo.ttft

    def run(self) -> Searching:
        low, high = yield from self._bracket(self.own if self.bound is None else _START * self.bound)
        while low and high / low > 1 + self.tolerance:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if (yield from self._holds(middle)) else (low, middle)
        return Goodput(rate=low, rule=self.rule, share=self.share, stable=self.stable, points=tuple(self.points))

    def _bracket(self, start: float) -> Generator[Trace, Sequence[Served], tuple[float, float]]:
        """(a rate that holds or 0, a higher one that does not)."""
        if (yield from self._holds(start)):
            low, high = start, start * self.step
            while (yield from self._holds(high)):
                low, high = high, high * self.step
            return low, high
        high, factor = start, self.step
        while high > start / self.deepest:
            low = high / factor
            if (yield from self._holds(low)):
                return low, high
            high, factor = low, factor**2
        return 0.0, high

    def _holds(self, rate: float) -> Holds:
        offered = self.trace.scaled(rate=rate)
        seen = point(offered, (yield offered), self.slo)
        self.points.append(seen)
        in_time = seen.attainment[self.rule] >= self.share
        if not in_time or (self.stable and piles_up(seen, self.rule, self.share, self.steady)):
            return False
        if seen.duration_s < self.least_s:
            needed = self.least_s * seen.rate / self.own
            raise TraceTooShort(
                f"no upper limit found: at {rate:.4g} requests/s enough is in time, but the trace is over in "
                f"{seen.duration_s:.3g} s, of {self.least_s:g} s that it must last (10 TTFT bounds unless set "
                f"otherwise). At its own rate it must last more than {needed:,.0f} s; record longer, draw more "
                "requests like these (trinity.traces.resampled), or set least_ttfts",
                needed,
            )
        return True
