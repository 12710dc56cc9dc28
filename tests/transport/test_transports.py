"""Every transport keeps one contract; a broken one is caught by it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from support.broken_transports import BROKEN
from support.lender import ready
from support.wrapped_transports import WrappedTransport
from trinity.connector import Connector
from trinity.core.messages import Pull
from trinity.errors import ClosedError, TransportError, UnknownName
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.testing.transport_contract import check_transport
from trinity.transport import base, inproc, make_transport
from trinity.transport.base import Transport, find_runs
from trinity.transport.registry import known_transports

SHAPE = BlockShape("kv", (2, 3, 4), torch.float32)


@pytest.mark.parametrize("rows", [16, 4096], ids=["copies at once", "copies in turns"])
@pytest.mark.parametrize("name", [name for name in known_transports() if name != "cuda_ipc"])  # it has its own tests
async def test_contract(name: str, rows: int) -> None:
    ready(name)
    await check_transport(lambda: make_transport(name), rows=rows)


@pytest.mark.parametrize("name", ["inproc", "shm"])
async def test_contract_where_copies_leave_the_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "INLINE_COPY_BYTES", 1)
    await check_transport(lambda: make_transport(name))


def test_sizes_of_the_contract_are_of_every_way_to_copy() -> None:
    assert base.INLINE_COPY_BYTES > 2 * 4096 * 8 * 4 * 32 > base.TURN_BYTES
    assert base.TURN_BYTES > 2 * 16 * 8 * 4 * 32


@pytest.mark.parametrize(("blocks", "block_bytes"), [(64, 1 << 15), (3, (5 << 18) + 8), (2, 3 << 20)])
@pytest.mark.parametrize("margin", [0, 8])
async def test_the_loop_turns_while_much_is_copied(
    blocks: int, block_bytes: int, margin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "TURN_BYTES", 1 << 18)
    source = np.random.default_rng(1).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    turns = asyncio.ensure_future(count_turns())
    piece = (margin, block_bytes - 2 * margin)
    order = list(range(blocks))
    plan = base.CopyPlan(order, order[::-1], *piece, block_bytes)
    assert await base.copy_pieces(target, source, plan) == blocks * piece[1]
    turns.cancel()
    wanted = np.zeros_like(source)
    wanted[:, margin : block_bytes - margin] = source[::-1, margin : block_bytes - margin]
    assert np.array_equal(target, wanted)
    assert await turns >= blocks * block_bytes // base.TURN_BYTES - 1


async def count_turns() -> int:
    turns = 0
    try:
        while True:
            turns += 1
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        return turns


async def test_a_cancelled_copy_ends_at_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "TURN_BYTES", 1 << 20)
    source, target = np.ones((8, 1 << 20), np.uint8), np.zeros((8, 1 << 20), np.uint8)
    copying = asyncio.ensure_future(
        base.copy_pieces(target, source, base.CopyPlan(range(8), range(8), 0, 1 << 20, 1 << 20))
    )
    await asyncio.sleep(0)
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert target[0].all()
    assert not target[-1].any()


@pytest.mark.parametrize("broken", BROKEN, ids=str)
async def test_contract_catches_a_broken_transport(broken: str) -> None:
    with pytest.raises((AssertionError, TransportError), match=BROKEN[broken].found):
        await check_transport(BROKEN[broken].make)
    inproc._published.clear()  # one of them does not


async def test_contract_catches_a_hang() -> None:
    with pytest.raises(AssertionError, match="no answer"):
        await check_transport(lambda: WrappedTransport(delay_s=60.0), timeout_s=0.2)


@pytest.mark.parametrize(
    ("source", "target", "pieces"),
    [
        ([], [], []),
        ([1], [7], [(1, 7, 1)]),
        ([1, 2, 3], [7, 8, 9], [(1, 7, 3)]),
        ([1, 2, 4], [7, 8, 9], [(1, 7, 2), (4, 9, 1)]),
        ([3, 2, 1], [1, 2, 3], [(3, 1, 1), (2, 2, 1), (1, 3, 1)]),
    ],
)
def test_runs(source: list[int], target: list[int], pieces: list[tuple[int, int, int]]) -> None:
    assert list(find_runs(source, target)) == pieces


def test_unknown_transport_lists_those_known() -> None:
    with pytest.raises(UnknownName, match="inproc"):
        make_transport("carrier-pigeon")


def connected(transport: str | Transport = "inproc") -> tuple[Connector, BlockMemory, BlockMemory]:
    connector = Connector(transport, timeout_s=0.5)
    source, target = BlockMemory(SHAPE, 8), BlockMemory(SHAPE, 8)
    source.tensor.copy_(torch.rand(source.tensor.shape))
    connector.bind("P0", {"kv": source})
    connector.bind("D0", {"kv": target})
    return connector, source, target


PULL = Pull("P0:1", 0, "P0", "kv", "r", (1, 2, 5), (3, 4, 0))


async def test_connector_pulls_and_records() -> None:
    connector, source, target = connected()
    answer = await connector.pull("D0", PULL)
    assert answer.failure is None
    assert torch.equal(target.tensor[[3, 4, 0]], source.tensor[[1, 2, 5]])
    assert answer.record["bytes"] == 3 * SHAPE.block_bytes
    assert (answer.record["scheme"], answer.record["blocks"], answer.record["pieces"]) == ("inproc", 3, 2)
    await connector.aclose()
    await connector.aclose()


def rewriting(source: BlockMemory, generation: int) -> WrappedTransport:
    """While it reads, the source takes its blocks back."""

    def revoke(memory: BlockMemory, blocks: Sequence[int]) -> None:
        source.generations[5] = generation

    return WrappedTransport(after=revoke)


@pytest.mark.parametrize(("offered", "now", "stale"), [(0, 0, False), (3, 3, False), (3, 2, False), (3, 4, True)])
async def test_connector_refuses_what_the_source_took_back(offered: int, now: int, stale: bool) -> None:
    connector, source, _ = connected()
    transport = rewriting(source, now)
    connector.routes["kv"] = connector.routes["kv"]._replace(transport=transport)
    connector._descriptors["P0", "kv"] = transport.publish(source)
    answer = await connector.pull("D0", msgspec.structs.replace(PULL, generation=offered))
    assert (answer.failure is not None) == stale
    if answer.failure is not None:
        assert (answer.failure.fields["cause"], answer.failure.fields["reason"]) == ("OfferRefused", "stale")
        assert answer.record["outcome"] == "failed"
    await connector.aclose()


async def test_connector_reports_a_failed_read_in_its_answer() -> None:
    connector, _, target = connected(WrappedTransport(fail=lambda kind, count: True))
    answer = await connector.pull("D0", PULL)
    assert answer.failure is not None
    assert answer.failure.error == "MigrationError"
    assert answer.failure.fields == {"source": "P0", "target": "D0", "kind": "kv", "cause": "PeerLost"}
    assert not target.tensor.any()
    await connector.aclose()


async def test_connector_bounds_every_read() -> None:
    connector, _, _ = connected(WrappedTransport(delay_s=60.0))
    answer = await connector.pull("D0", PULL)
    assert answer.failure is not None
    assert answer.failure.fields["cause"] == "TransferTimeout"
    await connector.aclose()


async def test_closed_connector_refuses() -> None:
    connector, _, _ = connected()
    await connector.aclose()
    answer = await connector.pull("D0", PULL)
    assert answer.failure is not None
    assert answer.failure.fields["cause"] == ClosedError.__name__
