"""Contract of every transport, as the function ``check_transport``, without a test framework.

Call it from your own tests: ``asyncio.run(check_transport(MyTransport))``. It raises ``AssertionError``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from trinity.errors import HandshakeError, LayoutMismatch, TransportError
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.transport.base import ByteRange, Remote, Strided, Transport

POOL_BLOCKS = 32
ContractCheck = Callable[["PoolPair"], Awaitable[None]]


class PoolPair:
    """A published source pool with content, and a target pool attached to it."""

    def __init__(self, transport: Transport, rows: int) -> None:
        self.transport = transport
        self.shape = BlockShape("kv", (2, rows, 8), torch.float32)
        self.source, self.target = (BlockMemory(self.shape, POOL_BLOCKS, shared=True) for _ in range(2))
        self.fill()
        self.descriptor = transport.publish(self.source)

    def fill(self) -> None:
        self.source.tensor.copy_(torch.rand(self.source.tensor.shape))
        self.target.tensor.fill_(-1.0)

    async def attach(self) -> Remote:
        return await self.transport.attach(self.descriptor, self.target)

    def expect(self, source: Sequence[int], target: Sequence[int], what: str, within: ByteRange = None) -> None:
        """Check that the target holds these blocks, or this part of them, and that no other byte was touched."""
        wanted = _bytes(torch.full_like(self.target.tensor, -1.0))
        theirs = _bytes(self.source.tensor)
        for start, to in zip(source, target, strict=True):
            for offset, length in self._runs(within):
                wanted[to, offset : offset + length] = theirs[start, offset : offset + length]
        assert torch.equal(_bytes(self.target.tensor), wanted), (
            f"{what}: the target's blocks are not what was asked for"
        )

    def _runs(self, within: ByteRange) -> list[tuple[int, int]]:
        """List offset and length of each run of bytes that a read moves of one block."""
        if isinstance(within, Strided):
            return [(within.offset + index * within.stride, within.length) for index in range(within.runs)]
        return [within or (0, self.shape.block_bytes)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(POOL_BLOCKS, -1).view(torch.uint8)


async def check_transport(make: Callable[[], Transport], *, rows: int = 16, timeout_s: float = 30.0) -> None:
    """Check a transport made by ``make`` against the contract of ``Transport`` and ``Remote``.

    ``rows`` sets the block size (2 * rows * 8 floats). Raises ``AssertionError`` naming what broke.
    """
    for check in CHECKS:
        await asyncio.sleep(0)  # a transport that never waits would do all of this in one turn of the loop
        await _check(make(), check, rows, timeout_s)
    transport = make()
    for _ in range(2):  # twice must be harmless
        getattr(transport, "prepare", lambda: None)()
    await _check(transport, reads_in_order_and_scattered, rows, timeout_s)


async def _check(transport: Transport, check: ContractCheck, rows: int, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await check(PoolPair(transport, rows))
    except TimeoutError as error:
        raise AssertionError(f"{check.__name__}: no answer within {timeout_s} s") from error
    finally:
        await transport.aclose()
        await transport.aclose()  # closing twice must be harmless


async def descriptor_is_bytes(pair: PoolPair) -> None:
    assert isinstance(pair.descriptor, bytes), "publish() must return bytes"


async def reads_in_order_and_scattered(pair: PoolPair) -> None:
    remote = await pair.attach()
    for source, target in (([0, 1, 2], [4, 5, 6]), ([7, 3, 9], [2, 0, 31]), ([5], [5]), ([1, 1], [8, 9])):
        pair.fill()
        moved = await remote.read(source, target)
        assert moved == len(source) * pair.shape.block_bytes, f"read() said {moved} bytes"
        pair.expect(source, target, f"read {source} into {target}")
    await remote.aclose()


async def empty_read(pair: PoolPair) -> None:
    remote = await pair.attach()
    assert await remote.read([], []) == 0
    pair.expect([], [], "an empty read")


async def latest_bytes_are_seen(pair: PoolPair) -> None:
    remote = await pair.attach()
    await remote.read([3], [3])
    pair.source.tensor[3].fill_(7.0)
    await remote.read([3], [3])
    pair.expect([3], [3], "a second read after the source changed")


async def bad_arguments_are_refused(pair: PoolPair) -> None:
    remote = await pair.attach()
    for source, target in (
        ([0, 1], [0]),
        ([POOL_BLOCKS], [0]),
        ([-1], [0]),
        ([0], [POOL_BLOCKS]),
        ([0], [-1]),
        ([0, 1], [2, 2]),
    ):
        with _must_refuse(f"read({source}, {target})"):
            await remote.read(source, target)
        pair.expect([], [], f"the refused read {source} into {target}")


async def pieces_of_blocks(pair: PoolPair) -> None:
    remote = await pair.attach()
    size = pair.shape.block_bytes
    for offset, length in ((0, 8), (8, 16), (size // 2, size // 2), (size - 8, 8), (4, 12), (0, size)):
        for source, target in (([0, 1, 2], [4, 5, 6]), ([7, 3], [2, 31])):
            pair.fill()
            moved = await remote.read(source, target, (offset, length))
            assert moved == len(source) * length, f"read() of {length} bytes of each block said {moved} bytes"
            pair.expect(source, target, f"read {source} into {target} within {offset}, {length}", (offset, length))


async def rows_of_blocks(pair: PoolPair) -> None:
    """Check reads of the first rows of blocks, which are pieces at equal distances: [2, rows, 8] floats here."""
    remote = await pair.attach()
    stride = pair.shape.block_bytes // 2
    for within in (Strided(0, 32, stride, 2), Strided(stride, 96, stride, 1), Strided(8, stride // 2, stride, 2)):
        for source, target in (([5], [5]), ([0, 1, 2], [4, 5, 6]), ([7, 3], [2, 31])):
            pair.fill()
            moved = await remote.read(source, target, within)
            wanted = len(source) * within.runs * within.length
            assert moved == wanted, f"read() of {wanted} bytes in pieces at equal distances said {moved} bytes"
            pair.expect(source, target, f"read {source} into {target} within {within}", within)


async def bad_pieces_are_refused(pair: PoolPair) -> None:
    remote = await pair.attach()
    size = pair.shape.block_bytes
    half = size // 2
    wrong: list[ByteRange] = [(-8, 8), (0, size + 1), (size, 8), (size - 8, 16), (0, -8), (8, 0)]
    wrong += [Strided(-8, 8, half, 2), Strided(0, 8, half, 3), Strided(half, 8, half, 2), Strided(0, half + 8, half, 2)]
    wrong += [Strided(8, half, half, 2), Strided(0, 8, half - 8, 2), Strided(0, 8, 0, 2), Strided(0, 0, half, 2)]
    for within in (*wrong, Strided(0, 8, half, 0)):
        with _must_refuse(f"read(within={within})"):
            await remote.read([0], [1], within)
        pair.expect([], [], f"the refused read within {within}")


async def generations_are_the_sources(pair: PoolPair) -> None:
    """Check that a reader gets the source's generations of the moment when it asks."""
    remote = await pair.attach()
    assert await remote.generation([]) == 0
    assert await remote.generation(range(POOL_BLOCKS)) == 0, "generations are zero at first"
    numbers = {3: 1, 17: 5, POOL_BLOCKS - 1: 1 << 40}
    for block, number in numbers.items():
        pair.source.generations[block] = number
    for blocks, wanted in (([0, 1], 0), ([3], 1), ([4, 3, 17], 5), ([17, 0], 5), (list(range(POOL_BLOCKS)), 1 << 40)):
        found = await remote.generation(blocks)
        assert found == wanted, f"generation({blocks}) said {found}, it is {wanted}"
    pair.source.generations[3] = 7
    assert await remote.generation([3]) == 7, "a generation that changed after it was asked for once"
    assert list(await asyncio.gather(*(remote.generation([block]) for block in (17, 3, 0)))) == [5, 7, 0]
    for blocks in ([POOL_BLOCKS], [-1]):
        with _must_refuse(f"generation({blocks})"):
            await remote.generation(blocks)


