"""Contract of a transport: publish a pool, attach to a peer's pool, read blocks; whatever one raises fails one read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from trinity.errors import OfferRefused, TransportError, describe_error
from trinity.memory.block_memory import BlockMemory, is_within, list_units
from trinity.memory.block_memory import ByteRange as ByteRange
from trinity.memory.block_memory import Strided as Strided
from trinity.memory.block_memory import find_runs as find_runs
from trinity.memory.native import Pool, PoolCopier

MAX_REQUEST_BYTES = 16 << 20  # of one request to the source of a pool
TURN_BYTES = 4 << 20  # copied between two turns of the event loop, in about 200 µs
INLINE_COPY_BYTES = 32 << 20  # copied on the event loop: takes less than ten hand-overs to a thread and back
logger = logging.getLogger("trinity")
T = TypeVar("T")


class Remote(Protocol):
    """A peer's pool, attached to a local one: blocks are pulled from it (TriInfer 4.3, step 3)."""

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        """Copy the peer's blocks ``source`` into the local blocks ``target``, pairwise; return the bytes moved.

        ``within`` (None for all) moves only that part of each block: offset and length in bytes for a group of
        layers, since blocks are [layers, ...], or ``Strided`` for the rows of a block that is not full. ``check_read``
        turns each of them into a ``CopyPlan``. The source's blocks are written and the target's free of queued writes
        (decision 0048): a read waits for no device before it begins. Every byte is in place on return; after a
        cancelled read nothing more is written. Raises ``OfferRefused`` before a byte moves if a block number or
        ``within`` is out of range, and ``PeerLost`` if the peer is gone.
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
    verified by digests unless the connector says otherwise. One that needs pools in memory files, which other processes
    can map, sets ``shared = True``. One that can let go of a pool before it is closed has ``withdraw(memory)``, and one
    that can start what serves pools of this host's memory before there is any has ``prepare()``, which may block.
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


class CopyPlan(NamedTuple):
    """Bytes that a read moves: of unit ``source[i]`` those from ``offset`` on, ``length`` of them, to ``target[i]``.

    Both pools count as units of ``unit_bytes``: blocks, or the equal parts of blocks that ``Strided`` selects from.
    """

    source: Sequence[int]
    target: Sequence[int]
    offset: int
    length: int
    unit_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes that the read moves."""
        return len(self.source) * self.length

    @property
    def piece(self) -> tuple[int, int]:
        """Offset and length in bytes of what moves of each unit."""
        return self.offset, self.length


def check_read(
    scheme: str, source: Sequence[int], blocks: int, target: Sequence[int], into: BlockMemory, within: ByteRange
) -> CopyPlan:
    """Check a read and plan what it copies.

    ``blocks`` is the number of blocks in the peer's pool. Raises ``OfferRefused`` if the read would leave a pool or a
    block, name a target block twice, or pair unequal numbers of blocks. Call it before a byte moves.
    """
    check_blocks(scheme, source, blocks, target, into)
    size = into.block_bytes
    if not isinstance(within, Strided):
        offset, length = within or (0, size)
        if offset < 0 or length < 1 or offset + length > size:
            text = f"bytes {offset} to {offset + length} are not within a block of {size} bytes"
            raise OfferRefused(text, "blocks", scheme)
        return CopyPlan(source, target, offset, length, size)
    if not is_within(within, size):
        raise OfferRefused(f"{within} is not within a block of {size} bytes", "blocks", scheme)
    if within.runs == 1:
        return CopyPlan(source, target, within.offset, within.length, size)
    theirs, ours = list_units(source, within, size), list_units(target, within, size)
    return CopyPlan(theirs, ours, within.offset % within.stride, within.length, within.stride)


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


async def copy_pieces(target: Pool, source: Pool, plan: CopyPlan) -> int:
    """Copy what ``plan`` says from one pool to another; return the bytes moved. See ``run_copy``."""
    return await run_copy(PoolCopier(target, source), plan)


async def run_copy(copier: PoolCopier, plan: CopyPlan) -> int:
    """Copy what ``plan`` says between the pools of ``copier``; return the bytes moved.

    Small copies between CPU pools run on the event loop, which gets a turn after every ``TURN_BYTES``. Copies above
    ``INLINE_COPY_BYTES`` run on a thread, because reaching one takes as long as several turns; so do copies of a GPU,
    which block until the device has run them. Nothing is written after a cancellation.
    """
    unit_bytes, moved = plan.unit_bytes, plan.bytes
    if moved > (INLINE_COPY_BYTES if copier.on_host else 0):
        await wait_for_copy(asyncio.to_thread(copier.copy, unit_bytes, plan.target, plan.source, plan.piece))
        return moved
    if moved <= TURN_BYTES:
        copier.copy(unit_bytes, plan.target, plan.source, plan.piece)
        return moved
    units, end = max(1, TURN_BYTES // plan.length), plan.offset + plan.length
    for first in range(0, len(plan.target), units):
        now = slice(first, first + units)
        for begin in range(plan.offset, end, TURN_BYTES):
            if first or begin > plan.offset:
                await asyncio.sleep(0)
            copier.copy(unit_bytes, plan.target[now], plan.source[now], (begin, min(TURN_BYTES, end - begin)))
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


async def contain(call: Awaitable[T], scheme: str) -> T:
    """Await a transport's call. Raises what it raises, but ``TransportError`` for what would end more than its read.

    That is SystemExit, which would end the program, and a CancelledError that nobody asked for: that of a task of the
    transport's own.
    """
    try:
        return await call
    except (Exception, KeyboardInterrupt):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TransportError("the transport cancelled its own call", scheme) from error
    except BaseException as error:
        raise TransportError(f"the transport raised {describe_error(error)}", scheme) from error


async def gather_or_cancel(reads: Iterable[Coroutine[Any, Any, int]]) -> list[int]:
    """Await reads that run side by side; if one fails, the others have ended before its error is raised."""
    first, *others = reads
    if not others:
        return [await first]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in (first, *others)]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def withdraw(transport: Transport, memory: BlockMemory) -> None:
    """Have a transport let go of a pool before it ends itself, where it has ``withdraw``. Errors are logged."""
    try:
        getattr(transport, "withdraw", lambda _: None)(memory)
    except Exception:
        logger.exception("%r could not withdraw a pool", transport)
