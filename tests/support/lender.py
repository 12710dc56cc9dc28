"""Processes that lend a pool, for tests of transports: ``lending`` starts one, ``Lending`` gives it its orders."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from support import lender_process
from support.lender_process import EMPTY as EMPTY
from support.paths import PYTHON_PATH
from trinity.errors import TransportUnavailable
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.transport import make_transport

LIVENESS_S = 120.0


def ready(scheme: str) -> None:
    """Skip the test where a transport is not installed; CI has every one of them."""
    try:
        for each in ("nixl", "ucx") if scheme == "auto" else (scheme,):
            make_transport(each)
    except TransportUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def pool(blocks: int, block_bytes: int, device: str = "cpu") -> BlockMemory:
    """A pool of int64 that no source holds."""
    memory = BlockMemory(BlockShape("kv", (block_bytes // 8,), torch.int64), blocks, device, shared=True)
    memory.tensor.fill_(EMPTY)
    return memory


def lent(blocks: int, block_bytes: int) -> torch.Tensor:
    """What the process lends: every word is its own number."""
    return torch.from_numpy(lender_process.numbers(blocks, block_bytes))


class Lending:
    """The process, its descriptor, and commands to it."""

    def __init__(self, process: asyncio.subprocess.Process, descriptor: bytes) -> None:
        self.process, self.descriptor = process, descriptor

    async def close(self) -> None:
        """Have it close its transport; it lives on, and its memory stays."""
        await self._order("close")

    async def revoke(self, block: int, generation: int) -> None:
        await self._order(f"revoke {block} {generation}")

    async def calls(self) -> list[str]:
        """What it has called of the driver, where that is a stand-in."""
        return await self._order("calls")

    async def _order(self, order: str) -> list[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(order.encode() + b"\n")
        answer = (await self.process.stdout.readline()).decode().split()
        assert answer[:1] == ["done"]
        return answer[1:]


@asynccontextmanager
async def lending(
    scheme: str, blocks: int, block_bytes: int, script: str = lender_process.__file__, **variables: str
) -> AsyncIterator[Lending]:
    command = (sys.executable, script, scheme, str(blocks), str(block_bytes))
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, **variables}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)
    try:
        assert process.stdout is not None
        yield Lending(process, bytes.fromhex((await process.stdout.readline()).decode()))
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def shuffled(blocks: int) -> list[int]:
    """All blocks, no two neighbours side by side: one message each."""
    return [*range(0, blocks, 2), *range(1, blocks, 2)]


async def holds(memory: BlockMemory, order: list[int]) -> bool:
    """Whether a pool has what a process lent, in that order: compared in a thread, as a pool may be large."""

    def same() -> bool:
        return torch.equal(memory.tensor.cpu(), lent(memory.blocks, memory.block_bytes)[order])

    return await asyncio.to_thread(same)


async def begun(memory: BlockMemory) -> None:
    """Until the first bytes of a transfer are there."""
    async with asyncio.timeout(LIVENESS_S):
        while not bool((memory.tensor[:, 0] != EMPTY).any()):
            await asyncio.sleep(0)


async def ends(reading: asyncio.Future[int]) -> BaseException | None:
    """How a read ends, and that it does."""
    await asyncio.wait([reading], timeout=LIVENESS_S)
    assert reading.done(), "the read hangs"
    return asyncio.CancelledError() if reading.cancelled() else reading.exception()
