"""Source side of ucx: a thread that sends blocks to every peer that holds the pool's key."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from itertools import count
from typing import Any

import msgspec
import numpy as np

from trinity.memory.block_memory import BlockMemory
from trinity.memory.devices import use_device
from trinity.transport.link import JOIN_S, stop_at_exit
from trinity.transport.sealed_requests import SEAL_BYTES, RequestKey, SealedRequest
from trinity.transport.ucx.protocol import (
    REQUEST_BYTES,
    REQUEST_TAG,
    PoolBytes,
    UcxDescriptor,
    UcxReply,
    UcxRequest,
    UcxWorker,
    piece_tag,
    split_pieces,
)

logger = logging.getLogger("trinity")
SOURCE_IDLE_S = 0.5  # UCX wakes the thread; this bounds what it misses
MAX_SENDS = 1 << 16  # messages in flight to one peer
MAX_RECEIVED = 64  # messages taken at a turn
MAX_ARRIVING = 256  # requests that have not arrived whole, of ``REQUEST_BYTES`` at most


class UcxPeer:
    """One link of a peer: the endpoint to it, and the sends in flight."""

    def __init__(self, endpoint: Any) -> None:
        self.endpoint = endpoint
        self.sends: deque[tuple[Any, Any]] = deque()  # request, and the bytes that it sends

    def drop_completed(self) -> None:
        """Release sends that have completed."""
        while self.sends and self.sends[0][0].completed:
            self.sends.popleft()


class UcxSource:
    """Serves published pools to peers on a thread of its own. Raises ``TransportUnavailable`` if UCX cannot run.

    ``gpu``: ordinal of the GPU that holds the first pool, the thread's current device; None for none.
    """

    def __init__(self, gpu: int | None = None) -> None:
        self.name = f"ucx-{secrets.token_hex(8)}"
        self._key = RequestKey(self.name)
        self._pools: dict[int, PoolBytes] = {}
        self._numbers = count()
        self._peers: dict[bytes, UcxPeer] = {}
        self._waiting: list[tuple[Any, np.ndarray]] = []  # receives in progress, and where they go
        self._nowhere, self._more = np.empty(1, np.uint8), False
        self._at_once = np.empty(REQUEST_BYTES, np.uint8)  # for requests that come whole or not at all
        self._gpu = gpu
        with use_device(gpu):  # UCX asks for the calling thread's CUDA context
            self._worker: UcxWorker | None = UcxWorker()
        self._address = self._worker.address
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="trinity-ucx-source", daemon=True)
        self._thread.start()
        stop_at_exit(self, self._thread)

    def register(self, memory: BlockMemory) -> UcxDescriptor:
        """Serve a pool from now on; return its descriptor."""
        number = next(self._numbers)
        self._pools[number] = PoolBytes(memory)
        return UcxDescriptor(self.name, self._address, number, self._key.value, memory.block_bytes, memory.blocks)

    def withdraw(self, memory: BlockMemory) -> None:
        """Serve a pool no more."""
        self._pools = {number: pool for number, pool in self._pools.items() if pool.memory is not memory}

    def stop(self) -> None:
        """Ask the thread to end; does not block."""
        with self._lock:
            self._closing.set()
            if self._worker is not None:
                self._worker.wake()

    def join(self) -> None:
        """Block until the thread has ended, for at most ``JOIN_S`` seconds."""
        self._thread.join(JOIN_S)

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        with use_device(self._gpu):
            self._serve()

    def _serve(self) -> None:
        worker = self._worker
        assert worker is not None
        while not self._closing.is_set():
            try:
                self._run_once(worker)
            except Exception:
                logger.exception("%s could not answer a peer's request", self.name)
        self._waiting.clear()
        for peer in self._peers.values():
            worker.close_endpoint(peer.endpoint, [request for request, _ in peer.sends])
            peer.sends.clear()
        self._peers.clear()
        with self._lock:
            self._worker = None
            worker.close()

    def _run_once(self, worker: UcxWorker) -> None:
        worker.wait(0 if self._more else SOURCE_IDLE_S)
        self._more = self._receive(worker)
        for receiving, data in [each for each in self._waiting if each[0].completed]:
            self._waiting = [each for each in self._waiting if each[0] is not receiving]
            self._open(worker, receiving, data)
        for link, peer in list(self._peers.items()):
            peer.drop_completed()
            if not peer.endpoint.alive:
                del self._peers[link]

    def _receive(self, worker: UcxWorker) -> bool:
        """Begin to receive messages; True if more may be there. Whoever reaches the port sends them.

        Requests are short, so that they are here whole as soon as they are announced. What comes in parts, by a
        stranger or a setting of UCX, cannot be cancelled, and may stay so for ever: only so many have memory of their
        own. Beyond these all use the same: a request that is here whole is served, and any other one dropped.
        """
        for _ in range(MAX_RECEIVED):
            message = worker.take_message(REQUEST_TAG)
            if message is None:
                return False
            if not SEAL_BYTES < message.length <= REQUEST_BYTES:
                worker.receive(message, self._nowhere)
                self._key.suspicions.add("a request for blocks of a wrong size")
                continue
            kept = len(self._waiting) < MAX_ARRIVING
            data = np.empty(message.length, np.uint8) if kept else self._at_once[: message.length]
            receiving = worker.receive(message, data)
            if receiving.completed:
                self._open(worker, receiving, data)
            elif kept:
                self._waiting.append((receiving, data))
            else:
                self._key.suspicions.add("a request for blocks in parts, one too many")
        return True

    def _open(self, worker: UcxWorker, receiving: Any, data: np.ndarray) -> None:
        """Answer a message that has come, if it is a request."""
        try:
            receiving.check_error()
        except Exception as error:
            self._key.suspicions.add(f"a request for blocks that broke off ({error!r})")
            return
        request = self._key.open(data.tobytes())
        if request is not None:
            self._answer(worker, request)

    def _answer(self, worker: UcxWorker, sealed: SealedRequest) -> None:
        request = msgspec.msgpack.decode(sealed.body, type=UcxRequest)
        if sealed.link not in self._peers:
            self._peers[sealed.link] = UcxPeer(worker.connect(request.address))
        peer = self._peers[sealed.link]
        reply, sends = self._reply(peer, request)
        header = np.frombuffer(self._key.seal_reply(sealed, msgspec.msgpack.encode(reply)), np.uint8)
        for index, data in enumerate([header, *sends]):
            peer.sends.append((worker.send(peer.endpoint, data, piece_tag(sealed.number, index)), data))

    def _reply(self, peer: UcxPeer, request: UcxRequest) -> tuple[UcxReply, list[Any]]:
        """Check a request; return the reply and the pieces to send after it, none after a refusal."""
        pool = self._pools.get(request.pool)
        if pool is None:
            return UcxReply("missing", f"{self.name} has no pool {request.pool}"), []
        memory, piece, unit_bytes = pool.memory, (request.offset, request.length), request.unit_bytes
        if not _fits(memory, request):
            return UcxReply("incompatible", f"no such blocks among {memory.blocks} of {memory.block_bytes} bytes"), []
        reply = UcxReply(generation=memory.generation(request.generations))
        if unit_bytes != memory.block_bytes and len(peer.sends) < MAX_SENDS:
            units = [first + index for first, count in request.runs for index in range(count)]
            return reply, [pool.gather(units, piece, unit_bytes)]
        parts = split_pieces(request.runs, piece, unit_bytes)
        if len(peer.sends) + len(parts) > MAX_SENDS:
            return UcxReply("busy", f"{len(peer.sends)} messages are in flight already"), []
        return reply, [pool.at(*run, piece) for run in parts]


def _fits(memory: BlockMemory, request: UcxRequest) -> bool:
    """Tell if all that is requested lies in the pool, and is no more than the pool has."""
    unit_bytes, counts = request.unit_bytes, [count for _, count in request.runs]
    if unit_bytes < 1 or memory.block_bytes % unit_bytes or any(count < 1 for count in counts):
        return False
    units = memory.blocks * (memory.block_bytes // unit_bytes)
    return (
        request.offset >= 0
        and 0 < request.length <= unit_bytes - request.offset
        and all(0 <= first <= units - count for first, count in request.runs)
        and (unit_bytes == memory.block_bytes or sum(counts) <= units)
        and all(0 <= block < memory.blocks for block in request.generations)
    )
