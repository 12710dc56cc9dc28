"""Finds choices that stand on a cliff: steps a little longer than their costs, and the goodput is gone.

Budgets are searched so that steps end just within a latency bound. Steps of an engine vary by a few percent; a
placement whose steps all lie at the bound then misses it with nearly every request. So the leading candidates are
replayed with steps 3 and 6 % longer at the same budgets.
"""

from __future__ import annotations

from itertools import islice

from trinity.errors import TraceTooShort
from trinity.planner.confirmation import find_leaders
from trinity.planner.plan import format_figure
from trinity.planner.problem import PlanningProblem
from trinity.planner.search import SearchResult, is_same_deployment, rank_results
from trinity.planner.strategy_result import StrategyResult
from trinity.planner.trials import rate_of

FACTORS = (1.03, 1.06)  # of the steps
CLIFF_LOSS = 0.15  # of the goodput, with the longest steps
LEADERS = 5  # candidates that may take the place of one on a cliff, beside the best of each method
MOST_RIVALS = 8  # that are replayed with longer steps


def prefer_off_cliff(
    case: PlanningProblem, searched: StrategyResult, may_choose: bool, needed: float = 0.0
) -> StrategyResult:
    """Measure the best with longer steps; where it stands on a cliff, say so and put the next that does not first.

    ``may_choose``: False leaves the choice as it is, and only says so. Another is preferred only where it scores more
    with the longest steps, and reaches ``needed`` (requests/s) with steps as they are, if the best does. What cannot be
    replayed on the compiled engine is left as it is.
    """
    best = searched.found[0]
    if not best.rate or not _is_compiled(case, best):
        return searched
    lost = measure_lost(case, best)
    if lost is None or lost <= CLIFF_LOSS:
        return searched
    said = _describe(case, best, lost)
    ranked = _rank(case, searched) if may_choose else searched.found
    least = needed if best.rate >= needed else 0.0
    rival = _find_sturdier(case, ranked, best, least) if may_choose else None
    if rival is None:
        serves = f"serves {least:g} requests/s and " if least else ""
        none = f" No other of the leading candidates {serves}is better then." if may_choose else ""
        return searched._replace(found=ranked, notes=(*searched.notes, f"{said}{none}"))
    rest = [each for each in ranked if not is_same_deployment(each, rival)]
    chosen = f"{said} {rival.entry.deployment} is preferred to it, which keeps {_kept(case, rival)}."
    return searched._replace(found=[rival, *rest], notes=(*searched.notes, chosen))


def measure_lost(case: PlanningProblem, found: SearchResult) -> float | None:
    """Measure the share of its goodput that a candidate loses with the longest steps; None where that is unknown."""
    deployment = found.entry.deployment
    if deployment not in case.longer_steps:
        seen = [(factor, _goodput(case, found, factor)) for factor in FACTORS]
        case.longer_steps[deployment] = tuple((factor, rate) for factor, rate in seen if rate is not None)
    rates = case.longer_steps[deployment]
    base = found.screened or found.rate
    return 1 - rates[-1][1] / base if len(rates) == len(FACTORS) and base else None


def _goodput(case: PlanningProblem, found: SearchResult, factor: float) -> float | None:
    trials = case.make_longer_trials(factor)
    before = trials.runs
    try:
        step = trials.limit(found.entry.deployment, found.screened or found.rate)
    except TraceTooShort:
        return None
    finally:
        case.trials.runs += trials.runs - before
    return 0.0 if step is None else rate_of(step)


def _is_compiled(case: PlanningProblem, found: SearchResult) -> bool:
    deployment = found.entry.deployment
    return not case.hardware.search_simulator(deployment, case.asked.slo).why_python(deployment.placement)


def _rank(case: PlanningProblem, searched: StrategyResult) -> list[SearchResult]:
    """Rank with the leading candidates, and the best of each method, searched to the end."""
    if searched.cores:
        return searched.found
    leaders = find_leaders(case.trials, searched.found, LEADERS)
    known = {each.entry.deployment: each for each in leaders}
    for method in {each.entry.deployment.method for each in searched.found}:
        own = [each for each in searched.found if each.entry.deployment.method == method]
        known.update((each.entry.deployment, each) for each in find_leaders(case.trials, own, 1))
    best = searched.found[0]
    ahead = rank_results(each for each in known.values() if not is_same_deployment(each, best))
    return [best, *ahead, *(each for each in searched.found if each.entry.deployment not in known)]


def _find_sturdier(
    case: PlanningProblem, ranked: list[SearchResult], best: SearchResult, least: float
) -> SearchResult | None:
    searched = (each for each in ranked[1:] if each.exact and each.rate >= least)
    return next((each for each in islice(searched, MOST_RIVALS) if _is_sturdier(case, each, best)), None)


def _is_sturdier(case: PlanningProblem, each: SearchResult, best: SearchResult) -> bool:
    if not each.rate or not _is_compiled(case, each):
        return False
    lost, worst = measure_lost(case, each), measure_lost(case, best)
    if lost is None or worst is None or lost > CLIFF_LOSS:
        return False
    return score_after(each, lost) > score_after(best, worst)


def score_after(found: SearchResult, lost: float) -> float:
    """Score a candidate that has lost this share of its goodput; what its score subtracts, as a cost, stays whole."""
    return found.score - lost * found.rate * found.entry.worth


def _describe(case: PlanningProblem, best: SearchResult, lost: float) -> str:
    return (
        f"{best.entry.deployment} stands on a cliff: of {format_figure(best.rate)} requests/s it keeps "
        f"{_kept(case, best)} (-{lost:.0%})."
    )


def _kept(case: PlanningProblem, found: SearchResult) -> str:
    """Say what a candidate serves with longer steps, such as "17.1 with steps 3 % longer and 3.8 with 6 %"."""
    rates = case.longer_steps[found.entry.deployment]
    return " and ".join(f"{format_figure(rate)} with steps {factor - 1:.0%} longer" for factor, rate in rates)
