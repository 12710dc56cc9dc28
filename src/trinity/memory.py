"""BlockMemory: the tensor behind one pool of blocks, seen as typed rows by stages and as bytes by transports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    has on a CPU), or uint8 where a block is not a multiple of 8 bytes.
    """

    def __init__(self, shape: BlockShape, blocks: int, device: str = "cpu") -> None:
        import torch

        self.shape, self.blocks, self.device = shape, blocks, device
        if torch.device(device).type == "cpu":
            self.tensor = _untouched_zeros(blocks * shape.block_bytes).view(shape.dtype).view(blocks, *shape.shape)
        else:
            self.tensor = torch.zeros((blocks, *shape.shape), dtype=shape.dtype, device=device)

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


def _untouched_zeros(size: int) -> torch.Tensor:
    """``size`` zero bytes that cost no memory until they are written: a pool larger than its use stays cheap."""
    import numpy as np
    import torch

    return torch.from_numpy(np.zeros(size, dtype=np.uint8))
