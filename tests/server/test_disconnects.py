"""Clients that leave, read nothing or come in hundreds: what nobody waits for ends at once, all others stay exact."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from support.http_server import ServedModel, answer_of_transformers, chat_body, serve_model, settled
from trinity.errors import ClosedError
from trinity.request import Request
from trinity.server import ServerConfig, connection
from trinity.server.application import ModelServer
from trinity.server.connection import UntilGone

LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
TOKENS = 16
LIVENESS_S = 120.0


async def begin(served: ServedModel, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a chat on a connection of its own."""
    host, port = served.url.removeprefix("http://").split(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=made, limit=1 << 14)
    data = json.dumps(body).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", "content-type: application/json"]
    head = "\r\n".join([*lines, f"content-length: {len(data)}", "", ""])
    writer.write(head.encode() + data)
    return reader, writer


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    async with serve_model() as served:
        _reader, writer = await begin(served, chat_body(**LONG, stream=stream))
        async with asyncio.timeout(120):
            while not any(len(each.token_times) >= 3 for each in served.pipe.streams):
                await asyncio.sleep(0)
        await leave(writer)
        made = await settled(served.pipe)
        assert made < 390, "all tokens were made for nobody"
        assert served.pipe.metrics.summary()["finished"] == {"cancelled": 1}
        await asyncio.sleep(0.1)
        assert await settled(served.pipe) == made
        metrics = (await served.http.get("/metrics")).text
    assert 'trinity_http_responses_total{path="/v1/chat/completions",status="499"} 1.0' in metrics


async def test_a_client_that_closes_its_sending_side_counts_as_one_that_left() -> None:
    """docs/server.md says so: behind a proxy the end of what a client sends is mostly all that is seen of its end."""
    async with serve_model() as served, asyncio.timeout(120):
        reader, writer = await begin(served, chat_body(**LONG))
        while not any(len(each.token_times) >= 3 for each in served.pipe.streams):
            await asyncio.sleep(0)
        writer.write_eof()
        assert not await reader.read(), "no answer"
        assert await settled(served.pipe) < 390
        assert served.pipe.metrics.summary()["finished"] == {"cancelled": 1}
        writer.close()


