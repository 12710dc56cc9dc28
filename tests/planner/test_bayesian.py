"""The wider space through Optuna, on the real simulator: knobs that the runtime has, an objective with a cost."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest

from support.planner_options import planner_options
from trinity.core.scheduler import BatchRules
from trinity.costs.budgets import StepBudgets
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import MODELS
from trinity.costs.step_cost import DEVICES, Roofline
from trinity.errors import ConfigError, UnknownName
from trinity.placement import Placement
from trinity.planner import HybridPlanner, Space
from trinity.planner.bounds import Kind
from trinity.planner.candidates import Deployment
from trinity.planner.search_space import list_knobs, simulator_options
from trinity.simulation import compiled_engine
from trinity.simulation.simulator import Simulator
from trinity.traces import synthesise
from trinity.traces.goodput import measure_point
from trinity.traces.trace import SLO, Trace, TraceRow

LLAVA = MODELS["llava-1.5-7b"]
STRICT = SLO(ttft=0.3, tbt=0.05)
needs_optuna = pytest.mark.skipif(find_spec("optuna") is None, reason="needs optuna")
needs_twin = pytest.mark.skipif(
    bool(compiled_engine.why_unavailable()), reason=f"no compiled twin: {compiled_engine.why_unavailable()}"
)
H100 = {"H100": Kind.of(DEVICES["H100"], Roofline(model=LLAVA, device=DEVICES["H100"]), 0.9)}


def trace(count: int = 250) -> Trace:
    return synthesise("MME", count, visual_tokens=lambda width, height: 576, rate=10, seed=3)


def planner(instances: int, space: Space, **options: Any) -> HybridPlanner:
    usual: dict[str, Any] = {"strategy": "bayesian", "seeds": 0, "least_requests": 250}
    slo = options.pop("slo", STRICT)
    return HybridPlanner(LLAVA, slo, instances=instances, **planner_options({**usual, "space": space, **options}))


def deployment(**settings: str | int) -> Deployment:
    return Deployment.of(Placement.parse("1E1PD"), ["H100"] * 2, tuple(settings.items()))


# ---------------------------------------------------------------- knobs


def test_without_settings_the_simulator_is_the_planners() -> None:
    assert simulator_options(deployment(), STRICT, LLAVA, H100, BatchRules()) == {}


def test_settings_become_rules_budgets_and_routing() -> None:
    asked = deployment(tokens=512, mixed_tokens=64, images=2, order="sjf", policy="time", routing="least_loaded")
    options = simulator_options(asked, STRICT, LLAVA, H100, BatchRules(chunked=False))
    assert (options["rules"].order, options["rules"].policy, options["rules"].chunked) == ("sjf", "time", False)
    assert options["routing"] == "least_loaded"
    assert options["budgets"]["E"].image_budget == 2 * 576
    assert options["budgets"]["PD"].token_budget == 64


def test_a_knob_at_zero_is_what_algorithm_1_finds() -> None:
    options = simulator_options(deployment(tokens=0, mixed_tokens=0, images=0), STRICT, LLAVA, H100, BatchRules())
    simulator = Simulator(LLAVA, STRICT, cluster=planner(2, Space()).hardware.cluster)
    for place, each in enumerate(simulator.settings(Placement.parse("1E1PD"))):
        found: StepBudgets = options["budgets"][each.roles]
        assert (found.token_budget, found.image_budget) == (each.rules.token_budget, each.rules.image_budget), place


def test_real_simulators_take_them() -> None:
    whole = planner(2, Space())
    asked = deployment(
        **{"tokens": 512, "mixed_tokens": 64, "images": 2, "order": "sjf", "policy": "time"},  # type: ignore[arg-type]
        **{"routing": "least_loaded", "reservation": "optimistic"},
    )
    made = whole.hardware.simulator(asked, STRICT)
    assert made.routing == "least_loaded"
    assert [each.rules.order for each in made.settings(asked.placement)] == ["sjf", "sjf"]
    assert {each.reservation for each in made.settings(asked.placement)} == {"optimistic"}
    assert whole.hardware.simulator(asked, STRICT) is made
    assert whole.hardware.simulator(deployment(), STRICT) is not made
    assert all(each.ttft_s is not None for each in made.serve(asked.placement)(trace(20)))


def test_the_spread_of_a_deployment_is_its_simulators() -> None:
    whole = planner(2, Space(spreads=(1, 4)))
    assert list_knobs(Space(spreads=(1, 4)))["spread"] == (1, 4)
    assert "spread" not in list_knobs(Space()), "the planner's own"
    assert [whole.hardware.simulator(deployment(spread=each), STRICT).config.spread for each in (4, 1)] == [4, 1]


@pytest.mark.parametrize("bad", [{"orders": ()}, {"trials": 0}, {"beta": -1.0}, {"fewest": 0}, {"spreads": (0,)}])
def test_a_space_without_choice_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"at least (one value for each knob|[01])"):
        Space(**bad)


# ---------------------------------------------------------------- the search

NARROW: dict[str, Any] = {
    **{"tokens": (0,), "mixed_tokens": (0,), "images": (0,)},
    **{"orders": ("fcfs",), "policies": ("alg1",), "routings": ("round_robin",)},
}
SCREENED: dict[str, Any] = {"routings": ("round_robin",)}  # of which the cores need not confirm anything


@needs_optuna
@needs_twin
@pytest.mark.parametrize("instances", [2, 3, 5])
def test_several_instances_are_placed_in_every_way(instances: int) -> None:
    """Each configuration has its own budgets by roles, so each placement needs a simulator of its own."""
    plan = planner(instances, Space(trials=24, **NARROW)).plan(trace())
    assert len({each.method for each in plan.candidates}) >= 4
    searched = [each for each in plan.candidates if each.exact]
    assert len({each.placement for each in searched}) >= 4
    assert plan.best.goodput["guard"] == max(each.goodput["guard"] for each in searched) > 0


@needs_optuna
@needs_twin
def test_its_figures_are_those_of_the_simulator_itself() -> None:
    plan = planner(3, Space(trials=12, **NARROW)).plan(trace())
    for each in [each for each in plan.candidates if each.score][:3]:
        simulator = Simulator(
            LLAVA,
            STRICT,
            cluster=Cluster.of("H100", each.instances),
            reservation=str(each.settings.get("reservation", "full")),  # type: ignore[arg-type]
        )
        rate = each.goodput["guard"]
        assert measure_point(simulator.serve(each.placement), trace(), STRICT, rate).attainment["guard"] >= 0.9
        assert measure_point(simulator.serve(each.placement), trace(), STRICT, 1.3 * rate).attainment["guard"] < 0.97


@needs_optuna
@needs_twin
def test_it_tries_algorithm_2_first_and_is_never_worse() -> None:
    plan = planner(3, Space(trials=8, **SCREENED)).plan(trace())
    assert plan.strategy == "bayesian"
    assert plan.paper is not None
    assert (plan.best.score or 0) >= (plan.paper.goodput["guard"])
    assert set(plan.best.settings) == set(list_knobs(Space()))
    assert "8 configurations tried by Optuna" in plan.explain()
    assert plan.paper.settings == {}
    assert plan.paper in plan.candidates


@needs_optuna
@needs_twin
def test_a_cost_makes_small_clusters_better() -> None:
    space = Space(trials=14, fewest=1, **NARROW)
    dear, free = (
        planner(3, Space(**{**{f: getattr(space, f) for f in space.__struct_fields__}, "beta": beta})).plan(trace())
        for beta in (1000.0, 0.0)
    )
    assert dear.best.instances < free.best.instances
    assert dear.best.score == pytest.approx(dear.best.goodput["guard"] - 1000 * dear.best.instances)
    assert free.best.score == free.best.goodput["guard"]


@needs_optuna
@needs_twin
def test_equal_seeds_give_equal_plans_and_prices_count() -> None:
    one, other = (
        planner(2, Space(trials=5, beta=0.1, **SCREENED), prices={"H100": 3.0}).plan(trace()) for _ in range(2)
    )
    assert one == other
    assert one.best.score == pytest.approx(one.best.goodput["guard"] - 0.1 * 3.0 * one.best.instances)


@pytest.mark.slow
@needs_optuna
@needs_twin
@pytest.mark.parametrize("space", [Space(trials=4, **NARROW), Space(trials=8)])
def test_what_asks_for_much_and_uses_little_is_reserved_as_it_decodes(space: Space) -> None:
    """LLaVA-1.5-7B on one H100 of which a third is used: whole reservations of 2,048 tokens bound the batch."""
    rows = [
        TraceRow(timestamp=100.0 * n, input_length=40, text_length=40, output_length=100, max_tokens=2048)
        for n in range(300)
    ]
    hybrid = planner(1, space, slo=SLO(ttft=4.0, tbt=0.1), memory_share=0.35)
    plan = hybrid.plan(Trace(rows))
    found = {"full": 0.0, "optimistic": 0.0}
    for each in plan.candidates:
        if each.exact and each.settings:
            kind = str(each.settings["reservation"])
            found[kind] = max(found[kind], each.goodput["guard"])
    assert plan.best.settings["reservation"] == "optimistic"
    assert found["optimistic"] > 1.5 * found["full"] > 0
    assert plan.backend == "compiled"


def test_a_reservation_that_is_none_is_refused() -> None:
    with pytest.raises(UnknownName, match="known: full, optimistic"):
        Space(reservations=("full", "some"))


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'trinity-epd\[plan\]'"):
        planner(2, Space(trials=2)).plan(trace())
