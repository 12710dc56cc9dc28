"""A pipeline runs a plan: its best placement, with tokens as ever."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from support.plans import BEST, plan
from trinity.core.routing.router import LeastLoaded
from trinity.core.scheduler import BatchRules
from trinity.costs.budgets import StepBudgets
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.errors import UnknownName
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.pipeline.deploy import PLAN_SETTINGS
from trinity.planner import Plan, Space
from trinity.planner.search_space import list_knobs
from trinity.remote.instance_setup import read_instance
from trinity.traces.trace import SLO

QUICK = EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(step_s=1e-4), scale=4096)
SLOW = SLO(ttft=10, tbt=10)


def planned(placement: str, **changes: object) -> Plan:
    return plan(best=msgspec.structs.replace(BEST, placement=placement, **changes))


async def test_a_plan_is_a_placement() -> None:
    async with Pipeline(QUICK, planned("1EP1D"), cache=CacheConfig(pools={"image": 8, "kv": 64})) as pipe:
        assert str(pipe.placement) == "1EP1D"
        output = await pipe.complete(EmulatedRequest(text_tokens=8, image_tokens=(576,), max_tokens=3))
        assert output.route == ["EP0", "D0"]


async def test_a_loaded_plan_too(tmp_path: object) -> None:
    path = f"{tmp_path}/plan.json"
    planned("1E1PD").save(path)
    assert str(Pipeline(QUICK, Plan.load(path)).placement) == "1E1PD"


async def test_the_policy_order_and_routing_of_a_wider_search_are_run() -> None:
    knobs = {"order": "sjf", "policy": "prefill_first", "routing": "least_loaded", "tokens": 0, "images": 0}
    pools = {"image": 8, "kv": 64}
    async with Pipeline(QUICK, planned("2EPD", settings=knobs), cache=CacheConfig(pools=pools)) as pipe:
        for host in pipe.hosts.values():
            rules = host.core.settings.rules
            assert (rules.order, rules.policy) == ("sjf", "prefill_first")
            assert isinstance(host.core.state.router.policy, LeastLoaded)
        output = await pipe.complete(EmulatedRequest(text_tokens=8, image_tokens=(576,), max_tokens=3))
        assert len(output.token_ids) == 3


async def test_what_the_user_says_goes_before_the_plan() -> None:
    plan = planned("2EPD", settings={"order": "sjf", "routing": "least_loaded"})
    pools = {"image": 8, "kv": 64}
    async with Pipeline(
        QUICK, plan, cache=CacheConfig(pools=pools), rules=BatchRules(order="deadline"), routing="random"
    ) as pipe:
        assert {host.core.settings.rules.order for host in pipe.hosts.values()} == {"deadline"}
        assert pipe.routing == "random"
    assert Pipeline(QUICK, "2EPD").routing == "round_robin"


ROOM = {"image": 8, "kv": 300}
LIMITS = {"order": "sjf", "tokens": 700, "mixed_tokens": 64, "images": 2}


async def test_batch_limits_of_a_wider_search_are_run() -> None:
    async with Pipeline(QUICK, planned("1EP1D", settings=LIMITS), cache=CacheConfig(pools=ROOM), slo=SLOW) as pipe:
        ep, d = (pipe.hosts[name].core.settings.rules for name in ("EP0", "D0"))
        assert (ep.token_budget, ep.image_budget, ep.order) == (700, 2 * 576, "sjf")
        assert (d.token_budget, d.image_budget) == (64, 1)
        output = await pipe.complete(EmulatedRequest(text_tokens=200, image_tokens=(576,) * 3, max_tokens=3))
        assert len(output.token_ids) == 3
        lanes = [slice for slice in pipe.timeline.slices() if slice.instance == "EP0"]
        assert max(each.args.get("prefill tokens", 0) for each in lanes) == 700
        assert max(each.args.get("media tokens", 0) for each in lanes) == 2 * 576


async def test_a_limit_at_zero_is_what_algorithm_1_finds() -> None:
    async def rules(settings: dict[str, int]) -> list[BatchRules]:
        plan = planned("1EP1D", settings=settings)
        async with Pipeline(QUICK, plan, cache=CacheConfig(pools=ROOM), slo=SLOW) as pipe:
            return [host.core.settings.rules for host in pipe.hosts.values()]

    assert await rules({"tokens": 0, "mixed_tokens": 0, "images": 0}) == await rules({})


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"budgets": StepBudgets(token_budget=100)}, [100, 100]),
        ({"rules": BatchRules(token_budget=90)}, [90, 90]),
        ({"token_budget": 80}, [80, 80]),
        ({"image_budget": 1}, [700, 64]),
    ],
)
async def test_the_users_own_limits_go_before_the_plans(given: Any, tokens: list[int]) -> None:
    async with Pipeline(QUICK, planned("1EP1D", settings=LIMITS), cache=CacheConfig(pools=ROOM), **given) as pipe:
        assert [pipe.hosts[name].core.settings.rules.token_budget for name in ("EP0", "D0")] == tokens
        assert "budgets" in given or pipe.hosts["EP0"].core.settings.rules.order == (
            "fcfs" if "rules" in given else "sjf"
        )


async def test_processes_are_told_of_them() -> None:
    plan = planned("1EP1D", settings={**LIMITS, "depth": 2, "reservation": "optimistic"})
    async with Pipeline(QUICK, plan, cache=CacheConfig(pools=ROOM), hosting="process") as pipe:
        asked = [EmulatedRequest(text_tokens=200, image_tokens=(576,) * 3, max_tokens=3) for _ in range(2)]
        outputs = await asyncio.gather(*map(pipe.complete, asked))
        assert [len(output.token_ids) for output in outputs] == [3, 3]
        setups = {name: read_instance(each.setup) for name, each in pipe.processes.items()}
    budgets = {name: (each.token_budget, each.image_budget) for name, each in setups.items()}
    assert budgets == {"EP0": (700, 2), "D0": (64, None)}
    assert {(each.depth, each.reservation) for each in setups.values()} == {(2, "optimistic")}
    lanes = [slice for slice in pipe.timeline.slices() if slice.instance == "EP0"]
    assert max(each.args.get("prefill tokens", 0) for each in lanes) == 700


def test_every_knob_of_the_search_is_run() -> None:
    assert set(list_knobs(Space(spreads=(1, 2)))) <= set(PLAN_SETTINGS)


@pytest.mark.parametrize(
    ("settings", "given", "spread"),
    [({"spread": 3}, {}, 3), ({"spread": 3}, {"spread": 1}, 1), ({}, {"spread": 2}, 2), ({}, {}, 1)],
)
def test_a_plans_spread_is_served_unless_the_user_has_another(
    settings: dict[str, int], given: dict[str, Any], spread: int
) -> None:
    pipe = Pipeline(QUICK, planned("2E1PD", settings=settings), **given)
    assert pipe._frontend.core.dispatch.spread == spread
    assert (pipe._config.spread or 1) == spread, "strips of an image, too"


def test_a_setting_of_another_version_is_not_left_out_in_silence() -> None:
    with pytest.raises(UnknownName, match="unknown setting of a plan 'chunk'; known: depth, images, mixed_tokens"):
        Pipeline(QUICK, planned("2EPD", settings={"chunk": 512}))
