"""Finds the deployment that serves most, in few replays: the race.

A failed replay rules out other placements by the instances it had too few of, in three cases that are clear enough to
count. Where first tokens are late and the instances that prefill, but do not decode, were busy nearly all the time, as
many or fewer of them are late as well, whatever the rest is. The same holds for instances that encode, where those were
busy all the time and prefill was not. Where too many of the requests whose first token was in time are late all the
same, there are too few instances that decode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import inf

from trinity.planner.candidates import Deployment
from trinity.planner.search import BoundedCandidate, SearchResult, rank_results, search_to_end
from trinity.planner.trials import Trials, rate_of, step_of
from trinity.stage_kinds import roles_of
from trinity.traces.goodput import RatePoint
from trinity.traces.trace import SLORule

BUSY = 0.9  # of the time at work: beyond, a group of instances is what others wait for


def race(trials: Trials, entries: Iterable[BoundedCandidate], known: Sequence[SearchResult] = ()) -> list[SearchResult]:
    """Search the best one's goodput in few replays; return the best first, then those that are beaten, by bound.

    - Next is the likely best: by its guess, corrected by how right guesses were of its method, and no higher than a
      rate at which it failed.
    - Until one holds, each is replayed at the rates at which its own search would begin.
    - From then on each is replayed once, at the next rate of the grid above the incumbent's. One that holds is searched
      as if it were alone, so its goodput is what ``search_all`` finds. It becomes the incumbent if it is better.
    - Skipped is one whose upper bound lies below that rate, and one that has no more instances of the roles of which
      another, at that rate or below it, had too few (``find_short_roles``).
    - ``known`` were searched before. The race ends once one holds and ``trials`` are out of runs.
    """
    field = _Field(trials, entries, known)
    while field.open and not (field.best and trials.out_of_runs):
        field.turn()
    return rank_results([*field.found, *(SearchResult(each.entry, False, None, each.bound) for each in field.open)])


class _Runner:
    """An entry that is not decided yet. ``cap``: a step at which it fails, or is assumed to."""

    def __init__(self, entry: BoundedCandidate) -> None:
        self.entry, self.kind = entry, entry.deployment.method
        self.expected, self.cap, self.asked = entry.guess, inf, 0

    @property
    def bound(self) -> float:
        return min(self.entry.upper, inf if self.cap == inf else rate_of(int(self.cap)))


class _Field:
    def __init__(self, trials: Trials, entries: Iterable[BoundedCandidate], known: Sequence[SearchResult]) -> None:
        self.trials, self.found = trials, list(known)
        done = {each.entry.deployment for each in known}
        self.open = [_Runner(entry) for entry in entries if entry.deployment not in done]
        self.best = max((each for each in known if each.step is not None), key=lambda each: each.score, default=None)
        self._right: dict[str, tuple[float, int]] = {}  # what was reached of guesses, by method: sum and count
        for each in known:
            self._learn(each.entry, each.rate if each.exact else each.bound)
        self._drop_beaten()

    def turn(self) -> None:
        """Run one more replay at least, or a whole search."""
        runner = max(self.open, key=self._prospect)
        if self.best is None:
            self._descend(runner)
        elif self.trials.holds(runner.entry.deployment, step := self._step(runner.entry)):
            self._search(runner)
        else:
            self._record_failure(runner, step)
        self._drop_beaten()

    def _prospect(self, runner: _Runner) -> float:
        right, count = self._right.get(runner.kind, (0.0, 0))
        expected = runner.expected * (right + 1) / (count + 1)
        return min(expected, runner.bound) * runner.entry.worth

    def _step(self, entry: BoundedCandidate) -> int:
        """Return the lowest step that beats the incumbent."""
        assert self.best is not None
        return step_of(self.best.score / entry.worth) + 1

    def _descend(self, runner: _Runner) -> None:
        """Replay the next rate at which its search begins, or search it: there is no incumbent yet."""
        steps = self.trials.first_steps(runner.entry.guess)
        if runner.asked == len(steps) or self.trials.holds(runner.entry.deployment, steps[runner.asked]):
            self._search(runner)
        else:
            self._record_failure(runner, steps[runner.asked])
            runner.asked += 1

    def _search(self, runner: _Runner) -> None:
        self.open.remove(runner)
        self.found.append(found := search_to_end(self.trials, runner.entry))
        self._learn(found.entry, found.rate)
        if found.step is not None and (self.best is None or found.score > self.best.score):
            self.best = found

    def _record_failure(self, runner: _Runner, step: int) -> None:
        """Record that it fails at a step, and so do those that are short of the same roles."""
        self._learn(runner.entry, rate_of(step))
        deployment = runner.entry.deployment
        short = find_short_roles(deployment, self.trials.point(deployment, step), self.trials.share, self.trials.rule)
        for each in self.open:
            if each is runner or (each.kind == runner.kind and has_no_more(each.entry.deployment, deployment, short)):
                each.cap, each.expected = min(each.cap, step), min(each.expected, rate_of(step))

    def _drop_beaten(self) -> None:
        """Drop those that cannot beat the incumbent."""
        if self.best is None:
            return
        still = []
        for each in self.open:
            step = self._step(each.entry)
            if each.entry.upper < rate_of(step) or each.cap <= step:
                self.found.append(SearchResult(each.entry, False, None, each.bound))
            else:
                still.append(each)
        self.open = still

    def _learn(self, entry: BoundedCandidate, reached: float) -> None:
        if 0 < entry.guess < inf:
            right, count = self._right.get(method := entry.deployment.method, (0.0, 0))
            self._right[method] = (right + min(reached / entry.guess, 1.0), count + 1)


def reaches(trials: Trials, entries: Iterable[BoundedCandidate], rate: float) -> BoundedCandidate | None:
    """Return the first that serves this rate; None where none does."""
    step = step_of(rate)
    step += rate_of(step) < rate * (1 - 1e-9)
    return next((each for each in entries if each.upper >= rate and trials.holds(each.deployment, step)), None)


def find_short_roles(deployment: Deployment, point: RatePoint, share: float, rule: SLORule) -> set[str]:
    """Find roles of which this deployment had too few to hold at a rate; none where that is not clear."""
    roles = {group.roles for group in deployment.placement.groups}
    if len(roles) < 2 or point.ttft_attainment < 0:
        return set()
    short = set()
    if point.ttft_attainment - point.attainment[rule] > (1 - share) * point.ttft_attainment:
        short |= {each for each in roles if roles_of(each).decodes}
    if point.ttft_attainment < share:
        prefill = {each for each in roles if roles_of(each).hands_kv_on}
        encode = {each for each in roles if roles_of(each).only_encodes}
        busy = {each for each in roles if point.load.get(each, 0.0) > BUSY}
        short |= prefill & busy or (busy & encode if prefill else set())  # what decodes is always at work
    return short


def has_no_more(other: Deployment, failed: Deployment, roles: Collection[str]) -> bool:
    """Check if another one has no more instances of one of these roles, all on one kind of device."""
    if not roles or len({*other.devices, *failed.devices}) > 1:
        return False
    theirs, own = _counts(other), _counts(failed)
    return any(theirs[each] <= own[each] for each in roles)


def _counts(deployment: Deployment) -> Counter[str]:
    counts: Counter[str] = Counter()
    for group in deployment.placement.groups:
        counts[group.roles] += group.count
    return counts
