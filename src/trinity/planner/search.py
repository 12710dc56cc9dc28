"""What strategies search: deployments with their bounds, and what was found of them."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from trinity.planner.candidates import Deployment
from trinity.planner.trials import Trials, rate_of


class Entry(NamedTuple):
    """A deployment with its bounds in requests/s, and what a request a second of it is worth (1, or 1 / price).

    ``upper`` is not exceeded, ``nominal`` is by stage times, ``likely`` by what else may be late.
    """

    deployment: Deployment
    upper: float
    nominal: float
    worth: float = 1.0
    likely: float = inf

    @property
    def guess(self) -> float:
        """Requests/s where its search begins."""
        return min(self.nominal, self.likely)


class Found(NamedTuple):
    """``step``: the highest rate of the grid at which it holds, None where none does; of an ``exact`` one.

    Else only ``bound`` is known: requests/s that it does not reach. ``value``: its score, where that is no rate.
    ``screened``: requests/s by the screening engine, where the cores decide.
    """

    entry: Entry
    exact: bool
    step: int | None
    bound: float
    value: float | None = None
    screened: float | None = None

    @property
    def rate(self) -> float:
        return 0.0 if self.step is None else rate_of(self.step)

    @property
    def score(self) -> float:
        return self.rate * self.entry.worth if self.value is None else self.value


def exhaustive(trials: Trials, entries: Iterable[Entry]) -> list[Found]:
    """Each one's goodput to the end, best first; those that are equal in the order of their nominal bounds."""
    return ranked([searched(trials, entry) for entry in entries])


def likely_first(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: -entry.guess * entry.worth)


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


def searched(trials: Trials, entry: Entry) -> Found:
    """Its goodput to the end, as if nothing else had been asked."""
    return Found(entry, True, trials.limit(entry.deployment, entry.guess), entry.upper)
