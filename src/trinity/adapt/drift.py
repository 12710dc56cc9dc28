"""Detects lasting shifts of the stage demand of traffic, counted as it arrives.

Has no clock and never waits: takes rows with their times, returns what to do. ``trinity.adapt.proposals`` runs it
beside a pipeline.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import islice

import msgspec

from trinity.adapt.arrivals import KEEP_S, ArrivalBook, DemandTick
from trinity.costs.demand import Demand, sum_by_stage
from trinity.errors import ConfigError, TraceError
from trinity.stage_kinds import all_letters
from trinity.traces.survival import RUNNING
from trinity.traces.trace import TraceRow

NEGLIGIBLE = 1e-3  # stage seconds a second, a thousandth of one device; smaller demands count as this
RECENT_S = 60.0  # of arrivals whose outputs are those of now
SETTLED_S = 300.0  # after which what was expected of a tick's rows counts as known
_NOISE_TICKS = 60  # over which the noise is averaged
_AFTER_BURST = 2.0  # values after a change that must tell of it beside a burst
_MOST_ADDED = 360  # values of a sum that are remembered


class PageHinkley:
    """Page-Hinkley test for a change of the mean of logarithms, up or down (Page 1954, Hinkley 1971).

    Sums each value's distance from the mean since the start, beyond half of log ``ratio``: a lasting change by less
    than the square root of ``ratio`` never accumulates, a change by ``ratio`` adds half of log ``ratio`` a value. A
    change is detected when a sum exceeds the larger of what ``least`` values after such a change add up to, and
    ``certainty`` · noise² / log ``ratio``. With independent normal values a false alarm then takes in the order of
    e^certainty values; with lasting bursts, fewer. A value counts as at most twice log ``ratio`` from the mean.

    ratio (factor, 2): change to detect, above 1.
    certainty (12): exponent of the values between false alarms.
    least (values, 3): fewest values after a change until it is detected.
    burst (values, 7): a change that is over after so many is none: without the ``burst`` neighbouring values that add
        most, the sum must still be what two values after a change by ``ratio`` add up to.
    warm (values, 12): no change is detected in the first ones.
    noise (0): initial standard deviation of the values; estimated from the differences of neighbours.

    With the defaults and ticks of 10 s a burst of a minute is no change, wherever in a tick it begins; in image traffic
    like the shipped hour's a doubled output length was detected after 104 s in the middle of 30 seeds, 166 s at most.
    Traffic of one request in two seconds is noisier: there a doubling takes longer. Raises ``ConfigError`` for values
    out of range.
    """

    def __init__(
        self,
        *,
        ratio: float = 2.0,
        certainty: float = 12.0,
        least: float = 3.0,
        burst: int = 7,
        warm: int = 12,
        noise: float = 0.0,
    ) -> None:
        positive = 0 < certainty < math.inf and 0 < least < math.inf
        if not (1 < ratio < math.inf and positive and warm >= 1 and burst >= 0):
            raise ConfigError(
                "a shift detector needs ratio above 1, certainty, least and warm above 0, burst of at least 0, "
                f"got {ratio}, {certainty}, {least}, {warm}, {burst}"
            )
        self.drift, self.certainty, self.least, self.warm = math.log(ratio) / 2, certainty, least, warm
        self.burst = burst
        self.count = 0
        self.mean = 0.0
        self._noise2 = noise**2
        self._last: float | None = None
        self._sums = [0.0, 0.0]  # up, down
        self._added: list[list[float]] = [[], []]  # what each value added to each sum, since it was 0

    @property
    def noise(self) -> float:
        """Standard deviation of the values, as estimated so far."""
        return math.sqrt(self._noise2)

    @property
    def threshold(self) -> float:
        """Sum above which a change is certain."""
        return max(self.least * self.drift, self.certainty * self._noise2 / (2 * self.drift))

    @property
    def strength(self) -> float:
        """The larger sum as a share of the threshold."""
        return max(self._sums) / self.threshold

    def add(self, value: float) -> int:
        """Add a value. Returns the number of values since a change that is now certain, this one included, or 0."""
        self.count += 1
        if self._last is None:
            self.mean = self._last = value
        half = self._clip(value - self._last) ** 2 / 2
        self._noise2 += (half - self._noise2) / min(self.count, _NOISE_TICKS) if self.count > 1 else 0.0
        self._last = value
        self.mean += self._clip(value - self.mean) / self.count
        off = self._clip(value - self.mean)
        for side, sign in enumerate((1, -1)):
            self._sums[side] = max(0.0, self._sums[side] + sign * off - self.drift)
            added = [*self._added[side][1 - _MOST_ADDED :], sign * off - self.drift]
            self._added[side] = added if self._sums[side] else []
        side = self._sums.index(max(self._sums))
        found = self.count > self.warm and self.strength > 1 and self._lasts(self._added[side])
        return len(self._added[side]) if found else 0

    def copy(self) -> PageHinkley:
        """Copy the test, to add values that may yet turn out to be others."""
        return deepcopy(self)

    def _lasts(self, added: list[float]) -> bool:
        """Check if what was added is enough without the burst that added most."""
        most = max(sum(added[start : start + self.burst]) for start in range(len(added)))
        return not self.burst or sum(added) - most > _AFTER_BURST * self.drift

    def _clip(self, off: float) -> float:
        most = 4 * self.drift
        return min(most, max(-most, off))


class DemandShift(msgspec.Struct, frozen=True, kw_only=True):
    """Lasting change of the demand of ``stage``.

    ``at_s`` (s): when it was detected. ``since_s`` (s): about when it began. ``before`` and ``after``: stage seconds a
    second by letter, until then and since. Times are of the rows' own clock.
    """

    at_s: float
    since_s: float
    stage: str
    before: dict[str, float]
    after: dict[str, float]

    @property
    def factor(self) -> float:
        """Demand of the stage after the change over that before; demands below ``NEGLIGIBLE`` count as that."""
        return max(NEGLIGIBLE, self.after[self.stage]) / max(NEGLIGIBLE, self.before[self.stage])

    def __str__(self) -> str:
        figures = ", ".join(f"{stage} {self.before[stage]:.3f} to {self.after[stage]:.3f}" for stage in all_letters())
        return f"at {self.at_s:,.0f} s: demand of {self.stage} x {self.factor:.2f} (stage seconds a second: {figures})"


class DriftDetector:
    """Detects shifts of stage demand in rows fed one after the other.

    Sums demand over ticks and tests the logarithms of each stage. A row counts once, in the tick in which it is first
    heard of: one that is fed while its request runs (``finish_reason`` "running", ``output_length`` what it has so far,
    ``latency_s`` since its arrival) as it arrives, one that is fed at its end alone, then. Of those that run, were
    refused or cut short the outputs count that ``OutputSurvival`` expects by the arrivals of a minute, estimated
    again at each tick. After a shift in one stage, all tests restart from its beginning.

    demand: predicts the stage seconds of a request.
    tick_s (s, 10): length of a tick, from 0.1 s to an hour.
    test (PageHinkley): makes the test of a stage, given the noise known so far.

    ``book`` has the rows of the last hour. Raises ``ConfigError`` for a tick out of range.
    """

    def __init__(self, demand: Demand, *, tick_s: float = 10.0, test: Callable[..., PageHinkley] = PageHinkley) -> None:
        if not 0.1 <= tick_s < KEEP_S:
            raise ConfigError(f"tick_s must be at least 0.1 s and less than an hour, got {tick_s!r} s")
        self.demand, self.tick_s, self._new = demand, tick_s, test
        self.now = -math.inf
        self.book = ArrivalBook()
        self._open, self._opened = DemandTick(), 0.0
        self._most = int(KEEP_S / tick_s)
        self._reset()

    def _reset(self) -> None:
        self._restart([], {stage: self._new() for stage in all_letters()}, -math.inf)

    def _restart(self, ticks: Iterable[DemandTick], tests: dict[str, PageHinkley], began: float) -> None:
        self._ticks, self._tests = deque(ticks), tests
        self._tested = 0  # ticks that are settled, and in the tests
        self._began = began  # s; of outputs before nothing is said of those since

    def feed(self, row: TraceRow, at_s: float | None = None) -> list[DemandShift]:
        """Add a row that became known at ``at_s`` (s; default: its end or, where it was not served, its arrival).

        Times must not fall; an earlier time counts as the latest one. Returns the shifts detected in ticks that have
        ended. Raises ``TraceError`` for a time that is not a finite number.
        """
        found = self.advance(known_at(row) if at_s is None else at_s)
        heard = self.book.add(row, self.now)
        if heard is not None:
            self._tick_of(row).add(heard, self.demand)
        return found

    def _tick_of(self, row: TraceRow) -> DemandTick:
        """Return the open tick or, of a running row, that of its arrival if that is still estimated."""
        ago = math.ceil((self._opened - row.timestamp / 1000) / self.tick_s) if row.finish_reason == RUNNING else 0
        return self._ticks[-ago] if 0 < ago <= len(self._ticks) - self._tested else self._open

    def advance(self, at_s: float) -> list[DemandShift]:
        """Advance the clock to ``at_s`` (s) without a row. Returns and raises as ``feed`` does."""
        if not math.isfinite(at_s):
            raise TraceError(f"a row's time must be a number of seconds, got {at_s!r}")
        if at_s - self.now > KEEP_S:  # the start, or a silence that outlasts all that is known
            self._reset()
            self.book.clear()
            self._open, self._opened = DemandTick(), at_s
        self.now = max(self.now, at_s)
        found = []
        while self._opened + self.tick_s <= self.now:
            self._opened += self.tick_s
            found += self._close()
        return found

    def _close(self) -> list[DemandShift]:
        self._ticks.append(self._open)
        self._open = DemandTick()
        self._estimate()
        if len(self._ticks) > self._most:
            self._ticks.popleft()
            self._tested = max(0, self._tested - 1)
        tests, began = self._test_ticks()
        if not any(began.values()):
            return []
        stage = max((each for each in began if began[each]), key=lambda each: tests[each].strength)
        return [self._restart_after_shift(stage, began[stage], tests)]

    def _estimate(self) -> None:
        """Estimate again the ticks that have rows of which the outputs were not known; settle those of long ago."""
        unsure = [tick for tick in islice(self._ticks, self._tested, None) if tick.expecting]
        if unsure:
            survival = self.book.survival(max(self._began, self._opened - RECENT_S), self._began)
            for tick in unsure:
                tick.estimate(self.demand, survival)
        for tick in islice(self._ticks, self._tested, max(0, len(self._ticks) - int(SETTLED_S / self.tick_s))):
            tick.settle()

    def _test_ticks(self) -> tuple[dict[str, PageHinkley], dict[str, int]]:
        """Return the tests after the last tick, and what they found with it.

        Settled ticks are tested once. Those after the first that is not are tested again each time, on copies.
        """
        tests, began = self._tests, dict.fromkeys(all_letters(), 0)
        for tick in list(islice(self._ticks, self._tested, None)):
            if tick.expecting and tests is self._tests:
                tests = {stage: test.copy() for stage, test in tests.items()}
            began = {stage: tests[stage].add(_log(tick.seconds[stage] / self.tick_s)) for stage in all_letters()}
            self._tested += tests is self._tests
        return tests, began

    def _restart_after_shift(self, stage: str, count: int, tests: Mapping[str, PageHinkley]) -> DemandShift:
        known, since_s = list(self._ticks), self._opened - count * self.tick_s
        before, after = known[:-count] or known[:1], known[-count:]
        self._restart(after, {each: self._new(noise=test.noise) for each, test in tests.items()}, since_s)
        self._estimate()
        return DemandShift(
            at_s=self._opened,
            since_s=since_s,
            stage=stage,
            before=_mean(before, self.tick_s),
            after=_mean(after, self.tick_s),
        )


def known_at(row: TraceRow) -> float:
    """Time in s at which all of a row is known: its end or, where it was not served, its arrival."""
    return row.timestamp / 1000 + (row.latency_s or 0.0)


def _log(seconds: float) -> float:
    return math.log(max(NEGLIGIBLE, seconds))


def _mean(ticks: Sequence[DemandTick], tick_s: float) -> dict[str, float]:
    """Mean stage seconds a second."""
    total = sum_by_stage(tick.seconds for tick in ticks)
    return {stage: seconds / (len(ticks) * tick_s) for stage, seconds in total.items()}
