"""Detects shifts of stage demand in traffic, replans on the requests since, and proposes another placement.

Has no clock and never waits: takes rows with their times, returns what to do. ``trinity.adapt.proposals`` runs it
beside a pipeline.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from trinity.costs.demand import Demand, sum_by_stage
from trinity.errors import ConfigError, TraceError, TrinityError
from trinity.placement import STAGES
from trinity.traces import resample
from trinity.traces.trace import Trace, TraceRow

NEGLIGIBLE = 1e-3  # stage seconds a second, a thousandth of one device; smaller demands count as this
_KEEP_S = 3600.0  # of traffic that is remembered; after a longer silence all starts anew
_NOISE_TICKS = 60  # over which the noise is averaged
_KEEP_ROWS = 100_000


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
    warm (values, 12): no change is detected in the first ones.
    noise (0): initial standard deviation of the values; estimated from the differences of neighbours.

    With the defaults and ticks of 10 s, image traffic like the shipped hour's gave no alarm in 200 hours of its own
    resampled ticks; a doubled output length was detected within 90 s. Traffic of one request in two seconds is noisier:
    there a doubling takes minutes. Raises ``ConfigError`` for values out of range.
    """

    def __init__(
        self, *, ratio: float = 2.0, certainty: float = 12.0, least: float = 3.0, warm: int = 12, noise: float = 0.0
    ) -> None:
        if not (1 < ratio < math.inf and 0 < certainty < math.inf and 0 < least < math.inf and warm >= 1):
            raise ConfigError(
                "a shift detector needs ratio above 1, certainty, least and warm above 0, "
                f"got {ratio}, {certainty}, {least}, {warm}"
            )
        self.drift, self.certainty, self.least, self.warm = math.log(ratio) / 2, certainty, least, warm
        self.count = 0
        self.mean = 0.0
        self._noise2 = noise**2
        self._last: float | None = None
        self._sums = [0.0, 0.0]  # up, down
        self._since = [0, 0]  # values in each sum

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
            self._since[side] = self._since[side] + 1 if self._sums[side] else 0
        found = self.count > self.warm and self.strength > 1
        return self._since[self._sums.index(max(self._sums))] if found else 0

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
        figures = ", ".join(f"{stage} {self.before[stage]:.3f} to {self.after[stage]:.3f}" for stage in STAGES)
        return f"at {self.at_s:,.0f} s: demand of {self.stage} x {self.factor:.2f} (stage seconds a second: {figures})"


