"""Ranges of bytes within blocks: one run of each block, or several runs at equal distances; the ranges of a pull."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct

from trinity.core.messages import Pull
from trinity.core.transfers import should_cut
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


class FilledRanges(Struct, frozen=True):
    """Bytes of blocks that their rows fill: ``within`` (offset, length) of each, None for all of it.

    ``tails``: of the blocks that are not full, by place in the list of blocks, the range of their rows instead.
    """

    within: tuple[int, int] | None
    tails: Mapping[int, Strided]


class BlockRead(Struct, frozen=True):
    """Arguments of one ``Remote.read``."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    within: ByteRange

    @property
    def pieces(self) -> int:
        """Number of separate runs of bytes that the read moves."""
        if isinstance(self.within, Strided):
            return len(self.source) * self.within.runs
        return len(self.source) if self.within else len(list(find_runs(self.source, self.target)))


class PullRanges(Struct, frozen=True):
    """Bytes of a pull: its ``reads``, and the bytes of its blocks that digests cover. ``plan_pull`` computes both once.

    Reads and digests differ: a last block that is nearly full moves whole, and its digest covers its rows.
    """

    reads: tuple[BlockRead, ...]
    filled: FilledRanges

    @property
    def pieces(self) -> int:
        """Number of separate runs of bytes that the pull moves."""
        return sum([each.pieces for each in self.reads])


def plan_pull(memory: BlockMemory, pull: Pull) -> PullRanges:
    """Compute the byte ranges of a pull into ``memory``.

    One read of all blocks, or, where the last one has few rows (``should_cut``), one of those before it and one of its
    rows.
    """
    source, target, within = pull.source_blocks, pull.target_blocks, layer_byte_range(memory, pull.layers)
    if not pull.tail:
        return PullRanges((BlockRead(source, target, within),), FilledRanges(within, {}))
    tail = tail_byte_range(memory, within, pull.tail)
    filled = FilledRanges(within, {len(target) - 1: tail})
    if not should_cut(len(source), pull.tail, memory.shape.rows):
        return PullRanges((BlockRead(source, target, within),), filled)
    full, last = BlockRead(source[:-1], target[:-1], within), BlockRead(source[-1:], target[-1:], tail)
    return PullRanges((full, last) if full.source else (last,), filled)


def find_filled(memory: BlockMemory, layers: tuple[int, int] | None, tails: Mapping[int, int]) -> FilledRanges:
    """Find the filled bytes of ``layers`` (None: all) of blocks; ``tails``: rows of those not full, by place."""
    within = layer_byte_range(memory, layers)
    return FilledRanges(within, {place: tail_byte_range(memory, within, tail) for place, tail in tails.items()})


def layer_byte_range(memory: BlockMemory, layers: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return (offset, length) in bytes of ``layers`` [first, end) in each block [layers, ...]; None: all of it."""
    if layers is None:
        return None
    each = memory.block_bytes // memory.shape.shape[0]
    return layers[0] * each, (layers[1] - layers[0]) * each


def tail_byte_range(memory: BlockMemory, within: tuple[int, int] | None, tail: int) -> Strided:
    """Return the first ``tail`` rows of ``within``, some layers (None: all), in a block [..., rows, width]."""
    offset, length = within or (0, memory.block_bytes)
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


def find_runs(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, length) of the longest runs of blocks that are consecutive on both sides."""
    start = 0
    for index in range(1, len(source) + 1):
        broken = index == len(source) or (
            source[index] != source[index - 1] + 1 or target[index] != target[index - 1] + 1
        )
        if broken:
            yield source[start], target[start], index - start
            start = index


def view_units(pool: np.ndarray | torch.Tensor, unit_bytes: int) -> Any:
    """View a contiguous pool as uint8 [units, unit_bytes]; never a copy."""
    if isinstance(pool, np.ndarray):
        return pool.reshape(-1).view(np.uint8).reshape(-1, unit_bytes)
    return pool.view(-1).view(sys.modules["torch"].uint8).view(-1, unit_bytes)
