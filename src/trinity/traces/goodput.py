"""Goodput: the highest request rate at which enough requests meet their SLO (TriInfer 2.2)."""

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
from trinity.traces.trace import COMPLETE, SLO, SLO_RULES, ServedRequest, SLORule, Trace

SHARE = 0.9  # of requests that must meet the SLO
STABLE_SHARE = 0.95  # of the offered rate that completions must reach
RATE_STEP = 1.25  # factor between rates until the limit is bracketed
RATE_TOLERANCE = 0.02  # of the rate, at which bisection ends
LEAST_REQUESTS = 1000
LEAST_TTFTS = 10  # TTFT bounds that a trace must last: shorter ones end before a queue has built up
DEEPEST_SEARCH = 4096.0  # factor below the first rate at which a search gives up
_START = 0.9  # of the bound, at which a search begins


class RequestOutcome(msgspec.Struct, frozen=True):
    """Outcome of one request.

    ``ttft_s`` (s): time to first token, None where there was none. ``itl_s`` (s): gaps between tokens.
    ``finish_reason``: as ``Output.finish_reason``.
    """

    ttft_s: float | None
    itl_s: Sequence[float] = ()
    finish_reason: str = "length"


Times = Sequence[float] | npt.NDArray[np.float64]
ServeFunction = Callable[[Trace], Sequence[ServedRequest]]  # returns one outcome for each row, in the trace's order
_RateCheck = Generator[Trace, Sequence[ServedRequest], bool]
GoodputSearch = Generator[Trace, Sequence[ServedRequest], "Goodput"]  # yields traces to serve, is sent their outcomes


class RatePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements at one request rate.

    ``rate`` (requests/s): the offered rate. ``duration_s`` (s): first arrival to last. ``attainment``: share of
    requests in time, by SLO rule. ``completed``: completions a second over arrivals a second.
    ``ttft_attainment``: share of requests that completed with a first token in time; -1 where unknown.
    ``load``: mean share of the time that the instances of each role set were busy, where the simulator's compiled
    engine reports it.
    """

    rate: float
    duration_s: float
    attainment: dict[str, float]
    completed: float
    ttft_attainment: float = -1.0
    load: dict[str, float] = {}

    @property
    def stable(self) -> bool:
        """True where completions keep up with arrivals."""
        return self.completed >= STABLE_SHARE


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a goodput search.

    - ``rate`` (requests/s): the highest rate at which ``share`` of the requests were in time by ``rule`` and, where
      ``stable``, completions kept up with arrivals (``falls_behind``); 0 where no rate held.
    - ``points``: all rates tried.
    """

    rate: float
    rule: str
    share: float
    stable: bool
    points: tuple[RatePoint, ...]

    @property
    def best_attainment(self) -> float:
        """The highest attainment at any rate tried."""
        return max(point.attainment[self.rule] for point in self.points)

    def _table(self) -> Table:
        found = f"{self.rate:.3f} requests/s" if self.rate else f"none: {self.best_attainment:.1%} at best"
        rows = [
            (
                f"{point.rate:.3f} requests/s",
                *(f"{point.attainment[rule]:.1%}" for rule in SLO_RULES),
                f"{point.completed:.2f}" + ("" if point.stable else " unstable"),
            )
            for point in sorted(self.points, key=lambda point: point.rate)
        ]
        return Table((f"goodput by {self.rule}: {found}", *SLO_RULES, "completed/offered"), rows)

    def __str__(self) -> str:
        return as_text(self._table())

    def _repr_html_(self) -> str:
        return as_html(self._table())


