"""Decodes that move away from an instance that leaves, live: exact, greedy and sampled; kills amid that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from e2e.test_grown import strike, until_up
from e2e.test_recovered import greedy, wanted
from e2e.test_switched import MANY, emulated, real, sampled, until_tokens
from support.emulated_pipelines import LIVENESS_S, right
from support.shared_launcher import sharing
from trinity.emulation.model import EmulatedRequest
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.request import Output


@pytest.fixture(autouse=True)
def launcher(torch_launcher: Launcher) -> Iterator[None]:
    wanted()  # it takes seconds to load, which is not for an event loop
    with sharing(torch_launcher):
        yield


def long_requests() -> list[EmulatedRequest]:
    """Four that decode for seconds, two on each of two instances, and that fit one of them."""
    return [EmulatedRequest(text_tokens=20, max_tokens=1400) for _ in range(4)]


def has_pace(pipe: Pipeline, name: str) -> bool:
    """True once an instance has reported how long a step of its decodes takes."""
    load = pipe.loads.get(name)
    return load is not None and load.predicted_s.get("D", 0.0) > 0.0


async def until_at_both(pipe: Pipeline) -> None:
    """Until two of four decode at each instance, whose pace has been reported."""
    entries = pipe._frontend.core.entries
    async with asyncio.timeout(LIVENESS_S):
        while (
            sorted(pipe._frontend.find_place(each) for each in entries) != ["D0", "D0", "D1", "D1"]
            or any(each.token_count < 3 for each in pipe.streams)
            or not has_pace(pipe, "D0")
            or not has_pace(pipe, "D1")
        ):
            await asyncio.sleep(0.002)


async def gathered(serving: list[asyncio.Task[Output]]) -> list[Output]:
    return list(await asyncio.wait_for(asyncio.gather(*serving), LIVENESS_S))


@pytest.mark.parametrize(
    ("change", "hosting"),
    [("remove", "thread"), ("switch", "process"), pytest.param("switch", "thread", marks=pytest.mark.slow)],
)
async def test_an_instance_is_empty_while_its_requests_go_on(change: str, hosting: str) -> None:
    """In place of waiting for seconds until they have ended: no recovery, and nothing is recomputed."""
    requests = long_requests()
    async with emulated("1E1P2D", hosting) as pipe:
        serving = [asyncio.ensure_future(pipe.complete(each)) for each in requests]
        await until_at_both(pipe)
        done = await asyncio.wait_for(pipe.switch("D1", "E") if change == "switch" else pipe.remove("D1"), LIVENESS_S)
        assert done.emptied
        assert not any(each.done() for each in serving), "they had ended before"
        outputs = await gathered(serving)
        assert [each.token_ids for each in outputs] == [right(each) for each in requests]
        assert [(each.lives, each.recomputed_tokens) for each in outputs] == [(1, 0)] * 4
        assert sorted(each.route[-1] for each in outputs) == ["D0"] * 4
        assert sum("D1" in each.route for each in outputs) == 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("hosting", ["thread", pytest.param("process", marks=pytest.mark.slow)])
async def test_requests_of_a_real_model_move_exactly(hosting: str) -> None:
    """Greedy ones, one with a penalty and log-probabilities, one that follows a pattern."""
    async with real("1E1P2D", hosting, failures=MANY) as pipe:
        alone = [await pipe.complete(each) for each in sampled()]
        serving = [asyncio.ensure_future(pipe.complete(each)) for each in (*greedy(), *sampled())]
        await until_tokens(pipe, 3)
        done = await asyncio.wait_for(pipe.switch("D1", "E"), LIVENESS_S)
        outputs = await gathered(serving)
        assert [each.token_ids for each in outputs[:3]] == wanted()
        assert [each.token_ids for each in outputs[3:]] == [each.token_ids for each in alone]
        assert done.emptied
        assert {each.lives for each in outputs} == {1}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("whom", ["D0", *(pytest.param(each, marks=pytest.mark.slow) for each in ("D1", "P0"))])
async def test_a_kill_while_decodes_move_away(whom: str) -> None:
    """Of their target, of the instance that leaves, and of the one that prefilled them."""
    requests = long_requests()
    async with emulated("1E1P2D") as pipe:
        serving = [asyncio.ensure_future(pipe.complete(each)) for each in requests]
        await until_at_both(pipe)
        switching = asyncio.ensure_future(pipe.switch("D1", "E", drain_s=2.0))
        async with asyncio.timeout(LIVENESS_S):
            while not any(each.moving for each in pipe._frontend.core.entries.values()) and not switching.done():
                await asyncio.sleep(0)
        strike(pipe, whom)
        assert (await asyncio.wait_for(switching, LIVENESS_S)).roles == "E"
        outputs = await gathered(serving)
        assert [each.token_ids for each in outputs] == [right(each) for each in requests]
        await until_up(pipe)
        assert str(pipe.placement) == "2E1P1D"


async def test_what_no_other_has_room_for_ends_where_it_is() -> None:
    """The other's pool holds two of them: a third has to wait until one has ended, or ends itself."""
    requests = [EmulatedRequest(text_tokens=20, max_tokens=600) for _ in range(4)]
    async with emulated("1E1P2D", pools={"image": 12, "kv": 80}) as pipe:
        serving = [asyncio.ensure_future(pipe.complete(each)) for each in requests]
        await until_at_both(pipe)
        done = await asyncio.wait_for(pipe.switch("D1", "E"), LIVENESS_S)
        assert done.emptied
        outputs = await gathered(serving)
        assert [each.token_ids for each in outputs] == [right(each) for each in requests]
        assert {each.lives for each in outputs} == {1}


async def test_a_request_of_text_and_pictures_moves_too() -> None:
    request = EmulatedRequest(text_tokens=18, image_tokens=(576,), contents=("cat",), max_tokens=1400)
    async with emulated("1E1P2D") as pipe:
        serving = asyncio.ensure_future(pipe.complete(request))
        async with asyncio.timeout(LIVENESS_S):
            while not (place := pipe._frontend.find_place(request.request_id)).startswith("D"):
                await asyncio.sleep(0.002)
            while not has_pace(pipe, place):
                await asyncio.sleep(0.002)
        await asyncio.wait_for(pipe.remove(place), LIVENESS_S)
        assert not serving.done()
        output = await asyncio.wait_for(serving, LIVENESS_S)
        assert (output.token_ids, output.lives) == (right(request), 1)