class DriftDetector:
    """Detects shifts of stage demand in rows fed one after the other.

    Sums demand over ticks and tests the logarithms of each stage. After a shift in one stage, all tests restart from
    its beginning.

    demand: predicts the stage seconds of a request.
    tick_s (s, 10): length of a tick, from 0.1 s to an hour.
    test (PageHinkley): makes the test of a stage, given the noise known so far.

    Raises ``ConfigError`` for a tick out of range.
    """

    def __init__(self, demand: Demand, *, tick_s: float = 10.0, test: Callable[..., PageHinkley] = PageHinkley) -> None:
        if not 0.1 <= tick_s < _KEEP_S:
            raise ConfigError(f"tick_s must be at least 0.1 s and less than an hour, got {tick_s!r} s")
        self.demand, self.tick_s, self._new = demand, tick_s, test
        self.now = -math.inf
        self._open: dict[str, float] = {}
        self._opened = 0.0
        self._reset()

    def _reset(self) -> None:
        self._tests = {stage: self._new() for stage in STAGES}
        self._ticks: deque[dict[str, float]] = deque(maxlen=int(_KEEP_S / self.tick_s))

    def feed(self, row: TraceRow, at_s: float | None = None) -> list[DemandShift]:
        """Add a row that became known at ``at_s`` (s; default: its end or, where it was not served, its arrival).

        Times must not fall; an earlier time counts as the latest one. Returns the shifts detected in ticks that have
        ended. Raises ``TraceError`` for a time that is not a finite number.
        """
        found = self.advance(known_at(row) if at_s is None else at_s)
        self._open = sum_by_stage((self._open, self.demand.of(row))) if self._open else self.demand.of(row)
        return found

    def advance(self, at_s: float) -> list[DemandShift]:
        """Advance the clock to ``at_s`` (s) without a row. Returns and raises as ``feed`` does."""
        if not math.isfinite(at_s):
            raise TraceError(f"a row's time must be a number of seconds, got {at_s!r}")
        if at_s - self.now > _KEEP_S:  # the start, or a silence that outlasts all that is known
            self._reset()
            self._open, self._opened = {}, at_s
        self.now = max(self.now, at_s)
        found = []
        while self._opened + self.tick_s <= self.now:
            self._opened += self.tick_s
            found += self._close()
            self._open = {}
        return found

    def _close(self) -> list[DemandShift]:
        seconds = {stage: self._open.get(stage, 0.0) / self.tick_s for stage in STAGES}
        self._ticks.append(seconds)
        began = {stage: self._tests[stage].add(_log(value)) for stage, value in seconds.items()}
        if not any(began.values()):
            return []
        stage = max(began, key=lambda each: self._tests[each].strength)
        return [self._restart_after_shift(stage, began[stage])]

    def _restart_after_shift(self, stage: str, ticks: int) -> DemandShift:
        known = list(self._ticks)
        before, after = known[:-ticks] or known[:1], known[-ticks:]
        self._tests = {each: self._new(noise=test.noise) for each, test in self._tests.items()}
        self._ticks.clear()
        for tick in after:
            self._ticks.append(tick)
            for each, seconds in tick.items():
                self._tests[each].add(_log(seconds))
        return DemandShift(
            at_s=self._opened,
            since_s=self._opened - ticks * self.tick_s,
            stage=stage,
            before=_mean(before),
            after=_mean(after),
        )


def known_at(row: TraceRow) -> float:
    """Time in s at which all of a row is known: its end or, where it was not served, its arrival."""
    return row.timestamp / 1000 + (row.latency_s or 0.0)


def _log(seconds: float) -> float:
    return math.log(max(NEGLIGIBLE, seconds))


