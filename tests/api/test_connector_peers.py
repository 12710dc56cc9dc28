"""A connector lets go of a peer that is gone, whatever it is doing with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from trinity.connector import Connector
from trinity.core.messages import Pull, Pulled
from trinity.errors import LayoutMismatch, UnknownName
from trinity.memory.block_memory import BlockMemory, BlockShape


class FakeRemote:
    def __init__(self, transport: FakeTransport) -> None:
        self.transport = transport

    async def read(self, source: Sequence[int], target: Sequence[int], within: Any = None) -> int:
        return len(source)

    async def generation(self, source: Sequence[int]) -> int:
        return 0

    async def aclose(self) -> None:
        self.transport.closed += 1


class FakeTransport:
    """``gate`` holds attaching up."""

    scheme, network = "fake", False

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.attached: list[bytes] = []
        self.closed = self.published = 0
        self.refusing = False

    def publish(self, memory: BlockMemory) -> bytes:
        self.published += 1
        if self.refusing and self.published % 2:  # the second of two pools
            raise OSError("no room")
        return b"ours"

    async def attach(self, descriptor: bytes, into: BlockMemory) -> FakeRemote:
        self.attached.append(descriptor)
        await self.gate.wait()
        return FakeRemote(self)

    async def aclose(self) -> None: ...


async def connector() -> tuple[Connector, FakeTransport]:
    transport = FakeTransport()
    made = Connector(cast(Any, transport))
    made.bind("D0", {"kv": cast(BlockMemory, None)})
    made.introduce("P0", {"kv": b"first"})
    return made, transport


async def pulled(made: Connector) -> Pulled:
    return await made.pull("D0", Pull("offer", 0, "P0", "kv", "request", (0,), (1,)))


async def test_what_was_attached_is_closed_and_the_next_life_attached_anew() -> None:
    made, transport = await connector()
    assert (await pulled(made)).failure is None
    made.forget("P0")
    lost = (await pulled(made)).failure
    assert lost is not None
    assert lost.fields["cause"] == "PeerLost"
    await asyncio.sleep(0)
    assert transport.closed == 1
    made.introduce("P0", {"kv": b"second"})
    assert (await pulled(made)).failure is None
    assert transport.attached == [b"first", b"second"]
    await made.aclose()
    assert transport.closed == 2


async def test_what_was_attached_goes_with_the_pools_that_it_reads_into() -> None:
    """The next pools of the name get what is pulled, and not the former ones, which nobody reads any more."""
    shape = BlockShape("kv", (1, 2, 1, 4, 8), torch.float32)
    source, former, later = (BlockMemory(shape, 2) for _ in range(3))
    made = Connector("inproc")
    made.bind("P0", {"kv": source})
    made.bind("D0", {"kv": former})
    source.tensor[0] = 7.0
    assert (await pulled(made)).failure is None
    assert former.tensor[1].eq(7.0).all()
    made.unbind({"kv": former})
    made.bind("D0", {"kv": later})
    former.tensor.zero_()
    assert (await pulled(made)).failure is None
    assert later.tensor[1].eq(7.0).all()
    assert former.tensor.eq(0.0).all()
    await made.aclose()


async def test_pools_that_go_while_they_are_attached_are_not_read_into() -> None:
    made, transport = await connector()
    former, later = cast(BlockMemory, object()), cast(BlockMemory, object())
    made._memories["D0", "kv"] = former
    transport.gate.clear()
    pulling = asyncio.ensure_future(pulled(made))
    await asyncio.sleep(0)
    made._memories["D0", "kv"] = later
    transport.gate.set()
    assert (await pulling).failure is not None
    assert not made._remotes
    await made.aclose()
    assert transport.closed == 1


async def test_a_peer_lost_while_it_is_attached_to_does_not_stay() -> None:
    made, transport = await connector()
    transport.gate.clear()
    pulling = asyncio.ensure_future(pulled(made))
    await asyncio.sleep(0)
    made.introduce("P0", {"kv": b"second"})
    transport.gate.set()
    lost = (await pulling).failure
    assert lost is not None
    assert lost.fields["cause"] == "PeerLost"
    assert (await pulled(made)).failure is None
    assert transport.attached == [b"first", b"second"]
    await made.aclose()
    assert transport.closed == 2


async def test_one_that_hangs_does_not_hold_up_the_others() -> None:
    made, transport = await connector()
    made.introduce("P1", {"kv": b"other"})
    transport.gate.clear()
    hanging = asyncio.ensure_future(pulled(made))
    await asyncio.sleep(0)
    other = asyncio.ensure_future(made.pull("D0", Pull("offer", 0, "P1", "kv", "request", (0,), (1,))))
    await asyncio.sleep(0.01)
    assert transport.attached == [b"first", b"other"]
    transport.gate.set()
    assert (await hanging).failure is None
    assert (await other).failure is None
    await made.aclose()


@pytest.mark.parametrize("medium", ["inproc", "shm"])
async def test_blocks_of_as_many_bytes_but_another_dtype_or_shape_do_not_move(medium: str) -> None:
    made, shape = Connector(medium), (2, 2, 1, 4, 8)
    source = BlockMemory(BlockShape("kv", shape, torch.float16), 4, shared=True)
    for other in (BlockShape("kv", shape, torch.bfloat16), BlockShape("kv", (2, 2, 2, 4, 4), torch.float16)):
        target = BlockMemory(other, 4, shared=True)
        assert target.block_bytes == source.block_bytes
        with pytest.raises(LayoutMismatch, match=r"float16.* \[2, 2, 1, 4, 8\]"):
            await made.move(source, [0], target, [0])
        target.close()
    source.close()
    await made.aclose()


async def test_pools_of_a_kind_that_no_route_has_are_named() -> None:
    """A KeyError of the connector's own table came."""
    made, shape = Connector("inproc"), BlockShape("keys", (2, 2, 1, 4, 8), torch.float16)
    source, target = (BlockMemory(shape, 4, shared=True) for _ in range(2))
    with pytest.raises(UnknownName, match="unknown kind of block 'keys'; known: image, kv"):
        await made.move(source, [0], target, [0])
    source.close()
    target.close()
    await made.aclose()


async def test_what_is_half_published_is_withdrawn() -> None:
    made, transport = await connector()
    withdrawn: list[object] = []
    transport.refusing, transport.published = True, 0
    cast(Any, transport).withdraw = withdrawn.append
    with pytest.raises(OSError, match="no room"):
        made.bind("D1", {"kv": cast(BlockMemory, "pool")})
    assert withdrawn == ["pool"], "the transport may have registered it before it raised"
    await made.aclose()


async def test_what_could_not_be_published_is_not_bound() -> None:
    made, transport = await connector()
    transport.refusing = True
    for _ in range(2):
        with pytest.raises(OSError, match="no room"):
            made.bind("D1", {"image": cast(BlockMemory, None), "kv": cast(BlockMemory, None)})
    transport.refusing = False
    assert made.bind("D1", {"kv": cast(BlockMemory, None)}) == {"kv": b"ours"}
    await made.aclose()