def goodput(
    serve: ServeFunction,
    trace: Trace,
    slo: SLO,
    *,
    rule: SLORule = "guard",
    stable: bool = True,
    share: float = SHARE,
    bound: float | None = None,
    least_requests: int = LEAST_REQUESTS,
    least_ttfts: float = LEAST_TTFTS,
    step: float = RATE_STEP,
    tolerance: float = RATE_TOLERANCE,
    deepest: float = DEEPEST_SEARCH,
) -> Goodput:
    """Search for the highest rate at which ``share`` of all requests, failed ones included, are in time.

    Serves the same requests with their arrival times scaled: first at 0.9 of ``bound`` or at the trace's own rate, then
    ``step`` times as fast or slow until the limit is bracketed, then by bisection.
    ``rule="p90", stable=False`` is the paper's rule (TriInfer 2.2), from which a queue before decode can hide.

    serve: answers a trace with one outcome for each row, such as a simulator, a live pipeline or a formula.
    trace: the requests.
    slo: the latency bounds.
    rule (SLO rule, "guard"): as ``SLO.is_met``.
    stable (True): completions must also keep up with arrivals.
    share (0.9): share of requests that must be in time.
    bound (requests/s, None): a rate that cannot be exceeded.
    least_requests (requests, 1000): fewest requests that a trace must have.
    least_ttfts (TTFT bounds, 10): shortest time over which the requests must arrive at a rate that holds.
    step (factor, 1.25): distance of rates until the limit is bracketed.
    tolerance (share of the rate, 0.02): precision of the result.
    deepest (factor, 4096): how far below the first rate the search gives up.

    Raises ``TraceTooShort`` for fewer than ``least_requests`` requests, and where all is in time although the requests
    arrive in less than ``least_ttfts`` TTFT bounds: such a rate is no answer, and the error's ``needed_s`` says how
    long the trace must be at its own rate. Raises ``ConfigError`` and ``UnknownName`` for values out of range.
    """
    options = GoodputOptions(rule=rule, stable=stable, share=share, bound=bound, least_requests=least_requests)
    options |= GoodputOptions(least_ttfts=least_ttfts, step=step, tolerance=tolerance, deepest=deepest)
    search = search_goodput(trace, slo, options)
    offered = next(search)
    while True:
        try:
            offered = search.send(serve(offered))
        except StopIteration as end:
            found: Goodput = end.value
            return found


class GoodputOptions(TypedDict, total=False):
    """Keyword arguments of ``goodput``; see there."""

    rule: SLORule
    stable: bool
    share: float
    bound: float | None
    least_requests: int
    least_ttfts: float
    step: float
    tolerance: float
    deepest: float


def search_goodput(trace: Trace, slo: SLO, options: GoodputOptions) -> GoodputSearch:
    """Run the search of ``goodput`` as a generator, for callers that serve asynchronously.

    Yields each trace to serve, is sent the outcomes, one for each row in the trace's order, and returns the
    ``Goodput``. Raises as ``goodput`` does.
    """
    search = _Search(trace, slo, options)
    return (yield from search.run())


def measure_point(serve: ServeFunction, trace: Trace, slo: SLO, rate: float | None = None) -> RatePoint:
    """Serve a trace, at its own rate or scaled to ``rate`` requests/s, and measure how much was in time.

    ``serve`` may offer a shortcut, ``serve.point(trace, slo, rate)``, which gives the same ``RatePoint`` or None.

    Raises ``ConfigError`` where ``serve`` does not answer every request, ``TraceError`` where the trace has no rate.
    """
    shortcut: _PointShortcut | None = getattr(serve, "point", None)
    known = None if shortcut is None else shortcut(trace, slo, rate)
    if known is not None:
        return known
    offered = trace if rate is None else trace.scale(rate=rate)
    return score_outcomes(offered, serve(offered), slo)


_PointShortcut = Callable[[Trace, SLO, float | None], RatePoint | None]


