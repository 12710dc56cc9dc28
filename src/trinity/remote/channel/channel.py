"""Control channel: ordered, length-framed messages between two processes, authenticated on both sides.

One for each pair of processes, over a Unix or TCP socket; over TCP inside TLS where certificates are given. Both sides
prove that they hold the pipeline's secret before any other byte is decoded (``handshake``). Each frame over TCP carries
a tag that only the two can make; one that was altered on its way ends the channel. A message of at most ``MAX_MESSAGE``
bytes travels in frames of ``MAX_FRAME``; nothing is ever unpickled.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from trinity.errors import ConfigError, IntegrityError, PeerLost, TransportError
from trinity.remote.channel.handshake import TAG, BrokenHandshake, CrowdedError, Seals, shake_hands
from trinity.remote.channel.tls import TLSConfig, open_tls

logger = logging.getLogger("trinity")
SECRET_VARIABLE = "TRINITY_SECRET"  # environment variable that holds the pipeline's secret
SHORTEST_SECRET = 32  # characters
MAX_FRAME = 1 << 20  # bytes: a longer message goes in several, so that a reader stands still for one alone
MAX_MESSAGE = 2 << 30  # bytes: the pixels of a request are the largest payload
MAX_HELLO = 1 << 20
MORE = 1 << 31  # of a frame's header: the message goes on in the next frame
TIMEOUT_S = 10.0
MAX_RESETS = 10  # tries to connect that are reset, before the peer is taken for another program
CROWDED_S = 0.1  # at most, before another try to connect where too many wait for a handshake
LONGEST_HOST = 253  # characters of a name (RFC 1035)
JOINED_BYTES = 64 << 10  # frames up to this size are written in one piece


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
        if scheme == "unix" and rest and "\0" not in rest:
            return cls("unix", path=rest)
        host, _, port = rest.rpartition(":")
        host = host.strip("[]")
        if scheme == "tcp" and _is_host(host) and _is_port(port):
            return cls("tcp", host=host, port=int(port))
        raise ConfigError(f"{text!r:.200} is no address: write unix:/path/to/socket or tcp:host:port")

    @property
    def is_any(self) -> bool:
        """True of a port that is still to be chosen."""
        return self.scheme == "tcp" and not self.port

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.scheme == "unix" else f"tcp:{self.host}:{self.port}"


def _is_host(text: str) -> bool:
    """Tell if a text could name a host: what no resolver takes fails there with errors of the system's own."""
    if not text.isprintable() or not 0 < len(text) <= LONGEST_HOST:
        return False
    try:
        return bool(text.encode("idna"))
    except UnicodeError:  # a part of it that is empty, or longer than 63 characters
        return False


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 65536


