"""The two processes of a measured transport.

python benchmarks/transfers/probe.py lend SCHEME publishes the pools that a line of JSON on stdin names, prints their
descriptors and lends until stdin ends. python benchmarks/transfers/probe.py read SCHEME reads them as a line of JSON
on stdin says, and prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import torch

from trinity.memory import native
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.transport import Remote, Transport, make_transport
from trinity.transport.shm import ShmDescriptor, map_pool

LEAST, MOST = 5, 200  # rounds of a case
Copy = Callable[[int], Awaitable[Any]]  # of so many bytes in one piece


def pool(blocks: int, block_bytes: int, fill: int, device: str = "cpu") -> BlockMemory:
    """A pool whose every page has been written."""
    memory = BlockMemory(BlockShape("kv", (block_bytes // 8,), torch.int64), blocks, device, shared=True)
    memory.tensor.copy_(torch.arange(fill, fill + blocks * block_bytes // 8).view(blocks, -1))
    return memory


async def lend(transport: Transport) -> None:
    order = json.loads(sys.stdin.readline())
    device = order.get("device", "cpu")
    memories = [pool(blocks, block_bytes, 7, device) for blocks, block_bytes in order["pools"]]
    print(json.dumps([transport.publish(memory).hex() for memory in memories]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.aclose()


class Reader:
    """The consumer: blocks of the first pool one way, as many bytes in one piece the other."""

    def __init__(self, transport: Transport, order: dict[str, Any]) -> None:
        self.transport, self.scheme = transport, transport.scheme
        self.blocks, self.block_bytes = order["pools"][0]
        self.seconds: float = order["seconds"]
        self.counts: list[int] = order["counts"]
        self.ours = pool(self.blocks, self.block_bytes, 0)
        self.order = random.Random(1)

    async def measure(self, descriptors: Sequence[bytes]) -> list[dict[str, Any]]:
        own = None
        if self.scheme == "inproc":  # source and target are in one process
            own = pool(self.blocks, self.block_bytes, 7)
            descriptors = [self.transport.publish(own)]
        remote = await self.transport.attach(descriptors[0], self.ours)
        copy = await self._one_piece(descriptors, own)
        return [await self._case(remote, copy, count) for count in self.counts]

    async def _one_piece(self, descriptors: Sequence[bytes], own: BlockMemory | None) -> Copy:
        """The limit: on this host one pass of csrc over the same memory, elsewhere one piece by the same transport."""
        if own is not None or self.scheme == "shm":
            peer = msgspec.msgpack.decode(descriptors[0], type=ShmDescriptor) if own is None else None
            theirs = own.raw if own is not None else map_pool(peer) if peer is not None else None
            ours = self.ours.raw
            assert theirs is not None
            assert ours is not None
            flat = (theirs.reshape(-1), ours.reshape(-1))

            async def copy(size: int) -> int:
                source, target = (each[:size].reshape(1, size) for each in flat)
                return native.copy_blocks(target, source, [0], [0])

            return copy
        whole = pool(1, self.blocks * self.block_bytes, 0)
        remote = await self.transport.attach(descriptors[1], whole)
        return lambda size: remote.read([0], [0], (0, size))

    async def _case(self, remote: Remote, copy: Copy, count: int) -> dict[str, Any]:
        source, target = (self.order.sample(range(self.blocks), count) for _ in range(2))
        size = count * self.block_bytes
        reads: list[float] = []
        copies: list[float] = []
        digests: list[float] = []
        until = time.perf_counter() + self.seconds
        while len(reads) < LEAST or (time.perf_counter() < until and len(reads) < MOST):  # in turn: noise hits them all
            reads.append(await timed(lambda: remote.read(source, target)))
            native.compute_digests(self.ours.pool, range(count))  # as the read's target: stores by a cache that has it
            copies.append(await timed(lambda: copy(size)))
            started = time.perf_counter()
            native.compute_digests(self.ours.pool, target)
            digests.append(time.perf_counter() - started)
        await remote.read(source, target)  # last, because the copy in one piece wrote other bytes there
        assert torch.equal(self.ours.tensor[target[-1]], self._lent(source[-1])), "not what was lent"
        return {"count": count, "bytes": size, "reads": reads, "copies": copies, "digests": digests}

    def _lent(self, block: int) -> torch.Tensor:
        words = self.block_bytes // 8
        return torch.arange(7 + block * words, 7 + (block + 1) * words)


async def timed(run: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    await run()
    return time.perf_counter() - started


async def read(transport: Transport) -> None:
    order = json.loads(sys.stdin.readline())
    found = await Reader(transport, order).measure([bytes.fromhex(each) for each in order["descriptors"]])
    print(json.dumps(found), flush=True)
    await transport.aclose()


async def main(role: str, scheme: str) -> None:
    await {"lend": lend, "read": read}[role](make_transport(scheme))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
