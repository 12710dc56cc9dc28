"""One HTTP request and its response: bounded bodies, server-sent events, a client that leaves or reads nothing."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Message, Receive, Scope, Send

from trinity.errors import ClosedError
from trinity.memory.freed_memory import RELEASE_EVERY_S, release_at_times
from trinity.server.body_values import JsonBodies, TooManyValues
from trinity.server.error_table import ApiError, describe_failure
from trinity.server.request_traces import NO_TRACE
from trinity.server.settings import SHORT_BODY, ServerConfig, find_room

T = TypeVar("T")
_PLAIN_ID = re.compile(rb"[\x21-\x7e]{1,128}")
BODY_GRACE_S = 10.0  # s for a body of any size, before its rate counts
LEAST_BODY_RATE = 8 << 10  # bytes a second: a client that sends less is as good as none, and holds its connection
LINGER_S = 1.0  # of a body that is refused
_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ClientGone(Exception):
    """The client has left, or reads nothing any more: nobody waits for the response."""


class HeldBytes:
    """Bytes of the bodies of all requests that are being read or served; ``json`` parses them.

    ``find_room`` says how many of them bodies of a size may have. A client has no more of them than it leaves to
    others, so that whatever one sends, there is room for another's.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held, self.json = most, 0, JsonBodies()
        self._of = Counter[str]()
        self._turn = asyncio.Lock()

    async def take_turn(self, read: int) -> None:
        """Wait before the next piece of a body of which so much is read: in a round of the loop one long body has one.

        Clients that send long bodies as fast as they can would else fill each round, for all others that have a line
        to read or a token to write.
        """
        if read > SHORT_BODY:
            async with self._turn:
                await asyncio.sleep(0)

    def take(self, count: int, before: int, client: str) -> None:
        """Take ``count`` bytes of a client's body that has ``before`` already.

        Raises ``ApiError`` beyond the bound: 429 if the body would fit but for the client's other ones, else 503.
        """
        size, held = before + count, self.held + count
        most = find_room(self.most, size)
        if held + self._of[client] + count > most:
            said = f"the requests being served have {self.held} bytes already, {self._of[client]} of them this client's"
            if held + size <= most:
                status, advice = 429, "a client has no more than it leaves to others: wait for its requests to end"
            else:
                status, advice = 503, "try again later"
            raise ApiError(status, "too_many_bytes", f"{said}; {advice}", headers={"retry-after": "1"})
        self.held += count
        self._of[client] += count

    def give_back(self, count: int, client: str) -> None:
        """Give a body's bytes back, and a long one's memory to the system, once nothing of it is in use."""
        self.held -= count
        self._of[client] -= count
        if not self._of[client]:
            del self._of[client]
        if count > SHORT_BODY:
            asyncio.get_running_loop().call_later(RELEASE_EVERY_S, release_at_times)


def _read_object(read: Callable[[dict[str, Any]], T], body: Any) -> T:
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_json", "the body must be a JSON object")
    return read(body)


