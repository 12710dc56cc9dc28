"""The contract of a transport: publish a pool, attach to a peer's, read blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from trinity.errors import OfferRefused
from trinity.memory.block_memory import BlockMemory
from trinity.memory.native import Pool, copy_blocks

Within = tuple[int, int] | None
TURN_BYTES = 4 << 20  # copied in some 200 µs
INLINE_BYTES = 32 << 20  # copied in less than ten times what it takes to get to a thread and back


class Remote(Protocol):
    """A peer's pool, attached to one of ours."""

    async def read(self, source: Sequence[int], target: Sequence[int], within: Within = None) -> int:
        """Copy the peer's blocks ``source`` into our blocks ``target``, pairwise; returns the bytes moved.

        ``within``, (offset, length) in bytes, moves that piece of each block alone: as blocks are [layers, ...], a
        group of layers. Every byte is in place on return. After a cancelled read nothing more is written. Raises
        ``OfferRefused`` before a byte moves where a block number or the piece is wrong, ``PeerLost`` where the peer is
        gone.
        """
        ...

    async def generation(self, source: Sequence[int]) -> int:
        """The highest generation of the peer's blocks ``source`` now, as it is at the source; 0 of none.

        Asked after a read: a number above the offer's says that the source has taken blocks back meanwhile, and that
        what was read may be something else. Raises ``OfferRefused``, ``PeerLost``.
        """
        ...

    async def aclose(self) -> None: ...


class Transport(Protocol):
    """A medium. ``publish`` describes a pool of ours in bytes; a peer attaches with them.

    One that copies within the host alone says so by ``network = False``; all others' blocks are verified by default.
    """

    scheme: str

    def publish(self, memory: BlockMemory) -> bytes: ...

    async def attach(self, descriptor: bytes, into: BlockMemory) -> Remote:
        """Open a peer's pool for reads into ``into``. Raises ``LayoutMismatch`` where block sizes differ."""
        ...

    async def aclose(self) -> None: ...


def check_read(
    scheme: str, source: Sequence[int], blocks: int, target: Sequence[int], into: BlockMemory, within: Within
) -> tuple[int, int]:
    """The piece of each block that a read moves; ``OfferRefused`` where it would touch what it must not."""
    check_blocks(scheme, source, blocks, target, into)
    offset, length = within or (0, into.block_bytes)
    if offset < 0 or length < 1 or offset + length > into.block_bytes:
        text = f"bytes {offset} to {offset + length} of blocks of {into.block_bytes} bytes"
        raise OfferRefused(text, "blocks", scheme)
    return offset, length


def check_blocks(scheme: str, source: Sequence[int], blocks: int, target: Sequence[int], into: BlockMemory) -> None:
    """Raise ``OfferRefused`` where a read would touch what it must not; before a byte moves."""
    if len(source) != len(target):
        raise OfferRefused(f"{len(source)} source blocks for {len(target)} target blocks", "blocks", scheme)
    if len(set(target)) != len(target):
        raise OfferRefused("a target block is named twice", "blocks", scheme)
    check_numbers(scheme, "source", source, blocks)
    check_numbers(scheme, "target", target, into.blocks)


def check_numbers(scheme: str, name: str, numbers: Sequence[int], size: int) -> None:
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


async def copy(target: Pool, source: Pool, to: Sequence[int], start: Sequence[int], piece: tuple[int, int]) -> int:
    """Copy a piece (offset, length) of the blocks ``start`` into the blocks ``to``; returns the bytes moved.

    The loop turns at least once for every ``TURN_BYTES``. A thread costs as much to get to as several of them: it is
    asked for large copies alone, and for those of a GPU, which wait for it. Nothing is written after a cancel.
    """
    offset, length = piece
    moved = len(to) * length
    if moved > (INLINE_BYTES if isinstance(target, np.ndarray) and isinstance(source, np.ndarray) else 0):
        await finish(asyncio.to_thread(copy_blocks, target, source, to, start, piece))
        return moved
    blocks, end = max(1, TURN_BYTES // length), offset + length
    for first in range(0, len(to), blocks):
        now = slice(first, first + blocks)
        for begin in range(offset, end, TURN_BYTES):
            if first or begin > offset:
                await asyncio.sleep(0)
            copy_blocks(target, source, to[now], start[now], (begin, min(TURN_BYTES, end - begin)))
    return moved


async def finish(copying: Coroutine[Any, Any, object]) -> None:
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
