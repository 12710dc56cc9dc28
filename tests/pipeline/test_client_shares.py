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
    return EmulatedRequest(text_tokens=4, max_tokens=1, _client=client)


@pytest.mark.parametrize("end", ["served", "cancelled"])
async def test_inputs_that_wait_count_as_bytes_of_their_clients(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity.preprocess.processor.ProcessedRequest.input_bytes", 100)
    async with trinity.Pipeline(MODEL, "EPD") as pipe, asyncio.timeout(60):
        room = pipe.processor.room
        asked = [EmulatedRequest(text_tokens=4, image_tokens=(64,), max_tokens=1, _client=client) for client in "aab"]
        tasks = [asyncio.create_task(pipe.complete(each)) for each in asked]
        while len(pipe._frontend.core.entries) < 3:
            await asyncio.sleep(0)
        assert {name: each.running for name, each in room._queue.turns._clients.items()} == {"a": 200, "b": 100}
        if end == "cancelled":
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pipe.wait_idle()
        assert (room.taken, pipe._frontend.core.waiting_bytes) == (0, 0)
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
        assert pipe._frontend._preparing_of == {"a": 6, "b": 3, "c": 2, "": 1}
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
        assert not pipe._frontend._preparing_of
        assert await pipe.complete(ask("a"))
