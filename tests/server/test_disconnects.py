"""Clients that leave, read nothing or come in hundreds: what nobody waits for ends at once, all others stay exact."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from typing import Any

import pytest

from support.http_server import ServedModel, answer_of_transformers, chat_body, serve_model, settled
from trinity.server import ServerConfig

LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
TOKENS = 16


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
