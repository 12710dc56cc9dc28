"""More connections than the system or the server has room for: others still get in, and the log stays short."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from support.certificates import Authority
from support.emulated_pipelines import LIVENESS_S, MODEL, POOLS
from support.http_connections import POST, Connection
from support.http_server import QUIET, listening
from support.paths import ROOT
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.server import acceptor
from trinity.server.acceptor import ConnectionAcceptor, OncePerMinute, default_connections
from trinity.server.application import ModelServer
from trinity.server.http_protocol import BoundedProtocol
from trinity.server.settings import ServerConfig

FILES, FLOOD = 96, 300
HEALTH = b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n"


@asynccontextmanager
async def limited_server(log: Path, connections: int = 0) -> AsyncIterator[int]:
    """Run a server with ``FILES`` open files in a process of its own; yields its port."""
    with log.open("wb") as written:
        run = await asyncio.create_subprocess_exec(
            sys.executable, str(ROOT / "tests/support/limited_server.py"), str(FILES), str(connections),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=written,
        )  # fmt: skip
    assert run.stdin is not None
    assert run.stdout is not None
    try:
        yield int(await run.stdout.readline())
        run.stdin.close()
        assert await run.wait() == 0
    finally:
        if run.returncode is None:
            run.kill()
            await run.wait()


async def connect(port: int) -> Connection:
    return Connection(*await asyncio.open_connection("127.0.0.1", port))


async def ask_health(port: int) -> bytes:
    """Ask on a connection of its own, again where it was closed unanswered."""
    while True:
        client = await connect(port)
        with closing(client.writer):
            try:
                await client.ask(HEALTH)
                return (await client.answer())[1]
            except (ConnectionError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.1)


def open_idle(port: int) -> socket.socket:
    made = socket.socket()
    made.setblocking(False)
    made.connect_ex(("127.0.0.1", port))
    return made


@pytest.mark.parametrize("connections", [0, 10_000], ids=["limit of open files", "more than it allows"])
async def test_a_flood_of_idle_connections_keeps_nobody_out(connections: int, tmp_path: Path) -> None:
    """At 9df71424 nobody got in, and the log grew by 34,640 tracebacks in 40 s."""
    async with asyncio.timeout(10 * LIVENESS_S), limited_server(tmp_path / "log", connections) as port:
        assert b"running" in await ask_health(port)
        idle = [open_idle(port) for _ in range(FLOOD)]
        await asyncio.sleep(3)
        async with asyncio.timeout(LIVENESS_S):
            assert b"running" in await ask_health(port), "while the flood lasts"
        for each in idle:
            each.close()
        async with asyncio.timeout(LIVENESS_S):
            assert b"running" in await ask_health(port)
    lines = (tmp_path / "log").read_text().splitlines()
    assert 1 <= len(lines) <= 10 * 2, "one a minute of each kind"
    assert "Traceback" not in "\n".join(lines)


class Held:
    """An app that answers "/health" at once, and other requests, their bodies read, once ``let_go`` is set."""

    def __init__(self) -> None:
        self.begun, self.let_go = 0, asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while scope["path"] != "/health" and (await receive()).get("more_body"):
            pass
        if scope["path"] != "/health":
            self.begun += 1
            await self.let_go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
        await send({"type": "http.response.body", "body": b"running"})

    async def hold(self, port: int) -> Connection:
        """Begin a request that is not answered yet."""
        begun, client = self.begun, await connect(port)
        await client.ask(POST + b"content-length: 1\r\n\r\na")
        while self.begun == begun:
            await asyncio.sleep(0.01)
        return client


@asynccontextmanager
async def limited(connections: int) -> AsyncIterator[tuple[Held, int, ConnectionAcceptor]]:
    """Serve ``Held`` over so many connections."""
    pipe = Pipeline(MODEL, "PD", cache=CacheConfig(pools=POOLS))
    server, app = ModelServer(pipe, ServerConfig(max_connections=connections)), Held()
    async with asyncio.timeout(LIVENESS_S), listening(app, server) as (url, running):
        assert running.acceptor is not None
        yield app, int(url.rpartition(":")[2]), running.acceptor


async def test_an_idle_connection_makes_room_and_one_that_is_answered_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor, "LEAST_IDLE_S", 0.05)
    async with limited(4) as (app, port, accepting):
        busy = await app.hold(port)
        idle = [await connect(port) for _ in range(3)]
        for _ in range(5):
            assert await ask_health(port) == b"running"
        for each in idle[:1]:
            assert not await each.reader.read(), "the first to be closed is the one that is idle for longest"
        app.let_go.set()
        assert (await busy.answer())[0] == 200
        for each in (busy, *idle):
            each.writer.close()
        assert accepting.closed_idle


async def test_new_connections_wait_while_all_are_answered() -> None:
    async with limited(2) as (app, port, _):
        busy = [await app.hold(port) for _ in range(2)]
        waiting = asyncio.create_task(ask_health(port))
        done, _ = await asyncio.wait([waiting], timeout=0.5)
        assert not done
        app.let_go.set()
        for each in busy:
            assert (await each.answer())[0] == 200
            each.writer.close()
        assert await waiting == b"running"


async def test_connections_that_are_idle_again_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 82dc40f9 nobody new got in any more, once all had been answered at the same time, until one closed."""
    monkeypatch.setattr(acceptor, "LEAST_IDLE_S", 0.05)
    async with limited(2) as (app, port, accepting):
        busy = [await app.hold(port) for _ in range(2)]
        waiting = asyncio.create_task(ask_health(port))
        done, _ = await asyncio.wait([waiting], timeout=0.5)
        assert not done
        assert not accepting.closed_idle
        app.let_go.set()
        for each in busy:
            assert (await each.answer())[0] == 200
        while not waiting.done():  # they stay, with a request each now and then
            await asyncio.wait([waiting], timeout=0.5)
            for each in busy:
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    await each.ask(HEALTH)
                    await each.answer()
        assert await waiting == b"running"
        for each in busy:
            each.writer.close()


