"""The control channel: both sides prove the secret, frames are bounded, whatever comes in its place is refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from trinity.errors import ConfigError, HandshakeError, PeerLost, TransportError
from trinity.remote.channel import channel as channels
from trinity.remote.channel.channel import Address, Channel, connect
from trinity.remote.channel.handshake import MAGIC, VERSION
from trinity.remote.channel.listener import listen

SECRET = b"s" * 32
Serve = Callable[[Channel], Awaitable[None]]


async def echo(channel: Channel) -> None:
    async for frame in channel:
        channel.send(frame)


@asynccontextmanager
async def server(serve: Serve = echo, address: str = "tcp:127.0.0.1:0") -> AsyncIterator[Address]:
    async with listen(Address.parse(address), SECRET, b"the server", serve) as bound:
        yield bound


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp:127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path / 'channel'}"


async def test_frames_come_back_in_order(address: str) -> None:
    async with server(address=address) as bound:
        channel = await connect(bound, SECRET, b"the client")
        assert channel.hello == b"the server"
        sent = [b"", b"x", os.urandom(100_000), b"last"]
        for frame in sent:
            channel.send(frame)
        assert [await channel.receive() for _ in sent] == sent
        await channel.aclose()
        await channel.aclose()
        with pytest.raises(PeerLost):
            channel.send(b"late")


async def test_the_server_learns_who_it_is() -> None:
    hellos: list[bytes] = []

    async def serve(channel: Channel) -> None:
        hellos.append(channel.hello)
        channel.send(b"ok")

    async with server(serve) as bound:
        channel = await connect(bound, SECRET, b"the client")
        assert await channel.receive() == b"ok"
        assert hellos == [b"the client"]
        channel.abort()


async def test_another_secret_is_refused_on_both_sides() -> None:
    served: list[Channel] = []

    async def serve(channel: Channel) -> None:
        served.append(channel)

    async with server(serve) as bound:
        with pytest.raises(HandshakeError, match="secret"):
            await connect(bound, b"t" * 32, b"the client")
    assert not served


async def test_a_server_that_does_not_hold_the_secret_is_refused() -> None:
    async with listen(Address.parse("tcp:127.0.0.1:0"), b"t" * 32, b"impostor", echo) as bound:
        with pytest.raises(HandshakeError):
            await connect(bound, SECRET, b"the client")


def greeting(version: int, nonce: bytes) -> bytes:
    return MAGIC + version.to_bytes(2, "big") + b"\0" + nonce


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 40, "does not speak"),
        (greeting(VERSION + 1, b"n" * 32), "version"),
        (greeting(VERSION, b"n" * 32) + b"p" * 32, "secret"),
        (b"TRN", "left during"),
        (b"", "left during"),
    ],
    ids=["http", "version", "proof", "cut", "silent"],
)
async def test_whatever_else_answers_is_refused(said: bytes, problem: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(HandshakeError, match=problem):
            await connect(Address("tcp", host="127.0.0.1", port=port), SECRET, b"the client")


async def test_a_server_that_never_answers_is_given_up() -> None:
    ended = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.transport.abort()
        ended.set()

    listening = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(HandshakeError, match="did not answer"):
            await connect(Address("tcp", host="127.0.0.1", port=port), SECRET, b"x", timeout_s=0.1)
        await ended.wait()


@pytest.mark.parametrize(
    "garbage", [b"", b"\x00" * 200, b"GET / HTTP/1.1\r\n\r\n" * 20, greeting(VERSION, b"n" * 32) + b"p" * 32]
)
async def test_garbage_does_not_disturb_the_others(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with server() as bound:
        good = await connect(bound, SECRET, b"good")
        reader, writer = await asyncio.open_connection(bound.host, bound.port)
        writer.write(garbage)
        writer.write_eof()
        await reader.read()
        writer.close()
        good.send(b"still here")
        assert await good.receive() == b"still here"
        await good.aclose()
    assert f"a connection to {bound} was refused: " in caplog.text


async def test_who_says_nothing_is_refused_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channels, "TIMEOUT_S", 0.1)
    async with server() as bound:
        reader, writer = await asyncio.open_connection(bound.host, bound.port)
        async with asyncio.timeout(120):
            await reader.read()
        writer.close()
    assert "no handshake within 0.1 s" in caplog.text


async def test_a_frame_above_the_limit_ends_the_channel() -> None:
    failures: list[Exception] = []

    async def serve(channel: Channel) -> None:
        channel.limit = 1000
        try:
            await channel.receive()
        except TransportError as error:
            failures.append(error)

    async with server(serve) as bound:
        channel = await connect(bound, SECRET, b"x")
        channel.send(b"y" * 1001)
        with pytest.raises(PeerLost):
            await channel.receive()
        small = await connect(bound, SECRET, b"x")
        small.limit = 10
        with pytest.raises(TransportError, match="above the limit"):
            small.send(b"y" * 11)
        small.abort()
    assert "above the limit" in str(failures[0])


async def test_a_frame_cut_in_its_middle_is_a_lost_peer() -> None:
    async def serve(channel: Channel) -> None:
        assert channel._sent is not None
        head = (100).to_bytes(4, "big")
        channel._writer.write(head + channel._sent.header_tag(head) + b"only this")
        await channel.aclose()

    async with server(serve) as bound:
        channel = await connect(bound, SECRET, b"x")
        with pytest.raises(PeerLost, match="middle of a frame"):
            await channel.receive()
        channel.abort()


def fill(channel: Channel) -> None:
    for _ in range(100):
        channel.send(b"z" * (1 << 18))


async def test_a_peer_that_does_not_read_for_a_while_is_not_lost(address: str) -> None:
    release, heard = asyncio.Event(), asyncio.Event()
    frames: list[int] = []

    async def serve(channel: Channel) -> None:
        await release.wait()
        async for frame in channel:
            frames.append(len(frame))
        heard.set()

    async with server(serve, address) as bound:
        channel = await connect(bound, SECRET, b"x")
        fill(channel)
        assert channel.backlog > 1 << 20
        assert not channel.closed
        release.set()
        await channel.aclose()
        await heard.wait()
    assert frames == [1 << 18] * 100


async def test_a_message_of_many_frames_arrives_whole_and_in_order(address: str) -> None:
    sizes = [0, 1, channels.MAX_FRAME - 1, channels.MAX_FRAME, channels.MAX_FRAME + 1, 7 * channels.MAX_FRAME, 3]
    sent = [os.urandom(size) for size in sizes]
    async with server(address=address) as bound:
        channel = await connect(bound, SECRET, b"the client")
        for message in sent:
            channel.send(message)
        assert [await channel.receive() for _ in sent] == sent
        await channel.aclose()


@pytest.mark.parametrize(
    "headers", [[channels.MAX_FRAME + 1], [channels.MORE], [channels.MORE | 600, channels.MORE | 600]]
)
async def test_frames_that_would_never_end_are_refused(headers: list[int]) -> None:
    failures: list[Exception] = []

    async def serve(channel: Channel) -> None:
        channel.limit = 1000
        try:
            await channel.receive()
        except TransportError as error:
            failures.append(error)

    async with server(serve) as bound:
        channel = await connect(bound, SECRET, b"x")
        for header in headers:
            channel._write_frame(header, memoryview(b"y" * min(header & ~channels.MORE, 600)))
        with pytest.raises(PeerLost):
            await channel.receive()
    assert "above the limit" in str(failures[0])


async def test_nobody_listening_is_a_lost_peer(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="cannot be reached"):
        await connect(Address("unix", path=str(tmp_path / "nobody")), SECRET, b"x")


async def test_an_address_in_use_is_a_config_error() -> None:
    async with server() as bound:
        with pytest.raises(ConfigError, match="cannot listen"):
            async with server(address=str(bound)):
                pass


@pytest.mark.parametrize(
    "text", ["", "tcp:", "tcp:host", "tcp:host:port", "tcp:h:99999", "unix:", "unix:/a\0b", "http://x", "tcp::80"]
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="no address"):
        Address.parse(text)


@pytest.mark.parametrize("host", ["a..b", ".a", f"{'a' * 64}.de", "a\0b", "a\nb", "[fe80::1%\0]", "[]", "a." * 127])
def test_hosts_that_no_resolver_takes_are_no_addresses(host: str) -> None:
    """They failed where they were looked up, by a ``UnicodeError`` or ``ValueError`` of the system's."""
    with pytest.raises(ConfigError, match="no address"):
        Address.parse(f"tcp:{host}:80")


@pytest.mark.parametrize("port", ["\u00b2", "\u0663", "9" * 5000, "-1", " 80", "8_0"])
def test_a_port_has_up_to_five_digits(port: str) -> None:
    with pytest.raises(ConfigError, match="no address"):
        Address.parse(f"tcp:h:{port}")


@pytest.mark.parametrize(
    "text",
    ["unix:/a/b", "tcp:localhost:80", "tcp:10.0.0.1:0", "tcp:::1:7", "tcp:fe80::1%eth0:7", "tcp:host-of-E_0.:0"],
)
def test_addresses_read_back(text: str) -> None:
    assert str(Address.parse(text)) == text
