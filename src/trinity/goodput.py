"""Goodput: the highest rate of the same requests at which enough of them are in time (TriInfer, section 5.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from trinity.errors import ConfigError, TraceTooShort, UnknownName
from trinity.tables import Table, as_html, as_text
from trinity.trace import COMPLETE, RULES, SLO, Rule, Served, Trace
from trinity.trace_statistics import arrival_rate

SHARE = 0.9  # of requests that must be in time
STABLE = 0.95  # of the offered rate that must be completed
STEP = 1.25  # between rates while the limit is not yet bracketed
TOLERANCE = 0.02  # of the rate, where bisection ends
LEAST_REQUESTS = 1000
LEAST_TTFTS = 10  # times the TTFT bound that a trace must last: shorter ones end before a queue has built up
_DEEPEST = 4096  # times below the first rate tried, where a search that found nothing gives up
_START = 0.9  # of the bound, where a search begins


class Outcome(msgspec.Struct, frozen=True):
    """What became of one request: seconds to its first token, gaps between tokens, why it ended."""

    ttft_s: float | None
    itl_s: Sequence[float] = ()
    finish_reason: str = "length"


Serve = Callable[[Trace], Sequence[Served]]  # one outcome for each row, in the trace's order


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen at one rate (requests a second): attainment by rule, completions a second over arrivals a second.

    ``duration_s`` is how long the requests took to arrive.
    """

    rate: float
    duration_s: float
    attainment: dict[str, float]
    completed: float

    @property
    def stable(self) -> bool:
        """Whether the completions keep up with the arrivals."""
        return self.completed >= STABLE


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """The highest ``rate`` at which the rule held, in requests a second, and every ``point`` that was tried.

    0 where none did: ``best`` is the highest attainment then seen. The rule is that ``share`` of the requests are in
    time by ``rule`` and, where ``stable``, that completions keep up with arrivals.
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
) -> Goodput:
    """Search the highest rate at which ``share`` of all requests, failed ones included, are in time.

    ``serve`` answers a trace with one outcome for each row: a simulator, a live pipeline, a formula. The same requests
    are served with their time stamps scaled: first at 0.9 of ``bound`` (requests a second that cannot be exceeded) or
    at the trace's own rate, then 1.25 times as fast or slow until the limit is bracketed, then by bisection to 2 %.
    ``rule="p90", stable=False`` is the paper's rule, which a queue before decode can hide from.

    Raises ``TraceTooShort`` for fewer than ``least_requests``, and where all is in time although the requests come in
    less than ``least_ttfts`` times the TTFT bound: such a rate is no answer, and the error's ``needed_s`` says how
    long the trace must be at its own rate.
    """
    _check(rule, share, bound, least_requests, least_ttfts)
    search = _Search(serve, trace, slo, rule, stable, share, least_requests, least_ttfts)
    return search.run(search.own if bound is None else _START * bound)


def _check(rule: Rule, share: float, bound: float | None, least_requests: int, least_ttfts: float) -> None:
    if rule not in RULES:
        raise UnknownName("SLO rule", rule, RULES)
    if not 0 < share <= 1:
        raise ConfigError(f"share must lie above 0 and at most at 1, got {share!r}")
    if bound is not None and not 0 < bound < math.inf:
        raise ConfigError(f"a bound must be a positive number of requests a second, got {bound!r}")
    if least_requests < 2 or not 0 < least_ttfts < math.inf:  # at 0 a search without a limit would never end
        raise ConfigError(f"least_requests is at least 2, least_ttfts positive, got {least_requests} and {least_ttfts}")


def measure(serve: Serve, trace: Trace, slo: SLO, rate: float | None = None) -> Point:
    """Serve a trace, at its own rate or scaled to ``rate``, and see how much was in time.

    Raises ``ConfigError`` where ``serve`` does not answer every request, ``TraceError`` where the trace has no rate.
    """
    offered = trace if rate is None else trace.scaled(rate=rate)
    outcomes = serve(offered)
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
    )


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
    offered, done = _middle_rate(arrivals), _middle_rate(finishes)
    if not offered or math.isinf(offered):
        return 0.0 if len(finishes) < len(arrivals) else 1.0
    return done / offered


def _middle_rate(seconds: Sequence[float]) -> float:
    """Events a second between the first and last tenth of them."""
    if len(seconds) < 2:
        return 0.0
    ordered, cut = sorted(seconds), len(seconds) // 10
    low, high = cut, len(ordered) - 1 - cut
    span = ordered[high] - ordered[low]
    return (high - low) / span if span > 0 else math.inf


class _Search:
    def __init__(
        self,
        serve: Serve,
        trace: Trace,
        slo: SLO,
        rule: Rule,
        stable: bool,
        share: float,
        least_requests: int,
        least_ttfts: float,
    ) -> None:
        self.serve, self.trace, self.slo = serve, trace, slo
        self.rule, self.stable, self.share = rule, stable, share
        self.least_s = least_ttfts * slo.ttft
        self.points: list[Point] = []
        self.own = self._own_rate(least_requests)

    def _own_rate(self, least_requests: int) -> float:
        times = sorted(row.timestamp / 1000 for row in self.trace)
        rate = arrival_rate(times)
        if rate is None:
            raise TraceTooShort(f"{len(times)} requests that come at once have no rate: give a longer trace", math.inf)
        if len(times) < least_requests:
            needed = least_requests / rate
            raise TraceTooShort(
                f"a trace of {len(times):,} requests is too short: a goodput from fewer than {least_requests:,} is too "
                f"high by far. It must last {needed:,.0f} s at its rate; record longer, or draw more requests like "
                "these (trinity.traces.resampled), or set least_requests",
                needed,
            )
        return rate

    def run(self, start: float) -> Goodput:
        low, high = self._bracket(start)
        while low and high / low > 1 + TOLERANCE:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._holds(middle) else (low, middle)
        return Goodput(rate=low, rule=self.rule, share=self.share, stable=self.stable, points=tuple(self.points))

    def _bracket(self, start: float) -> tuple[float, float]:
        """(a rate that holds or 0, a higher one that does not)."""
        if self._holds(start):
            low, high = start, start * STEP
            while self._holds(high):
                low, high = high, high * STEP
            return low, high
        high, factor = start, STEP
        while high > start / _DEEPEST:
            low = high / factor
            if self._holds(low):
                return low, high
            high, factor = low, factor**2
        return 0.0, high

    def _holds(self, rate: float) -> bool:
        point = measure(self.serve, self.trace, self.slo, rate)
        self.points.append(point)
        in_time = point.attainment[self.rule] >= self.share
        if not in_time or (self.stable and not point.stable):
            return False
        if point.duration_s < self.least_s:
            needed = self.least_s * point.rate / self.own
            raise TraceTooShort(
                f"no upper limit found: at {rate:.4g} requests/s enough is in time, but the trace is over in "
                f"{point.duration_s:.3g} s, of {self.least_s:g} s that it must last (10 TTFT bounds unless set "
                f"otherwise). At its own rate it must last more than {needed:,.0f} s; record longer, draw more "
                "requests like these (trinity.traces.resampled), or set least_ttfts",
                needed,
            )
        return True
