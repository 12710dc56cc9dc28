"""Ends of requests whose messages cannot be sent or read: what a request holds ends that request, and no instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from trinity.core.instance.state import State
from trinity.core.messages import (
    Caught,
    Commit,
    Emit,
    Failure,
    Fetch,
    Finished,
    Offer,
    Ready,
    Release,
    Submit,
    Value,
    Withdraw,
)
from trinity.errors import HandshakeError
from trinity.remote.channel.wire import UnsendableMessage, decode, encode

Attempt = tuple[str, int]  # a request's id and its attempt


def requests_of(message: Value, state: State | None = None) -> list[Attempt]:
    """List the requests that a message is about; ``state``: of its sender, which knows the requests of transfers."""
    if isinstance(message, (Submit, Offer)):
        return [(message.work.request, message.work.attempt)]
    if isinstance(message, Emit):
        return list(dict.fromkeys(zip(message.requests, message.attempts, strict=True)))
    if isinstance(message, Finished):
        return [(message.request, message.attempt)]
    if state is not None and isinstance(message, (Ready, Caught, Commit, Withdraw, Release, Fetch)):
        return _find_transfer(message.id, state)
    return []


def _find_transfer(offer: str, state: State) -> list[Attempt]:
    """Find the request whose blocks are offered, from here or to here."""
    if offer in state.outgoing:
        lease = state.outgoing[offer]
        return [(lease.request, lease.attempt)]
    here = state.requests.get(state.incoming.get(offer, ""))
    incoming = here.incoming if here is not None else None
    return [(incoming.offer.work.request, incoming.offer.work.attempt)] if incoming is not None else []


def requests_in(frame: bytes) -> list[Attempt]:
    """List the requests that a message is about which could not be decoded, as far as it can be told."""
    try:
        found = msgspec.msgpack.decode(frame, ext_hook=lambda code, data: None)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return []
    if not isinstance(found, dict):
        return []
    work = found.get("work", found)
    one = [(work.get("request"), work.get("attempt"))] if isinstance(work, dict) else []
    columns = [found.get(name) for name in ("requests", "attempts")]
    many = zip(*columns, strict=False) if all(isinstance(column, list) for column in columns) else ()
    return [(name, number) for name, number in (*one, *many) if isinstance(name, str) and isinstance(number, int)]


def decode_or_end(frame: bytes, name: str, tell: Callable[[list[Value]], None]) -> Value | None:
    """Decode a message; one that fails and is about requests ends these, by ``tell``, and gives None.

    ``name``: the instance that may hold something of them. Raises ``HandshakeError`` for any other that fails.
    """
    try:
        return decode(frame)
    except HandshakeError as error:
        requests = requests_in(frame)
        if not requests:
            raise
        tell([*end_requests(requests, error, (name,))])
        return None


def end_requests(requests: Iterable[Attempt], error: Exception, route: Sequence[str]) -> list[Finished]:
    """Make what the front end is told of requests whose message was lost. ``route``: who may hold something of them."""
    kind = "RequestTooLarge" if isinstance(error, UnsendableMessage) and error.too_large else "RequestError"
    hint = "send fewer or smaller media" if kind == "RequestTooLarge" else "check the request's values"
    text = f"{error}; {hint}".encode("ascii", "backslashreplace").decode()
    failure = Failure(kind, text)
    return [
        Finished(request=request, attempt=attempt, reason="error", failure=failure, route=tuple(route), cut=True)
        for request, attempt in requests
    ]


def encode_all(messages: Iterable[Value], name: str) -> list[bytes]:
    """Encode an instance's messages to the front end; in place of one that cannot be sent, the ends of its requests."""
    frames: list[bytes] = []
    for message in messages:
        try:
            frames.append(encode(message))
        except UnsendableMessage as error:
            frames += _encode_parts(message, error, name)
    return frames


def _encode_parts(message: Value, error: UnsendableMessage, name: str) -> list[bytes]:
    """Encode the rows of an Emit that can be sent, and the ends of all other requests of this message."""
    if not isinstance(message, Emit) or len(message.requests) == 1:
        return [encode(finished) for finished in end_requests(requests_of(message), error, (name,))]
    rows = [Emit((request,), (attempt,), (index,), (sampled,)) for (request, attempt, index, sampled) in message.rows()]
    return encode_all(rows, name)
