"""ucx between processes: exact bytes, exact tokens, refusals, and peers that die or freeze."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from support.exact_pipelines import check_exact, tokens_of_the_model
from support.lender import EMPTY, Lending, holds, lending, lent, pool, ready, shuffled
from trinity.errors import OfferRefused, TransferTimeout, TransportUnavailable
from trinity.memory.block_memory import BlockMemory, Strided
from trinity.transport import CopyPlan, link, make_transport, sealed_requests
from trinity.transport.link import LinkRemote
from trinity.transport.ucx import protocol, source
from trinity.transport.ucx.protocol import (
    REQUEST_BYTES,
    REQUEST_RUNS,
    REQUEST_TAG,
    UcxDescriptor,
    UcxReply,
    UcxWorker,
    piece_tag,
    split_pieces,
)
from trinity.transport.ucx.source import UcxSource
from trinity.transport.ucx.transport import UcxTransport

SMALL, LARGE = (32, 16 << 10), (512, 256 << 10)  # blocks, bytes of one


@pytest.fixture(autouse=True)
def _ready() -> None:
    ready("ucx")


Attached = tuple[UcxTransport, LinkRemote, BlockMemory]


async def attached(peer: Lending, size: tuple[int, int], **named: Any) -> Attached:
    transport, memory = UcxTransport(**named), await asyncio.to_thread(pool, *size)
    return transport, await transport.attach(peer.descriptor, memory), memory


async def test_another_process_is_read() -> None:
    async with lending("ucx", *LARGE) as peer:
        transport, remote, memory = await attached(peer, LARGE)
        assert await remote.read(shuffled(LARGE[0]), range(LARGE[0])) == LARGE[0] * LARGE[1]
        assert await holds(memory, shuffled(LARGE[0]))
        await transport.aclose()


async def test_many_reads_at_once() -> None:
    async with lending("ucx", *SMALL) as peer:
        transport, remote, memory = await attached(peer, SMALL)
        await asyncio.gather(*(remote.read([block], [31 - block]) for block in range(32)))
        assert torch.equal(memory.tensor, lent(*SMALL).flip(0))
        await transport.aclose()


# ------------------------------------------------------------ what is refused


def altered(descriptor: bytes, **changed: Any) -> bytes:
    return msgspec.msgpack.encode(
        msgspec.structs.replace(msgspec.msgpack.decode(descriptor, type=UcxDescriptor), **changed)
    )


async def refused(transport: UcxTransport, descriptor: bytes, memory: BlockMemory, block: int) -> str:
    """The reason that a source gives."""
    remote = await transport.attach(descriptor, memory)
    with pytest.raises(OfferRefused) as caught:
        await remote.read([block], [0])
    assert bool((memory.tensor == EMPTY).all())
    return caught.value.reason


async def test_a_source_says_why_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, memory, lent_pool = UcxTransport(), pool(*SMALL), pool(*SMALL)
    descriptor = transport.publish(lent_pool)
    with pytest.raises(OfferRefused) as caught:
        await transport.attach(altered(descriptor, pool=7), memory)
    assert caught.value.reason == "missing"
    assert await refused(transport, altered(descriptor, blocks=64), memory, 40) == "incompatible"
    monkeypatch.setattr(source, "MAX_SENDS", 0)
    assert await refused(transport, descriptor, memory, 1) == "busy"
    monkeypatch.undo()
    remote = await transport.attach(descriptor, memory)
    assert await remote.read([1], [1]) == SMALL[1], "a refusal is not the end of the link"
    await transport.aclose()


async def test_who_lacks_the_secret_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "CONNECT_S", 0.3)
    transport, memory = UcxTransport(), pool(*SMALL)
    descriptor = transport.publish(pool(*SMALL))
    with pytest.raises(TransferTimeout):
        await transport.attach(altered(descriptor, key=b"guessed"), memory)
    await transport.aclose()


def address_of(descriptor: bytes) -> bytes:
    return msgspec.msgpack.decode(descriptor, type=UcxDescriptor).address


Sent = list[tuple[int, bytes]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Tags and bytes of everything that links and sources of this process send."""
    found: Sent = []
    send = UcxWorker.send

    def record(worker: UcxWorker, endpoint: Any, data: Any, tag: int) -> Any:
        found.append((tag, bytes(data)))
        return send(worker, endpoint, data, tag)

    monkeypatch.setattr(UcxWorker, "send", record)
    return found


