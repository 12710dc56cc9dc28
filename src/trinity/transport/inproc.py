"""inproc: pools of instances in one process, copied from tensor to tensor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from trinity.errors import HandshakeError, LayoutMismatch, PeerLost
from trinity.memory.block_memory import BlockMemory
from trinity.memory.native import PoolCopier
from trinity.transport.base import ByteRange, check_block_numbers, check_read, run_copy


class Published(NamedTuple):
    """A published pool, and what copies from it into each pool that is attached."""

    memory: BlockMemory
    copiers: WeakKeyDictionary[BlockMemory, PoolCopier]


_published: dict[int, Published] = {}
_numbers = count(1)


class InprocDescriptor(msgspec.Struct, frozen=True):
    """A published pool: only the same process can attach to it."""

    process: int
    number: int
    block_bytes: int
    blocks: int


class InprocTransport:
    """Copies blocks between pools of this process. Large copies run on a thread, to keep the event loop free."""

    scheme = "inproc"
    network = False

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def publish(self, memory: BlockMemory) -> bytes:
        number = next(_numbers)
        _published[number] = Published(memory, WeakKeyDictionary())
        self._numbers.append(number)
        return msgspec.msgpack.encode(InprocDescriptor(os.getpid(), number, memory.block_bytes, memory.blocks))

    def withdraw(self, memory: BlockMemory) -> None:
        """Let go of a published pool: nobody attaches to it, or reads from it, any more."""
        for number in [each for each in self._numbers if each in _published and _published[each].memory is memory]:
            self._numbers.remove(number)
            del _published[number]

    async def attach(self, descriptor: bytes, into: BlockMemory) -> InprocRemote:
        try:
            peer = msgspec.msgpack.decode(descriptor, type=InprocDescriptor)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"not an inproc descriptor: {error}", self.scheme) from error
        if peer.process != os.getpid():
            raise HandshakeError(
                f"the pool is in process {peer.process}, which inproc cannot reach: use connector='shm'", self.scheme
            )
        if peer.block_bytes != into.block_bytes:
            text = f"the peer's blocks have {peer.block_bytes} bytes, ours {into.block_bytes}"
            raise LayoutMismatch(text)
        return InprocRemote(peer, into)

    async def aclose(self) -> None:
        for number in self._numbers:
            _published.pop(number, None)
        self._numbers.clear()


class InprocRemote:
    """A pool of this process, attached to another."""

    def __init__(self, peer: InprocDescriptor, into: BlockMemory) -> None:
        self._peer, self._into = peer, into

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        plan = check_read("inproc", source, self._peer.blocks, target, self._into, within)
        return await run_copy(self._find_copier(), plan)

    async def generation(self, source: Sequence[int]) -> int:
        check_block_numbers("inproc", "source", source, self._peer.blocks)
        return self._find_published().memory.generation(source)

    def _find_copier(self) -> PoolCopier:
        memory, copiers = self._find_published()
        copier = copiers.get(self._into)
        if copier is None:
            copier = copiers[self._into] = PoolCopier(self._into.pool, memory.pool)
        return copier

    def _find_published(self) -> Published:
        published = _published.get(self._peer.number)
        if published is None:
            raise PeerLost(f"pool {self._peer.number} is no longer published", "inproc", str(self._peer.number))
        return published

    async def aclose(self) -> None:
        return None
