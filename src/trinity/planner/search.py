"""Deployments with their bounds, results of a search, and the search of one to the end."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from trinity.planner.candidates import Deployment
from trinity.planner.trials import Trials, rate_of, step_of


class BoundedCandidate(NamedTuple):
    """A deployment with its bounds in requests/s.

    - ``upper``: not exceeded.
    - ``nominal``: by stage times.
    - ``worth`` (1): score of a request/s, 1 or 1 / price.
    - ``likely`` (inf): by waits for steps in progress.
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


class SearchResult(NamedTuple):
    """Result of a search of one candidate.

    - ``exact``: true if it was searched to the end. Otherwise only an upper bound is known.
    - ``step``: the highest step of the rate grid at which it holds; None where none does.
    - ``bound`` (requests/s): a rate that it does not reach.
    - ``value`` (None): its score, where that is not a rate.
    - ``screened`` (None, requests/s): by the screening engine, where the cores decide.
    """

    entry: BoundedCandidate
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


def search_all(trials: Trials, entries: Iterable[BoundedCandidate]) -> list[SearchResult]:
    """Search each one's goodput to the end; return them best first, equal ones in the order of their nominal bounds."""
    return rank_results([search_to_end(trials, entry) for entry in entries])


def sort_by_guess(entries: Iterable[BoundedCandidate]) -> list[BoundedCandidate]:
    return sorted(entries, key=lambda entry: -entry.guess * entry.worth)


def rank_results(found: Iterable[SearchResult]) -> list[SearchResult]:
    """Sort exact ones by score, then the others by upper bound; of equal ones the nominally better first."""
    return sorted(
        found,
        key=lambda each: (
            not each.exact,
            -(each.score if each.exact else each.bound * each.entry.worth),
            -each.entry.nominal * each.entry.worth,
        ),
    )


def search_to_end(trials: Trials, entry: BoundedCandidate) -> SearchResult:
    """Search its goodput to the end, as if nothing else had been replayed."""
    return SearchResult(entry, True, trials.limit(entry.deployment, entry.guess), entry.upper)


def search_above(trials: Trials, entry: BoundedCandidate, above: float) -> SearchResult:
    """Search its goodput to the end if it scores more than ``above``; one replay tells that it does not."""
    if above:
        step = step_of(above / entry.worth) + 1
        if not trials.holds(entry.deployment, step):
            return SearchResult(entry, False, None, min(entry.upper, rate_of(step)))
    return search_to_end(trials, entry)


def is_same_deployment(one: SearchResult, other: SearchResult) -> bool:
    """Check if both are of the same deployment."""
    return one.entry.deployment == other.entry.deployment
