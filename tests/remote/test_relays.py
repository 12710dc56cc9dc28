"""Who stands between two ends of a channel can cut it, and nothing else: what he alters ends it, typed and logged."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.emulated_pipelines import right
from support.relay import DOWN, GREETING, SIZE, TAG, UP, Relay, relay
from support.running_instances import LIVENESS_S, SECRET, free_port, started
from trinity.core.messages import Emit, Sampled
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.errors import HandshakeError, IntegrityError, PeerLost, RequestError
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.channel import handshake
from trinity.remote.channel.channel import Address, Channel, connect
from trinity.remote.channel.listener import listen
from trinity.remote.channel.wire import decode, encode
from trinity.remote.supervision.fork_client import kept_launcher
from trinity.remote.supervision.process_config import ProcessConfig

KEY = SECRET.encode()
FIRST = 3  # frames of the server that are let through: its hello and two more
Alter = Callable[[str, int, bytes], list[bytes]]


@asynccontextmanager
async def through(alter: Alter, **named: Any) -> AsyncIterator[tuple[Channel, Relay]]:
    """A client's channel to a server that sends ten frames, by way of a relay; the channel before any frame."""

    async def serve(channel: Channel) -> None:
        for number in range(10):
            channel.send(b"frame %d" % number)
        async for frame in channel:
            channel.send(frame)

    async with listen(Address.parse("tcp:127.0.0.1:0"), KEY, b"server", serve) as bound:
        made = Relay(bound, alter, **named)
        async with relay(made) as address:
            channel = await connect(address, KEY, b"client")
            try:
                yield channel, made
            finally:
                channel.abort()


async def read_all(channel: Channel, frames: int = 10) -> list[bytes]:
    async with asyncio.timeout(LIVENESS_S):
        return [await channel.receive() for _ in range(frames)]


