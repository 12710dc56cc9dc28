"""Ranges of bytes within blocks: one run of bytes of each block, or several runs at equal distances."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from trinity.memory.block_memory import BlockMemory

if TYPE_CHECKING:
    import torch


class Strided(NamedTuple):
    """``runs`` runs of ``length`` bytes of each block, the first at byte ``offset``, ``stride`` bytes apart.

    ``stride`` divides the block, and a run does not cross a multiple of it. The first rows of a KV block
    [layers, 2, heads, rows, head_dim] are such runs: one for each layer, key or value, and head.
    """

    offset: int
    length: int
    stride: int
    runs: int


ByteRange: TypeAlias = "tuple[int, int] | Strided | None"  # (offset, length), runs at equal distances, or all bytes


def layer_byte_range(memory: BlockMemory, layers: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return (offset, length) in bytes of ``layers`` [first, end) in each block [layers, ...]; None: all of it."""
    if layers is None:
        return None
    each = memory.block_bytes // memory.shape.shape[0]
    return layers[0] * each, (layers[1] - layers[0]) * each


def tail_byte_range(memory: BlockMemory, layers: tuple[int, int] | None, tail: int) -> Strided:
    """Return the first ``tail`` rows of ``layers`` (None: all) in a block [..., rows, width]."""
    offset, length = layer_byte_range(memory, layers) or (0, memory.block_bytes)
    rows, width = memory.shape.shape[-2:]
    row_bytes = width * memory.shape.dtype.itemsize
    return Strided(offset, tail * row_bytes, rows * row_bytes, length // (rows * row_bytes))


def is_within(within: Strided, block_bytes: int) -> bool:
    """Tell if these runs lie in a block of ``block_bytes`` as ``Strided`` says."""
    offset, length, stride, runs = within
    if min(length, stride, runs) < 1 or offset < 0 or block_bytes % stride:
        return False
    return offset % stride + length <= stride and offset // stride + runs <= block_bytes // stride


def list_units(blocks: Sequence[int], within: Strided, block_bytes: int) -> list[int]:
    """List the numbers of the runs, counting a pool in units of ``within.stride`` bytes."""
    first, each = within.offset // within.stride, block_bytes // within.stride
    return [block * each + unit for block in blocks for unit in range(first, first + within.runs)]


def view_units(pool: np.ndarray | torch.Tensor, unit_bytes: int) -> Any:
    """View a contiguous pool as uint8 [units, unit_bytes]; never a copy."""
    if isinstance(pool, np.ndarray):
        return pool.reshape(-1).view(np.uint8).reshape(-1, unit_bytes)
    return pool.view(-1).view(sys.modules["torch"].uint8).view(-1, unit_bytes)
