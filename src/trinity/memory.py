"""BlockMemory: the tensor behind one pool of blocks, seen as typed rows by stages and as bytes by transports."""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trinity.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class BlockShape:
    """Shape of one block: image [rows, width]; kv [layers, 2, kv_heads, rows, head_dim] (block-major, head-major)."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


class BlockMemory:
    """``tensor`` is [blocks, *shape], contiguous; a block of all layers is one contiguous piece.

    ``words`` is the same memory as [blocks, block_bytes / 8] int64 (index copies of int64 are the fastest that torch
    has on a CPU), or uint8 where a block is not a multiple of 8 bytes. With ``shared``, CPU memory is a sealed memory
    file whose descriptor is ``file``: other processes of this host can map it. Raises ``ConfigError`` where there is
    not enough memory for it.
    """

    def __init__(self, shape: BlockShape, blocks: int, device: str = "cpu", *, shared: bool = False) -> None:
        import torch

        self.shape, self.blocks, self.device = shape, blocks, device
        self.file: int | None = None
        if torch.device(device).type != "cpu":
            self.tensor = torch.zeros((blocks, *shape.shape), dtype=shape.dtype, device=device)
            return
        size = blocks * shape.block_bytes
        raw = self._shared(size) if shared else _untouched_zeros(size)
        self.tensor = torch.from_numpy(raw).view(shape.dtype).view(blocks, *shape.shape)

    @property
    def kind(self) -> str:
        return self.shape.kind

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes

    @property
    def words(self) -> torch.Tensor:
        import torch

        flat = self.tensor.view(self.blocks, -1).view(torch.uint8)
        return flat.view(torch.int64) if self.block_bytes % 8 == 0 else flat

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
