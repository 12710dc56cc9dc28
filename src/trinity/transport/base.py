"""Contract of a transport: publish a pool, attach to a peer's pool, read blocks from it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from trinity.errors import OfferRefused
from trinity.memory.block_memory import BlockMemory
from trinity.memory.native import ByteRange as ByteRange
from trinity.memory.native import Pool, copy_blocks

MAX_REQUEST_BYTES = 16 << 20  # of one request to the source of a pool
TURN_BYTES = 4 << 20  # copied between two turns of the event loop, in about 200 µs
INLINE_COPY_BYTES = 32 << 20  # copied on the event loop: takes less than ten hand-overs to a thread and back


class Remote(Protocol):
    """A peer's pool, attached to a local one: blocks are pulled from it (TriInfer 4.3, step 3)."""

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        """Copy the peer's blocks ``source`` into the local blocks ``target``, pairwise; return the bytes moved.

        ``within`` (offset and length in bytes, None for all) moves only that part of each block. Blocks are
        [layers, ...], so it selects a group of layers. Every byte is in place on return; after a cancelled read
        nothing more is written. Raises ``OfferRefused`` before a byte moves if a block number or ``within`` is out of
        range, and ``PeerLost`` if the peer is gone.
        """
        ...

    async def generation(self, source: Sequence[int]) -> int:
        """Fetch the highest current generation of the peer's blocks ``source``; 0 if ``source`` is empty.

        Called after a read. A generation above the offer's means that the source has taken blocks back since, so the
        bytes read may belong to something else. Raises ``OfferRefused``, ``PeerLost``.
        """
        ...

    async def aclose(self) -> None:
        """Detach from the pool. Calling it twice does no harm."""
        ...


class Transport(Protocol):
    """Medium that moves blocks between pools of different instances.

    ``scheme`` is its name. A transport that never leaves the host sets ``network = False``; blocks of all others are
    verified by digests unless the connector says otherwise.
    """

    scheme: str

    def publish(self, memory: BlockMemory) -> bytes:
        """Make a local pool readable by peers; return the descriptor with which they attach to it."""
        ...

    async def attach(self, descriptor: bytes, into: BlockMemory) -> Remote:
        """Open a peer's pool for reads into ``into``. Raises ``LayoutMismatch`` if block sizes differ."""
        ...

    async def aclose(self) -> None:
        """Detach from every peer and withdraw every published pool."""
        ...


def check_read(
    scheme: str, source: Sequence[int], blocks: int, target: Sequence[int], into: BlockMemory, within: ByteRange
) -> tuple[int, int]:
    """Check a read and resolve ``within`` to the (offset, length) in bytes that it moves of each block.

    ``blocks`` is the number of blocks in the peer's pool. Raises ``OfferRefused`` if the read would leave a pool or a
    block, name a target block twice, or pair unequal numbers of blocks. Call it before a byte moves.
    """
    check_blocks(scheme, source, blocks, target, into)
    offset, length = within or (0, into.block_bytes)
    if offset < 0 or length < 1 or offset + length > into.block_bytes:
        text = f"bytes {offset} to {offset + length} are not within a block of {into.block_bytes} bytes"
        raise OfferRefused(text, "blocks", scheme)
    return offset, length


def check_blocks(scheme: str, source: Sequence[int], blocks: int, target: Sequence[int], into: BlockMemory) -> None:
    """Raise ``OfferRefused`` if the block numbers of a read are out of range, unpaired or name a target twice."""
    if len(source) != len(target):
        raise OfferRefused(f"{len(source)} source blocks for {len(target)} target blocks", "blocks", scheme)
    if len(set(target)) != len(target):
        raise OfferRefused("a target block is named twice", "blocks", scheme)
    check_block_numbers(scheme, "source", source, blocks)
    check_block_numbers(scheme, "target", target, into.blocks)


def check_block_numbers(scheme: str, name: str, numbers: Sequence[int], size: int) -> None:
    """Raise ``OfferRefused`` if a block number is outside a pool of ``size`` blocks; ``name``: which side's."""
    if numbers and not (min(numbers) >= 0 and max(numbers) < size):
        raise OfferRefused(
            f"{name} blocks {min(numbers)} to {max(numbers)} are not in a pool of {size}", "blocks", scheme
        )


def find_runs(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, length) of the longest runs of blocks that are consecutive on both sides."""
    start = 0
    for index in range(1, len(source) + 1):
        broken = index == len(source) or (
            source[index] != source[index - 1] + 1 or target[index] != target[index - 1] + 1
        )
        if broken:
            yield source[start], target[start], index - start
            start = index


async def copy_pieces(
    target: Pool, source: Pool, to: Sequence[int], start: Sequence[int], piece: tuple[int, int]
) -> int:
    """Copy ``piece`` (offset, length in bytes) of the blocks ``start`` into the blocks ``to``; return the bytes moved.

    Small copies between CPU pools run on the event loop, which gets a turn after every ``TURN_BYTES``. Copies above
    ``INLINE_COPY_BYTES`` run on a thread, because reaching one takes as long as several turns; so do copies of a GPU,
    which block. Nothing is written after a cancellation.
    """
    offset, length = piece
    moved = len(to) * length
    if moved > (INLINE_COPY_BYTES if isinstance(target, np.ndarray) and isinstance(source, np.ndarray) else 0):
        await wait_for_copy(asyncio.to_thread(copy_blocks, target, source, to, start, piece))
        return moved
    blocks, end = max(1, TURN_BYTES // length), offset + length
    for first in range(0, len(to), blocks):
        now = slice(first, first + blocks)
        for begin in range(offset, end, TURN_BYTES):
            if first or begin > offset:
                await asyncio.sleep(0)
            copy_blocks(target, source, to[now], start[now], (begin, min(TURN_BYTES, end - begin)))
    return moved


async def wait_for_copy(copying: Coroutine[Any, Any, object]) -> None:
    """Await a copy to its end even if the caller is cancelled, because a thread cannot be stopped half-way."""
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
