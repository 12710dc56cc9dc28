"""What the two sides of ucx share: the library, one worker per thread, and what they say to each other."""

from __future__ import annotations

import importlib
import os
import select
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from trinity.errors import TransportUnavailable
from trinity.memory.block_memory import BlockMemory

INSTALL = 'pip install "ucxx-cu13==0.52.*"'
RDMA = Path("/sys/class/infiniband")
ASK = 1  # the tag of questions to a source; answers have the number of their reading and of their piece
PIECE_BITS = 24
CLOSE_NS = 10**9
SETTLE_S, SETTLING_S = 2.0, 0.001
MOST_BYTES = 16 << 20  # of a question


class Descriptor(msgspec.Struct, frozen=True):
    """A pool that a peer lends: its worker's address, the pool's number there, and what opens it."""

    name: str
    address: bytes
    pool: int
    secret: bytes
    block_bytes: int
    blocks: int


class Ask(msgspec.Struct, frozen=True):
    """Target to source: send these runs of blocks (first, count), or tell their generation where ``runs`` are none.

    ``link`` and ``address`` say where to; ``number`` is the reading's. Of each block, ``length`` bytes from ``offset``.
    """

    link: bytes
    address: bytes
    number: int
    pool: int
    secret: bytes
    offset: int
    length: int
    runs: list[tuple[int, int]]
    generations: list[int] = []


class Answer(msgspec.Struct, frozen=True):
    """Source to target, before the blocks: why not, or that they follow; the generation that was asked for."""

    reason: str = ""
    text: str = ""
    generation: int = 0


def load_api() -> Any:
    """ucxx's bindings. Raises ``TransportUnavailable`` where they are not installed.

    The loopback alone, unless UCX_NET_DEVICES says otherwise: UCX would listen on every interface. Its InfiniBand
    module crashes the process at exit where there is no such device.
    """
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    if not RDMA.exists():
        os.environ.setdefault("UCX_MODULES", "^ib")
    try:
        return importlib.import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise TransportUnavailable(f"ucxx cannot be loaded ({error}): {INSTALL}", "ucx") from error


def settings() -> dict[str, str]:
    """What UCX is told. Beside nixl's own copy of UCX it cannot keep track of memory, and then takes the process down
    when a peer dies in the middle of a rendezvous: it must send without one."""
    return {"RNDV_THRESH": "inf"} if any(name.startswith("nixl") for name in sys.modules) else {}


class Worker:
    """A worker of UCX. One thread uses it, ``wake`` alone is for any.

    Bytes of a transfer arrive while it is asked for progress or taken down, never otherwise.
    """

    def __init__(self) -> None:
        self._api = load_api()
        self.array = importlib.import_module("ucxx._lib.arr").Array
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._worker = self._api.UCXWorker(self._api.UCXContext(settings()))
            self._worker.init_blocking_progress_mode()
            self.address: bytes = self._worker.address.tobytes()
            self._poll = select.poll()
            for each in (self._wake, self._worker.epoll_file_descriptor):
                self._poll.register(each, select.POLLIN)
        except Exception as error:
            os.close(self._wake)
            raise TransportUnavailable(f"UCX cannot be used here: {error!r}", "ucx") from error

    def reach(self, address: bytes) -> Any:
        """An endpoint there, which notices when its peer dies."""
        where = self._api.UCXAddress.create_from_buffer(address)
        return self._api.UCXEndpoint.create_from_worker_address(self._worker, where, True)

    def wait(self, timeout_s: float) -> None:
        """Until there is something to do: of UCX, or by ``wake``."""
        self._worker.progress()
        if self._worker.arm():  # else something has come meanwhile
            self._poll.poll(timeout_s * 1000)
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        self._worker.progress()

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def arrived(self, tag: int) -> Any:
        """A message with this tag that has arrived, taken out of the queue; None where there is none."""
        found = self._worker.tag_probe(self._api.UCXXTag(tag), remove=True)
        return found if found.matched else None

    def receive(self, message: Any, into: Any) -> Any:
        return self._worker.tag_recv_with_handle(self.array(into), message)

    def send(self, endpoint: Any, data: Any, tag: int) -> Any:
        return endpoint.tag_send(self.array(data), self._api.UCXXTag(tag))

    def leave(self, endpoint: Any, requests: list[Any]) -> None:
        """Close an endpoint by force, and wait until what was on its way there has ended, well or not."""
        with suppress(Exception):
            endpoint.close_blocking(period=CLOSE_NS, max_attempts=1)
        until = time.monotonic() + SETTLE_S
        while not all(request.completed for request in requests) and time.monotonic() < until:
            self._worker.progress()
            time.sleep(SETTLING_S)

    def close(self) -> None:
        """Take it down, after which no byte arrives. Whoever calls holds no request any more."""
        with suppress(Exception):
            self._worker.cancel_inflight_requests()  # they hold the worker, and the worker them
        self._worker = None
        os.close(self._wake)


def piece_tag(number: int, piece: int) -> int:
    """The tag of the answer (piece 0) and of the pieces of a reading."""
    return (number << PIECE_BITS) | piece


class Bytes:
    """A pool as what UCX reads and writes: any consecutive bytes of it."""

    def __init__(self, memory: BlockMemory) -> None:
        self.memory = memory  # what UCX works on must not be freed
        self._flat: Any = memory.raw.reshape(-1) if memory.raw is not None else _flat_on_gpu(memory)

    def at(self, block: int, count: int, piece: tuple[int, int]) -> Any:
        """``count`` blocks from ``block`` on, or a piece (offset, length) of one."""
        size = self.memory.block_bytes
        start = block * size + piece[0]
        return self._flat[start : start + (count - 1) * size + piece[1]]


def _flat_on_gpu(memory: BlockMemory) -> Any:
    import torch  # emulated instances have none

    return memory.tensor.view(-1).view(torch.uint8)


def pieces(runs: list[tuple[int, int]], piece: tuple[int, int], block_bytes: int) -> list[tuple[int, int]]:
    """What one message each carries: a run of whole blocks is one, pieces of blocks are one each."""
    if piece == (0, block_bytes):
        return runs
    return [(first + index, 1) for first, count in runs for index in range(count)]
