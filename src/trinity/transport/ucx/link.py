"""Target side of ucx: a link that requests blocks from a source and receives them in place."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from trinity.errors import HandshakeError, OfferRefused, PeerLost, TransferTimeout, TransportError
from trinity.memory.block_memory import BlockMemory
from trinity.transport.base import CopyPlan, find_runs
from trinity.transport.link import Link, PendingRead
from trinity.transport.sealed_requests import LinkSeal
from trinity.transport.ucx.protocol import (
    REQUEST_BYTES,
    REQUEST_GENERATIONS,
    REQUEST_RUNS,
    REQUEST_TAG,
    PoolBytes,
    UcxDescriptor,
    UcxReply,
    UcxRequest,
    UcxWorker,
    piece_tag,
    split_pieces,
)

MAX_REPLY_BYTES, REPLY_S = 4096, 5.0
IDLE_S, BUSY_S = 0.5, 0.01  # UCX wakes the thread; these bound what it misses, and check deadlines

LOST_ERRORS = (
    "UCXXCanceledError",
    "UCXXConnectionResetError",
    "UCXXEndpointTimeoutError",
    "UCXXIOError",
    "UCXXNotConnectedError",
    "UCXXUnreachableError",
)


class UcxTransfer:
    """One request: its reply, then its pieces, in order, and what is to be done when all are here."""

    def __init__(self, number: int, sent: tuple[Any, Any], expected: deque[Any], end: Callable[[], None]) -> None:
        self.number, self.sent, self.expected, self.end = number, sent, expected, end
        self.reply: UcxReply | None = None
        self.piece = 0
        self.receiving: deque[tuple[Any, Any]] = deque()

    def close(self) -> None:
        """Drop every UCX request: one that is referenced keeps its worker alive."""
        self.receiving.clear()
        self.sent = (None, None)


class UcxLink(Link):
    """Reads one pool of a peer with a worker of its own."""

    def __init__(self, theirs: UcxDescriptor, into: BlockMemory) -> None:
        super().__init__("ucx", theirs.name, into.gpu)
        self._theirs, self._ours = theirs, PoolBytes(into)
        self._seal = LinkSeal(theirs.key, theirs.name)
        self._worker: UcxWorker | None = None
        self._endpoint: Any = None

    async def read(self, plan: CopyPlan, timeout_s: float) -> None:
        until, runs, done = time.monotonic() + timeout_s, list(find_runs(plan.source, plan.target)), 0
        for first in range(0, len(runs), REQUEST_RUNS):  # requests are short: see ``UcxSource``
            asked = runs[first : first + REQUEST_RUNS]
            end = done + sum(length for _, _, length in asked)
            part = plan._replace(source=plan.source[done:end], target=plan.target[done:end])
            await self._read_part(part, asked, until - time.monotonic())
            done = end

    async def _read_part(self, plan: CopyPlan, found: list[tuple[int, int, int]], timeout_s: float) -> None:
        theirs = [(start, length) for start, _, length in found]
        ours = [(to, length) for _, to, length in found]
        if plan.unit_bytes == self._theirs.block_bytes:
            pieces = split_pieces(ours, plan.piece, plan.unit_bytes)
            places, end = deque(self._ours.at(*run, plan.piece) for run in pieces), _nothing
        else:
            packed = await self._make_room(plan.bytes)
            places, end = deque([packed]), partial(self._ours.scatter, plan, packed)
        size = (*plan.piece, plan.unit_bytes)
        await self.ask(
            lambda: self._send_request(theirs, places, size, (), end), f"{len(plan.source)} blocks", timeout_s
        )

    async def _make_room(self, size: int) -> Any:
        """Make a buffer for packed pieces; that of a GPU is waited for, and not on the event loop."""
        make = self._ours.make_room
        return make(size) if self._ours.memory.gpu is None else await asyncio.to_thread(make, size)

    async def generation(self, source: Sequence[int], timeout_s: float) -> int:
        until, highest = time.monotonic() + timeout_s, 0
        for first in range(0, len(source), REQUEST_GENERATIONS):
            asked = partial(self._request_generations, source[first : first + REQUEST_GENERATIONS])
            reply: UcxReply = await self.ask(asked, "generations", until - time.monotonic())
            highest = max(highest, reply.generation)
        return highest

    def _wake(self) -> None:
        if self._worker is not None:
            self._worker.wake()

    # ------------------------------------------------------------ on the thread

    def _connect(self) -> None:
        worker = UcxWorker()
        with self._lock:
            self._worker = worker
        self._endpoint = worker.connect(self._theirs.address)
        self._await_first(lambda: self._request_generations([0]), self._wait)

    def _request_generations(self, source: Sequence[int]) -> UcxTransfer:
        size = self._theirs.block_bytes
        return self._send_request([], deque(), (0, size, size), source, _nothing)

    def _send_request(
        self,
        theirs: list[tuple[int, int]],
        places: deque[Any],
        size: tuple[int, int, int],
        generations: Sequence[int],
        end: Callable[[], None],
    ) -> UcxTransfer:
        """Request ``theirs``, runs of units; ``size`` is offset and length in each unit, and the unit's bytes."""
        assert self._worker is not None
        request = UcxRequest(self._worker.address, self._theirs.pool, *size, theirs, list(generations))
        number, message = self._seal.seal(msgspec.msgpack.encode(request))
        data = np.frombuffer(message, np.uint8)
        if len(data) > REQUEST_BYTES:
            raise OfferRefused(f"this host's address of {len(self._worker.address)} bytes is too long", "blocks", "ucx")
        sent = self._worker.send(self._endpoint, data, REQUEST_TAG)
        return UcxTransfer(number, (sent, data), places, end)

    def _next_read(self) -> PendingRead | None:
        if self._queue.empty():
            self._wait()
        return None if self._queue.empty() else self._queue.get()

    def _wait(self) -> None:
        assert self._worker is not None
        self._worker.wait(BUSY_S if self._in_flight else IDLE_S)
        if not self._endpoint.alive:
            raise self._peer_lost()

    def _peer_lost(self) -> PeerLost:
        return PeerLost(f"{self.peer} is gone", "ucx", self.peer)

    def _poll_transfer(self, handle: Any) -> tuple[bool, Any]:
        transfer: UcxTransfer = handle
        if transfer.reply is None:
            self._receive_reply(transfer)
        while transfer.reply is not None and transfer.expected and self._receive_piece(transfer):
            pass
        while transfer.receiving and transfer.receiving[0][0].completed:
            transfer.receiving.popleft()[0].check_error()
        over = transfer.reply is not None and not transfer.expected and not transfer.receiving
        if over:
            transfer.end()
        return over, transfer.reply

    def _receive_reply(self, transfer: UcxTransfer) -> None:
        """Receive the reply, if it has arrived: it is small, and complete once it is announced.

        A message in its place that is not the source's, or no reply to this request, counts as none.
        """
        assert self._worker is not None
        message = self._worker.take_message(piece_tag(transfer.number, 0))
        if message is None:
            return
        data = np.empty(min(message.length, MAX_REPLY_BYTES), np.uint8)
        request = self._worker.receive(message, data)
        until = time.monotonic() + REPLY_S
        while not request.completed:
            if time.monotonic() > until:
                raise TransferTimeout(f"{self.peer} began a reply and did not end it", "ucx", self.peer)
            self._wait()
        if message.length <= len(data):
            request.check_error()
        opened = self._seal.open(data.tobytes())
        if opened is None or opened[0] != transfer.number:
            return
        try:
            reply = msgspec.msgpack.decode(opened[1], type=UcxReply)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"{self.peer} sent an invalid reply: {error}", "ucx", self.peer) from error
        if reply.reason:
            raise OfferRefused(f"{self.peer} refuses: {reply.text}", reply.reason, "ucx", self.peer)
        transfer.reply = reply

    def _receive_piece(self, transfer: UcxTransfer) -> bool:
        """Begin to receive the next piece, if it has arrived. Raises ``TransportError`` if its length is wrong."""
        assert self._worker is not None
        message = self._worker.take_message(piece_tag(transfer.number, transfer.piece + 1))
        if message is None:
            return False
        place = transfer.expected.popleft()
        if message.length != len(place):
            text = f"{self.peer} sent {message.length} bytes instead of {len(place)}"
            raise TransportError(text, "ucx", self.peer)
        transfer.piece += 1
        transfer.receiving.append((self._worker.receive(message, place), place))
        return True

    def _disconnect(self, handles: list[Any]) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is None:
            return
        transfers: list[UcxTransfer] = [handle for handle in handles if handle is not None]
        requests = [request for transfer in transfers for request, _ in (transfer.sent, *transfer.receiving)]
        worker.close_endpoint(self._endpoint, requests)
        self._endpoint = None
        requests.clear()
        for transfer in transfers:
            transfer.close()
        worker.close()

    def _as_transport_error(self, error: Exception) -> TransportError:
        made = self._peer_lost() if type(error).__name__ in LOST_ERRORS else super()._as_transport_error(error)
        made.__cause__ = error.with_traceback(None)  # its frames would keep the connection alive
        return made


def _nothing() -> None:
    """Do nothing: the bytes of a request came to their place."""