def flip(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


def at_the_fourth(change: Callable[[bytes, list[bytes]], list[bytes]]) -> Alter:
    """The fourth frame of the server, changed; ``change`` is given all that went before too."""
    earlier: list[bytes] = []

    def alter(way: str, number: int, frame: bytes) -> list[bytes]:
        if way == DOWN:
            earlier.append(frame)
        return change(frame, earlier) if way == DOWN and number == FIRST + 1 else [frame]

    return alter


CHANGES: dict[str, Alter] = {
    "rewritten": at_the_fourth(lambda frame, earlier: [flip(frame, SIZE + TAG)]),
    "rewritten at its end": at_the_fourth(lambda frame, earlier: [flip(frame, len(frame) - TAG - 1)]),
    "a bit of its tag": at_the_fourth(lambda frame, earlier: [flip(frame, len(frame) - 1)]),
    "longer": at_the_fourth(lambda frame, earlier: [flip(frame, 0)]),
    "shorter": at_the_fourth(lambda frame, earlier: [flip(frame, SIZE - 1)]),
    "a bit of its size's tag": at_the_fourth(lambda frame, earlier: [flip(frame, SIZE)]),
    "replayed": at_the_fourth(lambda frame, earlier: [earlier[1], frame]),
    "sent twice": at_the_fourth(lambda frame, earlier: [frame, frame]),
    "dropped": at_the_fourth(lambda frame, earlier: []),
    "another's tag": at_the_fourth(lambda frame, earlier: [frame[:-TAG] + earlier[2][-TAG:]]),
    "made up": at_the_fourth(lambda frame, earlier: [struct.pack(">I", 4) + bytes(TAG) + b"evil" + bytes(TAG)]),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_an_altered_frame_ends_the_channel(change: str, caplog: pytest.LogCaptureFixture) -> None:
    async with through(CHANGES[change]) as (channel, _):
        found = await read_all(channel, FIRST - 1 + (change == "sent twice"))
        assert found == [b"frame %d" % number for number in range(len(found))]
        with pytest.raises(IntegrityError, match="not the one that was sent"):
            await read_all(channel, 1)
        assert channel.closed
        with pytest.raises(PeerLost):
            channel.send(b"more")
    assert "somebody on the way alters the control channel; it is closed" in caplog.text


async def test_two_frames_that_change_places_end_the_channel() -> None:
    held: list[bytes] = []

    def alter(way: str, number: int, frame: bytes) -> list[bytes]:
        if way == DOWN and number == FIRST + 1:
            held.append(frame)
            return []
        return [frame, *held] if way == DOWN and number == FIRST + 2 else [frame]

    async with through(alter) as (channel, _):
        assert len(await read_all(channel, 2)) == 2
        with pytest.raises(IntegrityError):
            await read_all(channel, 1)


async def test_a_frame_sent_back_to_its_sender_ends_the_channel() -> None:
    made: list[Relay] = []

    def alter(way: str, number: int, frame: bytes) -> list[bytes]:
        return [made[0].seen[UP][-1]] if way == DOWN and number == 2 else [frame]

    async with through(alter) as (channel, passing):
        made.append(passing)
        with pytest.raises(IntegrityError):
            await read_all(channel)


async def test_a_relay_that_alters_nothing_is_not_noticed() -> None:
    async with through(lambda way, number, frame: [frame]) as (channel, made):
        assert await read_all(channel) == [b"frame %d" % number for number in range(10)]
        channel.send(b"echo")
        assert await channel.receive() == b"echo"
        assert len(made.seen[DOWN]) == 12


async def test_an_earlier_conversation_is_not_believed_again() -> None:
    """All that the server said once, greeting and proof included, played to the next client."""
    async with through(lambda way, number, frame: [frame]) as (channel, made):
        await read_all(channel)
    ended = asyncio.Event()

    async def replay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(made.begun[DOWN] + b"".join(made.seen[DOWN]))
        await reader.read()
        writer.transport.abort()
        ended.set()

    async with await asyncio.start_server(replay, "127.0.0.1", 0) as replaying:
        port = replaying.sockets[0].getsockname()[1]
        with pytest.raises(HandshakeError, match="secret"):
            await connect(Address("tcp", host="127.0.0.1", port=port), KEY, b"client")
        await ended.wait()


@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("at", [6, 7, GREETING - 1], ids=["flags", "nonce", "end"])
async def test_an_altered_greeting_is_refused(way: str, at: int) -> None:
    """The flags too: nobody on the way can say that the system vouches, and so have no tags."""
    with pytest.raises(HandshakeError):
        async with through(
            lambda way, number, frame: [frame],
            start=lambda direction, greeting: flip(greeting, at) if direction == way else greeting,
        ):
            pass


# ---------------------------------------------------------------- the keys, by the standards alone


async def test_the_tags_are_what_the_standards_make_of_the_secret() -> None:
    """HKDF-SHA256 as in RFC 5869 and keyed BLAKE2b as in RFC 7693, written out here."""
    greetings: dict[str, bytes] = {}
    async with through(
        lambda way, number, frame: [frame],
        start=lambda way, greeting: greetings.setdefault(way, greeting),
    ) as (channel, made):
        await read_all(channel)
        both = greetings[UP] + greetings[DOWN]
        extracted = hmac.new(hashlib.sha256(both).digest(), KEY, "sha256").digest()
        key = hmac.new(extracted, b"trinity frames server\x01", "sha256").digest()
        for number, frame in enumerate(made.seen[DOWN], 1):
            count, payload = number.to_bytes(8, "big"), frame[SIZE + TAG : -TAG]
            tags = [
                hashlib.blake2b(count + part, key=key, digest_size=16).digest()
                for part in (b"head" + frame[:SIZE], b"data" + payload)
            ]
            assert [frame[SIZE : SIZE + TAG], frame[-TAG:]] == tags
        other = hmac.new(extracted, b"trinity frames client\x01", "sha256").digest()
        assert (
            made.seen[UP][0][-TAG:]
            == hashlib.blake2b((1).to_bytes(8, "big") + b"dataclient", key=other, digest_size=16).digest()
        )


# ---------------------------------------------------------------- Unix sockets, for which the system vouches


async def raw_channel(path: Path) -> tuple[Channel, bytes]:
    channel = await connect(Address("unix", path=str(path)), KEY, b"client")
    return channel, await channel.receive()


async def test_a_unix_socket_of_the_same_user_has_no_tags(tmp_path: Path) -> None:
    async def serve(channel: Channel) -> None:
        assert channel._sent is None
        channel.send(b"plain")
        await channel.receive()

    async with listen(Address("unix", path=str(tmp_path / "s")), KEY, b"server", serve):
        channel, found = await raw_channel(tmp_path / "s")
        assert found == b"plain"
        assert channel._sent is None
        channel.abort()


@pytest.mark.parametrize("stranger", ["server", "client"])
async def test_a_unix_socket_of_another_user_has_tags(
    tmp_path: Path, stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says which user the other end is of; here one of the two is told that it is another."""
    asked: list[int] = []

    class Said:
        size = struct.calcsize("3i")

        @staticmethod
        def unpack(found: bytes) -> tuple[int, int, int]:
            asked.append(1)
            mine = len(asked) == 1  # the client greets first
            return (0, 54321 if mine == (stranger == "client") else os.geteuid(), 0)

    monkeypatch.setattr(handshake, "PEER_CREDENTIALS", Said)

    async def serve(channel: Channel) -> None:
        assert channel._sent is not None
        channel.send(b"sealed")
        await channel.receive()

    async with listen(Address("unix", path=str(tmp_path / "s")), KEY, b"server", serve):
        channel, found = await raw_channel(tmp_path / "s")
        assert found == b"sealed"
        assert channel._received is not None
        channel.abort()
    assert len(asked) == 2


def test_the_kernel_tells_the_user_of_a_unix_socket() -> None:
    one, two = socket.socketpair()
    with one, two:
        found = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, handshake.PEER_CREDENTIALS.size)
    assert handshake.PEER_CREDENTIALS.unpack(found) == (os.getpid(), os.geteuid(), os.getegid())


# ---------------------------------------------------------------- a whole pipeline


def with_other_tokens(way: str, number: int, frame: bytes) -> list[bytes]:
    """Each token in an Emit, one higher; sizes stay as they are."""
    payload = frame[SIZE + TAG : -TAG]
    if way == UP or b"Emit" not in payload:
        return [frame]
    message = decode(payload)
    assert isinstance(message, Emit)
    sampled = tuple(Sampled(each.token ^ 1) for each in message.sampled)
    made = encode(Emit(message.requests, message.attempts, message.starts, sampled, message.behind))
    return [struct.pack(">I", len(made)) + frame[SIZE : SIZE + TAG] + made + frame[-TAG:]]


async def test_tokens_rewritten_on_the_way_are_not_served(caplog: pytest.LogCaptureFixture) -> None:
    model = EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(source="nothing takes time"))
    async with kept_launcher(torch=False) as launcher:
        one = await started(launcher, Address("tcp", host="127.0.0.1", port=free_port()), "")
        try:
            async with relay(Relay(one.address, with_other_tokens)) as address:
                instance = Instance("EPD", address=str(address), pools={"image": 64, "kv": 64})
                terms = ProcessConfig(secret=SECRET)
                async with Pipeline(model, [instance], hosting="process", processes=terms, cache=CacheConfig()) as pipe:
                    with pytest.raises(RequestError, match="instances died while they had this request"):
                        async with asyncio.timeout(LIVENESS_S):
                            await pipe.complete(EmulatedRequest(text_tokens=9, max_tokens=8))
        finally:
            await one.kill()
    assert re.search(r"instance EPD0 was lost: a frame from .* is not the one that was sent", caplog.text)


async def test_a_recorded_session_is_worth_nothing_to_a_peer_without_the_secret() -> None:
    """All that a front end sent to its instance, requests included, sent to the instance again."""
    model = EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(source="nothing takes time"))
    asked = EmulatedRequest(text_tokens=9, max_tokens=8)
    async with kept_launcher(torch=False) as launcher:
        one = await started(launcher, Address("tcp", host="127.0.0.1", port=free_port()), "")
        try:
            made = Relay(one.address)
            async with relay(made) as address:
                instance = Instance("EPD", address=str(address), pools={"image": 64, "kv": 64})
                terms = ProcessConfig(secret=SECRET)
                async with Pipeline(model, [instance], hosting="process", processes=terms, cache=CacheConfig()) as pipe:
                    assert (await pipe.complete(asked)).token_ids == right(asked, model)
                    had, recorded = one.descriptors(), list(made.seen[UP])
                    assert any(b"Submit" in frame for frame in recorded)
                    for whole in (b"".join(recorded), b"", recorded[0]):
                        played = await play(one.address, made.begun[UP], whole)
                        assert len(played) == GREETING, "it greets, and leaves at a proof that is of another greeting"
                    await one.settled(had)
                    assert (await pipe.complete(asked)).token_ids == right(asked, model)
                    assert pipe.processes["EPD0"].setup.epoch == 0
        finally:
            await one.kill()


async def play(address: Address, begun: bytes, frames: bytes) -> bytes:
    """Send what was recorded, and return what the other end answers until it closes."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    async with asyncio.timeout(LIVENESS_S):
        try:
            writer.write(begun + frames)
            return await reader.read()
        except ConnectionError:  # it closes with much of it unread
            return await reader.read()
        finally:
            writer.transport.abort()
