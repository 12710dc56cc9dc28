"""Which deployment serves most: the race, and all of them to the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from trinity.planner.candidates import Deployment
from trinity.planner.trials import Trials, rate_of, step_of


class Entry(NamedTuple):
    """A deployment with its bounds in requests/s, and what a request a second of it is worth (1, or 1 / price)."""

    deployment: Deployment
    upper: float
    nominal: float
    worth: float = 1.0


class Found(NamedTuple):
    """``step``: the highest rate of the grid at which it holds, None where none does; of an ``exact`` one.

    Else only ``bound`` is known: requests/s that it does not reach. ``value``: its score, where that is no rate.
    """

    entry: Entry
    exact: bool
    step: int | None
    bound: float
    value: float | None = None

    @property
    def rate(self) -> float:
        return 0.0 if self.step is None else rate_of(self.step)

    @property
    def score(self) -> float:
        return self.rate * self.entry.worth if self.value is None else self.value


def exhaustive(trials: Trials, entries: Iterable[Entry]) -> list[Found]:
    """Each one's goodput to the end, best first; those that are equal in the order of their nominal bounds."""
    return ranked([_searched(trials, entry) for entry in entries])


def by_nominal(entries: Iterable[Entry]) -> list[Entry]:
    """The likely best first."""
    return sorted(entries, key=lambda entry: -entry.nominal * entry.worth)


def race(trials: Trials, entries: Iterable[Entry], known: Sequence[Found] = (), *, margin: float = inf) -> list[Found]:
    """The best one's goodput, with few replays: best first, then those that are beaten, by their bounds.

    Each in turn is asked once whether it holds at the next rate of the grid above the incumbent's; one that does is
    searched on and becomes the incumbent: so of equal ones the first stays. One whose upper bound lies below that rate
    is not asked, nor one whose nominal bound lies below it by more than ``margin``. ``known`` were searched before.
    """
    found = list(known)
    done = {each.entry.deployment for each in known}
    best = max((each for each in known if each.step is not None), key=lambda each: each.score, default=None)
    left = _Left([entry for entry in entries if entry.deployment not in done], known, learns=margin < inf)
    while (entry := left.next()) is not None:
        outcome = _searched(trials, entry) if best is None else _challenged(trials, entry, best, margin)
        found.append(outcome)
        left.learn(outcome)
        if outcome.exact and outcome.step is not None:
            best = outcome
    return ranked(found)


class _Left:
    """Those that are not asked yet, in their order or, where it ``learns``, the likely best first.

    That is by nominal bounds, as far as these were right of others of the same method: of each method the nominally
    best one is next, so that one glance at every method finds it.
    """

    def __init__(self, entries: Sequence[Entry], known: Sequence[Found], *, learns: bool) -> None:
        self._learns = learns
        self._ratios: dict[str, tuple[float, int]] = {}  # reached over nominal: sum and count
        self._queues: dict[str, deque[tuple[float, int, Entry]]] = {}
        numbered = [(entry.nominal * entry.worth, -n, entry) for n, entry in enumerate(entries)]
        for each in sorted(numbered, key=lambda one: one[:2], reverse=True) if learns else numbered:
            self._queues.setdefault(self._kind(each[2]), deque()).append(each)
        for one in known:
            self.learn(one)

    def _kind(self, entry: Entry) -> str:
        return entry.deployment.method if self._learns else ""

    def next(self) -> Entry | None:
        """Taken out; None where none is left."""
        heads = [(queue[0][0] * self._usual(kind), queue[0][1], kind) for kind, queue in self._queues.items() if queue]
        return self._queues[max(heads)[2]].popleft()[2] if heads else None

    def learn(self, found: Found) -> None:
        """What became of one."""
        if not self._learns or not found.entry.nominal:
            return
        reached = found.rate if found.exact else min(found.bound, found.entry.nominal)
        total, count = self._ratios.get(kind := self._kind(found.entry), (0.0, 0))
        self._ratios[kind] = (total + reached / found.entry.nominal, count + 1)

    def _usual(self, kind: str) -> float:
        total, count = self._ratios.get(kind, (1.0, 1))
        return total / count


def ranked(found: Iterable[Found]) -> list[Found]:
    """Exact ones by score, then the others by what they cannot exceed; of equal ones the nominally better."""
    return sorted(
        found,
        key=lambda each: (
            not each.exact,
            -(each.score if each.exact else each.bound * each.entry.worth),
            -each.entry.nominal * each.entry.worth,
        ),
    )


def reaches(trials: Trials, entries: Iterable[Entry], rate: float) -> Entry | None:
    """The first that serves this rate; None where none does."""
    step = step_of(rate)
    step += rate_of(step) < rate * (1 - 1e-9)
    return next((each for each in entries if each.upper >= rate and trials.holds(each.deployment, step)), None)


def _searched(trials: Trials, entry: Entry, least: int | None = None) -> Found:
    step = trials.limit(entry.deployment, entry.nominal, least=least)
    return Found(entry, True, step, entry.upper)


def _challenged(trials: Trials, entry: Entry, best: Found, margin: float) -> Found:
    """One yes or no at the lowest rate that beats the incumbent."""
    step = step_of(best.score / entry.worth) + 1
    rate = rate_of(step)
    if entry.upper < rate or margin * entry.nominal < rate:
        return Found(entry, False, None, entry.upper)
    if not trials.holds(entry.deployment, step):
        return Found(entry, False, None, rate)
    return _searched(trials, entry, least=step)
