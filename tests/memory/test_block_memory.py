"""Pools of any size: none, and more than there is."""

from __future__ import annotations

import mmap

import pytest
import torch

from trinity.errors import ConfigError
from trinity.memory.block_memory import BlockMemory, BlockShape

SHAPE = BlockShape("kv", (2, 2, 2, 16, 64), torch.float32)


@pytest.mark.parametrize("shared", [False, True])
def test_a_pool_of_no_blocks(shared: bool) -> None:
    """Fails at 8235ded: the system maps no empty file."""
    memory = BlockMemory(SHAPE, 0, shared=shared)
    assert memory.tensor.shape == (0, *SHAPE.shape)
    assert memory.words.shape[0] == len(memory.generations) == memory.generation([]) == 0
    assert memory.raw is not None
    assert memory.raw.shape == (0, SHAPE.block_bytes)
    memory.close()


@pytest.mark.parametrize("blocks", [1 << 40, 1 << 46, 1 << 60])
@pytest.mark.parametrize("shared", [False, True])
def test_more_than_there_is_names_what_to_do(shared: bool, blocks: int) -> None:
    """Fails at 8235ded, with ``OSError`` and ``OverflowError``: 2 ** 55 bytes and more, of which no system has room."""
    with pytest.raises(ConfigError, match=r"cannot allocate a pool of [0-9,]+ bytes: .*; make the pools smaller"):
        BlockMemory(SHAPE, blocks, shared=shared)


def test_so_does_a_system_that_maps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's zeros are what such a system has."""
    monkeypatch.delattr(mmap, "MAP_PRIVATE")
    assert not BlockMemory(SHAPE, 2).tensor.any()
    with pytest.raises(ConfigError, match="make the pools smaller"):
        BlockMemory(SHAPE, 1 << 60)
