"""A process that reads a pool again and again, for tests of sources: ``python reader.py SCHEME BLOCKS BLOCK_BYTES``.

The descriptor comes on its stdin; it writes a line after each read of all blocks. It imports no torch, to start soon.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from support.paths import PYTHON_PATH
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.transport import make_transport


@asynccontextmanager
async def reading(scheme: str, descriptor: bytes, blocks: int, block_bytes: int) -> AsyncIterator[Reader]:
    command = (sys.executable, __file__, scheme, str(blocks), str(block_bytes))
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)
    try:
        assert process.stdin is not None
        process.stdin.write(descriptor.hex().encode() + b"\n")
        yield Reader(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


class Reader:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def rounds(self, count: int) -> None:
        """Until it has read all blocks so many times more, each time what was lent."""
        assert self.process.stdout is not None
        for _ in range(count):
            assert await self.process.stdout.readline() == b"exact\n"


async def read(scheme: str, blocks: int, block_bytes: int) -> None:
    descriptor = bytes.fromhex(await asyncio.to_thread(sys.stdin.readline))
    memory = BlockMemory(BlockShape("kv", (block_bytes // 8,), np.dtype(np.int64)), blocks, shared=True)
    assert memory.raw is not None
    order = [*range(0, blocks, 2), *range(1, blocks, 2)]
    found, wanted = memory.raw.view(np.int64), np.arange(blocks * block_bytes // 8).reshape(blocks, -1)[order]
    transport = make_transport(scheme)
    remote = await transport.attach(descriptor, memory)
    while True:
        found[:] = 0
        await remote.read(order, range(blocks))
        print("exact" if np.array_equal(found, wanted) else "different", flush=True)


if __name__ == "__main__":
    asyncio.run(read(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
