"""Accepts connections, no more than are allowed at once, and makes room for new clients at the cost of idle ones.

One address cannot take all of them: ``_find_place`` is the rule.

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
from contextlib import suppress
from typing import Protocol, cast

from trinity.server.client_names import ClientNames, ProxyNetwork

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
_REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_RESERVED = 64  # descriptors for everything else: weights' files, instances, children, media that are fetched


class OncePerMinute(logging.Filter):
    """Lets each message of a logger pass once a minute: what clients cause at will must not fill a disk.

    Records of one template are one message, and those with an error only if it has one type and was raised at one line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[object, float] = {}  # when, the longest ago first

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record is shown."""
        message = (record.msg, _locate(record.exc_info[1] if record.exc_info else None))
        last = self._shown.get(message)
        if last is not None and record.created - last < REPEAT_S:
            return False
        self._shown.pop(message, None)
        if len(self._shown) >= _MOST_MESSAGES:
            del self._shown[next(iter(self._shown))]
        self._shown[message] = record.created
        return True


def _locate(error: BaseException | None) -> tuple[str, str, int] | None:
    """Return an error's type, and the file and line that raised it; of a group those of its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None:
        return None
    file, line, at = "", 0, error.__traceback__
    while at is not None:
        file, line, at = at.tb_frame.f_code.co_filename, at.tb_lineno, at.tb_next
    return f"{type(error).__module__}.{type(error).__qualname__}", file, line


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


class Holder:
    """The connections of one address: ``tasks`` opened them; ``idle`` has since when each is idle, the longest first.

    The address None stands for all that are not counted: those of trusted proxies and of unix sockets.
    """

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.tasks: dict[HeldConnection, asyncio.Task[None]] = {}
        self.idle: OrderedDict[HeldConnection, float] = OrderedDict()


class ConnectionAcceptor:
    """Accepts at listening sockets, up to ``most`` connections at once.

    At the limit, a new connection takes the place of the one that has sent nothing for the longest time, at least
    ``LEAST_IDLE_S``. Where every connection is being answered, new ones wait in the kernel's queue. An address has
    three quarters of ``most`` at most; an IPv6 network of 64 bits is one address. At the limit, one that has more than
    half makes room before all others, and without that second. A connection beyond takes the place of an idle one of
    its own address, or is answered 429. ``proxies``: networks whose addresses many clients share; they are not counted.

    Attributes: ``held``, the connections with their holders; ``holders``, by address; ``closed_idle``, how many made
    room so far.
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        make_connection: MakeConnection,
        most: int,
        tls: ssl.SSLContext | None = None,
        proxies: Sequence[ProxyNetwork] = (),
    ) -> None:
        self._listening, self._make, self._most, self._tls = tuple(listening), make_connection, most, tls
        self._loop = asyncio.get_running_loop()
        self._names = ClientNames(proxies)
        self.held: dict[HeldConnection, Holder] = {}
        self.holders: dict[str | None, Holder] = {}
        self._largest = Holder(None)  # the one that has more than half, or had it last
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
            for idle in (self._idle, self.held[connection].idle):
                idle[connection] = self._loop.time()
                idle.move_to_end(connection)
            if self._later is None:
                self._resume()  # it may make room, where all others are being answered

    def note_busy(self, connection: HeldConnection) -> None:
        """Note that a whole request of a connection is being answered."""
        if self._idle.pop(connection, None) is not None:
            del self.held[connection].idle[connection]

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
            if len(self.held) >= self._most and not self._can_make_room():
                return
            try:
                accepted, peer = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _SHORTAGES:
                    self._wait_for_descriptors(error)
                    return
                continue  # the client left while it waited, or a rule of the system forbids it
            accepted.setblocking(False)
            if accepted.family in (socket.AF_INET, socket.AF_INET6):  # asyncio does so for sockets that it made alone
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address = self._names.find_counted(peer[0]) if isinstance(peer, tuple) else None
            holder = self.holders.get(address) or Holder(address)
            if self._find_place(holder):
                self._hold(holder, accepted)
            else:
                self._refuse(holder, accepted)
            if len(self.held) >= self._most:
                return  # room is made once another is there

    def _find_place(self, holder: Holder) -> bool:
        """Tell whether an address may have one more connection, and end the one whose place it takes."""
        at_limit = len(self.held) >= self._most
        if self._has_its_share(holder) or (at_limit and self._has_most(holder)):
            ending, least_s = next(iter(holder.idle), None), LEAST_IDLE_S
        elif at_limit:
            ending, least_s = self._choose_idle()
        else:
            return True
        if ending is None or self._idle[ending] + least_s > self._loop.time():
            return False
        self._end(ending)
        return True

    def _has_its_share(self, holder: Holder) -> bool:
        share = max(1, self._most - max(1, self._most // 4))
        return holder.address is not None and len(holder.tasks) >= share

    def _has_most(self, holder: Holder) -> bool:
        return holder.address is not None and len(holder.tasks) > max(1, self._most // 2)

    def _choose_idle(self) -> tuple[HeldConnection | None, float]:
        """Choose the connection that makes room for another address, and how many seconds it is to be idle."""
        if self._has_most(self._largest) and self._largest.idle:
            return next(iter(self._largest.idle)), 0.0
        return next(iter(self._idle), None), LEAST_IDLE_S

    def _hold(self, holder: Holder, accepted: socket.socket) -> None:
        connection = self._make()
        connection.acceptor = self
        self.held[connection], self.holders[holder.address] = holder, holder
        holder.tasks[connection] = self._loop.create_task(self._open(connection, accepted))
        if self._has_most(holder):
            self._largest = holder
        self.note_idle(connection)

    def _refuse(self, holder: Holder, accepted: socket.socket) -> None:
        """Close a connection; over plain HTTP its client is answered 429 first."""
        logger.warning(
            "%s has %d of %d connections and gets no more, so that others do; "
            "name a proxy whose clients share its address (--trusted-proxy, trusted_proxies), "
            "or raise max_connections (--max-connections)",
            holder.address,
            len(holder.tasks),
            self._most,
        )
        with accepted, suppress(OSError):
            if self._tls is None:
                accepted.send(_REFUSAL)

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

    def _can_make_room(self) -> bool:
        """Tell whether room can be made for another address; else pause until it may be."""
        ending, least_s = self._choose_idle()
        logger.warning(
            "the limit of %d connections is reached: idle ones are closed for new ones, which else wait; "
            "raise max_connections (--max-connections) and the limit of open files, or limit clients at a proxy",
            self._most,
        )
        if ending is None:
            self._pause()
            return False
        wait_s = self._idle[ending] + least_s - self._loop.time()
        if wait_s > 0:
            self._pause(wait_s)
        return wait_s <= 0

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
        opening = self.held[connection].tasks[connection]
        self._forget(connection)
        if connection.transport is None:
            opening.cancel()
        else:
            connection.transport.abort()

    def _forget(self, connection: HeldConnection) -> None:
        self.note_busy(connection)
        holder = self.held.pop(connection, None)
        if holder is not None:
            del holder.tasks[connection]
            if not holder.tasks:
                del self.holders[holder.address]
