"""Copies between two pools again and again are those of native.copy_blocks, and refuse what it refuses."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from trinity.errors import ConfigError, PeerLost
from trinity.memory import native
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.memory.native import PoolCopier
from trinity.transport import make_transport

BLOCKS, BLOCK_BYTES = 6, 48


def pools() -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(0).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    return np.zeros_like(source), source


@pytest.fixture(params=[True, False], ids=["compiled", "numpy"])
def _extension(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(native, "extension", None)


@pytest.mark.usefixtures("_extension")
@pytest.mark.parametrize("unit_bytes", [BLOCK_BYTES, 16])
@pytest.mark.parametrize("piece", [(0, 16), (8, 8)])
def test_copies_pieces_of_units(unit_bytes: int, piece: tuple[int, int]) -> None:
    target, source = pools()
    sources, targets = [3, 0, 5], range(1, 4)
    PoolCopier(target, source).copy(unit_bytes, targets, sources, piece)
    wanted, (offset, length) = np.zeros_like(target).reshape(-1, unit_bytes), piece
    for to, at in zip(targets, sources, strict=True):
        wanted[to, offset : offset + length] = source.reshape(-1, unit_bytes)[at, offset : offset + length]
    assert np.array_equal(target.reshape(-1, unit_bytes), wanted)


@pytest.mark.usefixtures("_extension")
@pytest.mark.parametrize(
    ("targets", "sources", "piece"),
    [
        ([0, 1], [0], (0, 8)),
        ([0], [BLOCKS], (0, 8)),
        ([-1], [0], (0, 8)),
        ([2, 2], [0, 1], (0, 8)),
        ([0], [0], (BLOCK_BYTES - 8, 16)),
        ([0], [0], (-8, 8)),
    ],
)
def test_what_does_not_fit_is_refused(targets: list[int], sources: list[int], piece: tuple[int, int]) -> None:
    target, source = pools()
    with pytest.raises(ConfigError):
        PoolCopier(target, source).copy(BLOCK_BYTES, targets, sources, piece)
    assert not target.any()


def test_pools_that_are_one_or_read_only_are_checked_each_time() -> None:
    target, source = pools()
    both = PoolCopier(source, source)
    with pytest.raises(ConfigError, match="overlap"):
        both.copy(BLOCK_BYTES, [1], [1], (0, 8))
    both.copy(BLOCK_BYTES, [1], [2], (0, BLOCK_BYTES))
    assert np.array_equal(source[1], source[2])
    target.flags.writeable = False
    with pytest.raises(ConfigError, match="read-only"):
        PoolCopier(target, source).copy(BLOCK_BYTES, [1], [2], (0, 8))
    PoolCopier(source, target).copy(BLOCK_BYTES, [1], [2], (0, BLOCK_BYTES))
    assert not source[1].any()


async def test_a_pool_that_is_withdrawn_is_held_by_nobody_who_read_it() -> None:
    def pool() -> BlockMemory:
        return BlockMemory(BlockShape("kv", (2, 4), torch.float32), 4)

    transport, source, target = make_transport("inproc"), pool(), pool()
    remote = await transport.attach(transport.publish(source), target)
    assert await remote.read([1], [2]) == await remote.read([1], [3]) == 32
    assert source.raw is not None
    left = weakref.ref(source.raw)
    transport.withdraw(source)  # type: ignore[attr-defined]
    del source
    gc.collect()
    assert left() is None
    with pytest.raises(PeerLost):
        await remote.read([1], [2])
