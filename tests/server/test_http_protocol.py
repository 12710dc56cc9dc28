"""Heads that never end, bodies that nobody waits for, answers that nobody reads, and requests one behind the other."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise
from typing import Any

import pytest

from support.http_connections import CHUNKED, EARLY, LATE, POST, connected, measure_body
from trinity.server import http_protocol


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


async def test_a_body_of_known_length_is_parsed_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces as small as a head's, 60 MB took 0.4 CPU-seconds of the event loop. What follows is still a head."""
    parsed, parse = list[int](), http_protocol.BoundedProtocol._parse

    def count(protocol: http_protocol.BoundedProtocol, piece: bytes) -> None:
        parsed.append(len(piece))
        parse(protocol, piece)

    monkeypatch.setattr(http_protocol.BoundedProtocol, "_parse", count)
    async with connected() as connect:
        client = await connect()
        body = POST + b"content-length: 4194304\r\n\r\n" + b"a" * (4 << 20)
        await client.ask(body + 2 * (POST + b"content-length: 1\r\n\r\na"))
        assert [await client.answer() for _ in range(3)] == [(200, b"4194304"), (200, b"1"), (200, b"1")]
    assert sum(parsed) == len(body) + 2 * len(POST + b"content-length: 1\r\n\r\na")
    assert len(parsed) < (4 << 20) // http_protocol.PIECE // 8, "by reads of the socket, of 64 KiB and more mostly"
    assert min(parsed[-2:]) <= http_protocol.PIECE


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


@pytest.mark.parametrize("pieces", [(b"a",), (b"a", b"b"), (b"abc",), (b"abc", b"POST / HT")])
async def test_a_body_that_was_answered_before_it_came_is_not_waited_for(
    pieces: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 66797f0 a byte of it stopped uvicorn's clock of an idle connection, and nothing started another."""
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)
    async with connected() as connect:
        client = await connect()
        await client.ask(EARLY)
        assert await client.answer() == (200, b"0")
        for piece in pieces:
            await client.ask(piece)
        assert await client.reader.read() in (b"", LATE), "no second answer while the first one's body is due"
        assert not connect.held()


async def test_a_body_that_comes_behind_its_answer_leaves_the_connection_usable() -> None:
    async with connected() as connect:
        client = await connect()
        for _ in range(3):
            await client.ask(EARLY)
            assert await client.answer() == (200, b"0")
            await client.ask(b"abc")
        await client.ask(POST + b"content-length: 1\r\n\r\na")
        assert await client.answer() == (200, b"1")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no TCP_USER_TIMEOUT")
