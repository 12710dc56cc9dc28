"""Watch traffic for a shift of stage demand, plan again on what came since, and propose another placement.

Nothing here has a clock or waits: rows go in with their times, what is to be done comes out.
``trinity.adapt.proposals`` runs it beside a pipeline.
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

NEGLIGIBLE = 1e-3  # stage seconds a second, a thousandth of one device: less counts as this much
_KEEP_S = 3600.0  # of traffic that is looked back on; after a longer silence all starts anew
_NOISE_TICKS = 60  # over which the noise is averaged
_KEEP_ROWS = 100_000


class PageHinkley:
    """Page-Hinkley test of the mean of logarithms, both ways (Page 1954, Hinkley 1971).

    Sums how far each value lies from the mean since the start, beyond half of log ``ratio``: a lasting change by less
    than the square root of ``ratio`` never sums up, one by ``ratio`` does at half of log ``ratio`` a value. A change
    is found when a sum exceeds what ``least`` values after such a change sum up to, or ``certainty`` · noise² /
    log ``ratio`` where that is more: with independent normal values a false alarm then takes in the order of
    e^certainty of them, with bursts that last fewer. ``noise`` is their standard deviation, taken from the differences
    of neighbours. One value counts as no further from the mean than twice log ``ratio``. No change is found in the
    first ``warm``.

    With the defaults and ticks of 10 s, image traffic as the shipped hour's gave no alarm in 200 hours of its own ticks
    drawn anew; a doubled output length was found within 90 s. Traffic of one request in two seconds is noisier: there a
    doubling takes minutes.
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
        return math.sqrt(self._noise2)

    @property
    def threshold(self) -> float:
        return max(self.least * self.drift, self.certainty * self._noise2 / (2 * self.drift))

    @property
    def strength(self) -> float:
        """The larger sum as a share of the threshold."""
        return max(self._sums) / self.threshold

    def add(self, value: float) -> int:
        """How many values ago a change began that is now certain, this one included; 0 where there is none."""
        self.count += 1
        if self._last is None:
            self.mean = self._last = value
        half = self._clipped(value - self._last) ** 2 / 2
        self._noise2 += (half - self._noise2) / min(self.count, _NOISE_TICKS) if self.count > 1 else 0.0
        self._last = value
        self.mean += self._clipped(value - self.mean) / self.count
        off = self._clipped(value - self.mean)
        for side, sign in enumerate((1, -1)):
            self._sums[side] = max(0.0, self._sums[side] + sign * off - self.drift)
            self._since[side] = self._since[side] + 1 if self._sums[side] else 0
        found = self.count > self.warm and self.strength > 1
        return self._since[self._sums.index(max(self._sums))] if found else 0

    def _clipped(self, off: float) -> float:
        most = 4 * self.drift
        return min(most, max(-most, off))


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """A lasting change of demand, found at ``at_s`` in stage ``stage``; it began about ``since_s``.

    ``before`` and ``after``: stage seconds a second by letter, up to then and since. Seconds of the rows' own clock.
    """

    at_s: float
    since_s: float
    stage: str
    before: dict[str, float]
    after: dict[str, float]

    @property
    def factor(self) -> float:
        """How many times as much its stage is asked for, less than ``NEGLIGIBLE`` counted as that."""
        return max(NEGLIGIBLE, self.after[self.stage]) / max(NEGLIGIBLE, self.before[self.stage])

    def __str__(self) -> str:
        figures = ", ".join(f"{stage} {self.before[stage]:.3f} to {self.after[stage]:.3f}" for stage in STAGES)
        return f"at {self.at_s:,.0f} s: demand of {self.stage} x {self.factor:.2f} (stage seconds a second: {figures})"


class Watch:
    """Finds shifts of stage demand in rows fed one after the other.

    Demand is summed over ticks of ``tick_s`` seconds; ``test`` makes the test that each stage's logarithms go through,
    with the noise known so far. After a shift in one stage all start anew from where it began.
    """

    def __init__(self, demand: Demand, *, tick_s: float = 10.0, test: Callable[..., PageHinkley] = PageHinkley) -> None:
        if not 0.1 <= tick_s < _KEEP_S:
            raise ConfigError(f"a tick lasts at least 0.1 s and less than an hour, got {tick_s!r} s")
        self.demand, self.tick_s, self._new = demand, tick_s, test
        self.now = -math.inf
        self._open: dict[str, float] = {}
        self._opened = 0.0
        self._reset()

    def _reset(self) -> None:
        self._tests = {stage: self._new() for stage in STAGES}
        self._ticks: deque[dict[str, float]] = deque(maxlen=int(_KEEP_S / self.tick_s))

    def feed(self, row: TraceRow, at_s: float | None = None) -> list[Shift]:
        """A row that became known at ``at_s``: when it ended or, where it was not served, when it arrived.

        Times must not fall; one that does counts as the latest. Gives the shifts found in ticks that are over now.
        Raises ``TraceError`` where a time is not a number.
        """
        found = self.until(known_at(row) if at_s is None else at_s)
        self._open = sum_by_stage((self._open, self.demand.of(row))) if self._open else self.demand.of(row)
        return found

    def until(self, at_s: float) -> list[Shift]:
        """Nothing more came before ``at_s``."""
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

    def _close(self) -> list[Shift]:
        seconds = {stage: self._open.get(stage, 0.0) / self.tick_s for stage in STAGES}
        self._ticks.append(seconds)
        began = {stage: self._tests[stage].add(_log(value)) for stage, value in seconds.items()}
        if not any(began.values()):
            return []
        stage = max(began, key=lambda each: self._tests[each].strength)
        return [self._shifted(stage, began[stage])]

    def _shifted(self, stage: str, ticks: int) -> Shift:
        known = list(self._ticks)
        before, after = known[:-ticks] or known[:1], known[-ticks:]
        self._tests = {each: self._new(noise=test.noise) for each, test in self._tests.items()}
        self._ticks.clear()
        for tick in after:
            self._ticks.append(tick)
            for each, seconds in tick.items():
                self._tests[each].add(_log(seconds))
        return Shift(
            at_s=self._opened,
            since_s=self._opened - ticks * self.tick_s,
            stage=stage,
            before=_mean(before),
            after=_mean(after),
        )