class Channel:
    """An authenticated connection, used on the event loop's thread.

    - ``seals`` (None): tags of frames sent and received; None where the system vouches for the peer.
    - ``limit`` (bytes): of one message.

    ``hello`` is the peer's first message.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        seals: Seals = None,
        limit: int = MAX_MESSAGE,
    ) -> None:
        self.hello, self.limit = b"", limit
        self._reader, self._writer = reader, writer
        self._sent = seals[0] if seals is not None else None
        self._received = seals[1] if seals is not None else None

    @property
    def closed(self) -> bool:
        """True once the connection is closed or closing."""
        return self._writer.is_closing()

    @property
    def backlog(self) -> int:
        """Bytes that wait for the peer to read. No number of them is a loss: what may wait is bounded by who sends."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, payload: bytes) -> None:
        """Queue one message without blocking. All its frames are tagged and queued at once: 3 ms a MiB of the caller.

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
        head = header.to_bytes(4, "big")
        pieces: list[bytes | memoryview] = [head, data]
        if self._sent is not None:
            pieces = [head + self._sent.header_tag(head), data, self._sent.data_tag(data)]
        for piece in [b"".join(pieces)] if len(data) <= JOINED_BYTES else pieces:
            self._writer.write(piece)

    async def receive(self) -> bytes:
        """Receive the next message.

        Raises ``PeerLost`` at the end, ``TransportError`` for one above the limit, ``IntegrityError`` where a frame was
        altered, repeated, left out or put elsewhere on its way. After any of them the channel is closed.
        """
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
        begun, tag = False, TAG if self._received is not None else 0
        try:
            head = await self._reader.readexactly(4 + tag)
            begun, header = True, int.from_bytes(head[:4], "big")
            if self._received is not None:
                self._check(head[4:], self._received.header_tag(head[:4]))
            size, more = header & ~MORE, bool(header & MORE)
            self._check_size(size, before, more)
            data = await self._reader.readexactly(size)
            if self._received is not None:
                self._check(await self._reader.readexactly(TAG), self._received.data_tag(data))
            return data, more
        except asyncio.IncompleteReadError as error:
            self.abort()
            what = "in the middle of a frame" if begun or error.partial else "between frames"
            raise PeerLost(f"the control channel ended {what}", "control") from error
        except OSError as error:
            self.abort()
            raise PeerLost(f"the control channel broke: {error}", "control") from error

    def _check_size(self, size: int, before: int, more: bool) -> None:
        """Raise ``TransportError`` for a frame that nobody sends, or one of a message that is too long."""
        if size > MAX_FRAME or (more and not size):
            text = f"a frame of {size} bytes is empty, or above the limit of {MAX_FRAME}: not from a channel of trinity"
        elif before + size > self.limit:
            text = f"a message of {before + size} bytes is above the limit of {self.limit}"
        else:
            return
        self.abort()
        raise TransportError(text, "control")

    def _check(self, tag: bytes, due: bytes) -> None:
        if not hmac.compare_digest(tag, due):
            self.abort()
            peer = self._writer.get_extra_info("peername")
            text = f"a frame from {peer} is not the one that was sent: somebody on the way alters the control channel"
            logger.error("%s; it is closed", text)
            raise IntegrityError(text, "control", str(peer))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield frames until the peer is gone."""
        with suppress(PeerLost):
            while True:
                yield await self.receive()

    def abort(self) -> None:
        """Drop the connection; queued frames are lost."""
        abort_writer(self._writer)

    async def aclose(self) -> None:
        """Send queued frames and close. Calling it twice does no harm."""
        self._writer.close()
        with suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), TIMEOUT_S)


def abort_writer(writer: asyncio.StreamWriter) -> None:
    """Drop a connection; what is queued is lost."""
    with suppress(AttributeError):  # asyncio: a transport that closed after its buffer ran empty has no loop any more
        writer.transport.abort()


async def connect(
    address: Address, secret: bytes, hello: bytes, *, timeout_s: float = TIMEOUT_S, tls: TLSConfig | None = None
) -> Channel:
    """Connect, authenticate both sides and exchange hellos; over TCP in TLS where ``tls`` is given.

    Raises ``HandshakeError`` (``BrokenHandshake`` where another try may succeed), ``PeerLost``, and ``ConfigError`` for
    files of ``tls`` that cannot be read.

    A listener with too many connections drops some before their proof: these try again while there is time.
    """
    resets, told = 0, False
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await _connect_once(address, secret, hello, tls)
                except CrowdedError as error:
                    resets, told = resets + (not error.told), told or error.told
                    if resets >= MAX_RESETS:
                        raise
                    await asyncio.sleep(random.uniform(0, CROWDED_S))
    except TimeoutError as error:
        why = "has no room for a handshake: too many connect at once" if told else "did not answer"
        raise BrokenHandshake(f"{address} {why} within {timeout_s} s", "control", str(address)) from error
    except OSError as error:
        raise PeerLost(f"{address} cannot be reached: {error}", "control", str(address)) from error


async def _connect_once(address: Address, secret: bytes, hello: bytes, tls: TLSConfig | None) -> Channel:
    reader, writer = await _open(address, tls)
    try:
        return await exchange_hellos(reader, writer, await shake_hands(reader, writer, secret, server=False), hello)
    except BaseException:
        abort_writer(writer)
        await asyncio.sleep(0)  # abort closes the socket in the loop's next turn
        raise


async def _open(address: Address, tls: TLSConfig | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.scheme == "unix":
        return await asyncio.open_unix_connection(address.path)
    if tls is not None:
        return await open_tls(address.host, address.port, tls)
    return await asyncio.open_connection(address.host, address.port)


async def exchange_hellos(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seals: Seals, hello: bytes
) -> Channel:
    """Make a channel of an authenticated connection; both sides say hello. Raises ``BrokenHandshake``."""
    channel = Channel(reader, writer, seals, MAX_HELLO)
    channel.send(hello)
    try:
        channel.hello, channel.limit = await channel.receive(), MAX_MESSAGE
    except PeerLost as error:
        raise BrokenHandshake(f"the peer left before its hello: {error}", "control") from error
    return channel
