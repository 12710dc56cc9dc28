"""Control channel: ordered, length-framed messages between two processes, authenticated on both sides.

One for each pair of processes, over a Unix or TCP socket. Both sides prove that they hold the pipeline's secret (HMAC
over the other's challenge) before any other byte is decoded. A message of at most ``MAX_MESSAGE`` bytes travels in
frames of ``MAX_FRAME``; nothing is ever unpickled.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from trinity.errors import ConfigError, HandshakeError, PeerLost, TransportError

logger = logging.getLogger("trinity")
SECRET_VARIABLE = "TRINITY_SECRET"  # environment variable that holds the pipeline's secret
SHORTEST_SECRET = 32  # characters
VERSION = 2
MAGIC = b"TRNY"
NONCE = 32
MAX_FRAME = 1 << 20  # bytes: a longer message goes in several, so that neither side's loop stands still for one
MAX_MESSAGE = 2 << 30  # bytes: the pixels of a request are the largest payload
MAX_HELLO = 1 << 20
MORE = 1 << 31  # of a frame's header: the message goes on in the next frame
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Address:
    """Address of a listener: ``unix:/path`` or ``tcp:host:port`` (port 0: any free port)."""

    scheme: str
    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address. Raises ``ConfigError`` if ``text`` is not one."""
        scheme, _, rest = text.partition(":")
        if scheme == "unix" and rest:
            return cls("unix", path=rest)
        host, _, port = rest.rpartition(":")
        if scheme == "tcp" and host and port.isdigit() and int(port) < 65536:
            return cls("tcp", host=host.strip("[]"), port=int(port))
        raise ConfigError(f"{text!r} is no address: write unix:/path/to/socket or tcp:host:port")

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.scheme == "unix" else f"tcp:{self.host}:{self.port}"


class Channel:
    """An authenticated connection, used on the event loop's thread. ``hello``: the peer's first message."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: bytes = b"", limit: int = MAX_MESSAGE
    ) -> None:
        self.hello, self.limit = hello, limit
        self._reader, self._writer = reader, writer

    @property
    def closed(self) -> bool:
        """True once the connection is closed or closing."""
        return self._writer.is_closing()

    @property
    def backlog(self) -> int:
        """Bytes that wait for the peer to read. No number of them is a loss: what may wait is bounded by who sends."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, payload: bytes) -> None:
        """Queue one message without blocking.

        Raises ``PeerLost`` if the peer is gone, ``TransportError`` if the message is too long: nothing of it is sent.
        """
        if self.closed:
            raise PeerLost("the control channel is closed", "control")
        if len(payload) > self.limit:
            raise TransportError(f"a message of {len(payload)} bytes is above the limit of {self.limit}", "control")
        rest = memoryview(payload)
        while len(rest) > MAX_FRAME:
            self._write_frame(MORE | MAX_FRAME, rest[:MAX_FRAME])
            rest = rest[MAX_FRAME:]
        self._write_frame(len(rest), rest)

    def _write_frame(self, header: int, data: memoryview) -> None:
        self._writer.write(header.to_bytes(4, "big"))
        self._writer.write(data)

    async def receive(self) -> bytes:
        """Receive the next message. Raises ``PeerLost`` at the end, ``TransportError`` for one above the limit."""
        data, more = await self._read_frame(0)
        if not more:
            return data
        message = bytearray(data)
        while more:
            data, more = await self._read_frame(len(message))
            message += data
        return bytes(message)

    async def _read_frame(self, before: int) -> tuple[bytes, bool]:
        """Read one frame of a message that has ``before`` bytes already; return it, and whether more of it follows."""
        try:
            header = int.from_bytes(await self._reader.readexactly(4), "big")
            size, more = header & ~MORE, bool(header & MORE)
            if size > MAX_FRAME or before + size > self.limit or (more and not size):
                self.abort()
                raise TransportError(
                    f"a message of {before + size} bytes is above the limit of {self.limit}", "control"
                )
            return await self._reader.readexactly(size), more
        except asyncio.IncompleteReadError as error:
            self.abort()
            what = "in the middle of a frame" if error.partial else "between frames"
            raise PeerLost(f"the control channel ended {what}", "control") from error
        except OSError as error:
            self.abort()
            raise PeerLost(f"the control channel broke: {error}", "control") from error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield frames until the peer is gone."""
        with suppress(PeerLost):
            while True:
                yield await self.receive()

    def abort(self) -> None:
        """Drop the connection; queued frames are lost."""
        _abort(self._writer)

    async def aclose(self) -> None:
        """Send queued frames and close. Calling it twice does no harm."""
        self._writer.close()
        with suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), TIMEOUT_S)


def _abort(writer: asyncio.StreamWriter) -> None:
    with suppress(AttributeError):  # asyncio: a transport that closed after its buffer ran empty has no loop any more
        writer.transport.abort()


async def connect(address: Address, secret: bytes, hello: bytes, *, timeout_s: float = TIMEOUT_S) -> Channel:
    """Connect, authenticate both sides and exchange hellos. Raises ``HandshakeError``, ``PeerLost``."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _open(address)
            try:
                return await _handshake(reader, writer, secret, hello, server=False)
            except BaseException:
                _abort(writer)
                await asyncio.sleep(0)  # abort closes the socket in the loop's next turn
                raise
    except TimeoutError as error:
        raise HandshakeError(f"{address} did not answer within {timeout_s} s", "control", str(address)) from error
    except OSError as error:
        raise PeerLost(f"{address} cannot be reached: {error}", "control", str(address)) from error


