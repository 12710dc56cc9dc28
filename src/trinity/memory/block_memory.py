"""BlockMemory: the tensor behind one pool of blocks, seen as typed rows by stages and as bytes by transports."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trinity.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

GENERATION_BYTES = 8


@dataclass(frozen=True)
class BlockShape:
    """Shape of one block: image [rows, width]; kv [layers, 2, kv_heads, rows, head_dim] (block-major, head-major).

    ``dtype`` is torch's, or numpy's for blocks that no tensor is made of (paced).
    """

    kind: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def block_bytes(self) -> int:
        size: int = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


class BlockMemory:
    """``tensor`` is [blocks, *shape], contiguous; a block of all layers is one contiguous piece.

    ``raw`` is the same memory as [blocks, block_bytes] uint8 of numpy, None on a GPU. torch is imported where a tensor
    is first asked for: paced instances never do.

    ``words`` is the same memory as [blocks, block_bytes / 8] int64 (index copies of int64 are the fastest that torch
    has on a CPU), or uint8 where a block is not a multiple of 8 bytes.

    ``generations`` is int64 [blocks], zero at first: a source that takes blocks back from a reader raises their
    numbers, and a reader that sees a higher one than it was promised drops what it read.

    With ``shared``, CPU memory is a sealed memory file whose descriptor is ``file``, which other processes of this host
    can map: blocks from byte 0 on, generations from ``generations_at`` on. Memory of a GPU stays where it is, and the
    file has the generations alone. Raises ``ConfigError`` where there is not enough memory.
    """

    def __init__(self, shape: BlockShape, blocks: int, device: str = "cpu", *, shared: bool = False) -> None:
        self.shape, self.blocks, self.device = shape, blocks, device
        self.file: int | None = None
        on_cpu = device.partition(":")[0] == "cpu"
        size = blocks * shape.block_bytes if on_cpu else 0
        self.generations_at = generations_at(size)
        total = self.generations_at + blocks * GENERATION_BYTES
        raw = self._shared(total) if shared else _untouched_zeros(total)
        self.generations = raw[self.generations_at :].view("int64")
        self.raw = raw[:size].reshape(blocks, shape.block_bytes) if on_cpu else None
        if not on_cpu:
            _ = self.tensor  # now, so that a lack of memory is a failure to start

    @cached_property
    def tensor(self) -> torch.Tensor:
        import torch

        dtype = self.shape.dtype
        if self.raw is None:
            return torch.zeros((self.blocks, *self.shape.shape), dtype=dtype, device=self.device)
        return torch.from_numpy(self.raw.reshape(-1)).view(dtype).view(self.blocks, *self.shape.shape)

    @property
    def pool(self) -> np.ndarray | torch.Tensor:
        """What copies and digests of blocks work on, with torch only where the memory is a GPU's."""
        return self.tensor if self.raw is None else self.raw

    @property
    def kind(self) -> str:
        return self.shape.kind

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes

    @property
    def words(self) -> torch.Tensor:
        return self.piece(0, self.block_bytes)

    def piece(self, offset: int, length: int) -> torch.Tensor:
        """Bytes ``offset`` to ``offset + length`` of every block, as [blocks, length / 8] int64 or as uint8."""
        import torch

        flat = self.tensor.view(self.blocks, -1).view(torch.uint8)
        if self.block_bytes % 8 or offset % 8 or length % 8:
            return flat[:, offset : offset + length]
        return flat.view(torch.int64)[:, offset // 8 : (offset + length) // 8]

    def generation(self, blocks: Sequence[int]) -> int:
        """The highest generation of these blocks now; 0 of none."""
        return int(self.generations[list(blocks)].max()) if len(blocks) else 0

    def _shared(self, size: int) -> np.ndarray:
        import numpy as np

        self.file = sealed_file(f"trinity-{self.kind}", size)
        self._closing = weakref.finalize(self, os.close, self.file)
        return np.frombuffer(mmap.mmap(self.file, size), dtype=np.uint8)

    def close(self) -> None:
        """Close the memory file; what is mapped stays until nothing refers to it. Twice is once."""
        if self.file is not None:
            self.file = None
            self._closing()


def generations_at(size: int) -> int:
    """Where the generations of a pool of ``size`` bytes begin in its memory file: on a page of their own."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def sealed_file(name: str, size: int) -> int:
    """A memory file of just this size for ever: a peer that truncated it would kill us with SIGBUS."""
    import fcntl

    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ConfigError(f"no memory file for a pool of {size:,} bytes: {error}") from error
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(file)
        raise ConfigError(f"a pool of {size:,} bytes cannot be had: {error}; make the pools smaller") from error
    return file


def _untouched_zeros(size: int) -> np.ndarray:
    """``size`` zero bytes that cost no memory until they are written: a pool larger than its use stays cheap."""
    import numpy as np

    return np.zeros(size, dtype=np.uint8)
