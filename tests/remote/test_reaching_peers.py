"""A peer that dies, resets or is busy while another connects to it costs nobody: who connects tries again."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.running_instances import LIVENESS_S, SECRET
from trinity.core.messages import PeerUp
from trinity.errors import HandshakeError
from trinity.remote.channel.channel import Address, Channel
from trinity.remote.channel.handshake import GREETING, MAGIC, NEEDS_TLS, PROOF, VERSION, shake_hands
from trinity.remote.channel.listener import listen
from trinity.remote.channel.wire import Hello, InstanceInfo, encode
from trinity.remote.worker import InstanceWorker

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
TRIES = 12  # more than connect() makes by itself


async def die_at_the_proof(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(MAGIC + VERSION.to_bytes(2, "big") + b"\1" + bytes(32))
    await reader.readexactly(GREETING + PROOF)


async def die_before_the_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await shake_hands(reader, writer, SECRET.encode(), server=True)


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def speak_another_version(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(MAGIC + (VERSION + 1).to_bytes(2, "big") + bytes(33))
    await writer.drain()
    await reader.readexactly(GREETING)


async def take_tls_alone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readexactly(GREETING)
    writer.write(NEEDS_TLS)
    await writer.drain()
    writer.close()
    await writer.wait_closed()


@asynccontextmanager
async def failing(peer: Peer, address: Address) -> AsyncIterator[list[int]]:
    """A listener of which every connection ends as ``peer`` ends; it lists them."""
    tries: list[int] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tries.append(len(tries))
        await peer(reader, writer)
        writer.transport.abort()

    async with await asyncio.start_unix_server(accept, address.path):
        yield tries
    Path(address.path).unlink(missing_ok=True)


class ReachingSession(InstanceWorker):
    """One that has reached its peer once it serves it."""

    reached: str = ""

    async def _serve_peer(self, channel: Channel, name: str, epoch: int) -> None:
        self.reached = name
        channel.abort()


def session_to(address: Address) -> tuple[ReachingSession, InstanceInfo]:
    session = ReachingSession(SECRET.encode(), "unix:mine", asyncio.Event())
    up = PeerUp("D0", "D", pools={"kv": 1})
    return session, InstanceInfo(up, Hello("D0"), {}, str(address))


@pytest.mark.parametrize("peer", [die_at_the_proof, die_before_the_hello, reset])
async def test_a_peer_that_dies_in_the_handshake_is_tried_again(peer: Peer, tmp_path: Path) -> None:
    """At 19bbccc the first two at once, and ten resets, cost the one who connects its life."""
    address = Address("unix", path=str(tmp_path / "peer"))
    session, info = session_to(address)

    async def serve(channel: Channel) -> None:
        await channel.receive()

    async with asyncio.timeout(LIVENESS_S):
        reaching = asyncio.ensure_future(session._reach(info))
        async with failing(peer, address) as tries:
            while len(tries) < TRIES and not reaching.done():
                await asyncio.sleep(0.01)
        async with listen(address, session.secret, encode(Hello("instance")), serve):
            await reaching
            while not session.reached:
                await asyncio.sleep(0.01)
    assert session.reached == "D0"


@pytest.mark.parametrize(
    ("peer", "said"), [(speak_another_version, "speaks version"), (take_tls_alone, "takes TLS alone")]
)
async def test_what_no_other_try_mends_is_told_at_once(peer: Peer, said: str, tmp_path: Path) -> None:
    address = Address("unix", path=str(tmp_path / "peer"))
    session, info = session_to(address)
    async with asyncio.timeout(LIVENESS_S), failing(peer, address) as tries:
        with pytest.raises(HandshakeError, match=said):
            await session._reach(info)
    assert tries == [0]
