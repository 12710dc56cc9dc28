"""The target's side of ucx: a link that asks a source for blocks and receives them where they belong."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
import numpy as np

from trinity.errors import HandshakeError, OfferRefused, PeerLost, TransportError
from trinity.memory.block_memory import BlockMemory
from trinity.transport.base import runs
from trinity.transport.link import Link, Reading
from trinity.transport.ucx.protocol import ASK, MOST_BYTES, Answer, Ask, Bytes, Descriptor, Worker, piece_tag, pieces

IDLE_S, BUSY_S = 0.5, 0.01  # UCX wakes the thread; these are for what it forgets, and for deadlines

LOST = (
    "UCXXCanceledError",
    "UCXXConnectionResetError",
    "UCXXEndpointTimeoutError",
    "UCXXIOError",
    "UCXXNotConnectedError",
    "UCXXUnreachableError",
)


class Transfer:
    """One question: its answer, then its pieces, in order."""

    def __init__(self, number: int, sent: tuple[Any, Any], wanted: deque[Any]) -> None:
        self.number, self.sent, self.wanted = number, sent, wanted
        self.answer: Answer | None = None
        self.piece = 0
        self.receiving: deque[tuple[Any, Any]] = deque()

    def close(self) -> None:
        """Let go of every request: one that is kept keeps its worker."""
        self.receiving.clear()
        self.sent = (None, None)


class UcxLink(Link):
    """A worker of ours that asks for blocks of one pool of a peer."""

    def __init__(self, theirs: Descriptor, into: BlockMemory) -> None:
        super().__init__("ucx", theirs.name)
        self._theirs, self._ours = theirs, Bytes(into)
        self._id = secrets.token_bytes(16)
        self._numbers = count(1)
        self._worker: Worker | None = None
        self._endpoint: Any = None

    async def read(
        self, source: Sequence[int], target: Sequence[int], piece: tuple[int, int], timeout_s: float
    ) -> None:
        found = list(runs(source, target))
        theirs = [(start, length) for start, _, length in found]
        ours = pieces([(to, length) for _, to, length in found], piece, self._theirs.block_bytes)
        await self.ask(lambda: self._question(theirs, ours, piece, ()), f"{len(source)} blocks", timeout_s)

    async def generation(self, source: Sequence[int], timeout_s: float) -> int:
        answer: Answer = await self.ask(lambda: self._generations(source), "generations", timeout_s)
        return answer.generation

    def _wake(self) -> None:
        if self._worker is not None:
            self._worker.wake()

    # ------------------------------------------------------------ on the thread

    def _connect(self) -> None:
        worker = Worker()
        with self._lock:
            self._worker = worker
        self._endpoint = worker.reach(self._theirs.address)
        self._first(lambda: self._generations([0]), self._wait)

    def _generations(self, source: Sequence[int]) -> Transfer:
        return self._question([], [], (0, self._theirs.block_bytes), source)

    def _question(
        self,
        theirs: list[tuple[int, int]],
        ours: list[tuple[int, int]],
        piece: tuple[int, int],
        generations: Sequence[int],
    ) -> Transfer:
        assert self._worker is not None
        peer, number = self._theirs, next(self._numbers)
        ask = Ask(self._id, self._worker.address, number, peer.pool, peer.secret, *piece, theirs, list(generations))
        data = np.frombuffer(msgspec.msgpack.encode(ask), np.uint8)
        if len(data) > MOST_BYTES:
            raise OfferRefused(f"{len(theirs)} runs of blocks are too many to ask for at once", "blocks", "ucx")
        sent = self._worker.send(self._endpoint, data, ASK)
        return Transfer(number, (sent, data), deque(self._ours.at(*run, piece) for run in ours))

    def _next(self) -> Reading | None:
        if self._asked.empty():
            self._wait()
        return None if self._asked.empty() else self._asked.get()

    def _wait(self) -> None:
        assert self._worker is not None
        self._worker.wait(BUSY_S if self._flying else IDLE_S)
        if not self._endpoint.alive:
            raise self._lost()

    def _lost(self) -> PeerLost:
        return PeerLost(f"{self.peer} is gone", "ucx", self.peer)

    def _look(self, handle: Any) -> tuple[bool, Any]:
        transfer: Transfer = handle
        if transfer.answer is None:
            self._hear(transfer)
        while transfer.answer is not None and transfer.wanted and self._receive(transfer):
            pass
        while transfer.receiving and transfer.receiving[0][0].completed:
            transfer.receiving.popleft()[0].check_error()
        return transfer.answer is not None and not transfer.wanted and not transfer.receiving, transfer.answer

    def _hear(self, transfer: Transfer) -> None:
        """The answer, if it has come: it is small, and whole when it is there."""
        assert self._worker is not None
        message = self._worker.arrived(piece_tag(transfer.number, 0))
        if message is None:
            return
        data = np.empty(message.length, np.uint8)
        request = self._worker.receive(message, data)
        while not request.completed:
            self._wait()
        request.check_error()
        try:
            answer = msgspec.msgpack.decode(data.tobytes(), type=Answer)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"{self.peer} answers with what is no answer: {error}", "ucx", self.peer) from error
        if answer.reason:
            raise OfferRefused(f"{self.peer} refuses: {answer.text}", answer.reason, "ucx", self.peer)
        transfer.answer = answer

    def _receive(self, transfer: Transfer) -> bool:
        """Begin to receive the next piece, if it has come. It must be as long as was asked for."""
        assert self._worker is not None
        message = self._worker.arrived(piece_tag(transfer.number, transfer.piece + 1))
        if message is None:
            return False
        place = transfer.wanted.popleft()
        if message.length != len(place):
            text = f"{self.peer} sent {message.length} bytes in place of {len(place)}"
            raise TransportError(text, "ucx", self.peer)
        transfer.piece += 1
        transfer.receiving.append((self._worker.receive(message, place), place))
        return True

    def _part(self, handles: list[Any]) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is None:
            return
        transfers: list[Transfer] = [handle for handle in handles if handle is not None]
        requests = [request for transfer in transfers for request, _ in (transfer.sent, *transfer.receiving)]
        worker.leave(self._endpoint, requests)
        self._endpoint = None
        requests.clear()
        for transfer in transfers:
            transfer.close()
        worker.close()

    def _typed(self, error: Exception) -> TransportError:
        made = self._lost() if type(error).__name__ in LOST else super()._typed(error)
        made.__cause__ = error.with_traceback(None)  # its frames would keep the connection alive
        return made
