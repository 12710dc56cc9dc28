"""Several encoders for one request in a plan: a switch of the search, which the pipeline of the plan follows."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.planner import HybridPlanner, Plan
from trinity.planner.search_config import SearchConfig
from trinity.planner.search_space import Space
from trinity.simulation.simulator import Simulator
from trinity.traces.goodput import measure_point
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow

SHAPE = get_model_shape("internvl2-8b")
TILE_S = 0.05
COST = LinearCost(step_s=0.02, prefill_s=1e-5, media_s=TILE_S / 256)  # an image of seven tiles takes 0.35 s to encode
needs_optuna = pytest.mark.skipif(find_spec("optuna") is None, reason="needs optuna")
TIGHT = SLO(0.35, 0.1)  # which one encoder cannot keep
NARROW: dict[str, Any] = {
    **{"tokens": (0,), "mixed_tokens": (0,), "images": (0,), "orders": ("fcfs",), "policies": ("alg1",)},
    **{"routings": ("round_robin",), "reservations": ("full",)},
}


def trace(size: tuple[int, int] = (2000, 1200)) -> Trace:
    """A request each half second, of an image that no other one has: at the model's rule seven tiles of 256 tokens."""
    rows = []
    for number in range(40):
        image = TraceImage(width=size[0], height=size[1], content=str(number))
        rows.append(TraceRow(timestamp=500.0 * number, input_length=9, text_length=9, output_length=2, images=[image]))
    return Trace(rows)


def plan(strategy: str, space: Space, asked: Trace | None = None, **options: Any) -> Plan:
    search = SearchConfig(strategy=strategy, space=space, seeds=0, least_requests=20)  # type: ignore[arg-type]
    return HybridPlanner(SHAPE, TIGHT, instances=4, cost=COST, search=search, **options).plan(asked or trace())


def attainment(placement: str, spread: int, rate: float) -> float:
    simulator = Simulator(SHAPE, TIGHT, cluster=Cluster.of("H100", 4), cost=COST, spread=spread)
    return measure_point(simulator.serve(placement), trace(), TIGHT, rate).attainment["guard"]


@pytest.mark.slow
@needs_optuna
def test_a_search_turns_it_on_where_tiles_make_a_bound_that_one_encoder_misses() -> None:
    """The figures are the simulator's own, which is told the same."""
    found = plan("bayesian", Space(trials=12, spreads=(1, 4), **NARROW))
    assert found.met
    assert found.best.settings["spread"] == 4
    rate = found.best.goodput["guard"]
    assert attainment(found.placement, 4, rate) >= 0.9 > attainment(found.placement, 1, rate)
    off = [each for each in found.candidates if each.settings.get("spread") == 1 and each.exact]
    assert off
    assert max(each.score or 0.0 for each in off) < rate
    assert "spread=4" in str(found)


def test_a_planner_that_is_told_so_says_so() -> None:
    found = plan("paper", Space(), spread=3)
    assert found.best.settings == {"spread": 3}
    assert found.met
    alone = plan("paper", Space())
    assert alone.best.settings == {}
    assert (alone.best.score or 0.0) < (found.best.score or 0.0)
