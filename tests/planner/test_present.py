"""The placement that runs now is evaluated by every plan, so that what is gained by another is known."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest

from trinity import traces
from trinity.adapt.replanner import measure_gain
from trinity.errors import PlacementError
from trinity.planner import HybridPlanner, Plan, SearchConfig
from trinity.simulation import compiled_engine
from trinity.traces.trace import SLO, Trace

BOUND = SLO(ttft=2.0, tbt=0.08)
needs_engine = pytest.mark.skipif(bool(compiled_engine.why_unavailable()), reason=compiled_engine.why_unavailable())


@cache
def trace() -> Trace:
    return traces.read_shipped("servegen-image-1h").window(0, 150)


def planner(strategy: str = "race", instances: int = 4, **options: Any) -> HybridPlanner:
    search = SearchConfig(strategy=strategy, seeds=0)  # type: ignore[arg-type]
    return HybridPlanner("qwen2-vl-7b", BOUND, instances=instances, device="H100", search=search, **options)


def known(plan: Plan, placement: str) -> list[float | None]:
    return [each.score for each in plan.candidates if each.placement == placement]


@needs_engine
@pytest.mark.parametrize(
    "present", ["1E1P2D", pytest.param("1ED3P", marks=pytest.mark.slow), pytest.param("4EPD", marks=pytest.mark.slow)]
)
def test_every_plan_knows_what_runs_as_an_exhaustive_search_does(present: str) -> None:
    every = planner("exhaustive").plan(trace())
    plan = planner().plan(trace(), present)
    assert known(plan, present) == known(every, present)
    assert plan.best == planner().plan(trace()).best  # nothing else is changed by it
    assert len(plan.candidates) == len(every.candidates)
    assert measure_gain(plan, present) == (plan.best.score or 0) / (known(every, present)[0] or 1)


@needs_engine
def test_without_it_the_race_leaves_most_of_them_unknown() -> None:
    plan = planner().plan(trace())
    assert sum(each.score is None for each in plan.candidates) > len(plan.candidates) / 2


@needs_engine
@pytest.mark.parametrize(
    "options",
    [
        {"objective": "throughput"},
        {"objective": "effective_throughput", "rate": 5.0},
        {"objective": "goodput_per_cost", "prices": {"H100": 2.0}},
        {"strategy": "paper"},
    ],
)
def test_whatever_is_asked_what_runs_is_known(options: dict[str, Any]) -> None:
    asked = dict(options)
    search = SearchConfig(strategy=asked.pop("strategy", "race"), seeds=0)
    slo = None if asked.get("objective") == "throughput" else BOUND
    made = HybridPlanner("qwen2-vl-7b", slo, instances=4, device="H100", search=search, **asked)
    plan = made.plan(trace(), "1ED3P")
    assert len(known(plan, "1ED3P")) == 1
    assert measure_gain(plan, "1ED3P") >= 1


@pytest.mark.slow
@needs_engine
def test_where_the_cores_decide_a_gain_is_known_too() -> None:
    plan = planner(routing="least_loaded").plan(trace(), "1ED3P")
    assert plan.stand_ins
    assert 1 <= measure_gain(plan, "1ED3P") < math.inf


@needs_engine
def test_of_fewer_instances_than_the_plan_has_it_is_known() -> None:
    plan = planner().plan(trace(), "2EPD")
    assert measure_gain(plan, "2EPD") > 1.5


@needs_engine
def test_what_cannot_run_there_is_refused() -> None:
    with pytest.raises(PlacementError, match="8EPD, which runs now, has 8 instances; the plan is for 4"):
        planner().plan(trace(), "8EPD")
    with pytest.raises(PlacementError):
        planner().plan(trace(), "4XYZ")
