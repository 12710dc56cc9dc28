"""Trials: replays one trace on many deployments at rates of one grid, each once."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NoReturn

from trinity.errors import TraceTooShort
from trinity.planner.candidates import Deployment
from trinity.planner.progress import Report
from trinity.simulation.rate_sweep import InstanceUsage, RateSweep
from trinity.traces.goodput import (
    LEAST_REQUESTS,
    LEAST_TTFTS,
    RATE_STEP,
    RATE_TOLERANCE,
    SHARE,
    RatePoint,
    ServeFunction,
    falls_behind,
    measure_point,
    steady_state_s,
    trace_rate,
)
from trinity.traces.trace import SLO, SLORule, Trace

GRID = 1 + RATE_TOLERANCE  # between two rates of the grid: all goodputs are powers of it, so that equal ones are equal
_STRIDE = round(math.log(RATE_STEP) / math.log(GRID))
_DEEPEST = round(math.log(4096) / math.log(GRID))  # below the first rate tried, where a search gives up
_START = 0.9  # of the guess, where a search begins


def rate_of(step: int) -> float:
    """Return requests/s of a step of the grid."""
    return GRID**step


def step_of(rate: float) -> int:
    """Return the highest step of the grid at or below a rate."""
    return math.floor(math.log(rate) / math.log(GRID) + 1e-9)


class Trials:
    """Replays deployments by ``serve_of``, and remembers the result at each rate.

    A rate holds where ``share`` of the requests are in time by ``rule`` and, where ``stable``, completions keep up: the
    criterion of ``trinity.traces.goodput.goodput``, on a grid of rates 2 % apart. Raises ``TraceTooShort`` as it does.

    - ``serve_of(deployment)``: the function that serves a trace on it.
    - ``trace``, ``slo``, ``rule``, ``stable``, ``share``: as above.
    - ``least_requests``, ``least_ttfts`` (TTFT bounds): how long the trace must be.
    - ``progress`` (None): called with the replays so far, and what runs.
    - ``most_runs`` (inf): replays that a search should make at most; ``runs`` counts them.
    """

    def __init__(
        self,
        serve_of: Callable[[Deployment], ServeFunction],
        trace: Trace,
        slo: SLO,
        *,
        rule: SLORule = "guard",
        stable: bool = True,
        share: float = SHARE,
        least_requests: int = LEAST_REQUESTS,
        least_ttfts: float = LEAST_TTFTS,
        progress: Report | None = None,
        most_runs: float = math.inf,
    ) -> None:
        self.most_runs = most_runs
        self.serve_of, self.trace, self.slo = serve_of, trace, slo
        self.rule, self.stable, self.share = rule, stable, share
        self.least_s = least_ttfts * slo.ttft
        self.steady_s = steady_state_s(trace, slo)
        self.runs, self._progress = 0, progress
        self._points: dict[Deployment, dict[int, RatePoint]] = {}
        self._serves: dict[Deployment, ServeFunction] = {}
        self.own = trace_rate(trace, least_requests)

    def point(self, deployment: Deployment, step: int) -> RatePoint:
        """Return the attainment at a rate; replayed once."""
        seen = self._points.setdefault(deployment, {})
        if step not in seen:
            self.tell(f"{deployment} at {rate_of(step):.3g} requests/s")
            seen[step] = measure_point(self._serve(deployment), self.trace, self.slo, rate_of(step))
        return seen[step]

    @property
    def out_of_runs(self) -> bool:
        """True if a search should make no more replays."""
        return self.runs >= self.most_runs

    def usage(self, deployment: Deployment, rate: float) -> InstanceUsage | None:
        """Return the use of instances in a replay at this rate; None where it is unknown."""
        serve = self._serve(deployment)
        return serve.usage(self.trace, self.slo, rate) if isinstance(serve, RateSweep) else None

    def _serve(self, deployment: Deployment) -> ServeFunction:
        if deployment not in self._serves:
            self._serves[deployment] = self.serve_of(deployment)
        return self._serves[deployment]

    def tell(self, what: str) -> None:
        """Count and report a replay that begins."""
        if self._progress is not None:
            self._progress(self.runs, what)
        self.runs += 1

    def points(self, deployment: Deployment) -> tuple[RatePoint, ...]:
        """Return all points seen of it, by rate."""
        return tuple(point for _, point in sorted(self._points.get(deployment, {}).items()))

    def holds(self, deployment: Deployment, step: int, rule: SLORule | None = None) -> bool:
        """Check if the rule holds at a rate. Raises ``TraceTooShort`` where it holds for too short a time."""
        point = self.point(deployment, step)
        if point.attainment[rule or self.rule] < self.share:
            return False
        if self.stable and falls_behind(point, rule or self.rule, self.share, self.steady_s):
            return False
        if point.duration_s < self.least_s:
            self._too_short(deployment, point, self.least_s)
        return True

    def _too_short(self, deployment: Deployment, point: RatePoint, least_s: float) -> NoReturn:
        needed = least_s * point.rate / self.own
        raise TraceTooShort(
            f"{deployment} serves {point.rate:.4g} requests/s in time, where the trace is over in "
            f"{point.duration_s:.3g} s, of {least_s:g} s that it must last: at its own rate more than "
            f"{needed:,.0f} s. Record longer, or let the planner draw more requests like these (resample=True)",
            needed,
        )

    def limit(self, deployment: Deployment, guess: float, rule: SLORule | None = None) -> int | None:
        """Find the highest step that holds, from a guess of the rate; None where none does.

        Where steps that fail lie between steps that hold, the guess decides which of them is found: the same guess
        finds the same step, whatever was replayed before.
        """
        low, high = self._bracket(deployment, guess, rule)
        while low is not None and high - low > 1:
            middle = max((low + high) // 2, high - 8 * _STRIDE)
            low, high = (middle, high) if self.holds(deployment, middle, rule) else (low, middle)
        return low

    def first_steps(self, guess: float) -> tuple[int, ...]:
        """Return the steps that ``limit`` replays first, as long as none holds."""
        start = step_of(_START * guess)
        return (start, start - _STRIDE, start - 3 * _STRIDE)

    def _bracket(self, deployment: Deployment, guess: float, rule: SLORule | None) -> tuple[int | None, int]:
        """Find (a step that holds or None, a higher one that does not)."""
        tried = self.first_steps(guess)
        start = tried[0]
        if self.holds(deployment, start, rule):
            low, high = start, start + _STRIDE
            while self.holds(deployment, high, rule):
                low, high = high, high + _STRIDE
            return low, high
        for high, low in pairwise(tried):
            if self.holds(deployment, low, rule):
                return low, high
        high, deepest = tried[-1], start - _DEEPEST  # one that cannot be in time at all is refuted here
        return (deepest, high) if self.holds(deployment, deepest, rule) else (None, high)
