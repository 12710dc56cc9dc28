"""Target side of nixl: agents, and the link that reads a pool of a peer with one.

A UCX transfer cannot be cancelled: a peer that freezes and later resumes still fills local blocks, even after the
handle is released and the peer removed. Only destroying the agent stops it, so every link has its own agent. (Over
TCP, UCX ends a source that was frozen for longer than its reader waited, when it wakes; the supervisor restarts it.)
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import queue
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from trinity.errors import HandshakeError, PeerLost, TransportError, TransportUnavailable
from trinity.memory.block_memory import GENERATION_BYTES, BlockMemory
from trinity.memory.devices import use_device
from trinity.transport.base import CopyPlan
from trinity.transport.link import Link, PendingRead
from trinity.transport.ucx_environment import set_ucx_defaults

logger = logging.getLogger("trinity")
INSTALL_NIXL = "pip install --no-deps nixl-cu13==1.5.1"
IDLE_POLL_S = 0.001  # between two looks for notifications: over TCP a source makes progress only then
TRANSFER_POLL_S = 0.0001  # between two looks at a transfer in flight
MAX_DESCRIPTOR_LISTS = 32  # one for each piece of a block that was read; a model has fewer groups of layers


def load_nixl() -> Any:
    """Import nixl's Python module. Raises ``TransportUnavailable`` if it is not installed."""
    set_ucx_defaults()
    raising = logging.raiseExceptions
    try:
        api = importlib.import_module("nixl_cu13._api")
    except ImportError as error:
        raise TransportUnavailable(f"nixl cannot be loaded ({error}): {INSTALL_NIXL}", "nixl") from error
    finally:
        logging.raiseExceptions = raising  # importing nixl turns this off for the whole process
    theirs = logging.getLogger("nixl")
    theirs.handlers.clear()
    theirs.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        theirs.setLevel(logging.WARNING)
    return api


