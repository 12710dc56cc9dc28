"""Finds the deployment that serves most, in few replays: the race."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from trinity.planner.pruning import find_short_roles, has_no_more
from trinity.planner.search import BoundedCandidate, SearchResult, rank_results, search_to_end
from trinity.planner.trials import Trials, rate_of, step_of


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