async def _open(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.scheme == "unix":
        return await asyncio.open_unix_connection(address.path)
    return await asyncio.open_connection(address.host, address.port)


@asynccontextmanager
async def listen(
    address: Address, secret: bytes, hello: bytes, serve: Callable[[Channel], Awaitable[None]]
) -> AsyncIterator[Address]:
    """Accept channels and hand each to ``serve`` once it is authenticated; yield the address in use.

    A peer that fails the handshake is dropped without harm to others. Raises ``ConfigError`` if it cannot listen.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        with suppress(asyncio.CancelledError):  # asyncio would report any exception of this task as an error
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    channel = await _handshake(reader, writer, secret, hello, server=True)
                await serve(channel)
            except TimeoutError:
                logger.warning("a connection to %s was refused: no handshake within %s s", bound, TIMEOUT_S)
            except TransportError as error:
                logger.warning("a connection to %s was refused: %s", bound, error)
            finally:
                _abort(writer)

    bound = address
    server, bound = await _bind(address, accept)
    try:
        yield bound
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
        if address.scheme == "unix":
            with suppress(OSError):
                os.unlink(address.path)


async def _bind(address: Address, accept: Callable[..., Awaitable[None]]) -> tuple[asyncio.Server, Address]:
    try:
        if address.scheme == "unix":
            return await asyncio.start_unix_server(accept, address.path), address
        server = await asyncio.start_server(accept, address.host, address.port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    return server, Address("tcp", host=address.host, port=server.sockets[0].getsockname()[1])


async def _handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, hello: bytes, *, server: bool
) -> Channel:
    """Exchange challenges and proofs, the client's proof first: a peer without the secret learns nothing."""
    try:
        mine = secrets.token_bytes(NONCE)
        writer.write(MAGIC + VERSION.to_bytes(2, "big") + mine)
        theirs = await _read_greeting(reader)
        roles = (b"server", b"client") if server else (b"client", b"server")
        if server:
            await _verify(reader, secret, roles[1], mine, theirs)
        writer.write(_proof(secret, roles[0], theirs, mine))
        if not server:
            await _verify(reader, secret, roles[1], mine, theirs)
        channel = Channel(reader, writer, limit=MAX_HELLO)
        channel.send(hello)
        return Channel(reader, writer, await channel.receive())
    except (asyncio.IncompleteReadError, OSError) as error:
        raise HandshakeError(
            "the peer left during the handshake: the secrets differ, or it is not an instance of trinity"
        ) from error


async def _read_greeting(reader: asyncio.StreamReader) -> bytes:
    greeting = await reader.readexactly(len(MAGIC) + 2 + NONCE)
    if not greeting.startswith(MAGIC):
        raise HandshakeError("the peer does not speak trinity's protocol", "control")
    version = int.from_bytes(greeting[len(MAGIC) : len(MAGIC) + 2], "big")
    if version != VERSION:
        text = f"the peer speaks version {version} of the protocol, this side {VERSION}"
        raise HandshakeError(f"{text}: install the same trinity on both", "control")
    return greeting[-NONCE:]


def _proof(secret: bytes, role: bytes, challenge: bytes, own: bytes) -> bytes:
    return hmac.digest(secret, role + challenge + own, "sha256")


async def _verify(reader: asyncio.StreamReader, secret: bytes, role: bytes, mine: bytes, theirs: bytes) -> None:
    proof = await reader.readexactly(32)
    if not hmac.compare_digest(proof, _proof(secret, role, mine, theirs)):
        raise HandshakeError("the peer does not hold this pipeline's secret", "control")
