"""A pipeline runs a plan: its best placement, with tokens as ever."""

from __future__ import annotations

import msgspec
import pytest

from planning import BEST, plan
from trinity.errors import TrinityWarning
from trinity.paced import LLAVA_15_7B, LinearCost, Paced, PacedRequest
from trinity.pipeline import Pipeline
from trinity.planner import Plan
from trinity.routing import LeastLoaded
from trinity.scheduler import Rules

QUICK = Paced(shape=LLAVA_15_7B, cost=LinearCost(step_s=1e-4), scale=4096)


def planned(placement: str, **changes: object) -> Plan:
    return plan(best=msgspec.structs.replace(BEST, placement=placement, **changes))


async def test_a_plan_is_a_placement() -> None:
    async with Pipeline(QUICK, planned("1EP1D"), pools={"image": 8, "kv": 64}) as pipe:
        assert str(pipe.placement) == "1EP1D"
        output = await pipe.complete(PacedRequest(text_tokens=8, image_tokens=(576,), max_tokens=3))
        assert output.route == ["EP0", "D0"]


async def test_a_loaded_plan_too(tmp_path: object) -> None:
    path = f"{tmp_path}/plan.json"
    planned("1E1PD").save(path)
    assert str(Pipeline(QUICK, Plan.load(path)).placement) == "1E1PD"


async def test_the_policy_order_and_routing_of_a_wider_search_are_run() -> None:
    knobs = {"order": "sjf", "policy": "prefill_first", "routing": "least_loaded", "tokens": 0, "images": 0}
    pools = {"image": 8, "kv": 64}
    async with Pipeline(QUICK, planned("2EPD", settings=knobs), pools=pools) as pipe:
        for host in pipe.hosts.values():
            rules = host.core.settings.rules
            assert (rules.order, rules.policy) == ("sjf", "prefill_first")
            assert isinstance(host.core.state.router.policy, LeastLoaded)
        output = await pipe.complete(PacedRequest(text_tokens=8, image_tokens=(576,), max_tokens=3))
        assert len(output.token_ids) == 3


async def test_what_the_user_says_goes_before_the_plan() -> None:
    plan = planned("2EPD", settings={"order": "sjf", "routing": "least_loaded"})
    pools = {"image": 8, "kv": 64}
    async with Pipeline(QUICK, plan, pools=pools, rules=Rules(order="deadline"), routing="random") as pipe:
        assert {host.core.settings.rules.order for host in pipe.hosts.values()} == {"deadline"}
        assert pipe.routing == "random"
    assert Pipeline(QUICK, "2EPD").routing == "round_robin"


async def test_batch_limits_beside_the_placement_are_not_left_out_in_silence() -> None:
    with pytest.warns(TrinityWarning, match=r"its batch limits \(tokens=512\) are not: give budgets="):
        Pipeline(QUICK, planned("2EPD", settings={"order": "sjf", "tokens": 512, "images": 0}))