def _mean(ticks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {stage: seconds / len(ticks) for stage, seconds in sum_by_stage(ticks).items()}


class ScoredPlacement(Protocol):
    """Placement with its score, such as a ``trinity.planner.Candidate``; None where not searched to the end."""

    @property
    def placement(self) -> str: ...
    @property
    def score(self) -> float | None: ...


class PlanResult(Protocol):
    """Result of a planner, such as a ``trinity.planner.Plan``."""

    @property
    def best(self) -> ScoredPlacement: ...
    @property
    def candidates(self) -> Sequence[ScoredPlacement]: ...


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Proposal to run ``placement`` instead of ``instead_of``, because of ``shift``.

    ``at_s`` (s): when it was made. ``requests``: number of requests since the shift, on which ``plan`` is based.
    ``gain`` (factor): score over that of the present placement; None where the present placement was not searched to
    the end (``strategy="exhaustive"`` does).
    """

    at_s: float
    placement: str
    instead_of: str
    shift: DemandShift
    requests: int
    plan: Any
    gain: float | None = None

    def __str__(self) -> str:
        better = (
            "gain unknown: the present placement was not searched to the end"
            if self.gain is None
            else f"{self.gain:.2f} times as good"
        )
        return (
            f"run {self.placement} instead of {self.instead_of} ({better}), planned on {self.requests:,} requests; "
            f"{self.shift}"
        )


def _gain(plan: PlanResult, present: str) -> float | None:
    """Gain of the best over the present placement; None where a score is unknown, infinite over a score of 0."""
    score = next((each.score for each in plan.candidates if each.placement == present), None)
    if score is None or plan.best.score is None:
        return None
    return plan.best.score / score if score else math.inf


class Replanner:
    """Decides when to plan again and on which requests, and turns plans into proposals.

    ``feed`` returns a trace when a plan is due; give the plan to ``propose``, or the error to ``record_failure``. Makes
    one plan at a time. Shifts during a plan or cool-down are planned for together, on the requests since the last of
    them. Plans for the present placement propose nothing. Tell ``set_placement`` when another placement runs.

    watch: detects shifts.
    placement: the placement that runs.
    cooldown_s (s, 600): no plan is made for this long after a proposal.
    requests (requests, 4000): requests that a plan needs (of 1,000 long ones the last end so late that completions seem
        not to keep up); fewer are resampled (``traces.resample``).
    least (requests, 50): fewest requests since a shift to plan on.
    least_gain (factor, 1.05): proposals known to gain less are dropped.
    seed (0): seed of resampling.

    Raises ``ConfigError`` for values out of range.
    """

    def __init__(
        self,
        watch: DriftDetector,
        placement: str,
        *,
        cooldown_s: float = 600.0,
        requests: int = 4000,
        least: int = 50,
        least_gain: float = 1.05,
        seed: int = 0,
    ) -> None:
        if not 0 <= cooldown_s < math.inf or not 1 <= least <= requests:
            raise ConfigError(
                f"cooldown_s must be at least 0 and least between 1 and requests, got {cooldown_s}, {least}, {requests}"
            )
        self.watch, self.placement = watch, placement
        self.cooldown_s, self.requests, self.least, self.seed = cooldown_s, requests, least, seed
        self.least_gain = least_gain
        self.shifts: deque[DemandShift] = deque(maxlen=1000)
        self.error: TrinityError | None = None
        self._rows: deque[tuple[float, TraceRow]] = deque(maxlen=_KEEP_ROWS)
        self._pending: DemandShift | None = None
        self._planning: tuple[DemandShift, int] | None = None
        self._quiet_until = -math.inf

    def feed(self, row: TraceRow, at_s: float | None = None) -> Trace | None:
        """Add a row, as ``DriftDetector.feed`` does. Returns a trace when a plan is due, else None."""
        for shift in self.watch.feed(row, at_s):
            self.shifts.append(shift)
            self._pending = shift
        self._rows.append((self.watch.now, row))
        while self._rows[0][0] < self.watch.now - _KEEP_S:
            self._rows.popleft()
        return self._trace_to_plan_on()

    def _trace_to_plan_on(self) -> Trace | None:
        if self._pending is None or self._planning is not None or self.watch.now < self._quiet_until:
            return None
        since = self._pending.since_s
        rows = [row for at_s, row in self._rows if at_s >= since]
        if len(rows) < self.least:
            return None
        self._planning, self._pending = (self._pending, len(rows)), None
        seen = Trace(row.request_at(row.timestamp) for row in rows)
        return seen if len(rows) >= self.requests else resample(seen, self.requests, seed=self.seed)

    def propose(self, plan: PlanResult) -> Proposal | None:
        """Turn the plan for the last trace into a proposal; None where the placement stays or the gain is too small."""
        shift, requests = self._end_planning()
        gain = _gain(plan, self.placement)
        if plan.best.placement == self.placement or (gain is not None and gain < self.least_gain):
            return None
        self._quiet_until = self.watch.now + self.cooldown_s
        return Proposal(
            at_s=self.watch.now,
            placement=plan.best.placement,
            instead_of=self.placement,
            shift=shift,
            requests=requests,
            plan=plan,
            gain=gain,
        )

    def record_failure(self, error: TrinityError) -> None:
        """Record in ``error`` why no plan could be made. The next shift is planned for all the same."""
        self._end_planning()
        self.error = error

    def set_placement(self, placement: str) -> None:
        """Record that another placement runs now."""
        self.placement = placement

    def _end_planning(self) -> tuple[DemandShift, int]:
        if self._planning is None:
            raise ConfigError("no plan is due: give feed() rows until it returns a trace to plan on")
        done, self._planning = self._planning, None
        return done
