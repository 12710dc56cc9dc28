"""Accepts connections, no more than are allowed at once, and makes room for new clients at the cost of idle ones.

asyncio's own accept loop knows no limit. Where descriptors run out it fails once for each connection that waits, with a
traceback each, and again every second.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, cast

logger = logging.getLogger("trinity.server.acceptor")

LEAST_IDLE_S = 1.0  # s that a connection has to send something before it makes room for another: some round trips
HANDSHAKE_S = 30.0  # s for the handshake of TLS, as for a request's head
SHORT_S = 0.5  # s without accepting once the system has no descriptor or memory for a connection
AT_ONCE = 64  # connections that are accepted in one turn of the loop
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MOST_BY_DEFAULT = 16384  # connections; each takes some 10 KiB here, and as much of the kernel's memory
LEAST_BY_DEFAULT = 16
REPEAT_S = 60.0  # s between two lines of the log with one message
_MOST_MESSAGES = 256
_RESERVED = 64  # descriptors for everything else: weights' files, instances, children, media that are fetched


class OncePerMinute(logging.Filter):
    """Lets each message of a logger pass once a minute: what clients cause at will must not fill a disk."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record is shown; those of one template are one message."""
        last = self._shown.get(record.msg)
        if last is not None and record.created - last < REPEAT_S:
            return False
        if len(self._shown) >= _MOST_MESSAGES:
            self._shown.clear()
        self._shown[record.msg] = record.created
        return True


logger.addFilter(OncePerMinute())


class HeldConnection(Protocol):
    """A connection's protocol: ``transport`` is None until its handshake is done."""

    acceptor: ConnectionAcceptor | None
    transport: asyncio.Transport


MakeConnection = Callable[[], HeldConnection]


def default_connections() -> int:
    """Return how many connections the limit of open files allows next to everything else that this process opens."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST_BY_DEFAULT
    return max(LEAST_BY_DEFAULT, min(MOST_BY_DEFAULT, files - max(_RESERVED, files // 4)))


class ConnectionAcceptor:
    """Accepts at listening sockets, up to ``most`` connections at once.

    At the limit, a new connection takes the place of the one that has sent nothing for the longest time, at least
    ``LEAST_IDLE_S``. Where every connection is being answered, new ones wait in the kernel's queue.

    Attributes: ``held``, the connections with the tasks that opened them; ``closed_idle``, how many made room so far.
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        make_connection: MakeConnection,
        most: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listening, self._make, self._most, self._tls = tuple(listening), make_connection, most, tls
        self._loop = asyncio.get_running_loop()
        self.held: dict[HeldConnection, asyncio.Task[None]] = {}
        self.closed_idle = 0
        self._idle: OrderedDict[HeldConnection, float] = OrderedDict()  # since when, the longest first
        self._accepting, self._closed = False, False
        self._later: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Accept from now on."""
        for each in self._listening:
            each.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more, and close the listening sockets; connections go on."""
        self._pause()
        self._closed = True
        for each in self._listening:
            each.close()

    # ------------------------------------------------------------ what connections report

    def note_idle(self, connection: HeldConnection) -> None:
        """Note that a connection's client is to send something, and that it has just shown to be there."""
        if connection in self.held:
            self._idle[connection] = self._loop.time()
            self._idle.move_to_end(connection)
            if self._later is None:
                self._resume()  # it may make room, where all others are being answered

    def note_busy(self, connection: HeldConnection) -> None:
        """Note that a whole request of a connection is being answered."""
        self._idle.pop(connection, None)

    def note_closed(self, connection: HeldConnection) -> None:
        """Note that a connection has ended."""
        self._forget(connection)
        if self._later is None:
            self._resume()

    # ------------------------------------------------------------ accepting

    def _resume(self) -> None:
        self._later = None
        if not self._accepting and not self._closed:
            self._accepting = True
            for each in self._listening:
                self._loop.add_reader(each, self._accept, each)

    def _pause(self, seconds: float | None = None) -> None:
        """Stop accepting, until a connection ends or for ``seconds``."""
        if self._accepting:
            self._accepting = False
            for each in self._listening:
                self._loop.remove_reader(each)
        if self._later is not None:
            self._later.cancel()
        self._later = None if seconds is None else self._loop.call_later(seconds, self._resume)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(AT_ONCE):
            if len(self.held) >= self._most and not self._make_room():
                return
            try:
                accepted, _address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _SHORTAGES:
                    self._wait_for_descriptors(error)
                    return
                continue  # the client left while it waited, or a rule of the system forbids it
            accepted.setblocking(False)
            connection = self._make()
            connection.acceptor = self
            self.held[connection] = self._loop.create_task(self._open(connection, accepted))
            self.note_idle(connection)
            if len(self.held) >= self._most:
                return  # room is made once another is there

    async def _open(self, connection: HeldConnection, accepted: socket.socket) -> None:
        handshake_s = HANDSHAKE_S if self._tls is not None else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: cast("asyncio.Protocol", connection),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=handshake_s,
            )
        except (OSError, asyncio.CancelledError):  # no TLS, or no connection any more: nobody is there to be answered
            accepted.close()
            self.note_closed(connection)

    def _make_room(self) -> bool:
        """Close the connection that has been idle for longest; else pause until there may be room."""
        longest = next(iter(self._idle.items()), None)
        logger.warning(
            "the limit of %d connections is reached: idle ones are closed for new ones, which else wait; "
            "raise max_connections (--max-connections) and the limit of open files, or limit clients at a proxy",
            self._most,
        )
        if longest is None:
            self._pause()
            return False
        connection, since = longest
        wait_s = since + LEAST_IDLE_S - self._loop.time()
        if wait_s > 0:
            self._pause(wait_s)
            return False
        self._end(connection)
        return True

    def _wait_for_descriptors(self, error: OSError) -> None:
        logger.warning(
            "no connection can be accepted just now (%s), with %d open; accepting goes on in %g s. "
            "Raise the limit of open files (ulimit -n)",
            error.strerror,
            len(self.held),
            SHORT_S,
        )
        late = self._loop.time() - LEAST_IDLE_S
        for connection, since in list(self._idle.items())[: (1 + len(self.held)) // 2]:
            if since <= late:
                self._end(connection)
        self._pause(SHORT_S)

    def _end(self, connection: HeldConnection) -> None:
        self.closed_idle += 1
        opening = self.held[connection]
        self._forget(connection)
        if connection.transport is None:
            opening.cancel()
        else:
            connection.transport.abort()

    def _forget(self, connection: HeldConnection) -> None:
        self.held.pop(connection, None)
        self._idle.pop(connection, None)
