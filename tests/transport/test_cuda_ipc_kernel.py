"""cuda_ipc copies many runs by one kernel where there is one: over the driver's stand-in, in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, at the imports below
pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from support import fake_cuda
from support.fake_cuda import Fake
from support.lender import EMPTY, lending, lent
from trinity.memory import device_blocks
from trinity.transport.cuda_ipc import transport as cuda_ipc
from trinity.transport.cuda_ipc.transport import MANY_RUNS

BLOCKS, BLOCK_BYTES = 32, 16 << 10
ODD = list(range(1, 2 * MANY_RUNS, 2))  # no two follow each other


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(cuda_ipc, "device_of", fake_cuda.on_device)
    made = Fake(fake_cuda.build(tmp_path))
    yield made
    assert made.opens() == 0
    made.lib.fake_clean()


async def test_many_runs_are_one_launch_where_a_kernel_can(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's memory is the host's, and so may the kernel's be; without one the driver copies run by run."""
    launched: list[int] = []
    kernel = True

    def copy(device: object, target: int, source: int, numbers: Any, unit_bytes: int, piece: tuple[int, int]) -> bool:
        assert device == "cuda:0"
        launched.append(numbers.shape[1])
        return kernel and device_blocks.copy_by_address("cpu", target, source, numbers, unit_bytes, piece)

    monkeypatch.setattr(cuda_ipc, "copy_by_address", copy)
    to = [each - 1 for each in ODD]
    wanted = torch.full((BLOCKS, BLOCK_BYTES // 8), EMPTY)
    wanted[to] = lent(BLOCKS, BLOCK_BYTES)[ODD]
    wanted[ODD, 64:192] = lent(BLOCKS, BLOCK_BYTES)[ODD, 64:192]
    wanted[[each + 16 for each in to[1:]]] = lent(BLOCKS, BLOCK_BYTES)[ODD[1:]]
    async with lending(fake.path, BLOCKS, BLOCK_BYTES, fake_cuda.__file__) as peer:
        for kernel in (True, False):
            transport, memory = fake.transport(), fake.pool(BLOCKS, BLOCK_BYTES)
            remote = await transport.attach(peer.descriptor, memory)
            fake.forget()
            launched.clear()
            assert await remote.read(ODD, to) == MANY_RUNS * BLOCK_BYTES
            assert await remote.read(ODD, ODD, (512, 1024)) == MANY_RUNS * 1024
            assert await remote.read(ODD[1:], [each + 16 for each in to[1:]]) == (MANY_RUNS - 1) * BLOCK_BYTES
            assert launched == [MANY_RUNS, MANY_RUNS], "few runs are the driver's"
            assert fake.calls().count("cuMemcpyDtoDAsync_v2") == MANY_RUNS - 1 + (0 if kernel else 2 * MANY_RUNS)
            assert torch.equal(memory.tensor, wanted)
            await transport.aclose()
