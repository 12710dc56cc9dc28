"""HTTP/1.1 of one connection: uvicorn's protocol over httptools, with bounds on what is no body.

uvicorn waits for ever for a request's head, for the rest of a body that it has answered, and for a client that reads
nothing; it keeps headers of any size, takes trailers for headers, reads the body of a request that asks for another
protocol as a request of its own, and tells only the last of several requests that their client has left. httptools, a C
parser, takes half a millisecond less of a request than h11.
"""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from trinity.server.acceptor import ConnectionAcceptor

# Bytes of a request beside its body: its head, its trailers, and sizes of chunks, which may have its body's size more.
MOST_HEAD = 64 << 10
HEAD_S = 30.0  # s from a connection, or a head's first byte, to the head's end; also for the rest of an answered body
UNREAD_S = 90.0  # s for which a client may read nothing of what was written, also once its connection is closed here

MOST_BEHIND = 16  # requests behind the one that is answered, before their connection is parsed no further
PIECE = 1 << 10  # bytes that are parsed at a time: asyncio reads up to 256 KiB, which may be 14,000 requests
LIVELY = 64 << 10  # bytes of a body after which its client counts as one that has just sent something
_FRAMING = (b"content-length", b"transfer-encoding")


class _HeadTooLarge(Exception):
    """The head that was parsed is larger than ``MOST_HEAD``."""