def score_outcomes(offered: Trace, outcomes: Sequence[ServedRequest], slo: SLO) -> RatePoint:
    """Score the outcomes of a trace already served, as ``measure_point`` does.

    Raises ``ConfigError`` where the number of outcomes is not that of the requests.
    """
    if len(outcomes) != len(offered):
        raise ConfigError(
            f"serve answered {len(outcomes)} of {len(offered)} requests; give an outcome for each, in the trace's "
            'order, also for one that failed (finish_reason "error")'
        )
    arrivals = [row.timestamp / 1000 for row in offered]
    times = sorted(arrivals)
    return RatePoint(
        rate=arrival_rate(times) or math.inf,
        duration_s=times[-1] - times[0] if times else 0.0,
        attainment={
            rule: sum(slo.is_met(each, rule) for each in outcomes) / max(1, len(outcomes)) for rule in SLO_RULES
        },
        completed=completed_share(arrivals, outcomes),
        ttft_attainment=sum(_is_ttft_met(each, slo) for each in outcomes) / max(1, len(outcomes)),
    )


def _is_ttft_met(served: ServedRequest, slo: SLO) -> bool:
    return served.finish_reason in COMPLETE and served.ttft_s is not None and served.ttft_s < slo.ttft


def completed_share(arrivals: Sequence[float], outcomes: Sequence[ServedRequest]) -> float:
    """Completions a second over arrivals a second; below 0.95, work piles up.

    Both rates exclude the first and the last tenth, so that neither an empty system at the start nor one long answer at
    the end counts. Failed requests lower it. ``arrivals`` in s, in the order of ``outcomes``.
    """
    finishes = [
        at + each.ttft_s + math.fsum(each.itl_s)
        for at, each in zip(arrivals, outcomes, strict=True)
        if each.finish_reason in COMPLETE and each.ttft_s is not None
    ]
    return completion_ratio(arrivals, finishes)


def completion_ratio(arrivals: Times, finishes: Times) -> float:
    """Compute ``completed_share`` from arrival times and finish times of completed requests, in s."""
    offered, done = _middle_rate(arrivals), _middle_rate(finishes)
    if not offered or math.isinf(offered):
        return 0.0 if len(finishes) < len(arrivals) else 1.0
    return done / offered


def _middle_rate(seconds: Times) -> float:
    """Events a second, without the first and the last tenth of them."""
    if len(seconds) < 2:
        return 0.0
    low = len(seconds) // 10
    high = len(seconds) - 1 - low
    ordered = np.partition(np.asarray(seconds, np.float64), (low, high))
    span = float(ordered[high] - ordered[low])
    return (high - low) / span if span > 0 else math.inf


def steady_state_s(trace: Trace, slo: SLO) -> float:
    """Shortest duration of a trace, in seconds, from which ``completed_share`` is meaningful.

    The last outputs end after the last arrival; in shorter traces they alone can bring completions below the limit.
    """
    gaps = sum(max(0, row.output_length - 1) for row in trace) / max(1, len(trace))
    return (slo.ttft + gaps * slo.tbt) / (1 - STABLE_SHARE)


def falls_behind(point: RatePoint, rule: str, share: float, steady: float) -> bool:
    """Check whether completions fall behind arrivals because work piles up.

    In traces shorter than ``steady`` seconds (``steady_state_s``), long outputs that are still in time lower the rate
    of completions too. Guard and mean TPOT bound the end of a request, so where enough requests meet one of them, it
    decides alone; otherwise only a longer trace can tell.
    """
    bounded = rule == "tpot" or point.attainment["guard"] >= share
    return not point.stable and (point.duration_s >= steady or not bounded)


def trace_rate(trace: Trace, least_requests: int = LEAST_REQUESTS) -> float:
    """Request rate of a trace, in requests/s.

    Raises ``TraceTooShort`` where all requests come at once or are fewer than ``least_requests``.
    """
    times = sorted(row.timestamp / 1000 for row in trace)
    rate = arrival_rate(times)
    if rate is None:
        raise TraceTooShort(f"{len(times)} requests that come at once have no rate: give a longer trace", math.inf)
    if len(times) < least_requests:
        needed = least_requests / rate
        raise TraceTooShort(
            f"a trace of {len(times):,} requests is too short: from fewer than {least_requests:,} a goodput comes "
            f"out far too high, and ranks are wrong. It must last {needed:,.0f} s at its rate: record longer, draw "
            "more requests like these (trinity.traces.resample; a planner does with resample=True), or set "
            "least_requests",
            needed,
        )
    return rate


