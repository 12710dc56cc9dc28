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
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import msgspec
import numpy as np

from trinity.errors import OfferRefused
from trinity.memory.block_memory import BlockMemory
from trinity.transport.nixl.agent import NixlDescriptor, NixlLink, Region
from trinity.transport.nixl.source import PushReply, PushRequest

logger = logging.getLogger("trinity")
STAGING_BYTES = 16 << 20
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
        import torch

        self._bytes = self._memory = torch.empty(self.size, dtype=torch.uint8, device=into.device)
        self.address, self.device = self._bytes.data_ptr(), self._bytes.get_device()

    def region(self, length: int) -> Region:
        """Describe the staging area as an array of pieces of ``length`` bytes each."""
        kind = "DRAM" if self._into.raw is not None else "VRAM"
        return Region(self.address, length, self.size // length, kind, self.device)

    def copy(self, target: Sequence[int], offset: int, length: int) -> None:
        """Copy the first pieces, ``length`` bytes each, to byte ``offset`` of the blocks ``target``."""
        pieces = self._bytes[: len(target) * length].reshape(len(target), length)
        if self._into.raw is not None:
            self._into.raw[list(target), offset : offset + length] = pieces
            return
        import torch

        ours = self._into.piece(offset, length)
        ours[list(target)] = pieces.view(ours.dtype)
        torch.cuda.synchronize(self._into.device)

    def abandon(self) -> None:
        """Keep the address range for ever, because the source may still write there; free CPU memory behind it."""
        _abandoned.append(self._memory)
        if self._into.raw is not None:
            self._memory.madvise(mmap.MADV_DONTNEED)
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), PROT_NONE)


class PushTransfer:
    """One request to the source, and the blocks ``target`` to which the written pieces belong."""

    def __init__(self, number: int, target: Sequence[int], piece: tuple[int, int]) -> None:
        self.number, self.target, self.piece = number, target, piece


class NixlPushLink(NixlLink):
    """Reads one pool of a peer by having the source write into a staging area."""

    def __init__(self, theirs: NixlDescriptor, into: BlockMemory) -> None:
        super().__init__(theirs, into)
        self._stage = StagingArea(into)
        self._read_lock, self._numbers = asyncio.Lock(), count(1)
        self._replies: dict[int, PushReply] = {}
        self._metadata = b""
        self._heartbeat: Any = None
        self._last_heartbeat = 0.0

    async def read(
        self, source: Sequence[int], target: Sequence[int], piece: tuple[int, int], timeout_s: float
    ) -> None:
        """Read as many blocks at a time as the staging area holds; reads of one link take turns."""
        most = self._stage.size // piece[1]
        async with self._read_lock:
            for start in range(0, len(source), most):
                blocks, places = source[start : start + most], target[start : start + most]
                await self.ask(partial(self._push, blocks, places, piece), f"{len(blocks)} blocks", timeout_s)

    # ------------------------------------------------------------ on the thread

    def _connect(self) -> None:
        super()._connect()
        whole = self._stage.region(1)
        self._agent.register_memory(whole.whole, whole.memory)
        self._metadata = self._agent.get_agent_metadata()

    def _push(self, source: Sequence[int], target: Sequence[int], piece: tuple[int, int]) -> PushTransfer:
        number = next(self._numbers)
        stage = self._stage.region(piece[1])
        request = PushRequest(self._metadata, number, self._theirs.pool, stage, piece[0], list(source))
        self._agent.send_notif(self._theirs.agent, msgspec.msgpack.encode(request))
        return PushTransfer(number, target, piece)

    def _take_notifications(self) -> None:
        for name, messages in self._agent.get_new_notifs().items():
            for message in messages if name == self._theirs.agent else ():
                reply = msgspec.msgpack.decode(message, type=PushReply)
                self._replies[reply.number] = reply

    def _poll_transfer(self, handle: Any) -> tuple[bool, Any]:
        if not isinstance(handle, PushTransfer):
            return super()._poll_transfer(handle)
        self._take_notifications()
        reply = self._replies.pop(handle.number, None)
        if reply is None:
            self._check_heartbeat()
            return False, None
        if reply.reason:
            raise OfferRefused(f"{self.peer} refuses: {reply.text}", reply.reason, "nixl", self.peer)
        self._stage.copy(handle.target, *handle.piece)
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
        left = [
            handle
            for handle in (*handles, self._heartbeat)
            if handle is not None and not isinstance(handle, PushTransfer)
        ]
        handles.clear()
        self._heartbeat = None
        super()._disconnect(left)
        if pushing:
            self._stage.abandon()
