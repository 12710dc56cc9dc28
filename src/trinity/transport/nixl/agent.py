"""Agents of nixl, and the link that reads a pool of a peer with one.

A transfer of UCX cannot be recalled: a peer that froze and goes on later still fills our blocks, even after the handle
was released and the peer removed. Only the end of the agent stops it: so every link has an agent of its own. (Over
TCP, a source that was frozen for so long that its reader gave up is ended by UCX when it wakes: supervision starts it
again.)
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
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trinity.errors import HandshakeError, PeerLost, TransportError, TransportUnavailable
from trinity.memory.block_memory import GENERATION_BYTES, BlockMemory
from trinity.transport.link import Link, Reading

logger = logging.getLogger("trinity")
INSTALL = "pip install --no-deps nixl-cu13==1.5.1"
RDMA = Path("/sys/class/infiniband")
POLL_S = 0.001  # a source over TCP answers when its agent is asked for news
FLYING_S = 0.0001  # between two looks at a transfer on its way
MOST_LISTS = 32  # of pieces of blocks: a model's groups of layers are fewer


def load_api() -> Any:
    """nixl's Python module. Raises ``TransportUnavailable`` where it is not installed.

    UCX would listen on every interface, without authentication: it gets the loopback alone unless UCX_NET_DEVICES says
    otherwise. Its InfiniBand module crashes the process at exit where there is no such device.
    """
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if not RDMA.exists():
        os.environ.setdefault("UCX_MODULES", "^ib")
    raising = logging.raiseExceptions
    try:
        api = importlib.import_module("nixl_cu13._api")
    except ImportError as error:
        raise TransportUnavailable(f"nixl cannot be loaded ({error}): {INSTALL}", "nixl") from error
    finally:
        logging.raiseExceptions = raising  # it turns this off for the whole process
    theirs = logging.getLogger("nixl")
    theirs.handlers.clear()
    theirs.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        theirs.setLevel(logging.WARNING)
    return api


class Region(msgspec.Struct, frozen=True):
    """A pool as nixl sees it; ``memory`` is DRAM or VRAM."""

    address: int
    block_bytes: int
    blocks: int
    memory: str
    device: int

    @property
    def whole(self) -> list[tuple[int, int, int, str]]:
        return [(self.address, self.block_bytes * self.blocks, self.device, "")]

    def rows(self, offset: int, length: int) -> np.ndarray:
        """A piece of all blocks as one strided row: a row for each would take a third of a second for 65,536."""
        return np.array([[self.address + offset, length, self.device, self.block_bytes, self.blocks]], np.uint64)

    def part(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """Some consecutive blocks as one descriptor."""
        return [(self.address + first * self.block_bytes, count * self.block_bytes, self.device)]


def generations_of(memory: BlockMemory) -> Region:
    return Region(memory.generations.ctypes.data, GENERATION_BYTES, memory.blocks, "DRAM", 0)


def region_of(memory: BlockMemory) -> Region:
    if memory.raw is not None:
        return Region(memory.raw.ctypes.data, memory.block_bytes, memory.blocks, "DRAM", 0)
    on_gpu = memory.tensor
    return Region(on_gpu.data_ptr(), memory.block_bytes, memory.blocks, "VRAM", on_gpu.get_device())


class Descriptor(msgspec.Struct, frozen=True):
    """A pool that a peer lends: the name and the metadata of its agent, where the pool and its generations are."""

    agent: str
    metadata: bytes
    pool: Region
    generations: Region


def make_agent(region: Region) -> Any:
    """A nixl agent whose name no other has: a peer that restarts must not pass for its predecessor."""
    api = load_api()
    if region.memory == "VRAM":
        import torch

        torch.cuda.set_device(region.device)  # UCX asks for the calling thread's CUDA context
    sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    settings = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync)
    try:
        return api.nixl_agent(f"trinity-{os.getpid()}-{secrets.token_hex(8)}", settings)
    except Exception as error:
        raise TransportUnavailable(f"nixl has no UCX here: {error!r}", "nixl") from error


class NixlLink(Link):
    """An agent of ours that reads one pool of a peer."""

    def __init__(self, theirs: Descriptor, into: BlockMemory) -> None:
        super().__init__("nixl", theirs.agent)
        self._theirs, self._into, self._ours = theirs, into, region_of(into)
        self._news = np.zeros(theirs.pool.blocks + 1, np.int64)  # the last is for beats
        self._asking = asyncio.Lock()
        self._agent: Any = None
        self._lists: dict[tuple[int, int], tuple[Any, Any]] = {}

    async def read(
        self, source: Sequence[int], target: Sequence[int], piece: tuple[int, int], timeout_s: float
    ) -> None:
        numbers = np.array(target, np.int32), np.array(source, np.int32)
        await self.ask(lambda: self._blocks(*numbers, piece), f"{len(source)} blocks", timeout_s)

    async def generation(self, source: Sequence[int], timeout_s: float) -> int:
        """The highest generation of the peer's blocks. One at a time: all use one place of ours."""
        first, last = min(source), max(source)
        async with self._asking:
            await self.ask(lambda: self._generations(first, last + 1 - first), "generations", timeout_s)
            return int(self._news[list(source)].max())

    # ------------------------------------------------------------ on the thread

    def _connect(self) -> None:
        """Connect, and read one number: the first transfer takes a tenth of a second, later ones microseconds."""
        self._agent = make_agent(self._ours)
        self._agent.register_memory(self._here.whole, "DRAM")
        self._agent.register_memory(self._ours.whole, self._ours.memory)
        self._agent.add_remote_agent(self._theirs.metadata)
        self._pair(0, self._ours.block_bytes)
        self._first(lambda: self._generations(0, 1), lambda: time.sleep(FLYING_S))

    @property
    def _here(self) -> Region:
        return Region(self._news.ctypes.data, GENERATION_BYTES, len(self._news), "DRAM", 0)

    def _pair(self, offset: int, length: int) -> tuple[Any, Any]:
        """Both sides' lists of this piece of all blocks, prepared once."""
        if (offset, length) not in self._lists:
            if len(self._lists) >= MOST_LISTS and len(self._flying) <= 1:  # the one for which it is asked
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

    def _blocks(self, target: np.ndarray, source: np.ndarray, piece: tuple[int, int]) -> Any:
        ours, theirs = self._pair(*piece)
        return self._go(self._agent.make_prepped_xfer("READ", ours, target, theirs, source))

    def _generations(self, first: int, count: int) -> Any:
        here = self._agent.get_xfer_descs(self._here.part(first, count), "DRAM")
        there = self._agent.get_xfer_descs(self._theirs.generations.part(first, count), "DRAM")
        return self._go(self._agent.initialize_xfer("READ", here, there, self._theirs.agent))

    def _beat(self) -> Any:
        """Read one number of the peer into a place of its own."""
        here = self._agent.get_xfer_descs(self._here.part(len(self._news) - 1, 1), "DRAM")
        there = self._agent.get_xfer_descs(self._theirs.generations.part(0, 1), "DRAM")
        return self._go(self._agent.initialize_xfer("READ", here, there, self._theirs.agent))

    def _go(self, handle: Any) -> Any:
        self._agent.transfer(handle)
        return handle

    def _next(self) -> Reading | None:
        try:
            return self._asked.get(timeout=FLYING_S if self._flying else None)
        except queue.Empty:
            return None

    def _start(self, reading: Reading) -> None:
        self._listen()  # a peer that has left is seen only by looking
        super()._start(reading)

    def _listen(self) -> None:
        self._agent.get_new_notifs()

    def _look(self, handle: Any) -> tuple[bool, Any]:
        state = self._agent.check_xfer_state(handle)
        if state == "DONE":
            self._agent.release_xfer_handle(handle)
        elif state != "PROC":
            raise PeerLost(f"a transfer from {self._theirs.agent} broke off", "nixl", self._theirs.agent)
        return state == "DONE", None

    def _part(self, handles: list[Any]) -> None:
        for handle in handles:
            with suppress(Exception):
                self._agent.release_xfer_handle(handle)
        handles.clear()
        self._release_lists()
        self._agent = None

    def _typed(self, error: Exception) -> TransportError:
        return typed(error, self._theirs.agent)


def typed(error: Exception, peer: str) -> TransportError:
    """One of ours for one of nixl's, without its traceback: that would keep the agent alive."""
    name = type(error).__name__
    if name in ("nixlRemoteDisconnectError", "nixlBackendError", "nixlCancelledError"):
        made: TransportError = PeerLost(f"{peer} is gone: {error!r}", "nixl", peer)
    elif name in ("nixlMismatchError", "nixlNotFoundError", "nixlInvalidParamError"):
        made = HandshakeError(f"what {peer} offers does not fit its agent: {error!r}", "nixl", peer)
    else:
        made = TransportError(f"nixl failed: {error!r}", "nixl", peer)
    made.__cause__ = error.with_traceback(None)
    return made
