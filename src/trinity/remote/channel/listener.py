"""Listener: accepts control channels, and bounds what costs anything before a connection is authenticated.

A connection that has not proved the secret holds a place for ten seconds at most, and there are few places. Where all
are taken the oldest of the address that has most of them gives way, so that a flood drops its own connections first;
a rightful client that is dropped tries again. Refusals are logged, a few of them each minute and then their number.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from trinity.errors import ConfigError, TransportError
from trinity.remote.channel import channel as channels
from trinity.remote.channel.channel import Address, Channel, abort_writer, exchange_hellos
from trinity.remote.channel.handshake import CROWDED, shake_hands
from trinity.remote.channel.tls import BUSY_ALERT, TLSConfig, expect_tls
from trinity.runtime.shielded_wait import wait_shielded

logger = logging.getLogger("trinity")
MAX_UNAUTHENTICATED = 128  # connections without a proof, at once; a quarter of the descriptors where these are few
BACKLOG = 1024  # connections that the system holds until they are accepted
NO_DESCRIPTOR_S = 0.05  # before the next connection is accepted, where the process has no descriptor left
LOGGED_REFUSALS, LOG_WINDOW_S = 8, 60.0
Serve = Callable[[Channel], Awaitable[None]]


class RefusalLog:
    """Log of connections that were refused: the first few of a minute with their reason, of the rest their number."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._since, self._count = time.monotonic(), 0

    def add(self, why: str) -> None:
        if time.monotonic() - self._since > LOG_WINDOW_S:
            self.flush()
        self._count += 1
        if self._count <= LOGGED_REFUSALS:
            logger.warning("a connection to %s was refused: %s", self._address, why)

    def flush(self) -> None:
        """Log the number of those that were not logged one by one, and begin a new minute."""
        if self._count > LOGGED_REFUSALS:
            more, seconds = self._count - LOGGED_REFUSALS, time.monotonic() - self._since
            logger.warning("%d more connections to %s were refused within %.0f s", more, self._address, seconds)
        self._since, self._count = time.monotonic(), 0


