"""More connections than the system or the server has room for: others still get in, and the log stays short."""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import socket
import sys
from collections import Counter
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
SHORT_S = 10.0  # s: some round trips on loopback, and a second or so that a client has to send something
GREEDY = "127.0.0.2"
TOO_MANY = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
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


async def connect(port: int, source: str = "127.0.0.1") -> Connection:
    return Connection(*await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0)))


async def ask_health(port: int, source: str = "127.0.0.1") -> bytes:
    """Ask on a connection of its own, again where it was closed unanswered or refused."""
    while True:
        client = await connect(port, source)
        with closing(client.writer), suppress(ConnectionError, asyncio.IncompleteReadError):
            await client.ask(HEALTH)
            status, body = await client.answer()
            if status == 200:
                return body
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


async def test_a_connection_sends_a_short_answer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At e5f41e3a Nagle's algorithm held each answer on a kept connection back for 40 ms, until the client's ACK."""
    seen, hold = list[int](), ConnectionAcceptor._hold

    def look(self: ConnectionAcceptor, holder: Any, accepted: socket.socket) -> None:
        seen.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        hold(self, holder, accepted)

    monkeypatch.setattr(ConnectionAcceptor, "_hold", look)
    async with limited(4) as (_, port, _accepting):
        assert await ask_health(port)
    assert seen
    assert all(seen)


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

    async def hold(self, port: int, source: str = "127.0.0.1") -> Connection:
        """Begin a request that is not answered yet."""
        begun, client = self.begun, await connect(port, source)
        await client.ask(POST + b"content-length: 1\r\n\r\na")
        while self.begun == begun:
            await asyncio.sleep(0.01)
        return client


@asynccontextmanager
async def limited(connections: int, **settings: Any) -> AsyncIterator[tuple[Held, int, ConnectionAcceptor]]:
    """Serve ``Held`` over so many connections."""
    pipe = Pipeline(MODEL, "PD", cache=CacheConfig(pools=POOLS))
    server, app = ModelServer(pipe, ServerConfig(max_connections=connections, **settings)), Held()
    async with asyncio.timeout(LIVENESS_S), listening(app, server) as (url, running):
        assert running.acceptor is not None
        yield app, int(url.rpartition(":")[2]), running.acceptor


async def test_an_idle_connection_makes_room_and_one_that_is_answered_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor, "LEAST_IDLE_S", 0.05)
    async with limited(4) as (app, port, accepting):
        busy = await app.hold(port)
        idle = [await connect(port, f"127.0.0.{each}") for each in (3, 4, 4)]
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
        busy = [await app.hold(port, source) for source in ("127.0.0.3", "127.0.0.4")]
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
        busy = [await app.hold(port, source) for source in ("127.0.0.3", "127.0.0.4")]
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
        clients.append(await connect(port, "127.0.0.3"))
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
            silent = [await connect(opened.getsockname()[1], f"127.0.0.{each}") for each in range(2, 8)]
            for each in silent[:4]:
                assert not await each.reader.read()
            assert len(accepting.held) <= 2
        accepting.close()
        for each in silent:
            each.writer.close()
        while accepting.held:
            await asyncio.sleep(0.01)


async def test_an_address_whose_requests_are_all_answered_keeps_no_other_out() -> None:
    """At b6e2a44b eight requests of one address held all of 8 connections, and nobody else reached /health."""
    async with limited(8) as (app, port, accepting):
        greedy = [await connect(port, GREEDY) for _ in range(8)]
        for each in greedy:
            with suppress(ConnectionError):
                await each.ask(POST + b"content-length: 1\r\n\r\na")
        async with asyncio.timeout(SHORT_S):
            for _ in range(10):
                assert await ask_health(port, "127.0.0.3") == b"running"
        assert app.begun == len(accepting.holders[GREEDY].tasks) == 6, "an address leaves a quarter to others"
        greedy.append(await connect(port, GREEDY))
        assert await greedy[-1].reader.read() == TOO_MANY
        app.let_go.set()
        for each in greedy[:6]:
            assert (await each.answer())[0] == 200
        for each in greedy:
            each.writer.close()


async def test_an_address_that_asks_all_the_time_keeps_no_other_out() -> None:
    """At b6e2a44b eight connections of one address, none silent for as long as a second, held all of 8."""
    async with limited(8) as (_, port, _):
        greedy = [await connect(port, GREEDY) for _ in range(8)]

        async def keep_asking(client: Connection) -> None:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    await client.ask(HEALTH)
                    await client.answer()
                    await asyncio.sleep(0.1)

        asking = [asyncio.create_task(keep_asking(each)) for each in greedy]
        try:
            async with asyncio.timeout(SHORT_S):
                for source in ("127.0.0.3", "127.0.0.4"):
                    assert await ask_health(port, source) == b"running"
        finally:
            for each in asking:
                each.cancel()
            await asyncio.wait(asking)
            for client in greedy:
                client.writer.close()


async def test_who_has_more_than_half_makes_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little it was idle; its own new connections end none of others."""
    monkeypatch.setattr(acceptor, "LEAST_IDLE_S", 3600.0)
    async with limited(8) as (_, port, accepting):
        others = [await connect(port, f"127.0.0.{each}") for each in (3, 4)]
        greedy = [await connect(port, GREEDY) for _ in range(6)]
        for each in greedy:
            await each.ask(HEALTH)
            await each.answer()
        refused = await connect(port, GREEDY)
        assert await refused.reader.read() == TOO_MANY
        for _ in range(2):
            others.append(await connect(port, f"127.0.0.{len(others) + 3}"))
            await others[-1].ask(HEALTH)
            assert await others[-1].answer() == (200, b"running")
        for each in greedy[:2]:
            assert not await each.reader.read(), "the first to be closed is the one that is idle for longest"
        assert accepting.closed_idle == 2
        waiting = asyncio.create_task(ask_health(port, "127.0.0.9"))
        done, _ = await asyncio.wait([waiting], timeout=0.5)
        assert not done, "half is no more than half: all have as long to send something"
        waiting.cancel()
        await asyncio.wait([waiting])
        for each in (*greedy, *others, refused):
            each.writer.close()


