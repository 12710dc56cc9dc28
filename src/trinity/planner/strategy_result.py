"""StrategyResult: the results of one strategy's search, with Algorithm 2's own choice beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trinity.planner.confirmation import Confirmation
from trinity.planner.search import SearchResult, rank_results


class StrategyResult(NamedTuple):
    """Result of a strategy: results best first, Algorithm 2's own choice, replays made, and notes for the plan."""

    found: list[SearchResult]
    paper: SearchResult | None
    runs: int
    notes: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    cores: Confirmation | None = None

    def add_paper_results(self, known: Sequence[SearchResult], paper: SearchResult | None) -> StrategyResult:
        """Add the results of Algorithm 2, which were searched to the end."""
        exact = {each.entry.deployment: each for each in (*known, *self.found) if each.exact}
        bounded = [each for each in self.found if each.entry.deployment not in exact]
        return self._replace(found=rank_results([*exact.values(), *bounded]), paper=paper)
