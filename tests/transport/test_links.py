"""Transports over links: peers that are killed, leave or freeze in the middle of a transfer, and what follows."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from support.freezing import freeze
from support.lender import EMPTY, LIVENESS_S, Lending, begun, ends, holds, lending, pool, ready, shuffled
from support.paths import PYTHON_PATH
from trinity.errors import PeerLost, TransferTimeout
from trinity.memory.block_memory import BlockMemory
from trinity.transport import link
from trinity.transport.link import LinkRemote
from trinity.transport.nixl.transport import NixlPushTransport
from trinity.transport.ucx.transport import UcxTransport

SMALL, LARGE = (32, 16 << 10), (512, 256 << 10)  # blocks, bytes of one
MADE: dict[str, Any] = {"nixl-push": NixlPushTransport, "ucx": UcxTransport}
Attached = tuple[Any, LinkRemote, BlockMemory]


@pytest.fixture(params=["nixl-push", "nixl-push over tcp", pytest.param("ucx", marks=pytest.mark.ucx_alone)])
def scheme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, lanes = request.param.partition(" over ")
    monkeypatch.delenv("UCX_TLS", raising=False)
    if lanes:
        monkeypatch.setenv("UCX_TLS", lanes)
    ready(name)
    return str(name)


async def attached(scheme: str, peer: Lending, size: tuple[int, int], **named: Any) -> Attached:
    transport, memory = MADE[scheme](**named), await asyncio.to_thread(pool, *size)
    return transport, await transport.attach(peer.descriptor, memory), memory


async def test_all_blocks_arrive(scheme: str) -> None:
    async with lending(scheme, *LARGE) as peer:
        transport, remote, memory = await attached(scheme, peer, LARGE)
        assert await remote.read(shuffled(LARGE[0]), range(LARGE[0])) == LARGE[0] * LARGE[1]
        assert await holds(memory, shuffled(LARGE[0]))
        await transport.aclose()


@pytest.mark.slow  # NIXL's own code has aborted the process that reads here
async def test_a_peer_killed_in_the_middle_is_lost(scheme: str) -> None:
    async with lending(scheme, *LARGE) as peer:
        transport, remote, memory = await attached(scheme, peer, LARGE)
        reading = asyncio.ensure_future(remote.read(shuffled(LARGE[0]), range(LARGE[0])))
        await begun(memory)
        peer.process.kill()
        assert isinstance(await ends(reading), PeerLost)
        assert bool((memory.tensor[:, 0] == EMPTY).any()), "it was over before the peer was killed"
        await transport.aclose()


async def test_a_peer_that_withdrew_its_pool_is_lost(scheme: str) -> None:
    async with lending(scheme, *SMALL) as peer:
        transport, remote, memory = await attached(scheme, peer, SMALL)
        await peer.close()
        with pytest.raises(PeerLost):
            await asyncio.wait_for(remote.read([0], [0]), LIVENESS_S)
        assert bool((memory.tensor == EMPTY).all())
        await transport.aclose()


async def test_nothing_is_written_after_a_timeout(scheme: str) -> None:
    async with lending(scheme, *LARGE) as peer:
        transport, remote, memory = await attached(scheme, peer, LARGE, timeout_s=1.0)
        reading = asyncio.ensure_future(remote.read(shuffled(LARGE[0]), range(LARGE[0])))
        await begun(memory)
        freeze(peer.process.pid)
        assert isinstance(await ends(reading), TransferTimeout)
        await unchanged_when_it_goes_on(peer, memory)
        remote._timeout_s = LIVENESS_S
        assert await asyncio.wait_for(remote.read([5], [5]), LIVENESS_S) == LARGE[1], "it is read again when it is back"
        await transport.aclose()


async def test_nothing_is_written_after_a_cancel(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "CANCEL_GRACE_S", 0.4)
    async with lending(scheme, *LARGE) as peer:
        transport, remote, memory = await attached(scheme, peer, LARGE)
        reading = asyncio.ensure_future(remote.read(shuffled(LARGE[0]), range(LARGE[0])))
        await begun(memory)
        freeze(peer.process.pid)
        reading.cancel()
        assert isinstance(await ends(reading), asyncio.CancelledError)
        await unchanged_when_it_goes_on(peer, memory)
        await transport.aclose()


async def unchanged_when_it_goes_on(peer: Lending, memory: BlockMemory) -> None:
    before = memory.tensor.clone()
    assert bool((before[:, 0] == EMPTY).any()), "it was over before the peer froze"
    peer.process.send_signal(signal.SIGCONT)
    await asyncio.sleep(0.3)
    assert torch.equal(memory.tensor, before), "bytes were written after the read had ended"


UNCLOSED = """
import asyncio, sys
from support.lender_process import make_memory
from trinity.transport import make_transport
async def main():
    transport = make_transport(sys.argv[1])
    memory = make_memory(4, int(sys.argv[2]), "cpu")
    global kept
    kept = await transport.attach(transport.publish(memory), memory), transport
    await kept[0].read([0], [1])
    if sys.argv[3] == "dropped":
        del kept, memory
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["kept", "dropped"])
@pytest.mark.parametrize("name", ["nixl", "ucx"])
def test_a_process_that_closes_nothing_ends_well(name: str, how: str) -> None:
    """A link that was dropped frees its pool on its own thread, which takes a while: the process waits for that."""
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, "-c", UNCLOSED, name, str(64 << 20), how]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


class Slow:
    """Something with a thread that takes a while to free what it holds."""

    def __init__(self) -> None:
        self.dropped, self.freed = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        link.stop_at_exit(self, self.thread)
        self.thread.start()

    def run(self) -> None:
        self.dropped.wait(LIVENESS_S)

    def stop(self) -> None: ...

    def join(self) -> None: ...

    def __del__(self) -> None:
        time.sleep(0.2)
        self.freed.set()


def test_the_end_of_the_process_waits_for_what_a_thread_frees_last() -> None:
    """Pools are freed with Python's help: a thread that does so while Python ends takes the process down."""
    slow = Slow()
    dropped, freed = slow.dropped, slow.freed
    del slow
    dropped.set()
    link._stop_all()
    assert freed.is_set()
