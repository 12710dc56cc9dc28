"""Evaluates the placement that runs now beside those that a search has found, so that a plan tells what is gained."""

from __future__ import annotations

from collections.abc import Callable

from trinity.errors import PlacementError
from trinity.placement import Placement
from trinity.planner.candidates import Deployment
from trinity.planner.problem import PlanningProblem
from trinity.planner.search import BoundedCandidate, SearchResult, rank_results, search_to_end
from trinity.planner.strategy_result import StrategyResult

PresentSearch = Callable[[BoundedCandidate], SearchResult]  # searches one to its end


def parse_present(present: Placement | str | None) -> Placement | None:
    """Parse the placement that runs now; None where none was given. Raises ``PlacementError`` for what is none."""
    return Placement.parse(present) if isinstance(present, str) else present


def add_present(
    case: PlanningProblem,
    searched: StrategyResult,
    present: Placement | None,
    devices: tuple[str, ...],
    search: PresentSearch | None = None,
) -> StrategyResult:
    """Search ``present`` to its end unless that was done; nothing is added where it is None.

    ``devices``: names of those that it may run on, the first of them where the search has none for it. ``search``:
    searches it, by goodput where not given. Raises ``PlacementError`` where it does not fit them.
    """
    same = [each for each in searched.found if each.entry.deployment.placement == present]
    if present is None or any(each.exact for each in same):
        return searched
    entry = same[0].entry if same else _bound_present(case, present, devices, searched)
    added = search(entry) if search else search_to_end(case.trials, entry)
    others = [each for each in searched.found if each.entry.deployment != entry.deployment]
    return searched._replace(found=rank_results([*others, added]))


def find_present(searched: StrategyResult, present: Placement | None) -> list[SearchResult]:
    """List the result of the present placement that was searched to its end; empty where none was asked for."""
    return [each for each in searched.found if each.exact and each.entry.deployment.placement == present][:1]


def _bound_present(
    case: PlanningProblem, present: Placement, devices: tuple[str, ...], searched: StrategyResult
) -> BoundedCandidate:
    if present.size > len(devices):
        raise PlacementError(f"{present}, which runs now, has {present.size} instances; the plan is for {len(devices)}")
    deployment = Deployment.of(present, devices[: present.size])
    if why := case.hardware.misfit(deployment):
        raise PlacementError(f"{present}, which runs now, does not fit the plan's devices: {why}")
    return case.bound_deployment(deployment, searched.found[0].entry.worth)