async def test_no_connection_is_closed_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "LEAST_IDLE_S", 0.05)
    async with limited(2) as (_, port, accepting):
        clients = [await connect(port)]
        await asyncio.sleep(0.2)
        clients.append(await connect(port))
        while len(accepting.held) < 2 and not accepting.closed_idle:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not accepting.closed_idle
        for each in clients:
            each.writer.close()


async def test_a_body_that_comes_keeps_its_place_and_one_that_drips_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "LEAST_IDLE_S", 0.1)
    async with limited(4) as (app, port, _):
        app.let_go.set()
        drip, steady, others = await connect(port), await connect(port), []
        await drip.ask(POST + b"content-length: 9000000\r\n\r\na")
        await steady.ask(POST + b"content-length: 4000000\r\n\r\n")
        for _ in range(40):
            await steady.ask(b" " * 100_000)
            others.append(await connect(port))
            await asyncio.sleep(0.05)
        assert (await steady.answer())[0] == 200
        assert not await drip.reader.read()
        for each in (drip, steady, *others):
            each.writer.close()


async def test_handshakes_that_never_end_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "LEAST_IDLE_S", 0.05)
    tls = Authority(tmp_path, "ca").issue("server").make_context(server=True)
    config = uvicorn.Config(Held(), **QUIET)
    config.load()
    state = ServerState()
    with socket.create_server(("127.0.0.1", 0)) as opened:
        accepting = ConnectionAcceptor([opened], lambda: BoundedProtocol(config, state, {}), 2, tls)
        accepting.start()
        async with asyncio.timeout(LIVENESS_S):
            silent = [await connect(opened.getsockname()[1]) for _ in range(6)]
            for each in silent[:4]:
                assert not await each.reader.read()
            assert len(accepting.held) <= 2
        accepting.close()
        for each in silent:
            each.writer.close()
        while accepting.held:
            await asyncio.sleep(0.01)


def test_a_message_is_shown_once_a_minute() -> None:
    shown = OncePerMinute()

    def show(text: str, at: float) -> bool:
        record = logging.makeLogRecord({"msg": text, "created": at})
        return shown.filter(record)

    assert [show("a", 0), show("a", 1), show("b", 1), show("a", 59), show("a", 60), show("a", 61)] == [
        True, False, True, False, True, False,
    ]  # fmt: skip


def test_some_descriptors_are_left_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for files in (20, 96, 1024, 1 << 20, -1):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        found.append(default_connections())
    assert found == [16, 32, 768, 16384, 16384]