async def test_an_address_makes_room_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "LEAST_IDLE_S", 0.05)
    async with limited(4) as (_, port, accepting):
        other, *own = [await connect(port, each) for each in ("127.0.0.3", GREEDY, GREEDY, GREEDY)]
        for _ in range(5):
            assert await ask_health(port, GREEDY) == b"running"
        assert not await own[0].reader.read()
        await other.ask(HEALTH)
        assert await other.answer() == (200, b"running"), "it was idle for longest, and is another's"
        assert accepting.closed_idle
        for each in (other, *own):
            each.writer.close()


async def test_a_trusted_proxy_may_have_all() -> None:
    async with limited(8, trusted_proxies=["127.0.0.2/32"]) as (app, port, accepting):
        busy = [await app.hold(port, GREEDY) for _ in range(8)]
        assert len(accepting.held) == 8
        app.let_go.set()
        for each in busy:
            assert (await each.answer())[0] == 200
            each.writer.close()


async def test_a_unix_socket_may_have_all(tmp_path: Path) -> None:
    app = Held()
    config = uvicorn.Config(app, **QUIET)
    config.load()
    state = ServerState()
    with closing(socket.socket(socket.AF_UNIX)) as opened:
        opened.bind(str(tmp_path / "socket"))
        opened.listen()
        accepting = ConnectionAcceptor([opened], lambda: BoundedProtocol(config, state, {}), 4)
        accepting.start()
        async with asyncio.timeout(LIVENESS_S):
            clients = [Connection(*await asyncio.open_unix_connection(tmp_path / "socket")) for _ in range(4)]
            for each in clients:
                await each.ask(HEALTH)
                assert await each.answer() == (200, b"running")
            assert len(accepting.held) == 4
            accepting.close()
            for each in clients:
                each.writer.close()
            while accepting.held:
                await asyncio.sleep(0.01)


