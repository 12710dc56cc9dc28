"""The best of a search on the cores that serve: which are asked, at what rates, and what a plan then says."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from support.planner_options import planner_options
from trinity.costs.model_shape import get_model_shape
from trinity.planner import HybridPlanner, Plan, confirmation, hybrid
from trinity.planner.confirmation import (
    Confirmation,
    choose_stretch,
    confirm,
    find_leaders,
    limit_near,
    merge_core_results,
    rate_for,
    replay_seconds,
)
from trinity.planner.hardware import Hardware, cluster_of
from trinity.planner.problem import GoodputCriterion, PlanningProblem
from trinity.planner.search import SearchResult, search_all
from trinity.planner.trials import rate_of
from trinity.simulation import compiled_engine
from trinity.traces import synthesise
from trinity.traces.trace import SLO, Trace

LLAVA = get_model_shape("llava-1.5-7b")
STRICT = SLO(0.3, 0.06)
pytestmark = pytest.mark.skipif(
    bool(compiled_engine.why_unavailable()), reason=f"no screening engine: {compiled_engine.why_unavailable()}"
)


def trace(count: int = 120, seed: int = 3) -> Trace:
    return synthesise("POPE", count, visual_tokens=lambda width, height: 576, rate=10, seed=seed)


def case(requests: Trace | None = None, instances: int = 2, **options: Any) -> PlanningProblem:
    cluster = cluster_of("H100", instances, engine="eager")
    hardware = Hardware(LLAVA, cluster, None, {}, {"routing": "least_loaded", **options})
    return PlanningProblem(
        hardware, requests or trace(), GoodputCriterion(STRICT, least_requests=100, least_ttfts=2.0), None
    )


def raced(whole: PlanningProblem) -> list[SearchResult]:
    return whole.search("race", whole.bound_deployments(whole.hardware.names))


# ---------------------------------------------------------------- a limit near its guess


@pytest.mark.parametrize("limit", [-40, -3, -1, 0, 1, 2, 5, 33])
def test_a_limit_is_found_and_few_rates_are_asked_where_it_is_near(limit: int) -> None:
    asked: list[int] = []

    def holds(step: int) -> bool:
        asked.append(step)
        return step <= limit

    assert limit_near(holds, 0, lambda: True) == (limit, limit + 1)
    assert len(asked) == len(set(asked)), "no rate is asked twice"
    assert len(asked) <= 2 + 2 * math.log2(1 + abs(limit) + 1)


def test_where_no_more_may_be_asked_what_was_seen_counts() -> None:
    left = iter([True, True, False])
    assert limit_near(lambda step: step <= 9, 0, lambda: next(left)) == (1, None)
    left = iter([True, True, False])
    assert limit_near(lambda step: step <= -9, 0, lambda: next(left)) == (None, -1)


# ---------------------------------------------------------------- who is asked


def test_leaders_are_the_best_of_all_by_the_screening_engine() -> None:
    whole = case(instances=3)
    every = search_all(whole.trials, whole.bound_deployments(whole.hardware.names))
    ahead = find_leaders(whole.trials, raced(case(instances=3)), 3)
    assert [each.rate for each in ahead] == [each.rate for each in every[:3]]


def test_the_cores_hold_what_a_confirmation_says_and_not_the_next_rate() -> None:
    whole = case()
    best = confirm(whole, raced(whole)).confirmed[0].found
    simulator = whole.hardware.simulator(best.entry.deployment, STRICT, backend="python")
    cores = whole.make_trials(whole.trace, lambda deployment: simulator.serve(deployment.placement))
    assert best.exact
    assert best.step is not None
    assert cores.holds(best.entry.deployment, best.step)
    assert not cores.holds(best.entry.deployment, best.step + 1)


def test_a_confirmation_has_the_replay_at_its_goodput_and_every_rate_that_was_asked() -> None:
    whole = case()
    made = confirm(whole, raced(whole))
    best = made.confirmed[0]
    assert best.replay is not None
    assert best.replay.backend == "python"
    assert best.found.step is not None
    rates = [point.rate for point in best.points]
    assert rates == sorted(rates)
    assert {rate_of(best.found.step), rate_of(best.found.step + 1)} <= set(rates)
    assert made.runs == sum(len(each.points) for each in made.confirmed)
    assert made.requests == len(whole.trace)


def test_no_more_replays_are_made_than_the_budget_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirmation, "MOST_RUNS", 3)
    whole = case(instances=3)
    assert confirm(whole, raced(whole)).runs <= 3 + 1  # at least two, and a challenger's one


def test_a_score_that_is_no_rate_is_asked_for_as_the_rate_that_has_it() -> None:
    found = raced(case())[0]
    assert rate_for(found, 12.0) == 12.0
    assert rate_for(found._replace(entry=found.entry._replace(worth=2.0)), 12.0) == 6.0
    assert rate_for(found._replace(value=found.rate - 3.0), 12.0) == pytest.approx(15.0)


def test_what_was_only_screened_has_no_figure_of_its_own() -> None:
    found = raced(case())
    listed = merge_core_results(Confirmation([], 0, 0), found)
    assert not any(each.exact or each.rate for each in listed)
    assert listed[0].screened == found[0].rate
    assert len(listed) == len(found)


# ---------------------------------------------------------------- on which requests


def test_a_short_trace_is_replayed_whole_and_of_a_long_one_a_stretch() -> None:
    whole = case(trace(600))
    leader = raced(whole)[0]
    assert choose_stretch(whole, leader, 550) is whole.trace
    stretch = choose_stretch(whole, leader, 200)
    assert len(stretch) == 200
    assert stretch[0].timestamp == 0.0
    lengths = [row.input_length for row in whole.trace]
    own = [row.input_length for row in stretch]
    assert any(lengths[at : at + 200] == own for at in range(401)), "requests in a row"


def test_a_stretch_is_as_hard_as_the_trace_by_the_screening_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates of a stretch count as those of the whole trace at which the screening engine comes to the same."""
    monkeypatch.setattr(confirmation, "STRETCH", 200)
    whole = case(trace(600))
    made = confirm(whole, raced(whole))
    assert made.requests < 600
    best = made.confirmed[0].found
    assert best.screened is not None
    assert best.rate == pytest.approx(best.screened, rel=0.07), "loads known at once or told: not far"


