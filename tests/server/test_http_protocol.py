"""Heads of requests that never end, by size or by time, and requests that go one behind the other on a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import pytest
import uvicorn

from support.emulated_pipelines import LIVENESS_S
from support.http_server import QUIET
from trinity.server import http_protocol

POST = b"POST / HTTP/1.1\r\nhost: here\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


async def measure_body(
    scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    """Answer a request with the size of its body; "/slow" a fifth of a second later."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await asyncio.sleep(0.2 if scope["path"] == "/slow" else 0)
    text = str(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


class Connection(NamedTuple):
    """A client's end."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Read one response: its status and its body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split()[1]), await self.reader.readexactly(length)

    async def send_for_ever(self, piece: bytes) -> int:
        """Send pieces until the server closes; return how many bytes it took."""
        sent = 0
        with suppress(ConnectionError):
            while not self.reader.at_eof():
                await self.ask(piece)
                sent += len(piece)
        return sent


@asynccontextmanager
async def connected() -> AsyncIterator[Callable[[], Awaitable[Connection]]]:
    server = uvicorn.Server(uvicorn.Config(measure_body, port=0, timeout_graceful_shutdown=1, **QUIET))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port, opened = server.servers[0].sockets[0].getsockname()[1], list[Connection]()

    async def connect() -> Connection:
        opened.append(Connection(*await asyncio.open_connection("127.0.0.1", port)))
        return opened[-1]

    try:
        async with asyncio.timeout(LIVENESS_S):
            yield connect
    finally:
        for each in opened:
            each.writer.close()
            with suppress(ConnectionError):
                await each.writer.wait_closed()
        server.should_exit = True
        await task


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (POST, b"x-more: " + b"a" * 1000 + b"\r\n"),
        (POST + b"x-long: ", b"a" * 1000),
        (b"POST /", b"a" * 1000),
        (CHUNKED, b"1\r\na\r\n" * 100),
        (CHUNKED, b"1;ext=" + b"e" * 90 + b"\r\na\r\n"),
        (CHUNKED + b"0\r\n", b"x-trailer: " + b"a" * 1000 + b"\r\n"),
        (b"", b"\r\n" * 500),
    ],
    ids=["headers", "one header", "path", "tiny chunks", "extensions of chunks", "trailers", "empty lines"],
)
async def test_what_is_no_body_is_bounded(head: bytes, piece: bytes) -> None:
    async with connected() as connect:
        client = await connect()
        await client.ask(head)
        assert await client.send_for_ever(piece) < 16 << 20, "of which the kernel's buffers take most"
        other = await connect()
        await other.ask(POST + b"content-length: 2\r\n\r\nab")
        assert await other.answer() == (200, b"2")


async def test_too_large_a_head_is_told() -> None:
    async with connected() as connect:
        client = await connect()
        await client.ask(POST + b"x-long: " + b"a" * (http_protocol.MOST_HEAD + 1))
        assert (await client.answer())[0] == 431
        assert await client.reader.read() == b""
        client = await connect()
        await client.ask(POST + b"x-long: " + b"a" * (http_protocol.MOST_HEAD - 200) + b"\r\n\r\n")
        assert await client.answer() == (200, b"0")


async def test_large_bodies_are_none_of_it() -> None:
    async with connected() as connect:
        client = await connect()
        for _ in range(3):
            await client.ask(CHUNKED + (b"400\r\n" + b"a" * 1024 + b"\r\n") * 2048 + b"0\r\n\r\n")
            assert await client.answer() == (200, b"%d" % (2 << 20))
            await client.ask(POST + b"content-length: 2097152\r\n\r\n" + b"a" * (2 << 20))
            assert await client.answer() == (200, b"%d" % (2 << 20))


@pytest.mark.parametrize("begun", [b"", b"\r\n", b"POST / HT", POST])
async def test_a_head_that_does_not_end_is_left(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)
    async with connected() as connect:
        client = await connect()
        await client.ask(begun)
        assert (await client.answer())[0] == 408
        assert await client.reader.read() == b""
        again = await connect()
        await again.ask(POST + b"content-length: 1\r\n\r\na")
        assert await again.answer() == (200, b"1")
        if begun:
            await again.ask(begun)
            assert (await again.answer())[0] == 408


async def test_a_head_behind_a_slow_answer_waits_with_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.05)
    async with connected() as connect:
        client = await connect()
        await client.ask(b"GET /slow HTTP/1.1\r\nhost: here\r\n\r\nGET / HT")
        assert await client.answer() == (200, b"0")
        await client.ask(b"TP/1.1\r\nhost: here\r\n\r\n")
        assert await client.answer() == (200, b"0")


async def test_requests_one_behind_the_other_are_answered_in_turn() -> None:
    async with connected() as connect:
        client = await connect()
        await client.ask(b"".join(POST + b"content-length: %d\r\n\r\n" % size + b"a" * size for size in range(9)))
        assert [await client.answer() for _ in range(9)] == [(200, b"%d" % size) for size in range(9)]