async def test_clients_that_come_and_go_at_random_hold_no_more_than_their_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor, "LEAST_IDLE_S", 0.01)
    draw, opened = random.Random(7), list[Connection]()
    async with limited(8) as (app, port, accepting):
        for _ in range(300):
            if opened and draw.random() < 0.3:
                opened.pop(draw.randrange(len(opened))).writer.close()
            else:
                opened.append(await connect(port, f"127.0.0.{draw.choice((2, 2, 2, 2, 3, 3, 4, 5))}"))
                with suppress(ConnectionError):
                    await opened[-1].ask(draw.choice((HEALTH, b"", POST + b"content-length: 1\r\n\r\na")))
            if draw.random() < 0.3:
                await asyncio.sleep(0.02)
            if draw.random() < 0.1:
                app.let_go.set()
                await asyncio.sleep(0.01)
                app.let_go.clear()
            counts = Counter(each.address for each in accepting.held.values())
            assert len(accepting.held) <= 8
            assert max(counts.values(), default=0) <= 6
            assert {address: len(each.tasks) for address, each in accepting.holders.items()} == counts
        app.let_go.set()
        for each in opened:
            each.writer.close()
        while accepting.held:
            await asyncio.sleep(0.01)
        assert not accepting.holders, "an address that has left is kept"


def test_a_message_is_shown_once_a_minute() -> None:
    shown = OncePerMinute()

    def show(text: str, at: float) -> bool:
        record = logging.makeLogRecord({"msg": text, "created": at})
        return shown.filter(record)

    assert [show("a", 0), show("a", 1), show("b", 1), show("a", 59), show("a", 60), show("a", 61)] == [
        True, False, True, False, True, False,
    ]  # fmt: skip


async def break_down(scope: Any, receive: Any, send: Any) -> None:
    """An app with two faults of one type, one of another, and one in a group of errors."""
    if scope["path"] == "/key":
        raise KeyError("one")
    if scope["path"] == "/key/other":
        raise KeyError("other")
    error = ValueError("alone")
    if scope["path"] == "/group":
        raise BaseExceptionGroup("several", [OSError("grouped")])
    raise error


async def test_each_fault_of_an_app_is_shown_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """At b6e2a44b all faults were one message, and the second one was silent."""
    pipe = Pipeline(MODEL, "PD", cache=CacheConfig(pools=POOLS))
    server = ModelServer(pipe, ServerConfig())
    async with asyncio.timeout(LIVENESS_S), listening(break_down, server) as (url, _):
        for path in (b"/key", b"/key", b"/key/other", b"/value", b"/group", b"/value", b"/key/other", b"/group"):
            client = await connect(int(url.rpartition(":")[2]))
            await client.ask(HEALTH.replace(b"/health", path))
            assert (await client.answer())[0] == 500
            client.writer.close()
    shown = [each.exc_info[1] for each in caplog.records if each.name == "uvicorn.error" and each.exc_info]
    assert [repr(each) for each in shown[:3]] == ["KeyError('one')", "KeyError('other')", "ValueError('alone')"]
    assert len(shown) == 4


def test_messages_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was shown first is forgotten first."""
    monkeypatch.setattr(acceptor, "_MOST_MESSAGES", 3)
    shown = OncePerMinute()
    given = [("a", 0), ("b", 1), ("c", 2), ("a", 60), ("d", 61), ("c", 61.5), ("a", 61.5), ("b", 61.5)]
    records = [logging.makeLogRecord({"msg": text, "created": at}) for text, at in given]
    assert [shown.filter(each) for each in records] == [True, True, True, True, True, False, False, True]


def test_some_descriptors_are_left_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for files in (20, 96, 1024, 1 << 20, -1):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        found.append(default_connections())
    assert found == [16, 32, 768, 16384, 16384]
