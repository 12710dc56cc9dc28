"""ApplyGuard: decides whether a proposal is applied, waits, or no longer holds. Has no clock and applies nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from trinity.adapt.replanner import Proposal
from trinity.errors import ConfigError
from trinity.errors.arguments import Number, Positive, Whole, check_struct
from trinity.placement import Placement

HOUR_S = 3600.0
Verdict = Literal["applies", "applied", "held back", "planned again", "dropped", "failed"]


class ApplyRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules by which proposals apply themselves. Raises ``ConfigError`` for values out of range.

    - ``least_gain`` (factor, 1.1): proposals that gain less are dropped; at least 1.
    - ``cooldown_s`` (seconds, 600): nothing is applied for this long after an apply, or one that failed.
    - ``most_per_hour`` (count, 3): most applies that begin within any hour, failed ones too.
    - ``fresh_s`` (seconds, 60): a proposal that has waited longer is planned again before it is applied.
    - ``retry_s`` (seconds, 5): pause after the pipeline has refused a change, as one that is under way.
    - ``tries`` (count, 2): a placement that has failed so often within an hour is not tried again.
    """

    least_gain: float = 1.1
    cooldown_s: Number = 600.0
    most_per_hour: Whole = 3
    fresh_s: Positive = 60.0
    retry_s: Positive = 5.0
    tries: Whole = 2

    def __post_init__(self) -> None:
        check_struct(self)
        if self.least_gain < 1:
            raise ConfigError(
                f"least_gain must be at least 1, the score of what runs, got {self.least_gain:g}: 1.1 asks for 10 %"
            )


class ApplyDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Record of what became of a proposal, and why.

    ``at_s`` (s): when, by the clock of whoever asks the guard. ``verdict``: "applies", then "applied" or "failed", or
    "held back" again where the pipeline refused it; "held back" once for each reason; "planned again" and "dropped"
    end a proposal without an apply.
    """

    at_s: float
    verdict: Verdict
    because: str
    proposal: Proposal

    def __str__(self) -> str:
        return f"{self.proposal.placement} instead of {self.proposal.instead_of} {self.verdict}: {self.because}"


class _Waiting(NamedTuple):
    """Proposal that waits, and since when (s)."""

    proposal: Proposal
    since_s: float


class _Begun(NamedTuple):
    """Apply that was begun at a time (s), and the placement."""

    at_s: float
    placement: str


class ApplyGuard:
    """State machine of proposals that apply themselves: a least gain, a cool-down, and at most so many an hour.

    Give it each proposal (``offer``), and ask it now and then (``look``). It says "applies" once; answer with
    ``succeed``, ``refuse`` (the pipeline cannot be changed just now: it waits and looks again) or ``fail``. It says
    "planned again" where a proposal has waited too long or is for another placement than runs by now: it no longer
    speaks of what is there. At most one proposal waits; a newer one replaces it. Times (s) are of any clock, and must
    not fall. ``decisions`` has the last thousand.
    """

    def __init__(self, rules: ApplyRules | None = None) -> None:
        self.rules = rules or ApplyRules()
        self.decisions: deque[ApplyDecision] = deque(maxlen=1000)
        self._waiting: _Waiting | None = None
        self._applying: _Waiting | None = None
        self._begun: deque[_Begun] = deque()  # in the last hour
        self._failures: deque[_Begun] = deque()
        self._cool_until = self._refused_until = float("-inf")
        self._held_for = ""  # kind of reason that was recorded for the one that waits

    @property
    def waiting(self) -> Proposal | None:
        """The proposal that waits."""
        return self._waiting.proposal if self._waiting else None

    @property
    def applying(self) -> Proposal | None:
        """The proposal that is being applied."""
        return self._applying.proposal if self._applying else None

    def offer(self, proposal: Proposal, now: float) -> ApplyDecision | None:
        """Take a proposal in. Returns a decision where it was dropped at once, None where it waits: ``look`` then."""
        if proposal.gain < self.rules.least_gain:
            because = f"it gains {proposal.gain:.2f}, less than {self.rules.least_gain:g}"
            return self._record(now, "dropped", because, proposal)
        if self._waiting is not None:
            self._record(now, "dropped", "a newer proposal came", self._waiting.proposal)
        self._waiting, self._held_for = _Waiting(proposal, now), ""
        return None

    def look(self, now: float, present: str, obstacle: str = "") -> ApplyDecision | None:
        """Decide about the proposal that waits. Returns what is new, None where nothing is.

        present: the placement that runs. obstacle: why no change can be made just now; empty where one can.
        """
        if self._waiting is None:
            return None
        proposal, since_s = self._waiting
        if self._applying is not None:
            return self._hold(now, "applying", f"{self._applying.proposal.placement} is being applied")
        if has_same_roles(present, proposal.placement):
            return self._end(now, "dropped", f"{proposal.placement} runs already")
        if held := next(self._iter_obstacles(now, obstacle), None):
            return self._hold(now, *held)
        if self._has_failed(now, proposal.placement):
            return self._end(now, "dropped", f"{proposal.placement} has failed {self.rules.tries} times within an hour")
        if not has_same_roles(present, proposal.instead_of):
            return self._end(now, "planned again", f"{present} runs by now")
        if now - since_s > self.rules.fresh_s:
            return self._end(now, "planned again", f"it has waited for {now - since_s:,.0f} s")
        self._applying, self._waiting = self._waiting, None
        self._begun.append(_Begun(now, proposal.placement))
        return self._record(now, "applies", f"it gains {proposal.gain:.2f}", proposal)

    def _iter_obstacles(self, now: float, obstacle: str) -> Iterator[tuple[str, str]]:
        """Iterate over what holds any proposal back now: the kind of reason, and the reason."""
        if now < self._cool_until:
            yield "cooling", f"{self._cool_until - now:,.0f} s of the cool-down are left"
        while self._begun and self._begun[0].at_s <= now - HOUR_S:
            self._begun.popleft()
        if len(self._begun) >= self.rules.most_per_hour:
            yield "hour", f"{len(self._begun)} applies have begun within an hour"
        if obstacle:
            yield "obstacle", obstacle
        if now < self._refused_until:
            yield "refused", "the pipeline has just refused a change"

    def _has_failed(self, now: float, placement: str) -> bool:
        while self._failures and self._failures[0].at_s <= now - HOUR_S:
            self._failures.popleft()
        return sum(has_same_roles(each.placement, placement) for each in self._failures) >= self.rules.tries

    def succeed(self, now: float, because: str = "") -> ApplyDecision:
        """Record that what was applied runs now."""
        proposal = self._end_apply()
        self._cool_until = now + self.rules.cooldown_s
        return self._record(now, "applied", because or "it runs now", proposal)

    def refuse(self, now: float, why: str) -> ApplyDecision:
        """Record that the pipeline could not be changed just now, and nothing was: the proposal waits again."""
        applying, self._refused_until = self._applying, now + self.rules.retry_s
        proposal = self._end_apply()
        self._begun.pop()
        if self._waiting is not None:
            return self._record(now, "dropped", "a newer proposal came", proposal)
        self._waiting, self._held_for = applying, "refused"
        return self._record(now, "held back", why, proposal)

    def fail(self, now: float, why: str) -> ApplyDecision:
        """Record that an apply failed. It waits again, to be planned again once the cool-down is over."""
        applying, proposal = self._applying, self._end_apply()
        self._cool_until = now + self.rules.cooldown_s
        self._failures.append(_Begun(now, proposal.placement))
        if self._waiting is None:
            self._waiting, self._held_for = applying, "cooling"
        return self._record(now, "failed", why, proposal)

    def _end_apply(self) -> Proposal:
        if self._applying is None:
            raise ConfigError('nothing is being applied: look() says "applies" first')
        done, self._applying = self._applying.proposal, None
        return done

    def _hold(self, now: float, kind: str, because: str) -> ApplyDecision | None:
        assert self._waiting is not None
        if kind == self._held_for:
            return None
        self._held_for = kind
        return self._record(now, "held back", because, self._waiting.proposal)

    def _end(self, now: float, verdict: Verdict, because: str) -> ApplyDecision:
        assert self._waiting is not None
        proposal, self._waiting = self._waiting.proposal, None
        return self._record(now, verdict, because, proposal)

    def _record(self, now: float, verdict: Verdict, because: str, proposal: Proposal) -> ApplyDecision:
        made = ApplyDecision(at_s=now, verdict=verdict, because=because, proposal=proposal)
        self.decisions.append(made)
        return made


def has_same_roles(one: str, other: str) -> bool:
    """Check if two placements have as many instances of each role, in whatever order they name them."""
    return _list_roles(one) == _list_roles(other)


def _list_roles(placement: str) -> list[str]:
    return sorted(roles for _, roles in Placement.parse(placement).instances())
