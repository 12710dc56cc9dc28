"""Ranges of bytes in blocks: those of layers and rows are what indexing the tensor gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity.memory.block_memory import (
    BlockMemory,
    BlockShape,
    Strided,
    is_within,
    layer_byte_range,
    list_units,
    tail_byte_range,
    view_units,
)

BLOCKS = 3


@st.composite
def tails(draw: st.DrawFn) -> tuple[BlockMemory, tuple[int, int] | None, int]:
    """A pool of images or KV, some of its layers, and rows."""
    extents = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    memory = BlockMemory(BlockShape("kv", tuple(extents), draw(st.sampled_from([torch.float32, torch.int16]))), BLOCKS)
    memory.raw[:] = np.random.default_rng(1).integers(0, 256, memory.raw.shape)  # type: ignore[index,union-attr]
    first = draw(st.integers(0, extents[0] - 1))
    layers = draw(st.sampled_from([None, (first, draw(st.integers(first + 1, extents[0])))])) if extents[2:] else None
    return memory, layers, draw(st.integers(1, extents[-2]))


@given(tails(), st.lists(st.integers(0, BLOCKS - 1), max_size=4))
def test_rows_are_what_indexing_gives(
    asked: tuple[BlockMemory, tuple[int, int] | None, int], blocks: list[int]
) -> None:
    memory, layers, tail = asked
    within = tail_byte_range(memory, layer_byte_range(memory, layers), tail)
    assert is_within(within, memory.block_bytes)
    wanted = memory.tensor[:, slice(*layers)] if layers else memory.tensor
    wanted = torch.from_numpy(
        np.frombuffer(wanted[blocks, ..., :tail, :].contiguous().numpy().tobytes(), np.uint8).copy()
    )
    start = within.offset % within.stride
    for pool in (memory.raw, memory.tensor):
        assert pool is not None
        units = view_units(pool, within.stride)[list_units(blocks, within, memory.block_bytes)]
        found = torch.as_tensor(units[:, start : start + within.length]).reshape(-1)
        assert torch.equal(found, wanted)


def test_layers_are_one_run() -> None:
    memory = BlockMemory(BlockShape("kv", (4, 2, 3, 5), torch.float32), 1)
    assert layer_byte_range(memory, None) is None
    assert layer_byte_range(memory, (1, 3)) == (120, 240)
    assert tail_byte_range(memory, (120, 240), 2) == Strided(120, 40, 60, 4)


@given(st.tuples(*[st.integers(-3, 40)] * 4))
def test_what_is_not_within_a_block_is_told(asked: tuple[int, int, int, int]) -> None:
    offset, length, stride, runs = within = Strided(*asked)
    covered = [set(range(offset + i * stride, offset + i * stride + length)) for i in range(max(0, runs))]
    right = (
        stride > 0
        and 24 % stride == 0
        and length > 0
        and runs > 0
        and all(run <= set(range(24)) and len({byte // stride for byte in run}) == 1 for run in covered)
    )
    assert is_within(within, 24) == right


@pytest.mark.parametrize("unit", [8, 24, 48])
def test_units_are_views(unit: int) -> None:
    memory = BlockMemory(BlockShape("kv", (2, 3, 2), torch.float32), BLOCKS)
    for pool in (memory.raw, memory.tensor):
        assert pool is not None
        view_units(pool, unit)[0, 0] = 9
        assert bytes(memory.raw.reshape(-1)[:1]) == b"\t"  # type: ignore[union-attr]
        view_units(pool, unit)[0, 0] = 0
