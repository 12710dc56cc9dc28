"""Plans again after a shift of traffic on the requests since, and proposes another placement. Has no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from trinity.adapt.arrivals import KEEP_S
from trinity.adapt.drift import NEGLIGIBLE, DemandShift, DriftDetector
from trinity.errors import ConfigError, TrinityError
from trinity.placement import Placement
from trinity.traces import resample
from trinity.traces.trace import Trace, TraceRow

FALL_S = 300.0  # a fall of demand has lasted before it is planned for


class ScoredPlacement(Protocol):
    """Placement with its score, such as a ``trinity.planner.Candidate``; None where not searched to the end.

    ``screened``: by the screening engine, where that was only a stand-in.
    """

    @property
    def placement(self) -> str: ...
    @property
    def score(self) -> float | None: ...
    @property
    def screened(self) -> float | None: ...


class PlanResult(Protocol):
    """Result of a planner, such as a ``trinity.planner.Plan``; ``met``: whether any placement meets the SLO."""

    @property
    def best(self) -> ScoredPlacement: ...
    @property
    def candidates(self) -> Sequence[ScoredPlacement]: ...
    @property
    def met(self) -> bool: ...


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Proposal to run ``placement`` instead of ``instead_of``, because of ``shift``.

    ``at_s`` (s): when it was made. ``requests``: number of requests since the shift, on which ``plan`` is based.
    ``gain`` (factor): score over that of the present placement on these requests; infinite where that serves none.
    """

    at_s: float
    placement: str
    instead_of: str
    shift: DemandShift
    requests: int
    plan: Any
    gain: float

    def __str__(self) -> str:
        return (
            f"run {self.placement} instead of {self.instead_of} ({self.gain:.2f} times as good), planned on "
            f"{self.requests:,} requests; {self.shift}"
        )


def measure_gain(plan: PlanResult, present: str) -> float:
    """Gain of the best over the present placement; infinite over a score of 0.

    By the screening engine's figures where the cores were not asked about the present one. Raises ``ConfigError`` where
    the plan knows neither.
    """
    same = [each for each in plan.candidates if each.placement == present]
    for best, known in (
        (plan.best.score, [each.score for each in same]),
        (plan.best.screened, [each.screened for each in same]),
    ):
        score = next((each for each in known if each is not None), None)
        if score is not None and best is not None:
            return best / score if score else math.inf
    raise ConfigError(
        f"the plan has no score of {present}, which runs now: pass it to the planner, planner.plan(trace, present)"
    )


class _Planning(NamedTuple):
    """Plan that is being made: for which shift, since when (s) requests count, how many, and beside which placement."""

    shift: DemandShift
    since_s: float
    requests: int
    placement: str


class _Level(NamedTuple):
    """Demand (stage seconds a second) that lasted from ``since_s`` until ``until_s`` (s)."""

    since_s: float
    until_s: float
    demand: Mapping[str, float]


def _is_fall(shift: DemandShift) -> bool:
    """Check if no stage's demand rises by more than what is never a shift."""
    return all(
        max(NEGLIGIBLE, shift.after[stage]) <= math.sqrt(2) * max(NEGLIGIBLE, seconds)
        for stage, seconds in shift.before.items()
    )


