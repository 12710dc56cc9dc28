"""nixl between processes, over shared memory and over TCP: exact bytes, exact tokens, and peers that die or freeze."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from support.exact_pipelines import check_exact, tokens_of_the_model
from support.freezing import freeze
from support.lender import EMPTY, LIVENESS_S, Lending, begun, ends, lending, lent, pool, ready
from support.thinned import thinned
from trinity.connector import Connector
from trinity.core.messages import Pull
from trinity.errors import HandshakeError, PeerLost, TransferTimeout, TransportUnavailable
from trinity.memory.block_memory import BlockMemory
from trinity.remote.supervision.process_config import kept_launcher
from trinity.transport import link, make_transport, ucx_environment
from trinity.transport.link import LinkRemote
from trinity.transport.nixl import agent
from trinity.transport.nixl.agent import NixlDescriptor
from trinity.transport.nixl.transport import NixlTransport

LANES = {"default": None, "tcp": "tcp"}
SMALL, LARGE = (32, 16 << 10), (512, 256 << 10)  # blocks, bytes of one; the large take a tenth of a second over TCP


@pytest.fixture(autouse=True)
def _ready() -> None:
    ready("nixl")


@pytest.fixture(params=LANES)
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """UCX's own choice, which is shared memory on one host; or TCP, as between hosts."""
    use(monkeypatch, request.param)
    return str(request.param)


def use(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    choice = LANES[name]
    if choice is None:
        monkeypatch.delenv("UCX_TLS", raising=False)
    else:
        monkeypatch.setenv("UCX_TLS", choice)


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "tcp")


async def attached(peer: Lending, size: tuple[int, int], **named: Any) -> tuple[NixlTransport, LinkRemote, BlockMemory]:
    transport, memory = NixlTransport(**named), pool(*size)
    return transport, await transport.attach(peer.descriptor, memory), memory


# ------------------------------------------------------------ what it moves


async def test_another_process_is_read(lanes: str) -> None:
    async with lending("nixl", *SMALL) as peer:
        transport, remote, memory = await attached(peer, SMALL)
        assert await remote.read([3, 1, 2, 31], [0, 7, 8, 30]) == 4 * SMALL[1]
        wanted = torch.full_like(memory.tensor, EMPTY)
        wanted[[0, 7, 8, 30]] = lent(*SMALL)[[3, 1, 2, 31]]
        assert torch.equal(memory.tensor, wanted)
        await transport.aclose()


async def test_many_reads_at_once(lanes: str) -> None:
    async with lending("nixl", *SMALL) as peer:
        transport, remote, memory = await attached(peer, SMALL)
        await asyncio.gather(*(remote.read([block], [31 - block]) for block in range(32)))
        assert torch.equal(memory.tensor, lent(*SMALL).flip(0))
        await transport.aclose()


@pytest.fixture(scope="module")
def wanted() -> list[tuple[int, ...]]:
    return tokens_of_the_model()


@pytest.fixture
def launcher(lanes: str) -> Iterator[None]:
    """Instances inherit the lanes from the process that forks them."""
    with kept_launcher():
        yield


@pytest.mark.parametrize("lanes", thinned(LANES, "default".__eq__), indirect=True)
async def test_pipelines_of_processes_are_exact(launcher: None, lanes: str, wanted: list[tuple[int, ...]]) -> None:
    for placement in ("E+P+D", "ED+P") if lanes == "default" else ("E+P+D",):
        await check_exact(placement, "nixl", wanted)


# ------------------------------------------------------------ peers that die, freeze or leave


async def test_a_peer_killed_in_the_middle_is_lost(tcp: None) -> None:
    async with lending("nixl", *LARGE) as peer:
        transport, remote, memory = await attached(peer, LARGE)
        reading = asyncio.ensure_future(remote.read(range(LARGE[0]), range(LARGE[0])))
        await begun(memory)
        peer.process.kill()
        assert isinstance(await ends(reading), PeerLost)
        assert bool((memory.tensor[:, 0] == EMPTY).any()), "it was over before the peer was killed"
        await transport.aclose()