async def test_a_body_that_drips_ends_early_and_one_that_comes_steadily_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At 9df71424 a byte now and then held a connection for ``body_timeout_s``."""
    monkeypatch.setattr(connection, "BODY_GRACE_S", 0.5)
    monkeypatch.setattr(connection, "LEAST_BODY_RATE", 1000)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    async with serve_model(config=ServerConfig(body_timeout_s=60)) as served, asyncio.timeout(120):
        ends = []
        for piece in (b" ", b" " * 1000):
            reader, writer = await asyncio.open_connection(*served.url.removeprefix("http://").split(":"))
            writer.write(head + b"content-length: 20000\r\n\r\n")
            sent = 0
            answer = asyncio.create_task(reader.readuntil(b"\r\n"))
            while sent < 20000 and not answer.done():
                writer.write(piece)
                sent += len(piece)
                await asyncio.sleep(0.1)
            ends.append((await answer, sent))
            writer.close()
        (dripped, few), (steady, all_of_it) = ends
        assert b" 408 " in dripped
        assert few < 600
        assert b" 400 " in steady, "spaces are no JSON"
        assert all_of_it == 20000


async def test_a_client_that_leaves_while_its_request_waits_to_be_prepared() -> None:
    async with serve_model() as served:
        hold = asyncio.Event()
        prepare = served.pipe.processor.aprocess

        async def slowly(request: Any) -> Any:
            await hold.wait()
            return await prepare(request)

        served.pipe.processor.aprocess = slowly  # type: ignore[method-assign]
        _reader, writer = await begin(served, chat_body(**LONG))
        async with asyncio.timeout(120):
            while not served.pipe.streams:
                await asyncio.sleep(0)
            await leave(writer)
            while served.server.active:
                await asyncio.sleep(0)
        hold.set()
        assert await settled(served.pipe) == 0


@pytest.mark.parametrize("within", [False, True])
async def test_a_drain_that_comes_once_the_answer_is_being_sent_stops_nothing(within: bool) -> None:
    """At 44286955 it was an error there, which ended the drain, and the server never came to its end."""
    gone: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    exchange: Any = SimpleNamespace(ended=False)
    block = UntilGone(exchange, lambda: gone)
    with pytest.raises(ClosedError) if within else contextlib.nullcontext():
        async with block:
            if within:
                block.leave(lambda: ClosedError("in time"))
                block.leave(lambda: ClosedError("late"))
                await asyncio.sleep(LIVENESS_S)
    block.leave(lambda: ClosedError("too late"))


async def test_a_server_whose_drain_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: ModelServer, seconds: float) -> None:
        raise ValueError("a broken drain")

    monkeypatch.setattr(ModelServer, "drain", fail)
    async with serve_model() as served:
        with pytest.raises(ValueError, match="a broken drain"):
            await served.uvicorn._drain()
        assert served.uvicorn.should_exit


def find_cycles(kind: type) -> list[Any]:
    """Return the objects of exactly a type that only the cyclic collector would free, of those made since a freeze.

    They stay in their cycles, and are found by a second call.
    """
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [each for each in gc.garbage if type(each) is kind]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
REFUSED: dict[str, dict[str, Any]] = {
    "too long": chat_body("word " * 20_000),
    "a field": {**chat_body(), "temperature": -1},
    "a field of a large body": {**chat_body("word " * 20_000), "guided_choice": ["word " * 20_000]},
    "a medium": {"messages": [{"role": "user", "content": [BROKEN]}]},
}


@pytest.mark.parametrize("end", ["served", *REFUSED, "left while it waits", "left while it decodes", "left stream"])
async def test_what_a_request_held_is_free_at_its_end(end: str) -> None:
    """An error holds the frames that it went through: one that they hold in turn kept bodies of 60 MB for minutes."""
    async with serve_model("llava", "EPD") as served, asyncio.timeout(120):
        prepare, hold = served.pipe.processor.aprocess, asyncio.Event()

        async def slowly(request: Any) -> Any:
            await hold.wait()
            return await prepare(request)

        if end == "left while it waits":
            served.pipe.processor.aprocess = slowly  # type: ignore[method-assign]
        fields = {**LONG, "stream": end == "left stream"}
        fields |= {"max_tokens": 3} if end == "served" else {}
        gc.disable()
        gc.freeze()  # what the tests before this one left: to look through all of it took a minute on a busy machine
        try:
            for _ in range(3):
                reader, writer = await begin(served, {**chat_body(), **fields, **REFUSED.get(end, {})})
                if end in ("served", *REFUSED):
                    assert (b" 200 " in await reader.readline()) == (end == "served")
                elif end == "left while it waits":
                    while not served.pipe.streams:
                        await asyncio.sleep(0)
                else:
                    while not any(len(each.token_times) >= 3 for each in served.pipe.streams):
                        await asyncio.sleep(0)
                await leave(writer)
                while served.server.active:
                    await asyncio.sleep(0.001)
                await settled(served.pipe)
            await asyncio.sleep(0.1)
            kept = find_cycles(Request)
        finally:
            gc.unfreeze()
            gc.enable()
        assert not kept, f"{len(kept)} requests wait for the collector"


async def test_a_client_that_reads_nothing_is_left() -> None:
    config = ServerConfig(send_timeout_s=0.2)
    async with serve_model(config=config) as served:
        fields = {**LONG, "logprobs": True, "top_logprobs": 20, "stream": True, "max_tokens": 300}
        held = [await begin(served, chat_body(**fields)) for _ in range(2)]
        async with asyncio.timeout(60):
            while not served.server.active:
                await asyncio.sleep(0.01)
            while served.server.active:
                await asyncio.sleep(0.01)
        await settled(served.pipe)
        assert served.server._counts["/v1/chat/completions", "499"] == 2
        for _, writer in held:
            await leave(writer)


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
async def test_many_streams_of_which_a_third_leaves(count: int) -> None:
    drawn, texts = random.Random(7), ["Good morning", "What a day", "And then?"]
    expected = {text: await asyncio.to_thread(answer_of_transformers, "llama", text, TOKENS) for text in texts}

    async def read(served: ServedModel, text: str, leaves: bool) -> None:
        body = chat_body(text, max_tokens=TOKENS, temperature=0, stream=True)
        async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            found = ""
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                found += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
                if leaves and found:
                    return
        assert found == expected[text][1]

    async with serve_model(max_waiting=4096) as served:
        asked = [(drawn.choice(texts), drawn.random() < 0.3) for _ in range(count)]
        async with asyncio.TaskGroup() as group:
            for text, leaves in asked:
                group.create_task(read(served, text, leaves))
        await settled(served.pipe)
        finished = served.pipe.metrics.summary()["finished"]
    assert sum(finished.values()) == count
    assert finished["length"] >= sum(not leaves for _, leaves in asked)
