"""The source's side of ucx: a thread that sends blocks to whoever asks and may have them."""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
from collections import deque
from typing import Any

import msgspec
import numpy as np

from trinity.memory.block_memory import BlockMemory
from trinity.transport.link import JOIN_S, stop_at_exit
from trinity.transport.ucx.protocol import ASK, MOST_BYTES, Answer, Ask, Bytes, Descriptor, Worker, piece_tag, pieces

logger = logging.getLogger("trinity")
PAUSE_S = 0.5  # UCX wakes the thread; this is for what it forgets
MOST_SENDS = 1 << 16  # messages on their way to one peer


class Peer:
    """One link of a peer: the endpoint to it, and what is on its way there."""

    def __init__(self, endpoint: Any) -> None:
        self.endpoint = endpoint
        self.sends: deque[tuple[Any, Any]] = deque()  # request and what it sends

    def settle(self) -> None:
        while self.sends and self.sends[0][0].completed:
            self.sends.popleft()


class Lender:
    """Pools of ours, and the thread that sends their blocks. Raises ``TransportUnavailable`` where UCX does not run."""

    def __init__(self) -> None:
        self.name = f"ucx-{secrets.token_hex(8)}"
        self._secret = secrets.token_bytes(16)
        self._pools: dict[int, Bytes] = {}
        self._peers: dict[bytes, Peer] = {}
        self._asks: list[tuple[Any, np.ndarray]] = []
        self._worker: Worker | None = Worker()
        self._address = self._worker.address
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="trinity-ucx-lender", daemon=True)
        self._thread.start()
        stop_at_exit(self, self._thread)

    def lend(self, memory: BlockMemory) -> Descriptor:
        number = len(self._pools)
        self._pools[number] = Bytes(memory)
        return Descriptor(self.name, self._address, number, self._secret, memory.block_bytes, memory.blocks)

    def stop(self) -> None:
        with self._lock:
            self._closing.set()
            if self._worker is not None:
                self._worker.wake()

    def join(self) -> None:
        self._thread.join(JOIN_S)

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        worker = self._worker
        assert worker is not None
        while not self._closing.is_set():
            try:
                self._turn(worker)
            except Exception:
                logger.exception("a peer's question to %s could not be answered", self.name)
        self._asks.clear()
        for peer in self._peers.values():
            worker.leave(peer.endpoint, [request for request, _ in peer.sends])
            peer.sends.clear()
        self._peers.clear()
        with self._lock:
            self._worker = None
            worker.close()

    def _turn(self, worker: Worker) -> None:
        worker.wait(PAUSE_S)
        while (message := worker.arrived(ASK)) is not None:
            data = np.empty(min(message.length, MOST_BYTES), np.uint8)
            self._asks.append((worker.receive(message, data), data))
        for ask in [ask for ask in self._asks if ask[0].completed]:
            self._asks.remove(ask)
            ask[0].check_error()
            self._answer(worker, ask[1].tobytes())
        for link, peer in list(self._peers.items()):
            peer.settle()
            if not peer.endpoint.alive:
                del self._peers[link]

    def _answer(self, worker: Worker, asked: bytes) -> None:
        ask = msgspec.msgpack.decode(asked, type=Ask)
        if not hmac.compare_digest(ask.secret, self._secret):
            logger.warning("somebody without the secret asked %s for blocks", self.name)
            return
        if ask.link not in self._peers:
            self._peers[ask.link] = Peer(worker.reach(ask.address))
        peer = self._peers[ask.link]
        answer, sends = self._reply(peer, ask)
        header = np.frombuffer(msgspec.msgpack.encode(answer), np.uint8)
        for index, data in enumerate([header, *sends]):
            peer.sends.append((worker.send(peer.endpoint, data, piece_tag(ask.number, index)), data))

    def _reply(self, peer: Peer, ask: Ask) -> tuple[Answer, list[Any]]:
        """What to say, and what to send after it. A refusal has its reason."""
        pool = self._pools.get(ask.pool)
        if pool is None:
            return Answer("missing", f"{self.name} lends no pool {ask.pool}"), []
        memory, piece = pool.memory, (ask.offset, ask.length)
        named = [*ask.generations, *(first for first, _ in ask.runs), *(first + count - 1 for first, count in ask.runs)]
        fits = ask.offset >= 0 and 0 < ask.length <= memory.block_bytes - ask.offset
        if not fits or any(not 0 <= block < memory.blocks for block in named) or any(n < 1 for _, n in ask.runs):
            return Answer("incompatible", f"no such blocks among {memory.blocks} of {memory.block_bytes} bytes"), []
        parts = pieces(ask.runs, piece, memory.block_bytes)
        if len(peer.sends) + len(parts) > MOST_SENDS:
            return Answer("busy", f"{len(peer.sends)} messages are on their way already"), []
        return Answer(generation=memory.generation(ask.generations)), [pool.at(*run, piece) for run in parts]