async def test_a_killed_peer_is_lost_before_a_byte_moves(lanes: str) -> None:
    async with lending("nixl", *SMALL) as peer:
        transport, remote, memory = await attached(peer, SMALL)
        peer.process.kill()
        await peer.process.wait()
        for _ in range(2):
            with pytest.raises(PeerLost):
                await asyncio.wait_for(remote.read([0], [0]), LIVENESS_S)
        with pytest.raises(PeerLost):
            await asyncio.wait_for(transport.attach(peer.descriptor, memory), LIVENESS_S)
        assert bool((memory.tensor == EMPTY).all())
        await transport.aclose()


async def test_a_peer_that_withdrew_its_pool_is_lost(lanes: str) -> None:
    """Its memory is there still, and the lanes would go on reading it."""
    async with lending("nixl", *SMALL) as peer:
        transport, remote, memory = await attached(peer, SMALL)
        await peer.close()
        with pytest.raises(PeerLost):
            await asyncio.wait_for(remote.read([0], [0]), LIVENESS_S)
        assert bool((memory.tensor == EMPTY).all())
        await transport.aclose()


async def test_nothing_is_written_after_a_timeout(tcp: None) -> None:
    async with lending("nixl", *LARGE) as peer:
        transport, remote, memory = await attached(peer, LARGE, timeout_s=1.0)
        reading = asyncio.ensure_future(remote.read(range(LARGE[0]), range(LARGE[0])))
        await begun(memory)
        freeze(peer.process.pid)
        assert isinstance(await ends(reading), TransferTimeout)
        await unchanged_when_it_goes_on(peer, memory)
        await transport.aclose()


async def test_nothing_is_written_after_a_cancel(tcp: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "CANCEL_GRACE_S", 0.4)
    async with lending("nixl", *LARGE) as peer:
        transport, remote, memory = await attached(peer, LARGE)
        reading = asyncio.ensure_future(remote.read(range(LARGE[0]), range(LARGE[0])))
        await begun(memory)
        freeze(peer.process.pid)
        began = time.monotonic()
        reading.cancel()
        assert isinstance(await ends(reading), asyncio.CancelledError)
        assert time.monotonic() - began > 0.3, "a read that can end by itself is given the time"
        await unchanged_when_it_goes_on(peer, memory)
        await transport.aclose()


async def unchanged_when_it_goes_on(peer: Lending, memory: BlockMemory) -> None:
    before = memory.tensor.clone()
    peer.process.send_signal(signal.SIGCONT)
    await asyncio.sleep(0.3)
    assert torch.equal(memory.tensor, before), "bytes were written after the read had ended"
    assert bool((before[:, 0] == EMPTY).any()), "it was over before the peer froze"


async def test_a_cancelled_read_of_a_live_peer_ends_by_itself(tcp: None) -> None:
    async with lending("nixl", *LARGE) as peer:
        transport, remote, memory = await attached(peer, LARGE)
        reading = asyncio.ensure_future(remote.read(range(LARGE[0]), range(LARGE[0])))
        await begun(memory)
        reading.cancel()
        reading.cancel()
        assert isinstance(await ends(reading), asyncio.CancelledError)
        before = memory.tensor.clone()
        await asyncio.sleep(0.1)
        assert torch.equal(memory.tensor, before)
        await transport.aclose()


async def test_a_frozen_peer_holds_nobody_else_up(tcp: None) -> None:
    async with lending("nixl", *SMALL) as frozen, lending("nixl", *SMALL) as other:
        transport, remote, memory = await attached(frozen, SMALL)
        second = await transport.attach(other.descriptor, memory)
        freeze(frozen.process.pid)
        waiting = asyncio.ensure_future(remote.read([0], [0]))
        for block in range(1, 9):
            await asyncio.wait_for(second.read([block], [block]), LIVENESS_S)
        assert not waiting.done()
        assert torch.equal(memory.tensor[1:9], lent(*SMALL)[1:9])
        await transport.aclose()
        assert isinstance(await ends(waiting), PeerLost)


