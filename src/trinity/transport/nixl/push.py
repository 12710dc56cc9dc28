"""nixl the other way: the source writes. On GPUs of one host it may be the only way; over TCP no faster for certain.

A write that is on its way cannot be stopped from here: over some lanes a source that froze writes when it goes on, long
after its reader has given up. So it never writes into blocks: it fills a stage of the link, from which the link copies,
and a stage that was given up while somebody may still write to it is never used for anything else.
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
from trinity.transport.nixl.agent import Descriptor, NixlLink, Region
from trinity.transport.nixl.source import PushAsk, Pushed

logger = logging.getLogger("trinity")
STAGE_BYTES = 16 << 20
PULSE_S = 0.05  # between two questions whether the source is alive, while it writes
PROT_NONE = 0
_given_up: list[Any] = []


class Stage:
    """Memory of a link that a source may write to at any time."""

    def __init__(self, into: BlockMemory) -> None:
        self._into = into
        self.size = max(STAGE_BYTES, into.block_bytes)
        self._kept: Any
        self.device = 0
        if into.raw is not None:
            self._kept = mmap.mmap(-1, self.size)
            self._bytes: Any = np.frombuffer(self._kept, np.uint8)
            self.address: int = self._bytes.ctypes.data
            return
        import torch

        self._bytes = self._kept = torch.empty(self.size, dtype=torch.uint8, device=into.device)
        self.address, self.device = self._bytes.data_ptr(), self._bytes.get_device()

    def region(self, length: int) -> Region:
        """The stage as places for pieces of ``length`` bytes."""
        kind = "DRAM" if self._into.raw is not None else "VRAM"
        return Region(self.address, length, self.size // length, kind, self.device)

    def copy(self, target: Sequence[int], offset: int, length: int) -> None:
        """Its first pieces into blocks."""
        pieces = self._bytes[: len(target) * length].reshape(len(target), length)
        if self._into.raw is not None:
            self._into.raw[list(target), offset : offset + length] = pieces
            return
        import torch

        ours = self._into.piece(offset, length)
        ours[list(target)] = pieces.view(ours.dtype)
        torch.cuda.synchronize(self._into.device)

    def give_up(self) -> None:
        """Somebody may still write here: keep the addresses for ever, and no memory where that can be done."""
        _given_up.append(self._kept)
        if self._into.raw is not None:
            self._kept.madvise(mmap.MADV_DONTNEED)
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), PROT_NONE)


class Pushing:
    """One question to the source, and where what it writes belongs."""

    def __init__(self, number: int, target: Sequence[int], piece: tuple[int, int]) -> None:
        self.number, self.target, self.piece = number, target, piece


class NixlPushLink(NixlLink):
    """Reads by having the source write."""

    def __init__(self, theirs: Descriptor, into: BlockMemory) -> None:
        super().__init__(theirs, into)
        self._stage = Stage(into)
        self._turns, self._numbers = asyncio.Lock(), count(1)
        self._said: dict[int, Pushed] = {}
        self._metadata = b""
        self._pulse: Any = None
        self._felt = 0.0

    async def read(
        self, source: Sequence[int], target: Sequence[int], piece: tuple[int, int], timeout_s: float
    ) -> None:
        """Stage by stage; reads of one link take turns."""
        most = self._stage.size // piece[1]
        async with self._turns:
            for start in range(0, len(source), most):
                blocks, places = source[start : start + most], target[start : start + most]
                await self.ask(partial(self._push, blocks, places, piece), f"{len(blocks)} blocks", timeout_s)

    # ------------------------------------------------------------ on the thread

    def _connect(self) -> None:
        super()._connect()
        whole = self._stage.region(1)
        self._agent.register_memory(whole.whole, whole.memory)
        self._metadata = self._agent.get_agent_metadata()

    def _push(self, source: Sequence[int], target: Sequence[int], piece: tuple[int, int]) -> Pushing:
        number = next(self._numbers)
        stage = self._stage.region(piece[1])
        ask = PushAsk(self._metadata, number, self._theirs.pool, stage, piece[0], list(source))
        self._agent.send_notif(self._theirs.agent, msgspec.msgpack.encode(ask))
        return Pushing(number, target, piece)

    def _listen(self) -> None:
        for name, messages in self._agent.get_new_notifs().items():
            for message in messages if name == self._theirs.agent else ():
                said = msgspec.msgpack.decode(message, type=Pushed)
                self._said[said.number] = said

    def _look(self, handle: Any) -> tuple[bool, Any]:
        if not isinstance(handle, Pushing):
            return super()._look(handle)
        self._listen()
        said = self._said.pop(handle.number, None)
        if said is None:
            self._feel_pulse()
            return False, None
        if said.reason:
            raise OfferRefused(f"{self.peer} refuses: {said.text}", said.reason, "nixl", self.peer)
        self._stage.copy(handle.target, *handle.piece)
        return True, None

    def _feel_pulse(self) -> None:
        """Read something of the source: a dead one is noticed by that alone."""
        now = time.monotonic()
        if self._pulse is not None and super()._look(self._pulse)[0]:
            self._pulse = None
        if self._pulse is None and now - self._felt > PULSE_S:
            self._felt, self._pulse = now, self._beat()

    def _part(self, handles: list[Any]) -> None:
        pushing = any(isinstance(handle, Pushing) for handle in handles)
        left = [handle for handle in (*handles, self._pulse) if handle is not None and not isinstance(handle, Pushing)]
        handles.clear()
        self._pulse = None
        super()._part(left)
        if pushing:
            self._stage.give_up()