class Region(msgspec.Struct, frozen=True):
    """A pool as nixl describes it; ``memory`` is DRAM or VRAM, ``address`` and ``block_bytes`` are in bytes."""

    address: int
    block_bytes: int
    blocks: int
    memory: str
    device: int

    @property
    def gpu(self) -> int | None:
        """Ordinal of the GPU that holds it; None for memory of the host."""
        return self.device if self.memory == "VRAM" else None

    @property
    def whole(self) -> list[tuple[int, int, int, str]]:
        """The whole pool as one descriptor for registration."""
        return [(self.address, self.block_bytes * self.blocks, self.device, "")]

    def in_units(self, unit_bytes: int) -> Region:
        """Describe the same pool with units of ``unit_bytes`` as its blocks."""
        return Region(self.address, unit_bytes, self.blocks * self.block_bytes // unit_bytes, self.memory, self.device)

    def rows(self, offset: int, length: int) -> np.ndarray:
        """Describe a piece of all blocks as one strided row: one for each of 65,536 blocks takes 0.3 s."""
        return np.array([[self.address + offset, length, self.device, self.block_bytes, self.blocks]], np.uint64)

    def pieces(self, numbers: Sequence[int], offset: int, length: int) -> np.ndarray:
        """Describe a piece of each of these blocks: one row of address, length and device for each."""
        addresses = self.address + np.array(numbers, np.uint64) * np.uint64(self.block_bytes) + np.uint64(offset)
        return np.stack([addresses, *(np.full(len(numbers), each, np.uint64) for each in (length, self.device))], 1)

    def part(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """Describe ``count`` consecutive blocks as one descriptor."""
        return [(self.address + first * self.block_bytes, count * self.block_bytes, self.device)]


def generations_region(memory: BlockMemory) -> Region:
    """Describe the generations of a pool's blocks, one int64 each."""
    return Region(memory.generations.ctypes.data, GENERATION_BYTES, memory.blocks, "DRAM", 0)


def pool_region(memory: BlockMemory) -> Region:
    """Describe the blocks of a pool."""
    if memory.raw is not None:
        return Region(memory.raw.ctypes.data, memory.block_bytes, memory.blocks, "DRAM", 0)
    on_gpu = memory.tensor
    return Region(on_gpu.data_ptr(), memory.block_bytes, memory.blocks, "VRAM", on_gpu.get_device())


class NixlDescriptor(msgspec.Struct, frozen=True):
    """A published pool: the name and metadata of its source's agent, blocks, generations, key of requests."""

    agent: str
    metadata: bytes
    pool: Region
    generations: Region
    key: bytes


def make_agent(gpu: int | None) -> Any:
    """Make a nixl agent with a unique name: a peer that restarts must not be taken for its predecessor.

    ``gpu``: ordinal of the GPU that holds its first pool; None for memory of the host.
    Raises ``TransportUnavailable`` if nixl or its UCX backend cannot be used.
    """
    api = load_nixl()
    sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    settings = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync)
    try:
        with use_device(gpu):  # UCX asks for the calling thread's CUDA context
            return api.nixl_agent(f"trinity-{os.getpid()}-{secrets.token_hex(8)}", settings)
    except Exception as error:
        raise TransportUnavailable(f"nixl has no UCX here: {error!r}", "nixl") from error


class NixlLink(Link):
    """Reads one pool of a peer with an agent of its own."""

    def __init__(self, theirs: NixlDescriptor, into: BlockMemory) -> None:
        super().__init__("nixl", theirs.agent, into.gpu)
        self._theirs, self._into, self._ours = theirs, into, pool_region(into)
        self._generation_copy = np.zeros(theirs.pool.blocks + 1, np.int64)  # the last one is for heartbeats
        self._generation_lock = asyncio.Lock()
        self._agent: Any = None
        self._lists: dict[tuple[int, int], tuple[Any, Any]] = {}

    async def read(self, plan: CopyPlan, timeout_s: float) -> None:
        prepared = plan.unit_bytes == self._theirs.pool.block_bytes and len(plan.source) > 1
        start = self._blocks if prepared or plan.length == self._theirs.pool.block_bytes else self._pieces
        await self.ask(lambda: start(plan), f"{len(plan.source)} blocks", timeout_s)

    async def generation(self, source: Sequence[int], timeout_s: float) -> int:
        """Fetch the highest generation of the peer's blocks. Calls take turns: all read into one buffer."""
        first, last = min(source), max(source)
        async with self._generation_lock:
            await self.ask(lambda: self._generations(first, last + 1 - first), "generations", timeout_s)
            return int(self._generation_copy[list(source)].max())

    # ------------------------------------------------------------ on the thread

    def _connect(self) -> None:
        """Connect and read one number: the first transfer takes a tenth of a second, later ones microseconds."""
        self._agent = make_agent(self._ours.gpu)
        self._agent.register_memory(self._local_generations.whole, "DRAM")
        self._agent.register_memory(self._ours.whole, self._ours.memory)
        self._agent.add_remote_agent(self._theirs.metadata)
        self._pair(0, self._ours.block_bytes)
        self._await_first(lambda: self._generations(0, 1), lambda: time.sleep(TRANSFER_POLL_S))

    @property
    def _local_generations(self) -> Region:
        return Region(self._generation_copy.ctypes.data, GENERATION_BYTES, len(self._generation_copy), "DRAM", 0)

    def _pair(self, offset: int, length: int) -> tuple[Any, Any]:
        """Return both sides' prepared descriptor lists of a piece of all blocks, made on first use."""
        if (offset, length) not in self._lists:
            if len(self._lists) >= MAX_DESCRIPTOR_LISTS and len(self._in_flight) <= 1:  # the read that needs this list
                self._release_lists()
            self._lists[offset, length] = (
                self._rows("NIXL_INIT_AGENT", self._ours, offset, length),
                self._rows(self._theirs.agent, self._theirs.pool, offset, length),
            )
        return self._lists[offset, length]

    def _rows(self, name: str, region: Region, offset: int, length: int) -> Any:
        return self._agent.prep_xfer_dlist(name, region.rows(offset, length), region.memory)

    def _release_lists(self) -> None:
        for rows in [rows for pair in self._lists.values() for rows in pair]:
            with suppress(Exception):
                rows.release()
        self._lists.clear()

    def _blocks(self, plan: CopyPlan) -> Any:
        ours, theirs = self._pair(*plan.piece)
        target, source = np.array(plan.target, np.int32), np.array(plan.source, np.int32)
        return self._start_transfer(self._agent.make_prepped_xfer("READ", ours, target, theirs, source))

    def _pieces(self, plan: CopyPlan) -> Any:
        """Read the rows of a block that is not full: their number differs each time, so nothing is prepared."""
        sides = ((self._ours, plan.target), (self._theirs.pool, plan.source))
        here, there = (
            self._agent.get_xfer_descs(region.in_units(plan.unit_bytes).pieces(numbers, *plan.piece), region.memory)
            for region, numbers in sides
        )
        return self._start_transfer(self._agent.initialize_xfer("READ", here, there, self._theirs.agent))

    def _generations(self, first: int, count: int, into: int | None = None) -> Any:
        """Start to read ``count`` numbers of the peer, into the same places, or from ``into`` on."""
        place = first if into is None else into
        here = self._agent.get_xfer_descs(self._local_generations.part(place, count), "DRAM")
        there = self._agent.get_xfer_descs(self._theirs.generations.part(first, count), "DRAM")
        return self._start_transfer(self._agent.initialize_xfer("READ", here, there, self._theirs.agent))

    def _start_heartbeat(self) -> Any:
        """Start to read one number of the peer, into a place that nothing else uses."""
        return self._generations(0, 1, into=len(self._generation_copy) - 1)

    def _start_transfer(self, handle: Any) -> Any:
        self._agent.transfer(handle)
        return handle

    def _next_read(self) -> PendingRead | None:
        try:
            return self._queue.get(timeout=TRANSFER_POLL_S if self._in_flight else None)
        except queue.Empty:
            return None

    def _start(self, pending: PendingRead) -> None:
        self._take_notifications()  # nixl notices that a peer has left only here
        super()._start(pending)

    def _take_notifications(self) -> None:
        self._agent.get_new_notifs()

    def _poll_transfer(self, handle: Any) -> tuple[bool, Any]:
        state = self._agent.check_xfer_state(handle)
        if state == "DONE":
            self._agent.release_xfer_handle(handle)
        elif state != "PROC":
            raise PeerLost(f"a transfer from {self._theirs.agent} was interrupted", "nixl", self._theirs.agent)
        return state == "DONE", None

    def _disconnect(self, handles: list[Any]) -> None:
        for handle in handles:
            with suppress(Exception):
                self._agent.release_xfer_handle(handle)
        handles.clear()
        self._release_lists()
        self._agent = None

    def _as_transport_error(self, error: Exception) -> TransportError:
        return as_transport_error(error, self._theirs.agent)


def as_transport_error(error: Exception, peer: str) -> TransportError:
    """Convert an error of nixl, without its traceback, which would keep the agent alive."""
    name = type(error).__name__
    if name in ("nixlRemoteDisconnectError", "nixlBackendError", "nixlCancelledError"):
        made: TransportError = PeerLost(f"{peer} is gone: {error!r}", "nixl", peer)
    elif name in ("nixlMismatchError", "nixlNotFoundError", "nixlInvalidParamError"):
        made = HandshakeError(f"the descriptor of {peer} does not match its agent: {error!r}", "nixl", peer)
    else:
        made = TransportError(f"nixl failed: {error!r}", "nixl", peer)
    made.__cause__ = error.with_traceback(None)
    return made
