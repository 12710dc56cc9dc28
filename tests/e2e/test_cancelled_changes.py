"""Changes of a placement whose caller is cancelled while they are carried out: what runs and what is noted agree."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from e2e.test_recovered import wanted
from e2e.test_switched import emulated
from support.emulated_pipelines import LIVENESS_S, asked, right
from support.shared_launcher import sharing
from trinity.errors import PlacementError, UnknownName
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.instance_client import InstanceClient
from trinity.runtime.host import InstanceHost

BOTH = pytest.mark.parametrize("hosting", ["thread", "process"])
Change = Callable[[Pipeline], Coroutine[Any, Any, Any]]


@pytest.fixture(autouse=True)
def launcher(torch_launcher: Launcher) -> Iterator[None]:
    wanted()  # it takes seconds to load, which is not for an event loop
    with sharing(torch_launcher):
        yield


def roles_of(pipe: Pipeline) -> dict[str, str]:
    """The roles of each instance, as the front end routes to it."""
    return {name: peer.roles for name, peer in pipe._frontend.core.router.peers.items()}


async def cancel_as_it_ends(pipe: Pipeline, change: Change, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Cancel a change so often, at the moment from which it can not be undone: its instance's life ends."""
    changing = asyncio.ensure_future(change(pipe))
    for kind in (InstanceHost, InstanceClient):
        original: Callable[[Any], Coroutine[Any, Any, None]] = kind.join

        async def join(self: Any, original: Callable[[Any], Coroutine[Any, Any, None]] = original) -> None:
            for _ in range(times):
                changing.cancel()
                await asyncio.sleep(0)
            await original(self)

        monkeypatch.setattr(kind, "join", join)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(changing, LIVENESS_S)
    monkeypatch.undo()


@BOTH
@pytest.mark.parametrize("times", [1, 2])
async def test_a_removal_that_can_not_be_undone_is_noted(
    hosting: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with emulated("1E1P2D", hosting) as pipe:
        await cancel_as_it_ends(pipe, lambda pipe: pipe.remove("D1"), monkeypatch, times)
        assert {each.name: each.roles for each in pipe.instances} == roles_of(pipe) == {"E0": "E", "P0": "P", "D0": "D"}
        assert str(pipe.placement) == "1E1P1D"
        with pytest.raises(UnknownName, match="D1"):
            await pipe.remove("D1")
        with pytest.raises(PlacementError, match="no instance would have stage D"):
            await pipe.remove("D0")
        await asyncio.wait_for(pipe.add(Instance("D", "D1", pools={"kv": 400})), LIVENESS_S)
        requests = asked()
        outputs = await asyncio.wait_for(asyncio.gather(*map(pipe.complete, requests)), LIVENESS_S)
        assert [each.token_ids for each in outputs] == [right(each) for each in requests]


@BOTH
async def test_a_switch_that_can_not_be_undone_is_noted(hosting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with emulated("2E1P1D", hosting) as pipe:
        await cancel_as_it_ends(pipe, lambda pipe: pipe.switch("E1", "D"), monkeypatch, 1)
        assert {each.name: each.roles for each in pipe.instances} == roles_of(pipe)
        assert str(pipe.placement) == "1E1P2D"
        await asyncio.wait_for(pipe.switch("E1", "E"), LIVENESS_S)
        assert roles_of(pipe)["E1"] == "E"


@BOTH
async def test_an_order_of_changes_stops_behind_the_one_that_can_not_be_undone(
    hosting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with emulated("2E1P2D", hosting) as pipe:
        await cancel_as_it_ends(pipe, lambda pipe: pipe.apply("1E1P1D", resize=True), monkeypatch, 1)
        assert {each.name: each.roles for each in pipe.instances} == roles_of(pipe)
        assert len(pipe.instances) == 4
        assert len(await asyncio.wait_for(pipe.apply("1E1P1D", resize=True), LIVENESS_S)) == 1
