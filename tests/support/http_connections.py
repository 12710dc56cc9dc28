"""A server with trinity's HTTP protocol and a small app, and clients that write bytes of their own to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import uvicorn

from support.emulated_pipelines import LIVENESS_S
from support.http_server import QUIET

POST = b"POST / HTTP/1.1\r\nhost: here\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
EARLY = b"POST /early HTTP/1.1\r\nhost: here\r\ncontent-length: 3\r\n\r\n"


async def measure_body(
    scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    """Answer a request with the size of its body; "/slow" a fifth of a second later, "/early" before it has come."""
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await asyncio.sleep(0.2 if scope["path"] == "/slow" else 0)
    text = b"x" * (64 << 20) if scope["path"] == "/large" else str(size).encode()
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


class Connect:
    """Makes connections to a server."""

    def __init__(self, server: uvicorn.Server) -> None:
        self._server, self.opened = server, list[Connection]()

    async def __call__(self) -> Connection:
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.opened.append(Connection(*await asyncio.open_connection("127.0.0.1", port)))
        return self.opened[-1]

    def held(self) -> int:
        """Count the connections that the server has."""
        return len(self._server.server_state.connections)


@asynccontextmanager
async def connected(app: Any = measure_body, **options: Any) -> AsyncIterator[Connect]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, timeout_graceful_shutdown=1, **(QUIET | options)))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    connect = Connect(server)
    try:
        async with asyncio.timeout(LIVENESS_S):
            yield connect
    finally:
        for each in connect.opened:
            each.writer.close()
            with suppress(ConnectionError):
                await each.writer.wait_closed()
        server.should_exit = True
        await task
