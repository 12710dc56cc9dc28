"""Shared by both sides of ucx: loading the library, a worker per thread, and the messages between them."""

from __future__ import annotations

import importlib
import os
import select
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from trinity.errors import TransportUnavailable
from trinity.memory.block_memory import BlockMemory, view_units
from trinity.memory.devices import make_device_buffer, use_copy_stream
from trinity.transport.base import CopyPlan
from trinity.transport.ucx_environment import set_ucx_defaults

INSTALL_UCXX = 'pip install "ucxx-cu13==0.52.*"'
REQUEST_TAG = 1  # tag of requests to a source; replies are tagged by request and piece, see piece_tag
PIECE_BITS = 24
REQUEST_BYTES = 8000  # of a request: UCX hands over as many in one piece, on every medium that was tried
REQUEST_RUNS, REQUEST_GENERATIONS = 500, 1000  # of one request: so many fit beside an address of 2 KB
CLOSE_NS = 10**9  # for UCX to close an endpoint
CLOSE_WAIT_S, CLOSE_POLL_S = 2.0, 0.001


class UcxDescriptor(msgspec.Struct, frozen=True):
    """A published pool: its source's worker address, its number there, and the key of requests."""

    name: str
    address: bytes
    pool: int
    key: bytes
    block_bytes: int
    blocks: int


class UcxRequest(msgspec.Struct, frozen=True):
    """Target to source: send ``runs`` of units (first, count), and report the generation of blocks ``generations``.

    ``address`` says where to send. The pool counts as units of ``unit_bytes``; of each, ``length`` bytes from byte
    ``offset`` are sent. Parts of blocks that are smaller than a block come in one message, side by side.
    """

    address: bytes
    pool: int
    offset: int
    length: int
    unit_bytes: int
    runs: list[tuple[int, int]]
    generations: list[int] = []


class UcxReply(msgspec.Struct, frozen=True):
    """Source to target, before any blocks: the generation asked for, or the ``reason`` and ``text`` of a refusal."""

    reason: str = ""
    text: str = ""
    generation: int = 0


def load_ucxx() -> Any:
    """Import ucxx's bindings. Raises ``TransportUnavailable`` if they are not installed."""
    set_ucx_defaults()
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        return importlib.import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise TransportUnavailable(f"ucxx cannot be loaded ({error}): {INSTALL_UCXX}", "ucx") from error


def make_ucx_config() -> dict[str, str]:
    """Build the settings of a UCX context.

    With nixl's copy of UCX in the same process, UCX cannot track memory, and crashes the process when a peer dies in
    the middle of a rendezvous. Rendezvous is then turned off.
    """
    return {"RNDV_THRESH": "inf"} if any(name.startswith("nixl") for name in sys.modules) else {}


