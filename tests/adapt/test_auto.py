"""placement="auto": starts as N x EPD, records, plans in the background, tells, and may apply the plan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from trinity.adapt.apply_guard import has_same_roles
from trinity.adapt.auto import AUTO_CACHE_BYTES, AutoPlanner, resolve_auto_placement
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import MODELS
from trinity.costs.step_cost import DEVICES, CostTables, Roofline
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest, EmulatedShape
from trinity.errors import ChangeRefused, ClosedError, ConfigError, PlacementError, TraceError, TrinityError
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
    """A pipeline as Auto sees it; ``answers``: what each apply raises; None: it is done; ...: it never ends."""

    def __init__(self, count: int, cost: Any = H100, answers: Iterable[Any] = ()) -> None:
        self.trace, self.cost, self.profiled = Trace(rows(count)), cost, 0
        self.answers, self.applied = iter(answers), list[Any]()

    async def apply(self, placement: Any, /) -> None:
        self.applied.append(placement)
        answer = next(self.answers)
        if answer is ...:
            await asyncio.Event().wait()
        if answer is not None:
            raise answer

    async def profile(self) -> CostTables:
        self.profiled += 1
        found = {"decodes": {1: 1e-3}, "prefill": {1: 1e-3}, "media": {576: 1e-3}}
        return CostTables.from_samples({1: found}, model="llava", device="cpu", dtype="bfloat16")


def auto(requests: int = 120, instances: int = 2, apply: bool = False) -> AutoPlanner:
    made = AutoPlanner(ROOF, instances, LOOSE, 60 << 30, apply)
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
        ({"apply": 1}, "apply is True or False"),
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


def test_a_plan_that_is_never_made_cannot_be_applied() -> None:
    with pytest.raises(ConfigError, match=r'apply=True applies the plan of placement="auto"'):
        Pipeline(QUICK, "2EPD", apply=True)


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


# ---------------------------------------------------------------- apply=True


def planned(placement: str = "1EP1D", met: bool = True) -> Any:
    return SimpleNamespace(placement=placement, met=met, explain=lambda: f"run {placement}")


async def applying(answers: Iterable[Any], plan: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[AutoPlanner, Recorded]:
    """An AutoPlanner that has made this plan, on a pipeline with these answers."""
    made, pipe = auto(apply=True), Recorded(120, answers=answers)
    monkeypatch.setattr(made, "plan_on", lambda *_: plan)
    await made.begin(pipe)
    return made, pipe


async def test_the_plan_is_applied_once_the_pipeline_can_be_changed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="trinity")
    plan, away = planned(), ChangeRefused("an instance is away (D0 is down)")
    made, pipe = await applying([away, away, None], plan, monkeypatch)
    await asyncio.wait_for(made.done.wait(), 60)
    assert (made.applied, made.error, pipe.applied) == (True, None, [plan] * 3)
    assert caplog.text.count("the plan for 1EP1D waits: an instance is away (D0 is down)") == 1
    await made.aclose()


@pytest.mark.parametrize("plan", [planned("2EPD"), planned("1EP1D", met=False)])
async def test_a_plan_that_betters_nothing_is_not_applied(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, pipe = await applying([], plan, monkeypatch)
    await asyncio.wait_for(made.done.wait(), 60)
    assert (made.applied, made.error, pipe.applied) == (False, None, [])
    await made.aclose()


@pytest.mark.parametrize("wrong", [PlacementError("not of these"), ZeroDivisionError("of trinity")])
async def test_a_plan_that_cannot_be_applied_is_told_and_kept(
    wrong: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, pipe = await applying([wrong], planned(), monkeypatch)
    await asyncio.wait_for(made.done.wait(), 60)
    assert (made.applied, len(pipe.applied)) == (False, 1)
    assert isinstance(made.error, TrinityError)
    assert made.plan is not None
    assert str(wrong) in str(made.error)
    assert str(wrong) in caplog.text
    await made.aclose()


@pytest.mark.parametrize("answer", [..., ClosedError("the pipeline is closed")])
async def test_closed_while_it_applies_it_ends(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, pipe = await applying([answer], planned(), monkeypatch)
    async with asyncio.timeout(60):
        while not pipe.applied:
            await asyncio.sleep(0.01)
        await made.aclose()
    assert (made.applied, made.error) == (False, None)


async def test_while_it_waits_for_an_instance_it_ends_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    made, pipe = await applying([ChangeRefused("away")] * 9, planned(), monkeypatch)
    made.every_s = 60.0
    async with asyncio.timeout(60):
        while not pipe.applied:
            await asyncio.sleep(0.01)
        await made.aclose()
    assert (made.applied, len(pipe.applied)) == (False, 1)


@pytest.mark.parametrize("apply", [True, False])
async def test_a_pipeline_becomes_what_its_plan_says(apply: bool) -> None:
    """Between two tokens there is no time for a prompt: three general instances are not to stay so."""
    tight, cache = SLO(ttft=0.3, tbt=0.008), CacheConfig(pools={"image": 8, "kv": 256})
    async with Pipeline(ROOF, "auto", instances=3, slo=tight, cache=cache, apply=apply) as pipe:
        assert pipe.auto is not None
        pipe.auto.requests, pipe.auto.every_s = 120, 0.01
        for row in rows(120):
            pipe.trace.append(msgspec.structs.replace(row, output_length=20))
        asked = EmulatedRequest(text_tokens=8, image_tokens=(576,), max_tokens=3)
        async with asyncio.timeout(60):
            while pipe.auto.plan is None:  # what is served until then would be planned for too
                await asyncio.sleep(0.01)
        while not pipe.auto.done.is_set():
            assert len((await asyncio.wait_for(pipe.complete(asked), 60)).token_ids) == 3
        assert (pipe.auto.applied, pipe.auto.error) == (apply, None)
        assert not has_same_roles(pipe.auto.plan.placement, "3EPD")
        assert has_same_roles(str(pipe.placement), pipe.auto.plan.placement if apply else "3EPD")
        output = await asyncio.wait_for(pipe.complete(asked), 60)
        assert (len(output.route) > 1) == apply
