"""A stand-in for the CUDA driver, and memory of its device: cuda_ipc's logic is tested across processes without a GPU.

``python fake_cuda.py LIBRARY BLOCKS BLOCK_BYTES`` lends a pool as lender_process.py does.
"""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from support.lender_process import EMPTY, fill, lend
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.transport.cuda_ipc import transport as cuda_ipc
from trinity.transport.cuda_ipc.transport import CudaIpcTransport

SOURCE = Path(__file__).with_suffix(".c")
OFFSET = 4096  # of a pool in its allocation


def build(folder: Path) -> str:
    """Compile the stand-in; its path."""
    library = folder / "libcuda-fake.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-O1", "-o", library, SOURCE], check=True)
    return str(library)


class Fake:
    """The library as a test sees it."""

    def __init__(self, library: str) -> None:
        self.path = library
        self.lib: Any = ctypes.CDLL(library)
        self.lib.fake_calls.restype = ctypes.c_char_p
        self.lib.fake_alloc.restype = ctypes.c_uint64
        self.lib.fake_alloc.argtypes = (ctypes.c_size_t,)

    def calls(self) -> list[str]:
        said: bytes = self.lib.fake_calls()
        return said.decode().split()

    def forget(self) -> None:
        self.lib.fake_forget()

    def contexts(self) -> int:
        """How many contexts this thread has made current and not given up."""
        return int(self.lib.fake_current())

    def opens(self) -> int:
        return int(self.lib.fake_opens())

    def pool(self, blocks: int, block_bytes: int) -> BlockMemory:
        """A pool of int64 on the stand-in's device, that no source holds."""
        import torch

        memory = self.memory(BlockShape("kv", (block_bytes // 8,), torch.int64), blocks)
        memory.tensor.fill_(EMPTY)
        return memory

    def memory(self, shape: BlockShape, blocks: int) -> BlockMemory:
        memory = BlockMemory(shape, blocks)
        size = blocks * shape.block_bytes
        device: Any = (ctypes.c_uint8 * size).from_address(self.lib.fake_alloc(OFFSET + size) + OFFSET)
        memory.raw = np.frombuffer(device, np.uint8).reshape(blocks, shape.block_bytes)
        memory.raw[:] = 0
        memory.__dict__.pop("tensor", None)
        return memory

    def transport(self) -> CudaIpcTransport:
        return CudaIpcTransport(self.path)


def on_device(memory: BlockMemory) -> int:
    return 0


if __name__ == "__main__":
    cuda_ipc.device_of = on_device
    fake, blocks, block_bytes = Fake(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    lent = fake.memory(BlockShape("kv", (block_bytes // 8,), np.dtype(np.int64)), blocks)
    fill(lent)
    asyncio.run(lend(fake.transport(), lent, lambda: " ".join(fake.calls())))