async def test_connector_reports_a_lost_peer_within_its_deadline(tcp: None) -> None:
    async with lending("nixl", *SMALL) as peer:
        connector = Connector("nixl", timeout_s=0.5)
        connector.bind("D0", {"kv": pool(*SMALL)})
        connector.introduce("P0", {"kv": peer.descriptor})
        pull = Pull("P0:1", 0, "P0", "kv", "r", (1, 2), (3, 4))
        assert (await connector.pull("D0", pull)).failure is None
        freeze(peer.process.pid)
        answer = await asyncio.wait_for(connector.pull("D0", pull), LIVENESS_S)
        assert answer.failure is not None
        assert answer.failure.fields["cause"] == "TransferTimeout"
        await connector.aclose()


async def test_a_forgotten_peer_leaves_nothing_behind(tcp: None) -> None:
    async with lending("nixl", *SMALL) as peer:
        connector = Connector("nixl")
        connector.bind("D0", {"kv": pool(*SMALL)})
        pull = Pull("P0:1", 0, "P0", "kv", "r", (1,), (3,))
        for _ in range(3):
            connector.introduce("P0", {"kv": peer.descriptor})  # as after each restart of the peer
            assert (await connector.pull("D0", pull)).failure is None
            connector.forget("P0")
        async with asyncio.timeout(LIVENESS_S):
            while any(thread.name == "trinity-nixl-link" for thread in threading.enumerate()):
                await asyncio.sleep(0.01)
        await connector.aclose()


# ------------------------------------------------------------ what it refuses


def altered(descriptor: bytes, **changed: Any) -> bytes:
    return msgspec.msgpack.encode(
        msgspec.structs.replace(msgspec.msgpack.decode(descriptor, type=NixlDescriptor), **changed)
    )


async def test_a_descriptor_that_does_not_fit_its_agent_is_refused() -> None:
    transport, memory = NixlTransport(), pool(*SMALL)
    descriptor = transport.publish(memory)
    region = msgspec.msgpack.decode(descriptor, type=NixlDescriptor).pool
    elsewhere = msgspec.structs.replace(region, address=region.address + (1 << 30))
    larger = msgspec.structs.replace(region, blocks=region.blocks + 1)
    for wrong in ({"metadata": b"garbage"}, {"agent": "another"}, {"pool": elsewhere}, {"pool": larger}):
        with pytest.raises(HandshakeError):
            await transport.attach(altered(descriptor, **wrong), memory)
    assert bool((memory.tensor == EMPTY).all())
    await transport.aclose()


async def test_two_transports_never_share_a_name() -> None:
    transports = [NixlTransport() for _ in range(2)]
    names = {msgspec.msgpack.decode(each.publish(pool(*SMALL)), type=NixlDescriptor).agent for each in transports}
    assert len(names) == 2
    for each in transports:
        await each.aclose()


async def test_what_was_prepared_publishes_and_ends_with_the_transport() -> None:
    transport = NixlTransport()
    await asyncio.to_thread(transport.prepare)
    assert transport._source is not None
    name = transport._source.name
    transport.prepare()
    assert msgspec.msgpack.decode(transport.publish(pool(*SMALL)), type=NixlDescriptor).agent == name
    await transport.aclose()
    unused = NixlTransport()
    await asyncio.to_thread(unused.prepare)
    await unused.aclose()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", None)
    with pytest.raises(TransportUnavailable, match="pip install --no-deps nixl-cu13"):
        make_transport("nixl")


async def test_lanes_that_are_not_there_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "no_such_lane")
    transport = NixlTransport()
    with pytest.raises(TransportUnavailable, match="nixl has no UCX here"):
        transport.publish(pool(*SMALL))
    await transport.aclose()


def test_settings_of_ucx_are_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("UCX_NET_DEVICES", "UCX_MODULES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ucx_environment, "INFINIBAND", tmp_path)
    agent.load_nixl()
    assert os.environ.get("UCX_NET_DEVICES") == "lo"
    assert "UCX_MODULES" not in os.environ, "a host with RDMA needs its module"
    monkeypatch.setattr(ucx_environment, "INFINIBAND", tmp_path / "none")
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    agent.load_nixl()
    assert (os.environ["UCX_NET_DEVICES"], os.environ["UCX_MODULES"]) == ("eth7", "^ib")


def test_loading_leaves_logging_as_it_was() -> None:
    assert logging.raiseExceptions
    assert not logging.getLogger("nixl").handlers
    assert importlib.import_module("nixl_cu13._api")