class Exchange:
    """One request and its response, over ASGI.

    ``request_id`` is the client's ``x-request-id`` where it sent a plain one, else new; the response names it.
    ``client`` is the name that the server knows its client by, set before the body is read.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, config: ServerConfig, held: HeldBytes) -> None:
        self.method: str = scope["method"]
        self.path_parameters: dict[str, str] = scope.get("path_params", {})
        self.raw_headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self.headers: dict[bytes, bytes] = dict(self.raw_headers)
        self.client = ""
        self.peer: str = (scope.get("client") or ("",))[0]
        self._query: bytes = scope.get("query_string", b"")
        given = self.headers.get(b"x-request-id", b"")
        self.request_id = given.decode() if _PLAIN_ID.fullmatch(given) else secrets.token_hex(12)
        self.status, self.streams, self.ended = 0, False, False
        self.trace = NO_TRACE
        self._block: UntilGone | None = None
        self._receive, self._send, self._config, self._held = receive, send, config, held
        self._taken = 0
        self._unread = self.method == "POST"

    def close(self) -> None:
        """Give back what the body took of the bytes that all requests share."""
        self._held.give_back(self._taken, self.client)
        self._taken = 0

    # ------------------------------------------------------------ the request

    async def read_json(self, read: Callable[[dict[str, Any]], T]) -> T:
        """Read the body as a JSON object, and return ``read(body)``. A large body is parsed and read in a thread.

        Raises ``ApiError``, ``ClientGone`` if it never comes, and what ``read`` raises.
        """
        kind = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":  # also what a page of another site could not send without asking first
            raise ApiError(415, "unsupported_media_type", "send JSON, with content-type application/json")
        try:
            return await self._held.json.decode(await self._read_body(), self.client, partial(_read_object, read))
        except TooManyValues as problem:
            raise ApiError(400, "too_many_values", f"the body has {problem}; send less") from None
        except RecursionError:
            raise ApiError(400, "invalid_json", "the body is nested too deep") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(400, "invalid_json", f"the body is no JSON: {error}") from None

    async def _read_body(self) -> list[bytes]:
        announced = self.headers.get(b"content-length", b"0")
        try:
            self._check_size(int(announced) if announced.isdigit() else 0)
            began = asyncio.get_running_loop().time()
            async with asyncio.timeout(min(self._config.body_timeout_s, BODY_GRACE_S)) as clock:
                parts = []
                async for part in self._parts():
                    parts.append(self._take(part))
                    allowed_s = BODY_GRACE_S + self._taken / LEAST_BODY_RATE
                    clock.reschedule(began + min(self._config.body_timeout_s, allowed_s))
                    await self._held.take_turn(self._taken)
            return parts
        except TimeoutError:
            text = (
                f"the body was not there after {self._config.body_timeout_s:g} s, or came at less than "
                f"{LEAST_BODY_RATE} bytes a second"
            )
            raise ApiError(408, "body_timeout", text, headers={"connection": "close"}) from None

    async def _parts(self) -> AsyncGenerator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = self._unread = message.get("more_body", False)
            yield message.get("body", b"")

    async def _discard(self) -> None:
        """Read on for a moment, so that a client that is still sending comes to read why it was refused.

        Else the end of its connection could overtake the answer, and wipe it out.
        """
        if not self._unread or b"expect" in self.headers:  # that one waits for leave to send
            return
        left = self._config.max_body_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S), contextlib.aclosing(self._parts()) as parts:
                async for part in parts:
                    left -= len(part)
                    if left < 0:
                        return

    def _take(self, part: bytes) -> bytes:
        self._check_size(self._taken + len(part))
        self._held.take(len(part), self._taken, self.client)
        self._taken += len(part)
        return part

    def _check_size(self, size: int) -> None:
        if size > self._config.max_body_bytes:
            text = f"the body has more than {self._config.max_body_bytes} bytes; send fewer or smaller media"
            raise ApiError(413, "body_too_large", text, headers={"connection": "close"})

    def find_query(self, name: str) -> bytes:
        """Find a parameter behind the path's question mark; b"" for none. Bytes that are no UTF-8 are kept."""
        return dict(parse_qsl(self._query.decode("latin-1"), encoding="latin-1")).get(name, "").encode("latin-1")

    def until_gone(self) -> UntilGone:
        """Make a block that is left with ``ClientGone`` as soon as the client has gone, the body being read."""
        self._block = UntilGone(self, self._receive)
        return self._block

    def stop(self) -> None:
        """Leave that block now, with ``ClosedError``: the server cannot wait for its end."""
        if self._block is not None:
            self._block.leave(lambda: ClosedError("the server is shutting down; send the request again"))

    # ------------------------------------------------------------ the response

    async def reply(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, kind: str = "application/json"
    ) -> None:
        """Send a whole response."""
        own = {"content-type": kind, "content-length": str(len(body))}
        await self._start(status, {**own, **(headers or {})})
        await self._write(body, last=True)

    async def start_events(self) -> None:
        """Send the head of a stream of events: from here on an error is an event."""
        self.streams = True
        await self._start(200, _EVENT_HEADERS)

    async def send_events(self, events: bytes, *, last: bool = False) -> None:
        """Send events in one write; waits while the client's buffers are full. Raises ``ClientGone``."""
        await self._write(events, last=last)

    async def fail(self, error: BaseException) -> None:
        """Send an error: as the response, or as an event where that has begun. Raises ``ClientGone``."""
        failure = describe_failure(error, self.request_id)
        if not self.status:
            await self._discard()
            await self.reply(failure.status, failure.body(), failure.headers)
        elif self.streams and not self.ended:
            await self._write(b"data: " + failure.body() + b"\n\n", last=True)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        named = {**headers, "x-request-id": self.request_id}
        raw = [(name.encode(), value.encode()) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _write(self, body: bytes, *, last: bool) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": not last}
        try:
            async with asyncio.timeout(self._config.send_timeout_s):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientGone from None
        self.ended = last


class UntilGone:
    """A block that is left with ``ClientGone`` as soon as the client has gone: what it waits for is cancelled."""

    def __init__(self, exchange: Exchange, receive: Receive) -> None:
        self._exchange, self._receive = exchange, receive
        self._scope = asyncio.timeout(None)
        self._watch: asyncio.Task[None] | None = None
        self._make_reason: Callable[[], Exception] = ClientGone  # one that is kept would hold what it is raised through

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._watch = asyncio.get_running_loop().create_task(self._watch_client())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch, self._watch = self._watch, None
        assert watch is not None
        watch.cancel()
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            left = True
        else:
            left = False
        finally:
            await asyncio.wait([watch])
            if not watch.cancelled():
                watch.exception()  # of a broken server: the client's own fate is told by sending
            del error, trace, watch
        if left:
            raise self._make_reason()

    def leave(self, make_reason: Callable[[], Exception]) -> None:
        """Leave the block now, unless it has ended or is being left."""
        if self._watch is not None and not self._exchange.ended and self._scope.when() is None:
            self._make_reason = make_reason
            self._scope.reschedule(0.0)

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.leave(ClientGone)
