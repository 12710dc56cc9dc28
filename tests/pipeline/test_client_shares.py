"""One client's share of the requests that may wait: what it sends leaves room for others, and is counted exactly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import trinity
from support.emulated_pipelines import MODEL
from trinity.emulation.model import EmulatedRequest
from trinity.errors import Overloaded


def ask(client: str) -> EmulatedRequest:
    return EmulatedRequest(text_tokens=4, max_tokens=1, client=client)


@pytest.mark.parametrize("end", ["served", "cancelled"])
async def test_inputs_that_wait_count_as_bytes_of_their_clients(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity.preprocess.processor.ProcessedRequest.input_bytes", 100)
    async with trinity.Pipeline(MODEL, "EPD") as pipe, asyncio.timeout(60):
        room = pipe.processor.room
        asked = [EmulatedRequest(text_tokens=4, image_tokens=(64,), max_tokens=1, client=client) for client in "aab"]
        tasks = [asyncio.create_task(pipe.complete(each)) for each in asked]
        while len(pipe._frontend.core.entries) < 3:
            await asyncio.sleep(0)
        assert {name: each.running for name, each in room._queue.turns._clients.items()} == {"a": 200, "b": 100}
        if end == "cancelled":
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pipe.wait_idle()
        assert (room.taken, pipe._frontend.core.inputs.waiting_bytes) == (0, 0)
        assert not room._queue.turns._clients


@pytest.mark.parametrize("end", ["served", "cancelled"])
async def test_each_client_leaves_room_for_another(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with trinity.Pipeline(MODEL, "EPD", max_waiting=12) as pipe, asyncio.timeout(60):
        prepare, go_on = pipe.processor.aprocess, asyncio.Event()

        async def slowly(request: Any) -> Any:
            await go_on.wait()
            return await prepare(request)

        monkeypatch.setattr(pipe.processor, "aprocess", slowly)
        tasks: dict[str, list[asyncio.Task[Any]]] = {}
        for client in ("a", "b", "c", ""):
            tasks[client] = [asyncio.create_task(pipe.complete(ask(client))) for _ in range(12)]
            for _ in range(5):
                await asyncio.sleep(0)
        refused = {client: sum(each.done() for each in given) for client, given in tasks.items()}
        assert refused == {"a": 6, "b": 9, "c": 10, "": 11}, "and whoever has no name takes what is left"
        assert pipe._frontend._waiting_of == {"a": 6, "b": 3, "c": 2, "": 1}
        waiting = [each for given in tasks.values() for each in given if not each.done()]
        if end == "cancelled":
            for each in waiting:
                each.cancel()
        go_on.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        for given in tasks.values():
            for each in given:
                if each not in waiting:
                    with pytest.raises(Overloaded):
                        each.result()
        assert not pipe._frontend._waiting_of
        assert await pipe.complete(ask("a"))


@pytest.mark.parametrize("end", ["served", "cancelled"])
async def test_what_waits_for_its_first_token_counts_as_its_clients(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 82dc40f9 only what was being prepared did: one client had 12 of the 12 that may wait."""
    async with trinity.Pipeline(MODEL, "EPD", max_waiting=12) as pipe, asyncio.timeout(60):
        front, kept = pipe._frontend, list[tuple[Any, ...]]()
        send = front.send_to_peer
        monkeypatch.setattr(front, "send_to_peer", lambda *given: kept.append(given))  # a stage that is slow just now
        tasks = list[asyncio.Task[Any]]()
        for client in ["a"] * 12 + ["b"] * 12:
            tasks.append(asyncio.create_task(pipe.complete(ask(client))))
            while not tasks[-1].done() and front.core.waiting < sum(not each.done() for each in tasks):
                await asyncio.sleep(0)
        assert (front.preparing, front._waiting_of) == (0, {"a": 6, "b": 3})
        refused = [each.exception() for each in tasks if each.done()]
        assert len(refused) == 15
        assert all(isinstance(each, Overloaded) for each in refused)
        waiting = [each for each in tasks if not each.done()]
        if end == "cancelled":
            for each in waiting:
                each.cancel()
        monkeypatch.undo()
        for message in kept:
            send(*message)
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not front._waiting_of
        assert not front._waiting
        assert await pipe.complete(ask("a"))


async def test_who_has_tokens_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with trinity.Pipeline(MODEL, "EPD", max_waiting=2) as pipe, asyncio.timeout(60):
        for number in range(3):
            asked = EmulatedRequest(text_tokens=4, max_tokens=8, client="a", request_id=f"r{number}")
            async with pipe.stream(asked) as tokens:
                assert pipe._frontend._waiting_of == {"a": 1}
                await anext(aiter(tokens))
                assert not pipe._frontend._waiting_of
