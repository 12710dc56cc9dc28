"""A pipeline runs a plan: its best placement, with tokens as ever."""

from __future__ import annotations

import msgspec
import pytest

from planning import BEST, plan
from trinity.errors import TrinityWarning
from trinity.paced import LLAVA_15_7B, LinearCost, Paced, PacedRequest
from trinity.pipeline import Pipeline
from trinity.planner import Plan

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


async def test_settings_beside_the_placement_are_not_applied_in_silence() -> None:
    with pytest.warns(TrinityWarning, match=r"its settings \(order=sjf\) are not: give rules="):
        Pipeline(QUICK, planned("2EPD", settings={"order": "sjf"}))