def _is_alike(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Check if no stage's demand differs by more than what is never a shift."""
    floored = [(max(NEGLIGIBLE, one[stage]), max(NEGLIGIBLE, other[stage])) for stage in one]
    return all(max(pair) <= math.sqrt(2) * min(pair) for pair in floored)


class Replanner:
    """Decides when to plan again and on which requests, and turns plans into proposals.

    ``feed`` returns a trace when a plan is due: the requests that came since the shift, running and refused ones with
    the outputs expected of them. Plan on it with ``placement`` evaluated too, and give the plan to ``propose``, or the
    error to ``record_failure``. Makes one plan at a time. Shifts during a plan or cool-down are planned for together,
    on the requests since the last of them. Plans for the present placement propose nothing, nor do those by which no
    placement meets the SLO. Tell ``set_placement`` when another placement runs.

    Traffic that swings is planned for as a whole: after a shift back to a demand of the last hour, within the square
    root of 2 in each stage, the trace has all requests since that demand began. A fall, in which no stage's demand
    rises, is planned for once it has lasted five minutes: what runs serves it meanwhile.

    watch: detects shifts.
    placement: the placement that runs.
    cooldown_s (s, 600): no plan is made for this long after a proposal.
    requests (requests, 4000): requests that a plan needs (of 1,000 long ones the last end so late that completions seem
        not to keep up); fewer are resampled (``traces.resample``), and so are
        more than four times as many.
    least (requests, 50): fewest requests since a shift to plan on.
    least_gain (factor, 1.1): proposals that gain less are dropped; at least 1.
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
        least_gain: float = 1.1,
        seed: int = 0,
    ) -> None:
        if not 0 <= cooldown_s < math.inf or not 1 <= least <= requests:
            raise ConfigError(
                f"cooldown_s must be at least 0 and least between 1 and requests, got {cooldown_s}, {least}, {requests}"
            )
        if not 1 <= least_gain < math.inf:
            raise ConfigError(
                f"least_gain must be at least 1, the score of what runs, got {least_gain}: 1.1 asks for 10 %"
            )
        self.watch, self.placement = watch, str(Placement.parse(placement))
        self.cooldown_s, self.requests, self.least, self.seed = cooldown_s, requests, least, seed
        self.least_gain = least_gain
        self.shifts: deque[DemandShift] = deque(maxlen=1000)
        self.error: TrinityError | None = None
        self._levels: deque[_Level] = deque(maxlen=100)
        self._pending: tuple[DemandShift, float] | None = None  # to plan for, and since when (s)
        self._planning: _Planning | None = None
        self._planned: _Planning | None = None  # the last one
        self._quiet_until = -math.inf

    def feed(self, row: TraceRow, at_s: float | None = None) -> Trace | None:
        """Add a row, as ``DriftDetector.feed`` does. Returns a trace when a plan is due, else None."""
        for shift in self.watch.feed(row, at_s):
            self.shifts.append(shift)
            self._pending = shift, self._since(shift)
        return self._trace_to_plan_on()

    def _since(self, shift: DemandShift) -> float:
        """Since when (s) requests are like those to come: the shift or, where it is one back, what it goes back to."""
        while self._levels and self._levels[0].until_s < shift.at_s - KEEP_S:
            self._levels.popleft()
        began = self._levels[-1].until_s if self._levels else -math.inf
        found = [level.since_s for level in self._levels if _is_alike(level.demand, shift.after)]
        self._levels.append(_Level(began, shift.since_s, shift.before))
        return min(found, default=shift.since_s)

    def _trace_to_plan_on(self) -> Trace | None:
        if self._pending is None or self._planning is not None or self.watch.now < self._quiet_until:
            return None
        shift, since_s = self._pending
        if _is_fall(shift) and self.watch.now < shift.since_s + FALL_S:
            return None
        if self.watch.book.count_since(since_s) < self.least:
            return None
        seen = self.watch.book.expected_since(since_s)
        self._planning, self._pending = _Planning(shift, since_s, len(seen), self.placement), None
        count = max(self.requests, min(len(seen), 4 * self.requests))
        return seen if len(seen) == count else resample(seen, count, seed=self.seed)

    def propose(self, plan: PlanResult) -> Proposal | None:
        """Turn the plan for the last trace into a proposal; None where the placement stays or the gain is too small.

        None as well where another placement has come to run since the trace was returned: the plan did not evaluate
        that one, and is made again. Raises ``ConfigError`` where the plan has no score of the present placement.
        """
        made = self._end_planning()
        if made.placement != self.placement:
            self.plan_again()
            return None
        if not plan.met or plan.best.placement == self.placement:
            return None
        gain = measure_gain(plan, self.placement)
        if gain < self.least_gain:
            return None
        self._quiet_until = self.watch.now + self.cooldown_s
        return Proposal(
            at_s=self.watch.now,
            placement=plan.best.placement,
            instead_of=self.placement,
            shift=made.shift,
            requests=made.requests,
            plan=plan,
            gain=gain,
        )

    def record_failure(self, error: TrinityError) -> None:
        """Record in ``error`` why no plan could be made. The next shift is planned for all the same."""
        self._end_planning()
        self.error = error

    def set_placement(self, placement: str) -> None:
        """Record that another placement runs now."""
        self.placement = str(Placement.parse(placement))

    def plan_again(self) -> None:
        """Have the next ``feed`` ask again for the last plan, on the requests that have come since; no cool-down holds.

        Where a newer shift waits, the plan is for that. Nothing happens while a plan is made, or if none ever was.
        """
        if self._planning is None and self._planned is not None:
            self._quiet_until = -math.inf
            self._pending = self._pending or (self._planned.shift, self._planned.since_s)

    def _end_planning(self) -> _Planning:
        if self._planning is None:
            raise ConfigError("no plan is due: give feed() rows until it returns a trace to plan on")
        self._planned, self._planning = self._planning, None
        return self._planned
