"""A process that lends a pool, for tests of transports: started by ``Lending``, commanded by lines on its stdin.

``python lending.py SCHEME BLOCKS BLOCK_BYTES`` prints the descriptor; "close" closes the transport and says so.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from trinity.errors import TransportUnavailable
from trinity.memory import BlockMemory, BlockShape
from trinity.transport import Transport, make_transport

EMPTY = -1


def ready(scheme: str) -> None:
    """Skip the test where a transport is not installed; CI has every one of them."""
    try:
        make_transport(scheme)
    except TransportUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def pool(blocks: int, block_bytes: int) -> BlockMemory:
    """A pool of int64 that no source holds."""
    memory = BlockMemory(BlockShape("kv", (block_bytes // 8,), torch.int64), blocks, shared=True)
    memory.tensor.fill_(EMPTY)
    return memory


def lent(blocks: int, block_bytes: int) -> torch.Tensor:
    """What the process lends: every word is its own number."""
    return torch.arange(blocks * block_bytes // 8).view(blocks, -1)


class Lending:
    """The process, its descriptor, and commands to it."""

    def __init__(self, process: asyncio.subprocess.Process, descriptor: bytes) -> None:
        self.process, self.descriptor = process, descriptor

    async def close(self) -> None:
        """Have it close its transport; it lives on, and its memory stays."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"close\n")
        assert await self.process.stdout.readline() == b"closed\n"


@asynccontextmanager
async def lending(scheme: str, blocks: int, block_bytes: int) -> AsyncIterator[Lending]:
    command = (sys.executable, __file__, scheme, str(blocks), str(block_bytes))
    source = str(Path(__file__).parent.parent / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)
    try:
        assert process.stdout is not None
        yield Lending(process, bytes.fromhex((await process.stdout.readline()).decode()))
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def lend(transport: Transport, blocks: int, block_bytes: int) -> None:
    memory = pool(blocks, block_bytes)
    memory.tensor.copy_(lent(blocks, block_bytes))
    print(transport.publish(memory).hex(), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        await transport.aclose()
        print("closed", flush=True)


if __name__ == "__main__":
    asyncio.run(lend(make_transport(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
