"""Targets that are killed or freeze while they read: their source goes on serving others, and keeps nothing of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.lender import LIVENESS_S, lent, pool, ready
from support.reader import reading
from trinity.transport import Transport, make_transport
from trinity.transport.nixl.transport import NixlTransport
from trinity.transport.ucx.transport import UcxTransport

SIZE = (256, 64 << 10)  # 16 MiB: some hundredths of a second
Lent = tuple[str, Transport, bytes]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("nixl over tcp", "nixl-push", "shm")]


@pytest.fixture(params=[*SLOW, "nixl-push over tcp", pytest.param("ucx", marks=pytest.mark.ucx_alone)])
async def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lent]:
    scheme, _, lanes = request.param.partition(" over ")
    monkeypatch.delenv("UCX_TLS", raising=False)
    if lanes:
        monkeypatch.setenv("UCX_TLS", lanes)
    ready(scheme)
    transport, memory = make_transport(scheme), pool(*SIZE)
    memory.tensor.copy_(lent(*SIZE))
    yield scheme, transport, transport.publish(memory)
    await transport.aclose()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_target_that_is_gone_harms_nobody(source: Lent, how: signal.Signals) -> None:
    scheme, transport, descriptor = source
    async with asyncio.timeout(LIVENESS_S):
        async with reading(scheme, descriptor, *SIZE) as gone:
            await gone.rounds(2)
            await asyncio.sleep(0.005)  # into the middle of a read
            gone.process.send_signal(how)
            async with reading(scheme, descriptor, *SIZE) as other:
                await other.rounds(3)
        await nothing_kept(transport)


async def nothing_kept(transport: Any) -> None:
    """What the source keeps of peers and of transfers goes with them."""
    while isinstance(transport, UcxTransport) and transport._source is not None and transport._source._peers:
        await asyncio.sleep(0.01)
    while isinstance(transport, NixlTransport) and transport._source is not None and transport._source.writing:
        await asyncio.sleep(0.01)