class _Search:
    def __init__(self, trace: Trace, slo: SLO, options: GoodputOptions) -> None:
        self.trace, self.slo = trace, slo
        self.rule, self.stable = options.get("rule", "guard"), options.get("stable", True)
        self.share, self.bound = options.get("share", SHARE), options.get("bound")
        self.step, self.tolerance = options.get("step", RATE_STEP), options.get("tolerance", RATE_TOLERANCE)
        self.deepest = options.get("deepest", DEEPEST_SEARCH)
        least_requests, least_ttfts = options.get("least_requests", LEAST_REQUESTS), options.get("least_ttfts")
        self.least_ttfts = LEAST_TTFTS if least_ttfts is None else least_ttfts
        self._check(least_requests)
        self.points: list[RatePoint] = []
        self.trace_rate, self.steady_s = trace_rate(trace, least_requests), steady_state_s(trace, slo)

    def _check(self, least_requests: int) -> None:
        if self.rule not in SLO_RULES:
            raise UnknownName("SLO rule", self.rule, SLO_RULES)
        if not 0 < self.share <= 1:
            raise ConfigError(f"share must be above 0 and at most 1, got {self.share!r}")
        if self.bound is not None and not 0 < self.bound < math.inf:
            raise ConfigError(f"a bound must be a positive number of requests a second, got {self.bound!r}")
        least = self.least_ttfts
        if least_requests < 2 or not 0 < least < math.inf:  # at 0 a search without a limit would never end
            raise ConfigError(
                f"least_requests must be at least 2 and least_ttfts positive, got {least_requests} and {least}"
            )
        if not (1 < self.step < math.inf and 0 < self.tolerance < math.inf and 1 <= self.deepest < math.inf):
            raise ConfigError(
                f"step must be above 1, tolerance above 0 and deepest at least 1, got {self.step!r}, "
                f"{self.tolerance!r} and {self.deepest!r}"
            )

    @property
    def least_s(self) -> float:
        return self.least_ttfts * self.slo.ttft

    def run(self) -> GoodputSearch:
        low, high = yield from self._bracket(self.trace_rate if self.bound is None else _START * self.bound)
        while low and high / low > 1 + self.tolerance:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if (yield from self._check_rate(middle)) else (low, middle)
        return Goodput(rate=low, rule=self.rule, share=self.share, stable=self.stable, points=tuple(self.points))

    def _bracket(self, start: float) -> Generator[Trace, Sequence[ServedRequest], tuple[float, float]]:
        """Find (a rate that holds or 0, a higher one that does not)."""
        if (yield from self._check_rate(start)):
            low, high = start, start * self.step
            while (yield from self._check_rate(high)):
                low, high = high, high * self.step
            return low, high
        high, factor = start, self.step
        while high > start / self.deepest:
            low = high / factor
            if (yield from self._check_rate(low)):
                return low, high
            high, factor = low, factor**2
        return 0.0, high

    def _check_rate(self, rate: float) -> _RateCheck:
        offered = self.trace.scale(rate=rate)
        seen = score_outcomes(offered, (yield offered), self.slo)
        self.points.append(seen)
        in_time = seen.attainment[self.rule] >= self.share
        if not in_time or (self.stable and falls_behind(seen, self.rule, self.share, self.steady_s)):
            return False
        if seen.duration_s < self.least_s:
            needed = self.least_s * seen.rate / self.trace_rate
            raise TraceTooShort(
                f"no upper limit found: at {rate:.4g} requests/s enough requests are in time, but the trace takes only "
                f"{seen.duration_s:.3g} s of the {self.least_s:g} s that it must last (10 TTFT bounds unless set "
                f"otherwise). At its own rate it must last more than {needed:,.0f} s: record longer, draw more "
                "requests like these (trinity.traces.resample), or set least_ttfts",
                needed,
            )
        return True