class Listener:
    """Accepts connections on ``sockets`` until ``aclose``; each that is authenticated is handed to ``serve``.

    With a ``context`` it takes connections in TLS alone.
    """

    def __init__(
        self,
        address: Address,
        sockets: list[socket.socket],
        secret: bytes,
        hello: bytes,
        serve: Serve,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._secret, self._hello, self._handler, self._context = secret, hello, serve, context
        self._refusals = RefusalLog(address)
        self._places = max(1, min(MAX_UNAUTHENTICATED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._waiting: dict[asyncio.Task[Any], str] = {}  # those without a proof and their hosts, oldest first
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        for each in sockets:
            self._start(self._accept(each), each)

    def _start(self, work: Coroutine[Any, Any, None], using: socket.socket) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_done, using))
        return task

    def _on_done(self, used: socket.socket, task: asyncio.Task[None]) -> None:
        used.close()  # also of a task that was cancelled before it began
        self._tasks.discard(task)
        self._waiting.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a control channel could not be served", exc_info=task.exception())

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, source = await self._loop.sock_accept(listening)
            except OSError as error:
                self._refusals.add(str(error))
                await asyncio.sleep(NO_DESCRIPTOR_S)
                continue
            while len(self._waiting) >= self._places:
                self._evict()
            host = str(source[0]) if isinstance(source, tuple) else ""
            self._waiting[self._start(self._serve(connection), connection)] = host
            await asyncio.sleep(0)  # sock_accept does not wait while there are connections: others need their turn

    def _evict(self) -> None:
        """Drop the oldest connection of the host that has most of those without a proof."""
        [(host, _)] = Counter(self._waiting.values()).most_common(1)
        oldest = next(task for task, its_host in self._waiting.items() if its_host == host)
        del self._waiting[oldest]
        oldest.cancel()
        self._refusals.add(f"{self._places} connections wait for a handshake, and others come")

    def _say_crowded(self, connection: socket.socket, writer: asyncio.StreamWriter | None) -> None:
        with suppress(OSError):
            if writer is not None:
                writer.write(CROWDED)
            else:
                connection.send(CROWDED if self._context is None else BUSY_ALERT)

    async def _serve(self, connection: socket.socket) -> None:
        """Authenticate a connection and hand it to the handler. Cancelled before its proof, it is told to come back."""
        channel, writer, proven = None, None, False
        opening = self._loop.create_task(_open_streams(connection, self._context))
        try:
            async with asyncio.timeout(channels.TIMEOUT_S):
                reader, writer = await asyncio.shield(opening)
                seals = await shake_hands(reader, writer, self._secret, server=True)
                proven = True
                self._waiting.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
                channel = await exchange_hellos(reader, writer, seals, self._hello)
        except TimeoutError:
            return self._refusals.add(f"no handshake within {channels.TIMEOUT_S} s")
        except (OSError, TransportError) as error:
            return self._refusals.add(str(error))
        except asyncio.CancelledError:
            if not proven:  # the peer would take it for a frame
                self._say_crowded(connection, writer)
            raise
        finally:
            if channel is None:
                await _drop(connection, opening)
        try:
            await self._handler(channel)
        finally:
            channel.abort()

    async def aclose(self) -> None:
        """Stop accepting and drop every connection."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._refusals.flush()


async def _drop(
    connection: socket.socket, opening: asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
) -> None:
    """End a connection that proved nothing, and wait until no transport has its descriptor any more.

    A handshake is not cancelled: asyncio's transport may outlive that for half a minute, and whoever gets the
    descriptor next would meet it. It ends as it reads the end of the connection. Who waits here may be cancelled
    again, as one that gave way while the listener closes: the writer is dropped all the same.
    """
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    try:
        await wait_shielded(asyncio.ensure_future(asyncio.wait([opening])))
    finally:
        if not opening.cancelled() and opening.exception() is None:
            abort_writer(opening.result()[1])


async def _open_streams(
    connection: socket.socket, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if context is not None:
        await expect_tls(connection)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


@asynccontextmanager
async def listen(
    address: Address, secret: bytes, hello: bytes, serve: Serve, tls: TLSConfig | None = None
) -> AsyncIterator[Address]:
    """Accept channels and hand each to ``serve`` once it is authenticated; yield the address in use.

    Over TCP with ``tls`` all are in TLS, whose files are read now. A peer that fails the handshake is dropped without
    harm to others. Raises ``ConfigError`` if it cannot listen, or a file of ``tls`` cannot be read.
    """
    context = tls.make_context(server=True) if tls is not None and address.scheme == "tcp" else None
    try:
        sockets = _bind_unix(address.path) if address.scheme == "unix" else await _bind_tcp(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    bound = address
    if address.scheme == "tcp":
        bound = Address("tcp", host=address.host, port=sockets[0].getsockname()[1])
    file = os.stat(address.path).st_ino if address.scheme == "unix" else 0
    listener = Listener(bound, sockets, secret, hello, serve, context)
    try:
        yield bound
    finally:
        await listener.aclose()
        if file:
            with suppress(OSError):
                if os.stat(address.path).st_ino == file:  # and not one that was put in its place
                    os.unlink(address.path)


def _bind_unix(path: str) -> list[socket.socket]:
    """Listen on a socket file, in place of one that a program has left. Raises ``OSError`` where one listens on it."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            if _is_listened_on(path):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)
            os.unlink(path)
    return [_listen(socket.AF_UNIX, path)]


def _is_listened_on(path: str) -> bool:
    """Tell a socket file of a program that listens from one that was left; one whose backlog is full listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trying:
        trying.setblocking(False)
        try:
            trying.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
        return True


async def _bind_tcp(address: Address) -> list[socket.socket]:
    """Listen on every address that the host's name stands for, on one port."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, where in dict.fromkeys((family, where) for family, _, _, _, where in found):
        port = sockets[0].getsockname()[1] if sockets else address.port
        try:
            sockets.append(_listen(family, (where[0], port, *where[2:])))
        except OSError as error:
            missing = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    else:
        missing = None if sockets else missing
    if missing is not None:
        for each in sockets:
            each.close()
        raise missing
    return sockets


def _listen(family: int, where: Any) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        if family != socket.AF_UNIX:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(where)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made
