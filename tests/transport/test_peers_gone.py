"""Peers in processes of their own, over every transport that reaches them: what is read, and what follows a kill."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest
import torch

from support.lender import EMPTY, lending, lent, pool, ready
from trinity.connector import Connector
from trinity.core.messages import Pull
from trinity.errors import PeerLost
from trinity.transport import make_transport, shm

BETWEEN_PROCESSES = ("nixl", "nixl-push", "shm", "ucx")
BLOCKS, BLOCK_BYTES = 32, 16 << 10
LIVENESS_S = 120.0
PULL = Pull("P0:1", 0, "P0", "kv", "r", (1, 2), (3, 4))


@pytest.fixture(params=BETWEEN_PROCESSES)
def scheme(request: pytest.FixtureRequest) -> str:
    ready(request.param)
    return str(request.param)


async def test_a_piece_of_a_peers_blocks(scheme: str) -> None:
    async with lending(scheme, BLOCKS, BLOCK_BYTES) as peer:
        transport, memory = make_transport(scheme), pool(BLOCKS, BLOCK_BYTES)
        remote = await transport.attach(peer.descriptor, memory)
        assert await remote.read([3, 1, 2], [0, 7, 8], (4096, 8192)) == 3 * 8192
        wanted = torch.full_like(memory.tensor, EMPTY)
        wanted[[0, 7, 8], 512:1536] = lent(BLOCKS, BLOCK_BYTES)[[3, 1, 2], 512:1536]
        assert torch.equal(memory.tensor, wanted)
        await transport.aclose()


async def test_what_a_peer_takes_back_is_stale(scheme: str) -> None:
    async with lending(scheme, BLOCKS, BLOCK_BYTES) as peer:
        connector = Connector(scheme, timeout_s=LIVENESS_S)
        connector.bind("D0", {"kv": pool(BLOCKS, BLOCK_BYTES)})
        connector.introduce("P0", {"kv": peer.descriptor})
        assert (await connector.pull("D0", PULL)).failure is None
        await peer.revoke(3, 1)
        assert (await connector.pull("D0", PULL)).failure is None, "another block was taken back"
        await peer.revoke(2, 1)
        answer = await connector.pull("D0", PULL)
        assert answer.failure is not None
        assert answer.failure.fields["reason"] == "stale"
        await connector.aclose()


async def test_a_killed_peer_is_lost(scheme: str) -> None:
    async with lending(scheme, BLOCKS, BLOCK_BYTES) as peer:
        transport, memory = make_transport(scheme), pool(BLOCKS, BLOCK_BYTES)
        remote = await transport.attach(peer.descriptor, memory)
        assert await remote.generation([1]) == 0
        peer.process.kill()
        await peer.process.wait()
        async with asyncio.timeout(LIVENESS_S):
            for _ in range(2):
                with pytest.raises(PeerLost):
                    await remote.read([0], [0])
                with pytest.raises(PeerLost):
                    await remote.generation([0])
            with pytest.raises(PeerLost):
                await transport.attach(peer.descriptor, memory)
        assert bool((memory.tensor == EMPTY).all())
        await transport.aclose()


async def test_a_connector_reports_a_killed_peer(scheme: str) -> None:
    async with lending(scheme, BLOCKS, BLOCK_BYTES) as peer:
        connector = Connector(scheme, timeout_s=LIVENESS_S)
        connector.bind("D0", {"kv": pool(BLOCKS, BLOCK_BYTES)})
        connector.introduce("P0", {"kv": peer.descriptor})
        assert (await connector.pull("D0", PULL)).failure is None
        peer.process.kill()
        await peer.process.wait()
        answer = await asyncio.wait_for(connector.pull("D0", PULL), LIVENESS_S)
        assert answer.failure is not None
        assert answer.failure.fields["cause"] == "PeerLost"
        await connector.aclose()


async def test_a_peer_that_came_back_under_its_name(scheme: str) -> None:
    """What its former life lent is never read of the next one, which is read once it is introduced."""
    connector = Connector(scheme, timeout_s=LIVENESS_S)
    memory = pool(BLOCKS, BLOCK_BYTES)
    connector.bind("D0", {"kv": memory})
    async with lending(scheme, BLOCKS, BLOCK_BYTES) as former:
        connector.introduce("P0", {"kv": former.descriptor})
        assert (await connector.pull("D0", PULL)).failure is None
        late = asyncio.ensure_future(connector.pull("D0", PULL))
        former.process.kill()
        await former.process.wait()
        await asyncio.wait_for(late, LIVENESS_S)
    async with lending(scheme, BLOCKS, BLOCK_BYTES) as again:
        memory.tensor.fill_(EMPTY)
        answer = await asyncio.wait_for(connector.pull("D0", PULL), LIVENESS_S)
        assert answer.failure is not None
        assert answer.failure.fields["cause"] == "PeerLost"
        assert bool((memory.tensor == EMPTY).all())
        connector.introduce("P0", {"kv": again.descriptor})
        assert (await connector.pull("D0", PULL)).failure is None
        assert torch.equal(memory.tensor[[3, 4]], lent(BLOCKS, BLOCK_BYTES)[[1, 2]])
        connector.introduce("P0", {"kv": former.descriptor})  # a word of the former life that comes late
        assert (await asyncio.wait_for(connector.pull("D0", PULL), LIVENESS_S)).failure is not None
    await connector.aclose()


@pytest.mark.parametrize("by_entry", [False, True], ids=["asked of the kernel", "read from /proc"])
async def test_the_life_of_a_process(by_entry: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over with its end, before anybody has waited for it; a process that has its number is another."""
    if by_entry:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    process = await asyncio.create_subprocess_exec("sleep", "60")
    peer = shm.ShmDescriptor(process.pid, shm.read_start_time(process.pid), 0, 8, 1)
    life, another = shm.ProcessWatch(peer), shm.ProcessWatch(msgspec.structs.replace(peer, started=1))
    assert (life._poll is None) is by_entry
    assert life.is_alive()
    assert not another.is_alive()
    process.kill()
    await process.wait()
    assert not life.is_alive()
    assert not shm.ProcessWatch(peer).is_alive()
    for each in (life, another, life):
        each.close()


def refuse(process: int) -> int:
    raise PermissionError(f"no handle on {process} in this sandbox")