class Stranger:
    """A worker that has reached another's port, and sends there as if it were a link, or a source."""

    def __init__(self, address: bytes) -> None:
        self.worker = UcxWorker()
        self.endpoint = self.worker.connect(address)
        self.kept: list[Any] = []

    def send(self, message: bytes, tag: int = REQUEST_TAG) -> None:
        data = np.frombuffer(message or b" ", np.uint8)
        request = self.endpoint.tag_send(self.worker.array(data), self.worker._api.UCXXTag(tag))
        self.kept.append((request, data))

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not done():
                self.worker.wait(0.001)
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self.worker.close_endpoint(self.endpoint, [request for request, _ in self.kept])
        self.kept.clear()
        self.worker.close()


async def test_a_request_that_is_replayed_moves_nothing(sent: Sent, caplog: pytest.LogCaptureFixture) -> None:
    transport, memory = UcxTransport(), pool(*SMALL)
    descriptor = transport.publish(pool(*SMALL))
    remote = await transport.attach(descriptor, memory)
    await remote.read([1], [1])
    stranger, before = Stranger(address_of(descriptor)), len(sent)
    requests = [message for tag, message in sent if tag == REQUEST_TAG]
    for message in requests:
        stranger.send(message)
    await stranger.until(lambda: len(sent) > before or caplog.text.count("has come before") == len(requests))
    assert len(sent) == before
    assert await remote.read([2], [2]) == SMALL[1]
    stranger.close()
    await transport.aclose()


async def test_what_strangers_begin_to_send_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages that come in parts, and whose rest never comes, hold little memory, and nobody waits for them."""
    may_receive, receive = threading.Event(), UcxSource._receive

    def receive_late(*given: Any) -> bool:
        assert may_receive.wait(60)
        return receive(*given)

    async def logged(what: str, count: int) -> None:
        async with asyncio.timeout(60):
            while caplog.text.count(what) < count:
                await asyncio.sleep(0.01)

    may_receive.set()
    monkeypatch.setattr(UcxSource, "_receive", receive_late)
    monkeypatch.setattr(source, "MAX_ARRIVING", 20)
    monkeypatch.setattr(sealed_requests, "LOGGED_MESSAGES", 1000)
    transport, memory = UcxTransport(), pool(*SMALL)
    descriptor = transport.publish(pool(*SMALL))
    remote = await transport.attach(descriptor, memory)
    served: Any = transport._source
    monkeypatch.setattr(protocol, "make_ucx_config", lambda: {"TLS": "tcp", "RNDV_THRESH": "0"})  # it only announces
    stranger = Stranger(address_of(descriptor))
    stranger.send(bytes(100))
    await stranger.until(lambda: "lacks its secret" in caplog.text)
    may_receive.clear()
    for size in (*(REQUEST_BYTES,) * 50, 1 << 20, 64 << 20, 10):
        stranger.send(bytes(size))
    for _ in range(500):
        stranger.worker.wait(0)
    may_receive.set()  # and the stranger does no more
    await logged("one too many", 30)
    await logged("a wrong size", 3)
    for _ in range(3):
        assert await remote.read([1, 0], [1, 3]) == 2 * SMALL[1]
        assert len(served._waiting) == 20
    await stranger.until(lambda: not served._waiting)
    stranger.close()
    await transport.aclose()


async def test_requests_are_as_short_as_come_whole(monkeypatch: pytest.MonkeyPatch, sent: Sent) -> None:
    """Whatever is asked for, in blocks or in parts of them, and however scattered."""
    many = 4 * REQUEST_RUNS
    transport, memory = UcxTransport(), pool(many, 128)
    other = pool(many, 128)
    other.tensor.copy_(torch.arange(other.tensor.numel()).reshape(other.tensor.shape) % 97)
    remote = await transport.attach(transport.publish(other), memory)
    blocks = [*range(0, many, 2), 1]
    assert await remote.read(blocks, blocks[::-1]) == len(blocks) * other.block_bytes
    assert torch.equal(memory.tensor[blocks[::-1]], other.tensor[blocks])
    assert await remote.read(blocks, blocks, Strided(0, 16, 64, 2)) == len(blocks) * 32
    assert await remote.generation(list(range(many))) == max(other.generation([each]) for each in (0, many - 1))
    requests = [len(message) for tag, message in sent if tag == REQUEST_TAG]
    assert max(requests) <= REQUEST_BYTES < sum(requests)
    await transport.aclose()


async def test_a_reply_of_somebody_else_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who knows the address of a link and the number of its request sends a refusal before the source replies."""
    may_answer, answer = threading.Event(), UcxSource._answer

    def answer_late(*given: Any) -> None:
        assert may_answer.wait(60)
        answer(*given)

    monkeypatch.setattr(UcxSource, "_answer", answer_late)
    may_answer.set()
    transport, memory = UcxTransport(), pool(*SMALL)
    remote = await transport.attach(transport.publish(pool(*SMALL)), memory)
    link: Any = await remote.link()
    may_answer.clear()
    reading = asyncio.create_task(remote.read([1], [1]))
    async with asyncio.timeout(60):
        while not (link._in_flight and link._in_flight[0].handle):
            await asyncio.sleep(0.001)
    stranger = Stranger(link._worker.address)
    for forged in (msgspec.msgpack.encode(UcxReply("missing", "a lie")), b"", bytes(10_000)):
        stranger.send(forged, piece_tag(link._in_flight[0].handle.number, 0))
    await stranger.until(lambda: all(request.completed for request, _ in stranger.kept))
    may_answer.set()
    assert await reading == SMALL[1]
    stranger.close()
    await transport.aclose()


