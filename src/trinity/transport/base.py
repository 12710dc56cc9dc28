"""The contract of a transport: publish a pool, attach to a peer's, read blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Protocol

from trinity.errors import OfferRefused
from trinity.memory import BlockMemory


class Remote(Protocol):
    """A peer's pool, attached to one of ours."""

    async def read(self, source: Sequence[int], target: Sequence[int]) -> int:
        """Copy the peer's blocks ``source`` into our blocks ``target``, pairwise; returns the bytes moved.

        Every byte is in place on return. After a cancelled read nothing more is written. Raises ``OfferRefused`` before
        a byte moves where a block number is wrong, ``PeerLost`` where the peer is gone.
        """
        ...

    async def aclose(self) -> None: ...


class Transport(Protocol):
    """A medium. ``publish`` describes a pool of ours in bytes; a peer attaches with them."""

    scheme: str

    def publish(self, memory: BlockMemory) -> bytes: ...

    async def attach(self, descriptor: bytes, into: BlockMemory) -> Remote:
        """Open a peer's pool for reads into ``into``. Raises ``LayoutMismatch`` where block sizes differ."""
        ...

    async def aclose(self) -> None: ...


def check_blocks(scheme: str, source: Sequence[int], blocks: int, target: Sequence[int], into: BlockMemory) -> None:
    """Raise ``OfferRefused`` where a read would touch what it must not; before a byte moves."""
    if len(source) != len(target):
        raise OfferRefused(f"{len(source)} source blocks for {len(target)} target blocks", "blocks", scheme)
    if len(set(target)) != len(target):
        raise OfferRefused("a target block is named twice", "blocks", scheme)
    for name, numbers, size in (("source", source, blocks), ("target", target, into.blocks)):
        if numbers and not (min(numbers) >= 0 and max(numbers) < size):
            raise OfferRefused(f"{name} blocks {min(numbers)} to {max(numbers)} of a pool of {size}", "blocks", scheme)


def runs(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(source, target, length) of the longest pieces that are consecutive on both sides."""
    start = 0
    for index in range(1, len(source) + 1):
        broken = index == len(source) or (
            source[index] != source[index - 1] + 1 or target[index] != target[index - 1] + 1
        )
        if broken:
            yield source[start], target[start], index - start
            start = index


async def finish(copying: Coroutine[Any, Any, None]) -> None:
    """Await a copy; a cancelled reader waits until it has ended, because a thread cannot be stopped in its middle."""
    task = asyncio.ensure_future(copying)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue
        raise
