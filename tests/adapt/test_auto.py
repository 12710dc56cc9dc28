"""placement="auto": starts as N x EPD, records, plans in the background and tells; nothing is moved."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from trinity.adapt.auto import AUTO_CACHE_BYTES, AutoPlanner, resolve_auto_placement
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import MODELS
from trinity.costs.step_cost import DEVICES, CostTables, Roofline
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest, EmulatedShape
from trinity.errors import ConfigError, TraceError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow

LLAVA = MODELS["llava-1.5-7b"]
H100 = Roofline(model=LLAVA, device=msgspec.structs.replace(DEVICES["H100"], pass_s=1e-3))
QUICK = EmulatedModel(shape=EmulatedShape.of(LLAVA), cost=LinearCost(step_s=1e-4), scale=4096)
ROOF = EmulatedModel(shape=EmulatedShape.of(LLAVA), cost=H100, scale=4096)
LOOSE = SLO(ttft=0.3, tbt=0.5)


def rows(count: int) -> list[TraceRow]:
    return [
        TraceRow(timestamp=100.0 * n, input_length=600, output_length=2, images=[TraceImage(tokens=576)])
        for n in range(count)
    ]


class Recorded:
    """A pipeline as Auto sees it."""

    def __init__(self, count: int, cost: Any = H100) -> None:
        self.trace, self.cost, self.profiled = Trace(rows(count)), cost, 0

    async def profile(self) -> CostTables:
        self.profiled += 1
        found = {"decodes": {1: 1e-3}, "prefill": {1: 1e-3}, "media": {576: 1e-3}}
        return CostTables.from_samples({1: found}, model="llava", device="cpu", dtype="float32")


def auto(requests: int = 120, instances: int = 2) -> AutoPlanner:
    made = AutoPlanner(ROOF, instances, LOOSE, 60 << 30)
    made.requests, made.every_s = requests, 0.01
    return made


async def test_it_plans_when_enough_was_recorded_and_tells(caplog: pytest.LogCaptureFixture) -> None:
    made, pipe = auto(), Recorded(119)
    caplog.set_level(logging.INFO, logger="trinity")
    await made.begin(pipe)
    await asyncio.sleep(0.05)
    assert made.plan is None
    pipe.trace.append(TraceRow(timestamp=12_000.0, input_length=30, output_length=2))
    await asyncio.wait_for(made.done.wait(), 60)
    assert made.plan is not None
    assert made.plan.best.instances == 2
    assert made.plan.slo == LOOSE
    assert made.plan.placement in caplog.text
    different = made.plan.placement != "2EPD"
    assert different == ("serves this traffic better than 2EPD" in caplog.text)
    assert pipe.profiled == 0
    await made.aclose()


async def test_costs_are_measured_where_they_are_not_known() -> None:
    made, pipe = auto(), Recorded(120, None)
    await made.begin(pipe)
    await asyncio.wait_for(made.done.wait(), 60)
    assert pipe.profiled == 1
    assert made.plan is not None or made.error is not None
    await made.aclose()


async def test_a_plan_that_cannot_be_made_is_told_and_no_failure(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise TraceError("too short for anything")

    made = auto()
    monkeypatch.setattr(made, "plan_on", fails)
    await made.begin(Recorded(120))
    await asyncio.wait_for(made.done.wait(), 60)
    assert isinstance(made.error, TraceError)
    assert "no plan could be made from 120 requests: too short for anything" in caplog.text
    await made.aclose()


async def test_a_fault_of_the_planner_is_told_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    made = auto()
    monkeypatch.setattr(made, "plan_on", fails)
    await made.begin(Recorded(120))
    await asyncio.wait_for(made.done.wait(), 60)
    assert "ZeroDivisionError" in str(made.error)
    assert "planning failed on 120 requests" in caplog.text
    await made.aclose()


async def test_closed_while_it_waits_or_plans_it_plans_no_more() -> None:
    waiting = auto()
    await waiting.begin(Recorded(3))
    await waiting.aclose()
    planning = auto()
    await planning.begin(Recorded(120))
    await asyncio.sleep(0.05)
    await planning.aclose()
    assert not waiting.done.is_set()
    assert planning.plan is None or planning.done.is_set()
    await auto().aclose()  # never begun


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slo": None}, "plans for an SLO"),
        ({"instances": None}, "needs instances="),
        ({"instances": 0}, "instances is a whole number of at least 1"),
    ],
)
def test_what_is_missing_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Pipeline(QUICK, "auto", **{"slo": LOOSE, "instances": 2, **options})


def test_the_shape_of_an_emulated_model_is_its_rooflines_or_a_known_one() -> None:
    assert AutoPlanner(ROOF, 2, LOOSE).model is LLAVA
    assert AutoPlanner(QUICK, 2, LOOSE).model is LLAVA
    assert AutoPlanner(QUICK, 2, LOOSE).memory == LLAVA.weight_bytes("EPD") + AUTO_CACHE_BYTES
    own = msgspec.structs.replace(LLAVA_15_7B, name="mine")
    with pytest.raises(ConfigError, match=r"'mine' is not one of .*MODELS"):
        AutoPlanner(EmulatedModel(shape=own, cost=LinearCost(), scale=4096), 2, LOOSE)


def test_any_other_placement_is_left_as_it_is() -> None:
    assert resolve_auto_placement(QUICK, "2EPD", None, None, None) == (None, "2EPD")
    assert resolve_auto_placement(QUICK, ["x"], 3, None, None) == (None, ["x"])


async def test_a_pipeline_starts_with_general_instances_serves_and_plans() -> None:
    pipe = Pipeline(QUICK, "auto", instances=2, slo=LOOSE, cache=CacheConfig(pools={"image": 8, "kv": 256}))
    assert (pipe.placement.method, pipe.placement.size) == ("EPD", 2)
    assert pipe.auto is not None
    pipe.auto.requests, pipe.auto.every_s = 5, 0.01
    async with pipe:
        for _ in range(5):
            await pipe.complete(EmulatedRequest(text_tokens=8, image_tokens=(576,), max_tokens=3))
        await asyncio.wait_for(pipe.auto.done.wait(), 60)
        assert len(pipe.trace) == 5
    assert pipe.auto.error is not None  # five requests are too few to draw others from
    assert "From 5 requests no others can be drawn" in str(pipe.auto.error)
