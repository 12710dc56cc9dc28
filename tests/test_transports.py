"""Every transport keeps one contract; a broken one is caught by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
import torch

from lending import ready
from trinity.connector import Connector
from trinity.errors import ClosedError, HandshakeError, TransportError, UnknownName
from trinity.memory import BlockMemory, BlockShape
from trinity.messages import Pull
from trinity.testing.transport_contract import check_transport
from trinity.testing.transports import WrappedTransport, zeroing
from trinity.transport import inproc, make_transport
from trinity.transport.base import Transport, runs
from trinity.transport.inproc import INLINE_BYTES, InprocTransport
from trinity.transport.registry import known_transports

SHAPE = BlockShape("kv", (2, 3, 4), torch.float32)


@pytest.mark.parametrize("rows", [16, 4096], ids=["inline copies", "copies on a thread"])
@pytest.mark.parametrize("name", known_transports())
async def test_contract(name: str, rows: int) -> None:
    ready(name)
    await check_transport(lambda: make_transport(name), rows=rows)


def test_large_blocks_leave_the_loop() -> None:
    assert 2 * 4096 * 8 * 4 * 32 > INLINE_BYTES > 2 * 16 * 8 * 4 * 32


def swap(memory: BlockMemory, blocks: Sequence[int]) -> None:
    memory.tensor[list(blocks)] = memory.tensor[list(reversed(blocks))]


def truncate(memory: BlockMemory, blocks: Sequence[int]) -> None:
    if len(blocks):
        memory.tensor[blocks[-1]] = -1.0


def overrun(memory: BlockMemory, blocks: Sequence[int]) -> None:
    memory.tensor[(max(blocks, default=0) + 1) % memory.blocks] = 5.0


def late(memory: BlockMemory, blocks: Sequence[int]) -> None:
    kept = memory.tensor[list(blocks)].clone()

    def write() -> None:
        memory.tensor[list(blocks)] = kept + 1.0

    asyncio.get_running_loop().call_later(0.01, write)


class Lenient(InprocTransport):
    """Takes whatever it is given for a descriptor."""

    async def attach(self, descriptor: bytes, into: BlockMemory):  # type: ignore[no-untyped-def]
        try:
            return await super().attach(descriptor, into)
        except HandshakeError:
            return None


class Forgetful(InprocTransport):
    """Goes on serving after it was closed."""

    async def aclose(self) -> None:
        return None


BROKEN: dict[str, Callable[[], Transport]] = {
    "wrong order": lambda: WrappedTransport(after=swap),
    "silent truncation": lambda: WrappedTransport(after=truncate),
    "another block touched": lambda: WrappedTransport(after=overrun),
    "late write": lambda: WrappedTransport(after=late),
    "read fails": lambda: WrappedTransport(fail=lambda kind, count: True),
    "zeroed": lambda: zeroing("kv"),
    "garbage accepted": Lenient,
    "serves when closed": Forgetful,
}


@pytest.mark.parametrize("broken", BROKEN, ids=str)
async def test_contract_catches_a_broken_transport(broken: str) -> None:
    with pytest.raises((AssertionError, TransportError)):
        await check_transport(BROKEN[broken])
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
    assert list(runs(source, target)) == pieces


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