def known_at(row: TraceRow) -> float:
    """Seconds at which all of a row was known: its end or, where it was not served, its arrival."""
    return row.timestamp / 1000 + (row.latency_s or 0.0)


def _log(seconds: float) -> float:
    return math.log(max(NEGLIGIBLE, seconds))


def _mean(ticks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {stage: seconds / len(ticks) for stage, seconds in sum_by_stage(ticks).items()}


class Candidate(Protocol):
    """A ``trinity.planner.Candidate``: ``score`` is None where it was not searched to the end."""

    @property
    def placement(self) -> str: ...
    @property
    def score(self) -> float | None: ...


class Planned(Protocol):
    """What a planner gives: a ``trinity.planner.Plan``."""

    @property
    def best(self) -> Candidate: ...
    @property
    def candidates(self) -> Sequence[Candidate]: ...


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """To run ``placement`` instead of ``instead_of``, as ``plan`` says, because of ``shift``.

    ``at_s``: when it was made. ``requests``: how many had come since the shift, from which it was planned. ``gain``:
    how many times the present placement's score it reaches; None where the plan does not say, because the present
    placement was not searched to the end (``strategy="exhaustive"`` does).
    """

    at_s: float
    placement: str
    instead_of: str
    shift: Shift
    requests: int
    plan: Any
    gain: float | None = None

    def __str__(self) -> str:
        better = "by how much it is better was not searched" if self.gain is None else f"{self.gain:.2f} times as good"
        return (
            f"run {self.placement} instead of {self.instead_of} ({better}), planned on {self.requests:,} requests; "
            f"{self.shift}"
        )


def _gain(plan: Planned, present: str) -> float | None:
    """Of the best over the present placement, where both scores are known; infinite over one that reaches nothing."""
    score = next((each.score for each in plan.candidates if each.placement == present), None)
    if score is None or plan.best.score is None:
        return None
    return plan.best.score / score if score else math.inf


class Redeploy:
    """When to plan again, and on what; whether that is a proposal.

    ``feed`` gives a trace when one is to be planned on; then ``planned`` takes the plan, or ``failed`` the error. One
    plan is made at a time, and none for ``cooldown_s`` after a proposal: shifts found meanwhile are planned for
    together, on the requests since the last of them. ``requests`` is how many a plan needs (of 1,000 long ones the
    last end so late that completions seem not to keep up): where fewer have come, they are drawn again
    (``traces.resample``), once ``least`` are there. A plan for the present placement proposes nothing, nor does one
    that is known to gain less than ``least_gain``. ``applied`` says that another placement runs now.
    """

    def __init__(
        self,
        watch: Watch,
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
                f"cooldown_s is at least 0 and least lies between 1 and requests, got {cooldown_s}, {least}, {requests}"
            )
        self.watch, self.placement = watch, placement
        self.cooldown_s, self.requests, self.least, self.seed = cooldown_s, requests, least, seed
        self.least_gain = least_gain
        self.shifts: deque[Shift] = deque(maxlen=1000)
        self.error: TrinityError | None = None
        self._rows: deque[tuple[float, TraceRow]] = deque(maxlen=_KEEP_ROWS)
        self._pending: Shift | None = None
        self._planning: tuple[Shift, int] | None = None
        self._quiet_until = -math.inf

    def feed(self, row: TraceRow, at_s: float | None = None) -> Trace | None:
        """See ``Watch.feed``. Gives a trace when a plan is due."""
        for shift in self.watch.feed(row, at_s):
            self.shifts.append(shift)
            self._pending = shift
        self._rows.append((self.watch.now, row))
        while self._rows[0][0] < self.watch.now - _KEEP_S:
            self._rows.popleft()
        return self._due()

    def _due(self) -> Trace | None:
        if self._pending is None or self._planning is not None or self.watch.now < self._quiet_until:
            return None
        since = self._pending.since_s
        rows = [row for at_s, row in self._rows if at_s >= since]
        if len(rows) < self.least:
            return None
        self._planning, self._pending = (self._pending, len(rows)), None
        seen = Trace(row.request_at(row.timestamp) for row in rows)
        return seen if len(rows) >= self.requests else resample(seen, self.requests, seed=self.seed)

    def planned(self, plan: Planned) -> Proposal | None:
        """The plan for the trace that was given; a proposal where it is for another placement, and worth it."""
        shift, requests = self._done()
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

    def failed(self, error: TrinityError) -> None:
        """No plan could be made; ``self.error`` keeps why. The next shift is planned for all the same."""
        self._done()
        self.error = error

    def applied(self, placement: str) -> None:
        self.placement = placement

    def _done(self) -> tuple[Shift, int]:
        if self._planning is None:
            raise ConfigError("no plan was asked for: give feed() rows until it returns a trace to plan on")
        done, self._planning = self._planning, None
        return done
