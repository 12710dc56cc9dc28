"""nixl-push: the stage that a source writes to, and what a source refuses."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import msgspec
import pytest
import torch

from support.exact_pipelines import check_exact, tokens_of_the_model
from support.lender import EMPTY, pool, ready
from trinity.errors import OfferRefused, PeerLost
from trinity.transport.base import CopyPlan
from trinity.transport.nixl import push
from trinity.transport.nixl.agent import NixlDescriptor
from trinity.transport.nixl.push import StagingArea
from trinity.transport.nixl.transport import NixlPushTransport

SIZE = (32, 16 << 10)


class Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def written(address: int, data: bytes) -> bool:
    """Whether another process could write there, as some lanes of UCX do."""
    here = ctypes.create_string_buffer(data, len(data))
    ours, theirs = Iovec(ctypes.addressof(here), len(data)), Iovec(address, len(data))
    call: Any = ctypes.CDLL(None, use_errno=True).process_vm_writev
    return int(call(os.getpid(), ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)) == len(data)


def test_a_stage_is_copied_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pool(*SIZE)
    stage = StagingArea(memory)
    assert written(stage.address, torch.arange(4).numpy().tobytes())
    stage.copy(CopyPlan([0, 1], [7, 3], 8, 16, SIZE[1]))
    wanted = torch.full_like(memory.tensor, EMPTY)
    wanted[7, 1:3], wanted[3, 1:3] = torch.tensor([0, 1]), torch.tensor([2, 3])
    assert torch.equal(memory.tensor, wanted)


def test_nobody_writes_to_a_stage_that_was_abandoned() -> None:
    stage = StagingArea(pool(*SIZE))
    assert written(stage.address + 4096, b"before")
    stage.abandon()
    assert not written(stage.address + 4096, b"after")


async def test_reads_larger_than_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    ready("nixl-push")
    monkeypatch.setattr(push, "STAGING_BYTES", 3 * SIZE[1])
    transport, source, memory = NixlPushTransport(), pool(*SIZE), pool(*SIZE)
    source.tensor.copy_(torch.arange(source.tensor.numel()).view_as(source.tensor))
    remote = await transport.attach(transport.publish(source), memory)
    await remote.read(range(32), [31 - block for block in range(32)])
    assert torch.equal(memory.tensor, source.tensor.flip(0))
    await transport.aclose()


async def test_a_source_says_why_it_refuses() -> None:
    ready("nixl-push")
    transport, memory = NixlPushTransport(), pool(*SIZE)
    descriptor = msgspec.msgpack.decode(transport.publish(pool(*SIZE)), type=NixlDescriptor)
    remote = await transport.attach(msgspec.msgpack.encode(descriptor), memory)
    link: Any = await remote.link()
    with pytest.raises(OfferRefused) as caught:
        await link.read(CopyPlan([40], [0], 0, SIZE[1], SIZE[1]), 10.0)
    assert caught.value.reason == "incompatible"
    for unit_bytes, first in ((24, 0), (0, 0), (SIZE[1] // 2, 2 * SIZE[0]), (SIZE[1] // 2, -1)):
        with pytest.raises(OfferRefused, match="no such blocks"):
            await link.read(CopyPlan([first], [0], 0, 8, unit_bytes), 10.0)
    link._theirs = msgspec.structs.replace(descriptor, pool=msgspec.structs.replace(descriptor.pool, address=4096))
    with pytest.raises(OfferRefused) as caught:
        await link.read(CopyPlan([1], [0], 0, SIZE[1], SIZE[1]), 10.0)
    assert caught.value.reason == "missing"
    assert bool((memory.tensor == EMPTY).all())
    await transport.aclose()


@pytest.mark.parametrize("when", ["begun", "in flight"])
async def test_a_write_that_fails_ends_its_read_at_once(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that could not write told nobody: its reader waited until its deadline."""
    ready("nixl-push")
    transport, source, memory = NixlPushTransport(timeout_s=20.0), pool(*SIZE), pool(*SIZE)
    source.tensor.fill_(3)
    remote = await transport.attach(transport.publish(source), memory)
    served: Any = transport._source
    agent, regions = served._agent, dict(served._regions)
    lent = next(region for region in regions if region.block_bytes == SIZE[1])
    with monkeypatch.context() as failing:
        if when == "begun":
            agent.deregister_memory(regions[lent])  # of which the source knows nothing
        else:
            failing.setattr(agent, "check_xfer_state", lambda handle: "ERR")
        with pytest.raises(PeerLost, match="could not write"):
            await remote.read([5], [5])
    assert bool((memory.tensor == EMPTY).all())
    if when == "begun":
        served._regions[lent] = agent.register_memory(lent.whole, lent.memory)
    assert await remote.read([5], [5]) == SIZE[1], "the source serves no more"
    assert bool((memory.tensor[5] == 3).all())
    await transport.aclose()


@pytest.fixture(scope="module")
def wanted() -> list[tuple[int, ...]]:
    return tokens_of_the_model()


@pytest.mark.slow
async def test_pipelines_of_processes_are_exact(wanted: list[tuple[int, ...]]) -> None:
    ready("nixl-push")
    await check_exact("E+P+D", "nixl-push", wanted)