class UcxWorker:
    """A UCX worker, used by one thread; only ``wake`` may be called from any.

    Bytes of a transfer arrive only while the worker makes progress or is closed. Raises ``TransportUnavailable``.
    """

    def __init__(self) -> None:
        self._api = load_ucxx()
        self.array = importlib.import_module("ucxx._lib.arr").Array
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._worker = self._api.UCXWorker(self._api.UCXContext(make_ucx_config()))
            self._worker.init_blocking_progress_mode()
            self.address: bytes = self._worker.address.tobytes()
            self._poll = select.poll()
            for each in (self._wake, self._worker.epoll_file_descriptor):
                self._poll.register(each, select.POLLIN)
        except Exception as error:
            os.close(self._wake)
            raise TransportUnavailable(f"UCX cannot be used here: {error!r}", "ucx") from error

    def connect(self, address: bytes) -> Any:
        """Open an endpoint to a worker's address; the endpoint notices when its peer dies."""
        where = self._api.UCXAddress.create_from_buffer(address)
        return self._api.UCXEndpoint.create_from_worker_address(self._worker, where, True)

    def wait(self, timeout_s: float) -> None:
        """Wait until UCX has something to do or ``wake`` is called, for at most ``timeout_s`` seconds."""
        self._worker.progress()
        if self._worker.arm():  # else something has arrived since
            self._poll.poll(timeout_s * 1000)
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        self._worker.progress()

    def wake(self) -> None:
        """End a ``wait`` early; may be called from any thread."""
        os.eventfd_write(self._wake, 1)

    def take_message(self, tag: int) -> Any:
        """Take a message with this tag out of the queue; None if none has arrived."""
        found = self._worker.tag_probe(self._api.UCXXTag(tag), remove=True)
        return found if found.matched else None

    def receive(self, message: Any, into: Any) -> Any:
        """Begin to receive a message that was taken; return the request."""
        return self._worker.tag_recv_with_handle(self.array(into), message)

    def send(self, endpoint: Any, data: Any, tag: int) -> Any:
        """Begin to send ``data``; return the request."""
        return endpoint.tag_send(self.array(data), self._api.UCXXTag(tag))

    def close_endpoint(self, endpoint: Any, requests: list[Any]) -> None:
        """Close an endpoint by force, and wait until all its requests have ended, successfully or not."""
        with suppress(Exception):
            endpoint.close_blocking(period=CLOSE_NS, max_attempts=1)
        until = time.monotonic() + CLOSE_WAIT_S
        while not all(request.completed for request in requests) and time.monotonic() < until:
            self._worker.progress()
            time.sleep(CLOSE_POLL_S)

    def close(self) -> None:
        """Destroy the worker; no byte arrives afterwards. The caller must have dropped its requests."""
        with suppress(Exception):
            self._worker.cancel_inflight_requests()  # they hold the worker, and the worker them
        self._worker = None
        os.close(self._wake)


def piece_tag(number: int, piece: int) -> int:
    """Build the tag of a request's reply (piece 0) or of one of the pieces that follow it."""
    return (number << PIECE_BITS) | piece


class PoolBytes:
    """A pool as flat bytes, from which UCX sends and into which it receives any consecutive part."""

    def __init__(self, memory: BlockMemory) -> None:
        self.memory = memory  # keeps the bytes alive while UCX uses them
        self._flat: Any = view_units(memory.pool, memory.block_bytes).reshape(-1)

    def at(self, block: int, count: int, piece: tuple[int, int]) -> Any:
        """View ``count`` blocks from ``block`` on, or a ``piece`` (offset, length in bytes) of one."""
        size = self.memory.block_bytes
        start = block * size + piece[0]
        return self._flat[start : start + (count - 1) * size + piece[1]]

    def gather(self, units: list[int], piece: tuple[int, int], unit_bytes: int) -> Any:
        """Copy a piece of each of these units, side by side."""
        with use_copy_stream(self.memory.gpu):
            return view_units(self._flat, unit_bytes)[units, piece[0] : piece[0] + piece[1]].reshape(-1)

    def scatter(self, plan: CopyPlan, pieces: Any) -> None:
        """Copy ``pieces``, which lie side by side, to where ``plan`` says."""
        place = slice(plan.offset, plan.offset + plan.length)
        with use_copy_stream(self.memory.gpu):
            view_units(self._flat, plan.unit_bytes)[list(plan.target), place] = pieces.reshape(-1, plan.length)

    def make_room(self, size: int) -> Any:
        """Make a buffer of ``size`` bytes beside the pool, on its device."""
        gpu = self.memory.gpu
        return np.empty(size, np.uint8) if gpu is None else make_device_buffer(size, gpu)


def split_pieces(runs: list[tuple[int, int]], piece: tuple[int, int], block_bytes: int) -> list[tuple[int, int]]:
    """Split runs (first, count) into messages: one for a run of whole blocks, one for each piece of a block."""
    if piece == (0, block_bytes):
        return runs
    return [(first + index, 1) for first, count in runs for index in range(count)]
