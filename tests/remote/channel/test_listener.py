"""Connections that never prove the secret: few at a time, for a short time, and they keep nobody out."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.running_instances import LIVENESS_S
from trinity.errors import ConfigError, HandshakeError, PeerLost
from trinity.remote.channel import channel as channels
from trinity.remote.channel import listener as listeners
from trinity.remote.channel.channel import Address, Channel, connect
from trinity.remote.channel.handshake import CROWDED, Seals
from trinity.remote.channel.listener import LOGGED_REFUSALS, RefusalLog, listen

SECRET = b"s" * 32
ANYWHERE = Address.parse("tcp:127.0.0.1:0")
PLACES = 16


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "MAX_UNAUTHENTICATED", PLACES)
    monkeypatch.setattr(channels, "TIMEOUT_S", LIVENESS_S)  # who gives way does so for want of a place


async def echo(channel: Channel) -> None:
    async for frame in channel:
        channel.send(frame)


async def is_served(address: Address) -> None:
    """A rightful peer gets in and is answered."""
    async with asyncio.timeout(LIVENESS_S):
        channel = await connect(address, SECRET, b"rightful")
        channel.send(b"here")
        assert await channel.receive() == b"here"
        await channel.aclose()


def knock(address: Address, source: str = "127.0.0.1") -> socket.socket:
    """A connection that says nothing."""
    made = socket.socket()
    made.settimeout(LIVENESS_S)
    try:
        made.bind((source, 0))
        made.connect((address.host, address.port))
    except OSError:
        made.close()
        raise
    return made


def is_open(each: socket.socket) -> bool:
    each.setblocking(False)
    try:
        while each.recv(4096):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


@asynccontextmanager
async def flood(address: Address) -> AsyncIterator[list[int]]:
    """Connect without end from another thread, as fast as it goes, and never say a word."""
    ended, made = threading.Event(), [0]

    def run() -> None:
        held: list[socket.socket] = []
        while not ended.is_set():
            with suppress(OSError):
                held.append(knock(address))
                made[0] += 1
            if len(held) > 200:
                held.pop(0).close()
        for each in held:
            each.close()

    flooding = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        yield made
    finally:
        ended.set()
        await flooding


async def test_few_of_those_that_say_nothing_have_a_place() -> None:
    async with listen(ANYWHERE, SECRET, b"server", echo) as bound:
        with ExitStack() as stack:
            silent = [stack.enter_context(await asyncio.to_thread(knock, bound)) for _ in range(5 * PLACES)]
            await is_served(bound)
            async with asyncio.timeout(LIVENESS_S):
                while sum(map(is_open, silent)) > PLACES:
                    await asyncio.sleep(0.02)
            still = [is_open(each) for each in silent]
            assert sum(still) >= PLACES - 1
            assert still[-PLACES + 1 :] == [True] * (PLACES - 1)  # the oldest gave way


async def test_a_flood_keeps_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    async with listen(ANYWHERE, SECRET, b"server", echo) as bound:
        async with flood(bound) as made:
            for _ in range(10):
                await is_served(bound)
            async with asyncio.timeout(LIVENESS_S):
                while made[0] < 20 * PLACES:
                    await asyncio.sleep(0.01)
        await is_served(bound)
    lines = [record for record in caplog.records if "refused" in record.message]
    assert len(lines) <= LOGGED_REFUSALS + 2
    assert "more connections to" in lines[-1].message


async def test_those_of_one_host_give_way_to_those_of_another() -> None:
    async with listen(ANYWHERE, SECRET, b"server", echo) as bound:
        with ExitStack() as stack:
            first = stack.enter_context(await asyncio.to_thread(knock, bound))
            others = [
                stack.enter_context(await asyncio.to_thread(knock, bound, "127.0.0.2")) for _ in range(3 * PLACES)
            ]
            async with asyncio.timeout(LIVENESS_S):
                while sum(map(is_open, others)) >= PLACES:
                    await asyncio.sleep(0.02)
            assert is_open(first)


async def test_who_gave_way_while_the_listener_closes_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled twice, for its place and for the end, as its streams open: they are closed all the same."""
    monkeypatch.setattr(listeners, "MAX_UNAUTHENTICATED", 1)
    goes_on, writers, opens = asyncio.Event(), [], listeners._open_streams

    async def open_late(*given: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        await goes_on.wait()
        streams = await opens(*given)
        writers.append(streams[1])
        return streams

    monkeypatch.setattr(listeners, "_open_streams", open_late)
    async with asyncio.timeout(LIVENESS_S), listen(ANYWHERE, SECRET, b"server", echo) as bound:
        with await asyncio.to_thread(knock, bound) as first, await asyncio.to_thread(knock, bound):
            while is_open(first):  # until it gave way
                await asyncio.sleep(0.01)
            goes_on.set()
            while not writers:
                await asyncio.sleep(0)  # and the listener closes in the turn in which the streams are open
    assert all(each.transport.is_closing() for each in writers)


async def test_who_gives_way_is_told_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "MAX_UNAUTHENTICATED", 1)
    async with listen(ANYWHERE, SECRET, b"server", echo) as bound:
        slow = await asyncio.to_thread(knock, bound)
        with slow:
            await is_served(bound)
            found = b""
            slow.setblocking(True)
            while part := await asyncio.to_thread(slow.recv, 4096):
                found += part
            assert found.endswith(CROWDED)
        await asyncio.gather(*(is_served(bound) for _ in range(12)))