@pytest.mark.parametrize("closed", [False, True])
async def test_a_client_that_reads_nothing_is_no_connection_for_long(
    closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 66797f0 its descriptor and what was written for it stayed as long as it liked, closed here or not."""
    monkeypatch.setattr(http_protocol, "UNREAD_S", 0.5)
    async with connected() as connect:
        client = await connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        more = b"connection: close\r\n" if closed else b""
        await client.ask(b"GET /large HTTP/1.1\r\nhost: here\r\n" + more + b"\r\n")
        while not connect.held():
            await asyncio.sleep(0.01)
        while connect.held():
            await asyncio.sleep(0.01)
        client.writer.transport.abort()


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


async def test_a_head_that_comes_at_once_has_the_same_bound() -> None:
    long = b"a" * http_protocol.MOST_HEAD
    async with connected() as connect:
        for head in (
            b"x-long: " + long,
            b"x-a: b\r\n" * (len(long) // 8),
            b"x-a: " + long + b"\r\nconnection: upgrade",
        ):
            client = await connect()
            await client.ask(POST + head + b"\r\n\r\n")
            assert (await client.answer())[0] == 431
            assert await client.reader.read() == b""


BAD = {
    "no HTTP": (b"no\0 HTTP\r\n\r\n", 400),
    "target": (b"GET http://h HTTP/1.1\r\nhost: here\r\n\r\n", 400),
    "head": (POST + b"x-long: " + b"a" * 70_000 + b"\r\n\r\n", 431),
    "empty lines": (b"\r\n" * 35_000, 431),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("good", [0, 1, 2, 3 + http_protocol.MOST_BEHIND])
async def test_what_cannot_be_read_is_told_behind_the_answers_that_are_due(good: int, bad: str) -> None:
    """At 50df865 the connection was closed at once, with the answers to good requests that came in the same read."""
    sent, status = BAD[bad]
    async with connected() as connect:
        client = await connect()
        slow = b"GET /slow HTTP/1.1\r\nhost: here\r\n\r\n" if good else b""
        await client.ask(slow + (POST + b"content-length: 1\r\n\r\na") * (good - 1) + sent + POST)
        for number in range(good):
            assert await client.answer() == (200, b"1" if number else b"0")
        assert (await client.answer())[0] == status
        assert await client.reader.read() == b""


async def test_a_body_that_cannot_be_read_ends_its_request() -> None:
    async with connected() as connect:
        client = await connect()
        await client.ask(CHUNKED + b"1\r\na\r\nno size\r\n")
        assert await client.reader.read() == b""


@pytest.mark.parametrize("path", [b"/", b"/slow"])
@pytest.mark.parametrize("size", [1, 70_000, 300_000])
@pytest.mark.parametrize(
    "last", [b" HTTP/1.1\r\nconnection: close\r\n\r\n", b" HTTP/1.0\r\n\r\n"], ids=["close", "HTTP/1.0"]
)
async def test_the_last_request_is_answered_whatever_follows(last: bytes, size: int, path: bytes) -> None:
    """At 50df865 what followed counted as a head too large, and closed the connection before the answer."""
    async with connected() as connect:
        client = await connect()
        await client.ask(b"GET " + path + last + b"a" * size)
        assert await client.answer() == (200, b"0")


UPGRADES = ["h2c", "websocket", "h2c, close"]
BODIES = {
    b"content-length: 24\r\n\r\n": b"GET / HTTP/1.1\r\nx: abc\r\n",
    b"transfer-encoding: chunked\r\n\r\n": b"18\r\nGET / HTTP/1.1\r\nx: abc\r\n\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize("framing", BODIES, ids=["length", "chunks"])
@pytest.mark.parametrize("pieces", [1, 2, 400])
async def test_an_upgrade_is_ignored_and_its_body_is_no_request(upgrade: str, framing: bytes, pieces: int) -> None:
    """As Java's own client asks for h2c. A body that is parsed as a request is one that a proxy has not seen."""
    kind, _, close = upgrade.partition(", ")
    asks = f"connection: upgrade, {close or 'x'}\r\nupgrade: {kind}\r\n".encode()
    head, behind = POST + asks + framing, POST + b"content-length: 1\r\n\r\na"
    sent = head + BODIES[framing] + (b"" if close else behind)
    cuts = {1: [], 2: [len(head)], 400: list(range(1, len(sent)))}[pieces]
    async with connected() as connect:
        client = await connect()
        for start, end in pairwise([0, *cuts, len(sent)]):
            await client.ask(sent[start:end])
            await asyncio.sleep(0)
        assert await client.answer() == (200, b"24")
        if close:
            assert await client.reader.read() == b""
        else:
            assert await client.answer() == (200, b"1")


async def test_many_upgrades_at_once_are_answered_in_turn() -> None:
    async with connected() as connect:
        client = await connect()
        await client.ask(b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * 1500)
        for _ in range(1500):
            assert await client.answer() == (200, b"0")


async def test_trailers_are_no_headers() -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def note_headers(scope: Any, receive: Any, send: Any) -> None:
        await measure_body(scope, receive, send)
        seen.append(scope["headers"])

    async with connected(note_headers) as connect:
        client = await connect()
        for _ in range(2):
            await client.ask(CHUNKED + b"1\r\na\r\n0\r\nauthorization: Bearer key\r\n\r\n")
            assert await client.answer() == (200, b"1")
    assert seen == [[(b"host", b"here"), (b"transfer-encoding", b"chunked")]] * 2


@pytest.mark.parametrize("behind", [0, 1, http_protocol.MOST_BEHIND])
async def test_a_client_that_leaves_ends_the_request_before_those_behind_it(behind: int) -> None:
    begun, told = asyncio.Event(), asyncio.Event()

    async def wait_for_leave(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        told.set()

    async with connected(wait_for_leave) as connect:
        client = await connect()
        await client.ask((POST + b"content-length: 1\r\n\r\na") * (1 + behind))
        await begun.wait()
        client.writer.close()
        await told.wait()


async def test_a_connection_is_not_read_for_ever_ahead_of_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, held, parse = [0], asyncio.Event(), http_protocol.BoundedProtocol.on_headers_complete

    def count(protocol: http_protocol.BoundedProtocol) -> None:
        heads[0] += 1
        parse(protocol)

    async def hold(scope: Any, receive: Any, send: Any) -> None:
        await held.wait()
        await measure_body(scope, receive, send)

    monkeypatch.setattr(http_protocol.BoundedProtocol, "on_headers_complete", count)
    async with connected(hold) as connect:
        client = await connect()
        client.writer.write((POST + b"content-length: 65536\r\n\r\n" + b"a" * 65536) * 200)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await client.writer.drain()
        assert heads[0] <= http_protocol.MOST_BEHIND + 8, "those of the last read are parsed"
        held.set()
        for _ in range(200):
            assert await client.answer() == (200, b"65536")


async def test_a_trailer_that_asks_for_the_end_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser takes nothing behind it: at 51e32b0 the answer kept the connection, and the next was never one."""
    monkeypatch.setattr(http_protocol, "HEAD_S", 1000.0)
    sent = CHUNKED + b"1\r\na\r\n0\r\nconnection: close\r\n\r\n"
    async with connected(timeout_keep_alive=1000) as connect:
        for cut in (len(sent), len(sent) - 4):
            client = await connect()
            await client.ask(sent[:cut])
            await asyncio.sleep(0)
            await client.ask(sent[cut:] + POST + b"content-length: 1\r\n\r\na")
            assert await client.answer() == (200, b"1")
            assert await client.reader.read() == b""


async def test_such_a_trailer_behind_an_answer_ends_the_connection() -> None:
    async with connected() as connect:
        client = await connect()
        await client.ask(b"POST /early HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n")
        assert await client.answer() == (200, b"0")
        await client.ask(b"1\r\na\r\n0\r\nconnection: close\r\n\r\n")
        assert await client.reader.read() == b""


@pytest.mark.parametrize(
    "target", [b"GET http://h", b"GET http://a:999999/", b"CONNECT a:443", b"GET http://[::1", b"GET a b"]
)
async def test_a_target_that_is_none_is_told(target: bytes) -> None:
    async with connected() as connect:
        client = await connect()
        await client.ask(target + b" HTTP/1.1\r\nhost: here\r\n\r\n")
        assert (await client.answer())[0] == 400
        assert await client.reader.read() == b""


async def test_a_body_that_never_comes_behind_its_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 51e32b0 the clock of an idle connection ran, which is more than twice as long."""
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)
    async with connected(timeout_keep_alive=1000) as connect:
        client = await connect()
        await client.ask(EARLY)
        assert await client.answer() == (200, b"0")
        assert await client.reader.read() == b""
        assert not connect.held()


@pytest.mark.parametrize("request_", [b"GET / HTTP/1.1\r\n\r\n", POST + b"content-length: 1\r\n\r\na"])
async def test_a_block_of_tiny_requests_is_not_parsed_at_once(request_: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 51e32b0 a connection had 14,000 requests parsed in one call, while nobody else was served."""
    most, parse = [0], http_protocol.BoundedProtocol.on_headers_complete

    def count(protocol: http_protocol.BoundedProtocol) -> None:
        parse(protocol)
        most[0] = max(most[0], len(protocol.pipeline))

    monkeypatch.setattr(http_protocol.BoundedProtocol, "on_headers_complete", count)
    number = (1 << 17) // len(request_)
    async with connected() as connect:
        client = await connect()
        asking = asyncio.create_task(client.ask(request_ * number))
        for _ in range(number):
            assert await client.answer() == (200, b"1" if b"content-length" in request_ else b"0")
        await asking
    assert most[0] <= 1 + http_protocol.MOST_BEHIND + http_protocol.PIECE // len(request_)


async def test_no_clock_of_an_idle_connection_runs_while_what_was_held_back_is_answered() -> None:
    async with connected(timeout_keep_alive=0.05) as connect:
        client = await connect()
        early = b"POST /early HTTP/1.1\r\nhost: here\r\ncontent-length: 70000\r\n\r\n" + b"a" * 70_000
        await client.ask(early + b"GET /slow HTTP/1.1\r\nhost: here\r\n\r\n")
        assert await client.answer() == (200, b"0")
        assert await client.answer() == (200, b"0")