class _Parser:
    """httptools' parser, which goes on with the body of a request whose upgrade is not taken (RFC 9110, 7.8)."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self._inner = self._make_inner()

    def feed_data(self, data: bytes) -> None:
        """Parse. Raises ``HttpParserError``, and ``HttpParserUpgrade`` for an upgrade that is taken."""
        while True:
            try:
                return self._inner.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._protocol.ignores_upgrade:
                    raise
                self._inner = self._make_inner()
                data = self._protocol.repeat_framing() + data[upgrade.args[0] :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _make_inner(self) -> httptools.HttpRequestParser:
        made = httptools.HttpRequestParser(self._protocol)
        made.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        return made


class _Flow(FlowControl):
    """uvicorn's flow of a connection: what has come and is not parsed comes before what is read."""

    def __init__(self, transport: asyncio.Transport, protocol: BoundedProtocol) -> None:
        super().__init__(transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if not self._protocol.is_behind():
            super().resume_reading()
            self._protocol.parse_unread()


class BoundedProtocol(HttpToolsProtocol):
    """One connection, which is closed where a head takes longer than ``HEAD_S`` or is larger than ``MOST_HEAD``.

    Unless a request is being answered, one of two clocks always runs: uvicorn's while nothing comes, ours from then on.

    It builds on what uvicorn's class shows without an underscore, which is the same from 0.34 to 0.54.

    Attributes: ``ignores_upgrade``, True between a head whose upgrade is not taken and its framing, fed again;
    ``acceptor``, to which the connection reports, None where another server accepts.
    """

    ignores_upgrade = False
    acceptor: ConnectionAcceptor | None = None
    _unnoted = 0  # bytes of the body since the acceptor last had a note
    _left = 0  # bytes of the body that are to come, where its head says how long it is: they are parsed as they come
    _unread = memoryview(b"")  # what has come and is not parsed yet: reading is paused as long as there is any
    _parsing = False
    _is_last = False  # nothing is parsed behind the request that came last
    _refused: HTTPStatus | None = None  # what is told behind its answer
    _beside = 0  # bytes of this request that are no body
    _head_is_due = True
    _too_large = False
    _clock: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        self.ws_protocol_class = None  # no upgrade is taken: trinity has no web sockets
        self.parser = _Parser(self)  # type: ignore[assignment] # it has the same methods
        super().connection_made(transport)
        self.flow = _Flow(transport, self)
        _end_unread(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread = memoryview(b"")
        self._stop_clock()
        if self.acceptor is not None:
            self.acceptor.note_closed(self)
        super().connection_lost(exc)
        cycle, self._answered = self._answered, None  # uvicorn has told the last one alone
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse what has come, as far as it may be. Answers 431 where a request has too much beside its body."""
        if not self._is_last:
            self._unread = memoryview(bytes(self._unread) + data if self._unread else data)
            self.parse_unread()

    def parse_unread(self) -> None:
        """Parse what has come, a piece at a time, until reading is paused."""
        if self._parsing:
            return
        self._parsing = True
        try:
            while self._unread and not self.flow.read_paused and not self.transport.is_closing():
                size = max(PIECE, self._left)
                piece, self._unread = self._unread[:size], self._unread[size:]
                self._parse(bytes(piece))
                if self._is_last:
                    self._unread = memoryview(b"")
        finally:
            self._parsing = False

    def is_behind(self) -> bool:
        """Tell whether more requests wait than are read ahead."""
        return len(self.pipeline) > MOST_BEHIND

    def on_response_complete(self) -> None:
        """Start the next request, or a clock: of an idle connection, and of the rest of a body that is answered."""
        parsing, self._parsing = self._parsing, True  # what waits comes before what is parsed next
        self._answered = self.pipeline[-1][0] if self.pipeline else self._answered
        super().on_response_complete()
        self._note_state()
        self._parsing = parsing
        self.flow.resume_reading()  # there is one less behind
        if self._refused is not None:
            self._refuse(self._refused)
        if self._clock is None and not self._head_is_due and not self._is_answering():
            self._start_clock()

    def _parse(self, piece: bytes) -> None:
        self._beside += len(piece)
        super().data_received(piece)
        if self.transport.is_closing() or self._is_last:
            return
        if self._beside > MOST_HEAD:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self._clock is None and self.timeout_keep_alive_task is None and not self._is_answering():
            self._start_clock()

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be parsed."""
        self._refuse(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if self._too_large else HTTPStatus.BAD_REQUEST,
        )

    # ------------------------------------------------------------ what the parser calls

    def on_message_begin(self) -> None:
        if self._head_is_due:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._head_is_due:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are dropped: what stands behind a body is none of its head (RFC 9110, 6.5.1)."""
        if self._head_is_due:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._head_is_due:
            self.ignores_upgrade = False
            return
        if self._beside > MOST_HEAD and self._measure_head() > MOST_HEAD:
            self._too_large = True
            raise _HeadTooLarge
        self._stop_clock()
        self.ignores_upgrade = self.parser.should_upgrade()
        super().on_headers_complete()  # which raises for a target that is none
        if not self.pipeline:
            self._answered = self.cycle
        self._beside, self._head_is_due, self._unnoted = 0, False, 0
        framing = dict(self._framing())
        self._left = 0 if b"transfer-encoding" in framing else int(framing.get(b"content-length", 0))
        self._note_state()
        self.flow.resume_reading()  # who is not read is not seen to leave

    def on_body(self, body: bytes) -> None:
        self._beside -= 2 * len(body)
        self._left -= len(body)
        super().on_body(body)
        self._unnoted += len(body)
        if self._unnoted >= LIVELY:
            self._unnoted = 0
            self._note_state()

    def on_message_complete(self) -> None:
        if not self.ignores_upgrade:
            self._beside, self._head_is_due, self._left = 0, True, 0
            self._stop_clock()
            super().on_message_complete()
            self._note_state()
            if not self.parser.should_keep_alive():
                self._end_behind(self.cycle)

    def _end_behind(self, cycle: RequestResponseCycle) -> None:
        """Close behind a request that asks for it, if by a trailer: the parser takes nothing that follows."""
        self._is_last, cycle.keep_alive = True, False
        if cycle.response_complete:
            self.transport.close()

    def repeat_framing(self) -> bytes:
        """Make a head that tells a parser how long the body of this request is."""
        framing = [b"%s: %s\r\n" % each for each in self._framing()]
        return b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n"

    def _framing(self) -> list[tuple[bytes, bytes]]:
        return [each for each in self.headers if each[0] in _FRAMING]

    def _measure_head(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _note_state(self) -> None:
        """Report whether the client is to send something, or a whole request of it is being answered."""
        if self.acceptor is None:
            return
        cycle = self._answered
        if cycle is None or cycle.response_complete or cycle.more_body:
            self.acceptor.note_idle(self)
        else:
            self.acceptor.note_busy(self)

    def _start_clock(self) -> None:
        self._clock = self.loop.call_later(HEAD_S, self._refuse, HTTPStatus.REQUEST_TIMEOUT)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: HTTPStatus) -> None:
        """Say why, and close; behind the answers that are due, and nothing where a body is what cannot be read."""
        if self._head_is_due and self._is_answering():
            self._is_last, self._refused = True, status
            return
        if self._head_is_due:
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode())
        self.transport.close()


def _end_unread(transport: asyncio.Transport) -> None:
    """Have the kernel end a connection whose client reads nothing: asyncio closes none that has bytes to write."""
    connection = transport.get_extra_info("socket")
    if connection.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_S))
