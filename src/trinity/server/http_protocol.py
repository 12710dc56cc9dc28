"""HTTP/1.1 of one connection: uvicorn's protocol over httptools, with bounds on what is no body.

uvicorn waits for ever for a request's head, and keeps headers of any size. httptools, a C parser, takes half a
millisecond less of a request than h11.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD = (
    64 << 10
)  # bytes of a request beside its body: its head, trailers, chunk sizes (these: its body's size more)
HEAD_S = 30.0  # s from a connection, or a head's first byte, to the head's end


class BoundedProtocol(HttpToolsProtocol):
    """One connection, which is closed where a head takes longer than ``HEAD_S`` or is larger than ``MOST_HEAD``."""

    _beside = 0  # bytes of this request that are no body
    _head_timer: asyncio.TimerHandle | None = None
    _head_is_due = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come. Answers 431, and closes, where a request has too much beside its body."""
        self._beside += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._beside > MOST_HEAD:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self._head_is_due and self._beside > 0 and self._head_timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._beside, self._head_is_due = 0, False
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._beside -= 2 * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._beside, self._head_is_due = 0, True
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._on_late_head)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_late_head(self) -> None:
        self._head_timer = None
        if self._is_answering():  # a head behind that waits with its client
            self._start_timer()
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: HTTPStatus) -> None:
        """Say why, unless an answer is on its way, and close."""
        if not self._is_answering():
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode())
        self.transport.close()