async def test_who_has_proven_the_secret_is_told_nothing_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one that closes amid the hellos: it would take the word for the head of a frame."""
    reached = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seals: Seals, hello: bytes) -> Channel:
        channel = Channel(reader, writer, seals)
        channel.send(hello)
        reached.set()
        await asyncio.Event().wait()
        return channel

    async with asyncio.timeout(LIVENESS_S):
        async with listen(ANYWHERE, SECRET, b"server", echo) as bound:
            monkeypatch.setattr(listeners, "exchange_hellos", late)
            met = await connect(bound, SECRET, b"client")
            await reached.wait()
        with pytest.raises(PeerLost, match="between frames"):
            await met.receive()
        await met.aclose()


async def test_a_client_that_never_gets_a_place_says_why() -> None:
    async def crowd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):  # who has no time left leaves at once
            writer.write(await reader.readexactly(39))
            await reader.readexactly(32)
            writer.write(CROWDED)
        writer.close()

    before = asyncio.all_tasks()
    async with await asyncio.start_server(crowd, "127.0.0.1", 0) as full:
        address = Address("tcp", host="127.0.0.1", port=full.sockets[0].getsockname()[1])
        with pytest.raises(HandshakeError, match="no room for a handshake: too many connect at once"):
            await connect(address, SECRET, b"x", timeout_s=0.5)
    async with asyncio.timeout(LIVENESS_S):
        while asyncio.all_tasks() - before:  # of a connection that came last
            await asyncio.sleep(0.01)


async def test_places_are_a_part_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (40, 40))
    async with listen(ANYWHERE, SECRET, b"server", echo) as bound:
        with ExitStack() as stack:
            silent = [stack.enter_context(await asyncio.to_thread(knock, bound)) for _ in range(30)]
            await is_served(bound)
            async with asyncio.timeout(LIVENESS_S):
                while sum(map(is_open, silent)) > 10:
                    await asyncio.sleep(0.02)


async def test_without_a_descriptor_it_waits_for_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError(24, "Too many open files")] * 3
    loop = asyncio.get_running_loop()
    accept = loop.sock_accept

    async def scarce(listening: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", scarce)
    async with listen(ANYWHERE, SECRET, b"server", echo) as bound:
        await is_served(bound)
    assert "Too many open files" in caplog.text


async def test_an_error_of_the_handler_is_logged_and_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def serve(channel: Channel) -> None:
        if channel.hello == b"bad":
            raise RuntimeError("the handler failed")
        await echo(channel)

    async with listen(ANYWHERE, SECRET, b"server", serve) as bound:
        bad = await connect(bound, SECRET, b"bad")
        async with asyncio.timeout(LIVENESS_S):
            while not bad.closed:
                with suppress(PeerLost):
                    await bad.receive()
        await is_served(bound)
    assert "the handler failed" in caplog.text


async def test_every_address_of_a_name_is_listened_on() -> None:
    async with listen(Address("tcp", host="localhost", port=0), SECRET, b"server", echo) as bound:
        assert bound.port > 0
        await is_served(bound)
        await is_served(Address("tcp", host="127.0.0.1", port=bound.port))


async def test_a_name_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on tcp:no\.such\.host\.invalid:0"):
        async with listen(Address("tcp", host="no.such.host.invalid", port=0), SECRET, b"server", echo):
            pass


async def test_a_socket_file_that_was_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with listen(Address("unix", path=str(path)), SECRET, b"server", echo) as bound:
        await is_served(bound)
    assert not path.exists()
    path.write_text("a file of somebody's")
    with pytest.raises(ConfigError, match="cannot listen"):
        async with listen(Address("unix", path=str(path)), SECRET, b"server", echo):
            pass
    assert path.read_text() == "a file of somebody's"


async def test_a_socket_file_on_which_one_listens_is_left_to_it(tmp_path: Path) -> None:
    where = Address("unix", path=str(tmp_path / "socket"))
    async with listen(where, SECRET, b"server", echo) as bound:
        with pytest.raises(ConfigError, match=r"cannot listen.*in use"):
            async with listen(where, SECRET, b"server", echo):
                pass
        await is_served(bound)
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(where.path)
        full.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(where.path)
        with pytest.raises(ConfigError, match="in use"):
            async with listen(where, SECRET, b"server", echo):
                pass
        for each in waiting:
            each.close()


async def test_a_socket_file_that_another_program_has_put_there_is_left(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with listen(Address("unix", path=str(path)), SECRET, b"server", echo):
        path.rename(tmp_path / "kept")  # so that its number is not given again
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_refusals_are_counted_once_there_are_many(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    log = RefusalLog(ANYWHERE)
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            log.add("no reason")
        assert len(caplog.records) == LOGGED_REFUSALS
        now[0] += listeners.LOG_WINDOW_S + 1
        log.add("another")
    assert [record.message for record in caplog.records[LOGGED_REFUSALS:]] == [
        f"{1000 - LOGGED_REFUSALS} more connections to {ANYWHERE} were refused within 61 s",
        f"a connection to {ANYWHERE} was refused: another",
    ]
