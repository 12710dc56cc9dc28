"""Proposals that apply themselves beside a pipeline: what is told to the guard, to the replanner, and to the log."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from support.steady_traffic import FLAT, Plan, steady
from trinity.adapt.apply_guard import ApplyRules
from trinity.adapt.auto_apply import AutoApply
from trinity.adapt.drift import DriftDetector
from trinity.adapt.replanner import Replanner
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.errors import ChangeRefused, ClosedError, ConfigError, PlacementError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.traces.trace import Trace, TraceRow

LIVENESS_S = 60.0
SHIFTED = [*steady(0, 300), *steady(300, 420, out=21)]  # D's demand doubles
AGAIN = [*steady(420, 700, out=21), *steady(700, 820, out=41)]
QUICK = ApplyRules(cooldown_s=0, retry_s=0.01)


class Served:
    """A pipeline whose requests are rows that are given; ``answers``: what each apply raises, None where it is done."""

    def __init__(self, answers: Iterable[Any] = (), placement: str = "1P1D") -> None:
        self.trace, self.streams, self.state = Trace(), (), "running"
        self.metrics = SimpleNamespace(counts=lambda: {"refused": {}})
        self.placement, self.change_obstacle = placement, ""
        self.answers, self.asked = iter(answers), list[Any]()

    async def apply(self, placement: Any, /) -> list[Any]:
        self.asked.append(placement)
        answer = next(self.answers)
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        elif answer is not None:
            self.state = "closed" if isinstance(answer, ClosedError) else self.state
            raise answer
        self.placement = placement
        return [SimpleNamespace(name="D1", roles="D")]

    def serve(self, rows: Iterable[TraceRow]) -> None:
        for each in rows:
            self.trace.append(each)


def watcher(pipe: Any, plans: Iterable[Any], rules: ApplyRules = QUICK, placement: str = "1P1D") -> AutoApply:
    made, answers = Replanner(DriftDetector(FLAT), placement, least=5, requests=20, cooldown_s=0), iter(plans)
    return AutoApply(pipe, made, lambda trace, present: next(answers), rules=rules, every_s=0.01)


async def begin(made: AutoApply) -> asyncio.Task[None]:
    task = asyncio.create_task(made.run())
    for _ in range(20):  # turns of the loop until it follows, each of them quick
        await asyncio.sleep(0)
    return task


@asynccontextmanager
async def watching(made: AutoApply) -> AsyncIterator[asyncio.Task[None]]:
    """Its task; it has begun to follow."""
    task = await begin(made)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(made: AutoApply, *verdicts: str) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while len(made.decisions) < len(verdicts):
            await asyncio.sleep(0.005)
    assert [each.verdict for each in made.decisions] == list(verdicts)


async def test_a_shift_is_applied_and_the_replanner_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trinity")
    pipe = Served([None])
    made = watcher(pipe, [Plan("1P2D")])
    async with watching(made):
        pipe.serve(SHIFTED)
        await until(made, "applies", "applied")
        await asyncio.sleep(0.03)
    assert (pipe.asked, made.replanner.placement, made.error) == (["1P2D"], "1P2D", None)
    applies, applied = made.decisions
    assert applied.because == "D1 is D"
    assert applies.proposal is applied.proposal
    assert time.time() - 600 < applies.at_s <= applied.at_s < time.time() + 600
    assert "placement 1P2D instead of 1P1D applies: it gains 2.00" in caplog.text


async def test_steady_traffic_applies_nothing() -> None:
    pipe = Served()
    made = watcher(pipe, [])
    async with watching(made):
        pipe.serve(steady(0, 420))
        async with asyncio.timeout(LIVENESS_S):
            while made.replanner.watch.now < 419:
                await asyncio.sleep(0.005)
    assert (made.decisions, pipe.asked) == ((), [])


async def test_it_waits_until_the_pipeline_can_be_changed() -> None:
    """Once for what it sees beforehand, once for what only the attempt says."""
    pipe = Served([ChangeRefused("E1 is starting"), None])
    pipe.change_obstacle = "an instance is away (E1 is down)"
    made = watcher(pipe, [Plan("1P2D")])
    async with watching(made):
        pipe.serve(SHIFTED)
        await until(made, "held back")
        pipe.change_obstacle = ""
        await until(made, "held back", "applies", "held back", "applies", "applied")
    assert [each.because for each in made.decisions if each.verdict == "held back"] == [
        "an instance is away (E1 is down)",
        "E1 is starting",
    ]
    assert made.error is None


async def test_what_has_waited_too_long_is_planned_again_on_what_came_since() -> None:
    pipe = Served([None])
    pipe.change_obstacle = "another change is under way"
    made = watcher(pipe, [Plan("1P2D"), Plan("1P3D")], ApplyRules(cooldown_s=0, fresh_s=0.02))
    async with watching(made):
        pipe.serve(SHIFTED)
        await until(made, "held back")
        await asyncio.sleep(0.03)
        pipe.change_obstacle = ""
        await until(made, "held back", "planned again")
        pipe.serve(steady(420, 440, out=21))
        await until(made, "held back", "planned again", "applies", "applied")
    assert pipe.asked == ["1P3D"]
    first, last = made.decisions[0].proposal, made.decisions[-1].proposal
    assert first.shift == last.shift
    assert last.requests > first.requests


async def test_of_what_somebody_else_has_changed_it_is_planned_anew() -> None:
    pipe, presents = Served([None]), list[str]()
    pipe.change_obstacle = "another change is under way"
    made = watcher(pipe, [])
    answers = iter([Plan("1P2D"), Plan("1P3D")])

    def plan(trace: Trace, present: str) -> Plan:
        presents.append(present)
        answer = next(answers)
        answer.candidates[-1].placement = present
        return answer

    made.plan = plan
    async with watching(made):
        pipe.serve(SHIFTED)
        await until(made, "held back")
        pipe.placement, pipe.change_obstacle = "2P1D", ""
        await until(made, "held back", "planned again")
        pipe.serve(steady(420, 430, out=21))
        await until(made, "held back", "planned again", "applies", "applied")
    assert presents == ["1P1D", "2P1D"]
    assert made.decisions[-1].proposal.instead_of == "2P1D"


async def test_a_plan_for_a_placement_that_is_gone_is_made_again() -> None:
    """While it was made somebody has changed what runs: it has no score of that."""
    pipe, presents, release = Served([None]), list[str](), asyncio.Event()
    loop, made = asyncio.get_running_loop(), watcher(pipe, [])

    def plan(trace: Trace, present: str) -> Plan:
        presents.append(present)
        if len(presents) == 1:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(LIVENESS_S)
        answer = Plan("1P2D")
        answer.candidates[-1].placement = present
        return answer

    made.plan = plan
    async with watching(made):
        pipe.serve(SHIFTED)
        async with asyncio.timeout(LIVENESS_S):
            while not presents:
                await asyncio.sleep(0.005)
            pipe.placement = "3PD"
            while made.replanner.placement != "3PD":
                await asyncio.sleep(0.005)
        release.set()
        async with asyncio.timeout(LIVENESS_S):
            while made.replanner.watch.now < 900 and len(presents) < 2:
                pipe.serve(steady(made.replanner.watch.now + 1, made.replanner.watch.now + 2, out=21))
                await asyncio.sleep(0.02)
        await until(made, "applies", "applied")
    assert presents == ["1P1D", "3PD"]
    assert made.decisions[-1].proposal.instead_of == "3PD"


async def test_an_error_of_an_apply_is_kept_and_it_is_not_tried_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    wrong = [PlacementError("not of these, once"), PlacementError("not of these, twice")]
    pipe = Served(wrong)
    made = watcher(pipe, [Plan("1P2D"), Plan("1P2D")], ApplyRules(cooldown_s=0.05, fresh_s=0.02))
    async with watching(made) as task:
        pipe.serve(SHIFTED)
        await until(made, "applies", "failed", "planned again")
        assert made.error is wrong[0]
        pipe.serve(steady(420, 430, out=21))
        start = ("applies", "failed", "planned again")
        async with asyncio.timeout(LIVENESS_S):
            while made.decisions[-1].verdict != "dropped":
                await asyncio.sleep(0.005)
        assert [each.verdict for each in made.decisions] == [*start, "applies", "failed", "dropped"]
        assert not task.done()
    assert made.error is wrong[1]
    assert "failed 2 times within an hour" in made.decisions[-1].because
    assert "failed: not of these, twice" in caplog.text
    assert pipe.placement == "1P1D"


async def test_rows_are_followed_while_an_apply_runs() -> None:
    release = asyncio.Event()
    pipe = Served([release, None])
    made = watcher(pipe, [Plan("1P2D"), Plan("1P3D")])
    async with watching(made):
        pipe.serve(SHIFTED)
        await until(made, "applies")
        pipe.serve(AGAIN)
        await until(made, "applies", "held back")
        assert made.decisions[-1].because == "1P2D is being applied"
        assert made.replanner.placement == "1P1D"
        release.set()
        await until(made, "applies", "held back", "applied", "planned again")
    assert (pipe.asked, made.replanner.placement) == (["1P2D"], "1P2D")


async def test_it_ends_with_its_pipeline() -> None:
    pipe = Served([ClosedError("the pipeline is closed")])
    made = watcher(pipe, [Plan("1P2D")])
    task = await begin(made)
    pipe.serve(SHIFTED)
    await asyncio.wait_for(task, LIVENESS_S)
    assert [each.verdict for each in made.decisions] == ["applies"]
    assert made.error is None


async def test_cancelled_amid_an_apply_it_cancels_that() -> None:
    never, cancelled = asyncio.Event(), list[bool]()
    pipe = Served([never])
    made, wait = watcher(pipe, [Plan("1P2D")]), never.wait

    async def waits() -> Any:
        try:
            return await wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    never.wait = waits  # type: ignore[method-assign]
    async with watching(made) as task:
        pipe.serve(SHIFTED)
        await until(made, "applies")
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert cancelled == [True]


@pytest.mark.parametrize("wrong", ["plan", "apply"])
async def test_what_is_no_error_of_trinity_comes_out(wrong: str) -> None:
    pipe = Served([ZeroDivisionError("apply")])
    made = watcher(pipe, [Plan("1P2D")])
    if wrong == "plan":
        made.plan = lambda trace, present: 1 // 0  # type: ignore[assignment, return-value]
    async with watching(made) as task:
        pipe.serve(SHIFTED)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(task, LIVENESS_S)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("every_s", [0, -1, float("nan"), float("inf")])
def test_a_pause_must_be_positive(every_s: float) -> None:
    with pytest.raises(ConfigError, match="every_s"):
        AutoApply(Served(), watcher(Served(), []).replanner, lambda *_: Plan("1P2D"), every_s=every_s)


async def test_a_pipeline_that_does_not_run_cannot_be_watched() -> None:
    model = EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(step_s=1e-3), scale=4096)
    pipe = Pipeline(model, "1E1PD", cache=CacheConfig(pools={"image": 8, "kv": 256}))
    with pytest.raises(ClosedError, match="a pipeline that is new cannot be watched; start one"):
        await watcher(pipe, []).run()
    async with pipe:
        pass
    with pytest.raises(ClosedError, match="a pipeline that is closed cannot be watched"):
        await watcher(pipe, []).run()


async def test_one_watcher_runs_once_at_a_time() -> None:
    made = watcher(Served(), [])
    async with watching(made):
        with pytest.raises(ConfigError, match="this watcher runs already"):
            await made.run()
    async with watching(made) as task:  # another time
        assert not task.done()


# ---------------------------------------------------------------- a real pipeline


async def test_a_real_pipeline_switches_while_it_serves() -> None:
    """Of its own requests only that they come matters here: which shift they have is told by rows that are given."""
    model = EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(step_s=2e-3), scale=4096)
    async with Pipeline(model, "2E1P1D", cache=CacheConfig(pools={"image": 8, "kv": 256})) as pipe:
        plan = Plan("1E1P2D")
        plan.candidates[-1].placement = "2E1P1D"
        made = watcher(pipe, [plan], placement="2E1P1D")
        async with watching(made):
            for row in SHIFTED:
                pipe.trace.append(row)
            asked = EmulatedRequest(text_tokens=8, image_tokens=(576,), max_tokens=5)
            async with asyncio.timeout(LIVENESS_S):
                while not made.decisions or made.decisions[-1].verdict != "applied":
                    assert len((await pipe.complete(asked)).token_ids) == 5
        assert str(pipe.placement) == "1E1P2D"
        assert made.decisions[-1].because == "E1 is D"
        assert made.error is None
        assert len((await pipe.complete(asked)).token_ids) == 5


@pytest.mark.parametrize("hosting", ["thread", "process"])
async def test_a_pipeline_that_is_closed_amid_an_apply_leaves_nothing(hosting: Any) -> None:
    model = EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(step_s=5e-2), scale=4096)
    pipe = Pipeline(model, "1E1P2D", hosting=hosting, cache=CacheConfig(pools={"image": 8, "kv": 256}))
    planning, decoding = threading.Event(), threading.Event()

    def plan(trace: Trace, present: str) -> Plan:
        planning.set()
        assert decoding.wait(LIVENESS_S)
        answer = Plan("2E1P1D")
        answer.candidates[-1].placement = present
        return answer

    made = watcher(pipe, [], placement="1E1P2D")
    made.plan = plan
    async with pipe, asyncio.timeout(LIVENESS_S):
        task = await begin(made)
        for row in SHIFTED:
            pipe.trace.append(row)
        while not planning.is_set():
            await asyncio.sleep(0.005)
        asked = [EmulatedRequest(text_tokens=8, image_tokens=(576,), max_tokens=500) for _ in range(4)]
        serving = [asyncio.ensure_future(pipe.complete(each)) for each in asked]
        while sum(each.token_count > 2 for each in pipe.streams) < 4:
            await asyncio.sleep(0.005)
        decoding.set()
        await until(made, "applies")
        await asyncio.sleep(0.05)
        assert "another change is under way" in pipe.change_obstacle
    await asyncio.wait_for(task, LIVENESS_S)
    ended = await asyncio.gather(*serving, return_exceptions=True)
    assert all(isinstance(each, ClosedError) for each in ended), ended
    assert (made.error, [each.verdict for each in made.decisions]) == (None, ["applies"])