def test_reports_are_counted_in_what_a_replay_takes() -> None:
    told, untold = (replay_seconds(trace(100), 10.0, 8, informed) for informed in (True, False))
    assert told - untold == pytest.approx(10 * 10.0 * 8 * 9 * confirmation.REPORT_S)
    assert replay_seconds(trace(200), 10.0, 8, False) > 1.8 * untold


# ---------------------------------------------------------------- a plan


def planned(**options: Any) -> Plan:
    fixed: dict[str, Any] = {"instances": 2, "seeds": 1, "least_requests": 100, **options}
    return HybridPlanner(LLAVA, SLO(0.15, 0.06), engine="eager", **planner_options(fixed)).plan(trace())


def test_a_plan_says_what_stood_for_what_and_prints_what_the_cores_did() -> None:
    plan = planned(routing="least_loaded")
    assert plan.backend == "screening"
    assert plan.stand_ins == ("routing=least_loaded as least_loaded, loads known at once",)
    assert (plan.core_runs > 0, plan.core_requests) == (True, plan.trace.requests)
    assert plan.best.screened
    assert plan.best.gap == pytest.approx(plan.best.goodput["guard"] / plan.best.screened - 1)
    assert plan.best.utilisation
    assert len(plan.best.spread) == 1
    assert "where the screening engine has" in plan.explain()
    assert "screened    gap" in str(plan) or "screened" in str(plan).splitlines()[1]
    rows = list(plan.rows())
    assert rows[0]["gap"] == plan.best.gap


def test_where_the_screening_engine_has_all_nothing_is_confirmed() -> None:
    plan = planned()
    assert (plan.backend, plan.stand_ins, plan.core_runs, plan.best.gap) == ("compiled", (), 0, None)
    assert "screened" not in str(plan)
    assert "gap" not in next(iter(plan.rows()))


def test_a_plan_that_was_saved_before_there_were_gaps_is_read() -> None:
    plain = msgspec.json.decode(msgspec.json.encode(planned()))
    for name in ("stand_ins", "core_runs", "core_requests", "priced"):
        del plain[name]
    for each in (plain["best"], *plain["candidates"]):
        del each["screened"], each["longer_steps"]
    read = msgspec.json.decode(msgspec.json.encode(plain), type=Plan)
    assert (read.stand_ins, read.best.gap) == ((), None)


# ---------------------------------------------------------------- what is not screened


@pytest.mark.slow
def test_what_is_not_screened_is_searched_on_the_cores_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hybrid, "SHORT", 100)
    plan = planned(depth=2)
    assert (plan.backend, plan.stand_ins, plan.trace.requests) == ("python", (), 100)
    assert "Not screened (depth=2)" in plan.explain()
    assert "Not screened (depth=2)" in caplog.text, "it is said before the search"
    assert set(plan.best.goodput) == {"guard"}
    assert plan.best.spread == ()


def test_an_objective_of_one_replay_is_screened_and_says_so() -> None:
    plan = HybridPlanner(LLAVA, None, instances=2, objective="throughput", routing="least_loaded").plan(trace())
    assert (plan.backend, plan.core_runs) == ("screening", 0)
    assert "The search ran on the screening engine, with routing=least_loaded" in plan.explain()
