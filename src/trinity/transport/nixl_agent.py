"""Agents of nixl: one that lends pools, and one for every pool of a peer that is read.

A transfer of UCX cannot be recalled: a peer that froze and goes on later still fills our blocks, even after the handle
was released and the peer removed. Only the end of the agent stops it. So every remote pool has an agent of its own,
which may end without harm to the others, and each agent has one thread that alone uses it. (Over TCP, a source that
was frozen for so long that its reader gave up is ended by UCX when it wakes: supervision starts it again.)
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import logging
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trinity.errors import HandshakeError, PeerLost, TransferTimeout, TransportError, TransportUnavailable
from trinity.memory import BlockMemory

logger = logging.getLogger("trinity")
INSTALL = "pip install --no-deps nixl-cu13==1.5.1"
RDMA = Path("/sys/class/infiniband")
POLL_S = 0.001  # a source over TCP answers when its agent is asked for news
FLYING_S = 0.0001  # between two looks at a transfer on its way
GRACE_S = 1.0  # a cancelled read may end by itself for so long; then its agent ends
OPEN_S = 10.0
JOIN_S = 5.0
_alive: weakref.WeakSet[Lender | Link] = weakref.WeakSet()


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

    @property
    def rows(self) -> np.ndarray:
        """One strided row for all blocks: a row for each would take a third of a second for 65,536."""
        return np.array([[self.address, self.block_bytes, self.device, self.block_bytes, self.blocks]], np.uint64)


def region_of(memory: BlockMemory) -> Region:
    on_gpu = memory.tensor.is_cuda
    device = memory.tensor.get_device() if on_gpu else 0
    address = memory.tensor.data_ptr()
    return Region(address, memory.block_bytes, memory.blocks, "VRAM" if on_gpu else "DRAM", device)


class Descriptor(msgspec.Struct, frozen=True):
    """A pool that a peer lends: the name and the metadata of its agent, and where the pool is."""

    agent: str
    metadata: bytes
    pool: Region


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


class Lender:
    """The agent whose pools peers read. Its thread answers them where the medium needs that, as TCP does."""

    def __init__(self, first: Region) -> None:
        self._agent = make_agent(first)
        self.name: str = self._agent.name
        self._regions: dict[Region, Any] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trinity-nixl-lender", daemon=True)
        self._thread.start()
        _alive.add(self)

    def lend(self, region: Region) -> bytes:
        """Register a pool; the agent's metadata, which tell a peer of every pool so far."""
        try:
            if region not in self._regions:
                self._regions[region] = self._agent.register_memory(region.whole, region.memory)
            metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransportUnavailable(f"nixl cannot register a pool: {error!r}", "nixl") from error
        return metadata

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                self._agent.get_new_notifs()
            except Exception:
                logger.exception("the nixl agent %s could not answer its peers", self.name)
        for registered in self._regions.values():
            with suppress(Exception):
                self._agent.deregister_memory(registered)
        self._agent = None

    def stop(self) -> None:
        self._closing.set()

    def join(self) -> None:
        self._thread.join(JOIN_S)


@dataclass(eq=False)
class Reading:
    """One read. ``until`` is when it is given up, on the monotonic clock."""

    source: np.ndarray
    target: np.ndarray
    until: float
    done: Future[None] = field(default_factory=Future)
    handle: Any = None

    async def wait(self) -> None:
        """Return once nothing more is written. A cancelled one has ``GRACE_S`` to end by itself."""
        waiting = asyncio.wrap_future(self.done)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self.until = min(self.until, time.monotonic() + GRACE_S)
            while not waiting.done():
                with suppress(asyncio.CancelledError, TransportError):
                    await asyncio.shield(waiting)
            raise


