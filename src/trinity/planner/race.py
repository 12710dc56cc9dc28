"""Which deployment serves most: the race, and all of them to the end."""

from __future__ import annotations

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
    left = [entry for entry in entries if entry.deployment not in done]
    while left:
        entry = left.pop(_next(left, found) if margin < inf else 0)
        outcome = _searched(trials, entry) if best is None else _challenged(trials, entry, best, margin)
        found.append(outcome)
        if outcome.exact and outcome.step is not None:
            best = outcome
    return ranked(found)


def _next(left: Sequence[Entry], found: Sequence[Found]) -> int:
    """Which one is likely the best: by nominal bounds, as far as these were right of others of its method."""
    ratios: dict[str, list[float]] = {}
    for each in found:
        reached = each.rate if each.exact else min(each.bound, each.entry.nominal)
        ratios.setdefault(each.entry.deployment.method, []).append(reached / each.entry.nominal)
    usual = {method: sum(each) / len(each) for method, each in ratios.items()}
    return max(
        range(len(left)),
        key=lambda n: (left[n].nominal * left[n].worth * usual.get(left[n].deployment.method, 1.0), -n),
    )


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