def test_whole_blocks_travel_as_runs() -> None:
    assert split_pieces([(3, 2), (9, 1)], (0, 64), 64) == [(3, 2), (9, 1)]
    for piece in ((0, 32), (32, 32)):
        assert split_pieces([(3, 2), (9, 1)], piece, 64) == [(3, 1), (4, 1), (9, 1)]


async def test_pieces_that_a_pool_does_not_have_are_refused() -> None:
    transport, memory = UcxTransport(), pool(*SMALL)
    remote = await transport.attach(transport.publish(pool(*SMALL)), memory)
    link: Any = await remote.link()
    half, blocks = SMALL[1] // 2, SMALL[0]
    for units, offset, unit_bytes in (([2 * blocks], 0, half), ([-1], 0, half), ([0], half, half), ([0], 0, 24)):
        with pytest.raises(OfferRefused, match="no such blocks"):
            await link.read(CopyPlan(units, [0] * len(units), offset, 8, unit_bytes), 10.0)
    with pytest.raises(OfferRefused, match="no such blocks"):  # more than the pool has
        await link.read(CopyPlan([0] * (2 * blocks + 1), list(range(2 * blocks + 1)), 0, 8, half), 10.0)
    assert bool((memory.tensor == EMPTY).all())
    await transport.aclose()


# ------------------------------------------------------------ in pipelines, beside others, and where it is not


@pytest.fixture(scope="module")
def wanted() -> list[tuple[int, ...]]:
    return tokens_of_the_model()


MORE = [pytest.param(placement, marks=pytest.mark.slow) for placement in ("E+P+D", "EP+D", "2E2P2D")]


@pytest.mark.parametrize("placement", ["ED+P", *MORE])
async def test_pipelines_of_processes_are_exact(placement: str, wanted: list[tuple[int, ...]]) -> None:
    records = await check_exact(placement, "ucx", wanted)
    assert all(record["setup_s"] >= 0 for record in records)


async def test_it_lives_beside_nixl() -> None:
    ready("nixl")
    async with lending("ucx", *SMALL) as one, lending("nixl", *SMALL) as other:
        for scheme, peer in (("ucx", one), ("nixl", other)):
            transport, memory = make_transport(scheme), pool(*SMALL)
            remote = await transport.attach(peer.descriptor, memory)
            assert await remote.read([1], [2]) == SMALL[1]
            assert torch.equal(memory.tensor[2], lent(*SMALL)[1])
            await transport.aclose()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    with pytest.raises(TransportUnavailable, match="ucxx-cu13==0"):
        make_transport("ucx")