class Link:
    """An agent of ours that reads one pool of a peer. It fails as a whole, and is not used again then."""

    def __init__(self, theirs: Descriptor, into: BlockMemory) -> None:
        self._theirs, self._into, self._ours = theirs, into, region_of(into)
        self.opened: Future[None] = Future()
        self.failure: TransportError | None = None
        self._scratch = np.zeros(1, np.uint8)
        self._agent: Any = None
        self._lists: tuple[Any, Any] = (None, None)
        self._flying: list[Reading] = []
        self._asked: queue.Queue[Reading | None] = queue.Queue()
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="trinity-nixl-link", daemon=True)
        self._thread.start()
        _alive.add(self)

    async def open(self) -> None:
        """Wait until the peer has answered. Raises ``PeerLost``, ``HandshakeError``, ``TransferTimeout``."""
        await asyncio.shield(asyncio.wrap_future(self.opened))

    async def read(self, source: Sequence[int], target: Sequence[int], timeout_s: float) -> None:
        """Carry blocks over. Raises ``PeerLost``, ``TransferTimeout``; nothing more is written then."""
        reading = Reading(np.array(source, np.int32), np.array(target, np.int32), time.monotonic() + timeout_s)
        with self._lock:
            if self.failure is not None:
                raise again(self.failure)
            self._asked.put(reading)
        await reading.wait()

    def stop(self) -> None:
        self._closing.set()
        self._asked.put(None)

    def join(self) -> None:
        self._thread.join(JOIN_S)

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        failure: TransportError
        try:
            self._connect()
            self.opened.set_result(None)
            while not self._closing.is_set():
                self._turn()
            failure = PeerLost("the link was closed", "nixl", self._theirs.agent)
        except TransportError as error:
            failure = error
        except Exception as error:
            failure = typed(error, self._theirs.agent)
        self._end(failure)

    def _connect(self) -> None:
        """Connect, and read one byte: the first transfer takes a tenth of a second, later ones microseconds."""
        self._agent = make_agent(self._ours)
        scratch = [(self._scratch.ctypes.data, 1, 0, "")]
        self._agent.register_memory(scratch, "DRAM")
        self._agent.register_memory(self._ours.whole, self._ours.memory)
        self._agent.add_remote_agent(self._theirs.metadata)
        self._lists = (self._rows("NIXL_INIT_AGENT", self._ours), self._rows(self._theirs.agent, self._theirs.pool))
        here = self._agent.get_xfer_descs([(self._scratch.ctypes.data, 1, 0)], "DRAM")
        first = [(self._theirs.pool.address, 1, self._theirs.pool.device)]
        there = self._agent.get_xfer_descs(first, self._theirs.pool.memory)
        nothing = np.zeros(0, np.int32)
        reading = Reading(nothing, nothing, time.monotonic() + OPEN_S)
        reading.handle = self._agent.initialize_xfer("READ", here, there, self._theirs.agent)
        self._flying.append(reading)
        self._agent.transfer(reading.handle)
        while self._flying and not self._closing.wait(FLYING_S):
            self._look(reading)

    def _rows(self, name: str, region: Region) -> Any:
        return self._agent.prep_xfer_dlist(name, region.rows, region.memory)

    def _turn(self) -> None:
        """Begin what is asked, look after what is on its way."""
        try:
            asked = self._asked.get(timeout=FLYING_S if self._flying else None)
        except queue.Empty:
            pass
        else:
            if asked is not None:
                self._begin(asked)
        for reading in list(self._flying):
            self._look(reading)

    def _begin(self, reading: Reading) -> None:
        self._flying.append(reading)
        self._agent.get_new_notifs()  # a peer that has left is seen only by looking
        ours, theirs = self._lists
        reading.handle = self._agent.make_prepped_xfer("READ", ours, reading.target, theirs, reading.source)
        self._agent.transfer(reading.handle)

    def _look(self, reading: Reading) -> None:
        state = self._agent.check_xfer_state(reading.handle)
        if state == "DONE":
            self._flying.remove(reading)
            self._agent.release_xfer_handle(reading.handle)
            reading.done.set_result(None)
        elif state != "PROC":
            raise PeerLost(f"a transfer from {self._theirs.agent} broke off", "nixl", self._theirs.agent)
        elif time.monotonic() > reading.until:
            text = f"{self._theirs.agent} did not deliver {len(reading.source)} blocks in time"
            raise TransferTimeout(text, "nixl", self._theirs.agent)

    def _end(self, failure: TransportError) -> None:
        """End the agent, and with it whatever is on its way; only then say so."""
        failed = self._flying
        for reading in failed:
            with suppress(Exception):
                self._agent.release_xfer_handle(reading.handle)
            reading.handle = None
        for rows in self._lists:
            with suppress(Exception):
                rows.release()
        self._lists = (None, None)
        self._agent = None
        with self._lock:
            self.failure = failure
            while not self._asked.empty():
                asked = self._asked.get()
                failed += [asked] if asked is not None else []
        for each in (self.opened, *(reading.done for reading in failed)):
            if not each.done():
                each.set_exception(again(failure))
        self._flying = []


def again(failure: TransportError) -> TransportError:
    """The same error for one more who waits: one object raised twice would collect both tracebacks."""
    copy = type(failure)(str(failure), scheme=failure.scheme, peer=failure.peer)
    copy.__cause__ = failure.__cause__
    return copy


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


@atexit.register
def _stop_all() -> None:
    """A thread inside UCX while the process takes it down would crash."""
    left = list(_alive)
    for each in left:
        each.stop()
    for each in left:
        each.join()
