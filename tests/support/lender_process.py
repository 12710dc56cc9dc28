"""The process that lends a pool to a test: ``python lender_process.py SCHEME BLOCKS BLOCK_BYTES``.

It prints the descriptor. "close" closes the transport, "revoke BLOCK GENERATION" sets a block's generation; each order
on stdin is answered by a line. On a CPU it imports no torch, to start soon: there are a hundred of them in each run.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

import numpy as np

from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.transport import Transport, make_transport

EMPTY = -1  # a word that no process lends


def numbers(blocks: int, block_bytes: int) -> np.ndarray:
    """What the process lends: every word is its own number."""
    return np.arange(blocks * block_bytes // 8).reshape(blocks, -1)


def make_memory(blocks: int, block_bytes: int, device: str) -> BlockMemory:
    """A pool of int64 that holds its ``numbers``."""
    if device == "cpu":
        memory = BlockMemory(BlockShape("kv", (block_bytes // 8,), np.dtype(np.int64)), blocks, shared=True)
        fill(memory)
        return memory
    import torch

    memory = BlockMemory(BlockShape("kv", (block_bytes // 8,), torch.int64), blocks, device, shared=True)
    memory.tensor.copy_(torch.from_numpy(numbers(blocks, block_bytes)))
    return memory


def fill(memory: BlockMemory) -> None:
    assert memory.raw is not None
    memory.raw.view(np.int64)[:] = numbers(memory.blocks, memory.block_bytes)


async def lend(transport: Transport, memory: BlockMemory, calls: Callable[[], str] = lambda: "") -> None:
    print(transport.publish(memory).hex(), flush=True)
    while order := (await asyncio.to_thread(sys.stdin.readline)).split():
        if order[0] == "close":
            await transport.aclose()
        elif order[0] == "revoke":
            memory.generations[int(order[1])] = int(order[2])
        print("done", calls() if order[0] == "calls" else "", flush=True)


if __name__ == "__main__":
    scheme, size = sys.argv[1], (int(sys.argv[2]), int(sys.argv[3]))
    asyncio.run(lend(make_transport(scheme), make_memory(*size, os.environ.get("DEVICE", "cpu"))))