@contextmanager
def _must_refuse(what: str) -> Iterator[None]:
    try:
        yield
    except TransportError:
        return
    raise AssertionError(f"{what} must raise a TransportError before a byte moves")


async def another_layout_is_refused(pair: PoolPair) -> None:
    other = BlockMemory(BlockShape("kv", (3, 16, 8), torch.float32), 4)
    try:
        await pair.transport.attach(pair.descriptor, other)
    except LayoutMismatch:
        return
    raise AssertionError("attach() with blocks of another size must raise LayoutMismatch")


async def garbage_descriptor_is_refused(pair: PoolPair) -> None:
    for garbage in (b"", b"\x00" * 7, b"\xff" * 64):
        try:
            await pair.transport.attach(garbage, pair.target)
        except HandshakeError:
            continue
        raise AssertionError(f"attach({garbage!r}) must raise HandshakeError")


async def concurrent_reads(pair: PoolPair) -> None:
    remote = await pair.attach()
    await asyncio.gather(*(remote.read([block], [POOL_BLOCKS - 1 - block]) for block in range(16)))
    pair.expect(list(range(16)), [POOL_BLOCKS - 1 - block for block in range(16)], "16 reads at once")


async def nothing_is_written_after_cancel(pair: PoolPair) -> None:
    remote = await pair.attach()
    reading = asyncio.ensure_future(remote.read(list(range(POOL_BLOCKS)), list(range(POOL_BLOCKS))))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    before = pair.target.tensor.clone()
    pair.source.tensor.fill_(9.0)
    await asyncio.sleep(0.05)
    assert torch.equal(pair.target.tensor, before), "bytes were written after a cancelled read had returned"


async def the_loop_keeps_turning(pair: PoolPair) -> None:
    remote = await pair.attach()
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.ensure_future(turn())
    for _ in range(8):
        await remote.read(list(range(POOL_BLOCKS)), list(range(POOL_BLOCKS)))
        await asyncio.sleep(0)
    turning.cancel()
    assert turns >= 8, f"the event loop turned only {turns} times during 8 reads"


async def a_closed_peer_is_lost(pair: PoolPair) -> None:
    remote = await pair.attach()
    await pair.transport.aclose()
    with _must_refuse("a read from a closed peer"):
        await remote.read([0], [0])
    pair.expect([], [], "a read from a closed peer")
    with _must_refuse("generation() of a closed peer"):
        await remote.generation([0])


CHECKS: tuple[ContractCheck, ...] = (
    descriptor_is_bytes,
    reads_in_order_and_scattered,
    empty_read,
    latest_bytes_are_seen,
    pieces_of_blocks,
    rows_of_blocks,
    bad_pieces_are_refused,
    generations_are_the_sources,
    bad_arguments_are_refused,
    another_layout_is_refused,
    garbage_descriptor_is_refused,
    concurrent_reads,
    nothing_is_written_after_cancel,
    the_loop_keeps_turning,
    a_closed_peer_is_lost,
)
