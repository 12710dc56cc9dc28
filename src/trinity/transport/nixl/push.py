"""nixl-push: the source writes, for GPUs of one host where reads may not work; over TCP it is not known to be faster.

The target cannot stop a write in flight: over some media a source that froze writes when it resumes, long after its
reader has given up. It therefore never writes into blocks, but into a staging area of the link, from which the link
copies. A staging area that is abandoned while the source may still write to it is never used for anything else.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import time
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from trinity.errors import OfferRefused, PeerLost
from trinity.memory.block_memory import BlockMemory, view_units
from trinity.memory.devices import make_device_buffer, use_copy_stream
from trinity.memory.native import copy_blocks
from trinity.transport.base import CopyPlan
from trinity.transport.nixl.agent import NixlDescriptor, NixlLink, Region
from trinity.transport.nixl.source import FAILED, PushReply, PushRequest
from trinity.transport.sealed_requests import LinkSeal

logger = logging.getLogger("trinity")
STAGING_BYTES = 16 << 20
PARTS = 2  # of a staging area: one is copied from while the source fills the other
HEARTBEAT_S = 0.05  # between two checks that the source is alive, while it writes
PROT_NONE = 0
_abandoned: list[Any] = []


class StagingArea:
    """Staging area: memory of a link that a source may write to at any time."""

    def __init__(self, into: BlockMemory) -> None:
        self._into = into
        self.size = max(STAGING_BYTES, into.block_bytes)
        self._memory: Any
        self.device = 0
        if into.raw is not None:
            self._memory = mmap.mmap(-1, self.size)
            self._bytes: Any = np.frombuffer(self._memory, np.uint8)
            self.address: int = self._bytes.ctypes.data
            return
        self._bytes = self._memory = make_device_buffer(self.size, into.gpu)
        self.address, self.device = self._bytes.data_ptr(), self._bytes.get_device()

    def region(self, length: int, at: int = 0, size: int | None = None) -> Region:
        """Describe ``size`` bytes of the staging area from byte ``at`` on as an array of pieces of ``length`` bytes."""
        kind = "DRAM" if self._into.raw is not None else "VRAM"
        count = (self.size if size is None else size) // length
        return Region(self.address + at, length, count, kind, self.device)

    def copy(self, plan: CopyPlan, at: int = 0) -> None:
        """Copy the pieces that lie side by side from byte ``at`` on to where ``plan`` says."""
        pieces = self._bytes[at : at + plan.bytes].reshape(-1, plan.length)
        if self._into.raw is not None and plan.length == plan.unit_bytes:
            copy_blocks(view_units(self._into.pool, plan.length), pieces, plan.target, range(len(pieces)))
            return
        ours = view_units(self._into.pool, plan.unit_bytes)
        with use_copy_stream(self._into.gpu):
            ours[list(plan.target), plan.offset : plan.offset + plan.length] = pieces

    def abandon(self) -> None:
        """Keep the address range for ever, because the source may still write there; free CPU memory behind it."""
        _abandoned.append(self._memory)
        if self._into.raw is not None:
            self._memory.madvise(mmap.MADV_DONTNEED)
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), PROT_NONE)


class PushTransfer(NamedTuple):
    """One request to the source, and the share of a read that it writes into the staging area from byte ``at`` on."""

    number: int
    plan: CopyPlan
    at: int


class NixlPushLink(NixlLink):
    """Reads one pool of a peer by having the source write into a staging area."""

    def __init__(self, theirs: NixlDescriptor, into: BlockMemory) -> None:
        super().__init__(theirs, into)
        self._stage = StagingArea(into)
        self._read_lock, self._seal = asyncio.Lock(), LinkSeal(theirs.key, theirs.agent)
        self._replies: dict[int, PushReply | None] = {}  # None until it comes
        self._metadata = b""
        self._heartbeat: Any = None
        self._last_heartbeat = 0.0

    async def read(self, plan: CopyPlan, timeout_s: float) -> None:
        """Read as many blocks at a time as a part of the staging area holds; reads of one link take turns."""
        parts = PARTS if plan.bytes > self._stage.size >= PARTS * plan.length else 1
        async with self._read_lock:
            ways = (self._read_through(plan, part, parts, timeout_s) for part in range(parts))
            failed = [each for each in await asyncio.gather(*ways, return_exceptions=True) if each is not None]
        if failed:
            raise failed[0]

    async def _read_through(self, plan: CopyPlan, part: int, parts: int, timeout_s: float) -> None:
        """Read every ``parts``-th share of ``plan`` through one part of the staging area."""
        size = self._stage.size // parts
        stage, most = (part * size, size), size // plan.length
        for start in range(part * most, len(plan.source), parts * most):
            now = slice(start, start + most)
            share = plan._replace(source=plan.source[now], target=plan.target[now])
            await self.ask(partial(self._push, share, stage), f"{len(share.source)} blocks", timeout_s)

    # ------------------------------------------------------------ on the thread

    def _connect(self) -> None:
        super()._connect()
        whole = self._stage.region(1)
        self._agent.register_memory(whole.whole, whole.memory)
        self._metadata = self._agent.get_agent_metadata()

    def _push(self, plan: CopyPlan, part: tuple[int, int]) -> PushTransfer:
        stage, pool = self._stage.region(plan.length, *part), self._theirs.pool
        request = PushRequest(self._metadata, pool, stage, plan.offset, list(plan.source), plan.unit_bytes)
        number, message = self._seal.seal(msgspec.msgpack.encode(request))
        self._replies[number] = None
        self._agent.send_notif(self._theirs.agent, message)
        return PushTransfer(number, plan, part[0])

    def _take_notifications(self) -> None:
        for name, messages in self._agent.get_new_notifs().items():
            for message in messages if name == self._theirs.agent else ():
                opened = self._seal.open(message)
                if opened is not None and opened[0] in self._replies:
                    self._replies[opened[0]] = msgspec.msgpack.decode(opened[1], type=PushReply)

    def _poll_transfer(self, handle: Any) -> tuple[bool, Any]:
        if not isinstance(handle, PushTransfer):
            return super()._poll_transfer(handle)
        self._take_notifications()
        reply = self._replies[handle.number]
        if reply is None:
            self._check_heartbeat()
            return False, None
        del self._replies[handle.number]
        if reply.reason == FAILED:
            raise PeerLost(f"{self.peer} could not write: {reply.text}", "nixl", self.peer)
        if reply.reason:
            raise OfferRefused(f"{self.peer} refuses: {reply.text}", reply.reason, "nixl", self.peer)
        self._stage.copy(handle.plan, handle.at)
        return True, None

    def _check_heartbeat(self) -> None:
        """Read a number from the source every ``HEARTBEAT_S``: only that shows that a source has died."""
        now = time.monotonic()
        if self._heartbeat is not None and super()._poll_transfer(self._heartbeat)[0]:
            self._heartbeat = None
        if self._heartbeat is None and now - self._last_heartbeat > HEARTBEAT_S:
            self._last_heartbeat, self._heartbeat = now, self._start_heartbeat()

    def _disconnect(self, handles: list[Any]) -> None:
        pushing = any(isinstance(handle, PushTransfer) for handle in handles)
        left = [each for each in (*handles, self._heartbeat) if not isinstance(each, PushTransfer | None)]
        handles.clear()
        self._heartbeat = None
        super()._disconnect(left)
        if pushing:
            self._stage.abandon()
