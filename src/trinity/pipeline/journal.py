"""RequestJournal: tells a pipeline's buddy of its requests, so that this one can go on with them."""

from __future__ import annotations

import asyncio
import time
from pathlib import PurePath
from typing import Any

import msgspec

from trinity.core.frontend.journal import Closing, JournalStart, JournalWriter, Opening
from trinity.core.messages import Failure, Work
from trinity.emulation.model import EmulatedRequest
from trinity.errors import RequestError
from trinity.pipeline.stream import Stream
from trinity.preprocess.processor import ProcessedRequest
from trinity.remote.buddy import Buddy, JournalSender
from trinity.remote.channel.channel import Address
from trinity.remote.channel.tls import TLSConfig
from trinity.request import Request


class RequestNote(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a request that the shell of its buddy needs beside its work.

    - ``request``: as its reader gave it, in msgpack; empty where it holds what no message can (an image as an object).
    - ``session``, ``clipped``, ``emulated``, ``stop``: as ``Request`` and ``ProcessedRequest`` have them.
    """

    request: bytes
    session: str
    clipped: bool
    emulated: bool
    stop: tuple[str, ...]


class RequestJournal:
    """Words of a pipeline to its buddy; none where it has none."""

    def __init__(self) -> None:
        self._writer = JournalWriter(0)
        self._sender: JournalSender | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def reached(self) -> bool:
        """True while the buddy is told of requests."""
        return self._sender is not None and self._sender.reached

    def start(self, buddy: Buddy, name: str, start: JournalStart, secret: bytes, tls: TLSConfig | None) -> None:
        """Begin to keep one, if there is a buddy, and reach it as soon as that can be."""
        if buddy.address is not None:
            self._writer = JournalWriter(buddy.journal_bytes)
            self._sender = JournalSender(Address.parse(buddy.address), name, start, secret, tls, self._writer)
            self._running = asyncio.create_task(self._sender.run(), name="trinity-buddy")

    async def note(
        self,
        stream: Stream,
        processed: ProcessedRequest,
        *,
        reader: str = "",
        given: bytes | None = None,
        adoptions: int = 0,
    ) -> None:
        """Tell of a request before it begins, and wait until the buddy knows of it, if that answers.

        ``reader``: the id by which its reader will ask for it; its own, where that is not said. ``given``: the request
        as a former front end told of it; "" where that could not.
        """
        if self._sender is None or stream.encode_only:
            return
        request, work = stream.request, processed.work
        given = encode_request(request) if given is None else given
        sent = processed.inputs if processed.inputs and not given else ()
        opening = Opening(
            key=request.request_id,
            reader=reader or request.request_id,
            work=work,
            note=msgspec.msgpack.encode(
                RequestNote(
                    request=given,
                    session=request.session,
                    clipped=processed.clipped,
                    emulated=processed.emulated,
                    stop=processed.stop,
                )
            ),
            inputs=sent,
            input_bytes=processed.input_bytes if sent else 0,
            unread=_has_pixels(work, processed) and not sent,
            adoptions=adoptions,
        )
        self._writer.begin(opening, stream.sampled, time.monotonic())
        await self._sender.wait_kept()

    def end(self, stream: Stream) -> None:
        """Tell how a request ended."""
        error = stream.error
        failure = Failure(type(error).__name__, str(error)) if isinstance(error, RequestError) else None
        self._writer.end(Closing(stream.request.request_id, stream.output.finish_reason, failure))

    async def aclose(self) -> None:
        """Tell the buddy that nothing is to go on."""
        if self._running is not None and self._sender is not None:
            await self._sender.aclose()
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)


def _has_pixels(work: Work, processed: ProcessedRequest) -> bool:
    return bool(work.media and not processed.emulated)


def encode_request(request: Request) -> bytes:
    """Encode a request that was checked; "" where it holds what cannot be read again elsewhere, such as an image."""
    try:
        return msgspec.msgpack.encode(msgspec.structs.replace(request, client=""), enc_hook=_encode_path)
    except Exception:  # a source is an object of anyone's
        return b""


def _encode_path(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} is an object of this process")


def decode_request(note: RequestNote, key: str, work: Work) -> Request:
    """Read the request, under its new name. One that could not be sent has its prompt's place alone."""
    if not note.request:
        return Request("", request_id=key, session=note.session, deadline_s=work.deadline_s)
    kind = EmulatedRequest if note.emulated else Request
    return msgspec.structs.replace(msgspec.msgpack.decode(note.request, type=kind), request_id=key)
