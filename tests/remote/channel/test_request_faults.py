"""Whatever a request holds ends that request, typed, and no instance: on all three ways that messages go."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.emulated_pipelines import LIVENESS_S, MODEL, POOLS, asked, check, right
from trinity.core import InstanceCore
from trinity.core.instance.settings import Settings
from trinity.core.messages import (
    IMAGE,
    Commit,
    Emit,
    Finished,
    MediaSpan,
    Moved,
    Offer,
    Part,
    PeerLoad,
    PeerUp,
    ResolvedSampling,
    Sampled,
    Send,
    Step,
    Stepped,
    Submit,
    Value,
    Work,
)
from trinity.emulation.model import EmulatedRequest
from trinity.errors import HandshakeError, Overloaded, RequestError, RequestTooLarge
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.channel import channel as channels
from trinity.remote.channel.request_faults import encode_all, end_requests, requests_in, requests_of
from trinity.remote.channel.wire import UnsendableMessage, decode, encode
from trinity.remote.worker import REPORT_BACKLOG, InstanceWorker
from trinity.request import Sampling

WORK = Work(request="r", prompt=(1, 2), attempt=3)


def bad(**sampling: Any) -> Work:
    return Work(request="bad", prompt=(1,), sampling=ResolvedSampling(**sampling))


class Broken(torch.Tensor):
    """A tensor that cannot be read."""

    def detach(self) -> torch.Tensor:
        raise MemoryError("no room")


BROKEN = torch.zeros(2).as_subclass(Broken)
HOPELESS = [
    Submit(bad(seed=2**64)),
    Submit(bad(bad_words_ids=(("\ud800",),))),
    Submit(bad(temperature=cast(Any, torch.float32))),
    Submit(bad(suppress_tokens=(2**70,))),
    Submit(Work(request="bad", prompt=(2**64,))),
    Submit(Work(request="bad", prompt=(1,)), ({"pixels": BROKEN},)),
    Submit(Work(request="bad", prompt=(1,)), ({"pixels": object()},)),
]


@pytest.mark.parametrize("message", HOPELESS, ids=range(len(HOPELESS)))
def test_a_message_that_cannot_be_sent_is_one_typed_error(message: Submit) -> None:
    with pytest.raises(UnsendableMessage) as caught:
        encode(message)
    (finished,) = end_requests(requests_of(message), caught.value, ("E0",))
    assert (finished.request, finished.reason, finished.route) == ("bad", "error", ("E0",))
    assert finished.failure is not None
    assert finished.failure.error == "RequestError"
    assert decode(encode(finished)) == finished


def test_one_that_is_too_large_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_MESSAGE", 1000)
    with pytest.raises(UnsendableMessage, match="above the 1000") as caught:
        encode(Submit(WORK, ({"pixels": torch.zeros(400)},)))
    (finished,) = end_requests([("r", 3)], caught.value, ())
    assert finished.failure is not None
    assert finished.failure.error == "RequestTooLarge"
    assert "smaller media" in finished.failure.message


def test_rows_of_a_step_that_can_be_sent_are_sent() -> None:
    emit = Emit(("a", "b", "c"), (0, 4, 0), (0, 5, 9), (Sampled(1), Sampled(2**80), Sampled(3)), 1)
    found = [decode(frame) for frame in encode_all([emit, Moved("a", 0, "D0", 1)], "P0")]
    assert [list(each.rows()) for each in found if isinstance(each, Emit)] == [
        [("a", 0, 1, Sampled(1))],
        [("c", 0, 10, Sampled(3))],
    ]
    (ended,) = [each for each in found if isinstance(each, Finished)]
    assert (ended.request, ended.attempt, ended.route) == ("b", 4, ("P0",))
    assert isinstance(found[-1], Moved)


def test_an_end_that_cannot_be_told_is_told_plainly() -> None:
    said = Finished(request="r", attempt=2, reason="length", count=9, transfers=({"bytes": 2**70},))
    (frame,) = encode_all([said], "D0")
    found = decode(frame)
    assert isinstance(found, Finished)
    assert (found.request, found.attempt, found.reason, found.count) == ("r", 2, "error", 0)


def test_of_what_concerns_no_request_nothing_is_told() -> None:
    assert encode_all([PeerLoad("E0", free={"kv": 2**70})], "E0") == []


# ---------------------------------------------------------------- read by the other side


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": True}, {"temperature": "hot"}, {"bad_words_ids": (3,)}, {"suppress_tokens": ("x",)}, {"seed": 0.5}],
)
def test_what_the_other_side_cannot_read_is_about_the_same_request(sampling: dict[str, Any]) -> None:
    frame = encode(Submit(Work(request="r", prompt=(1,), attempt=3, sampling=ResolvedSampling(**sampling))))
    with pytest.raises(HandshakeError):
        decode(frame)
    assert requests_in(frame) == [("r", 3)]


@given(st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["work", "request", "attempt", "requests", "attempts"]), inner, max_size=5),
).map(msgspec.msgpack.encode))  # fmt: skip
def test_of_any_bytes_the_requests_are_told_or_none(frame: bytes) -> None:
    for name, attempt in requests_in(frame):
        assert isinstance(name, str)
        assert isinstance(attempt, int)


# ---------------------------------------------------------------- instance to instance


def offering() -> tuple[InstanceCore, Offer]:
    """An E that has offered its features to a P."""
    core = InstanceCore(Settings("E0", "E", {IMAGE: 4}))
    for peer in (core.announcement(), PeerUp("P0", "PD", pools={IMAGE: 4, "kv": 40})):
        core.handle(peer, 0.0)
    span = MediaSpan("image", 5, 0, 5, "cat")
    out = core.handle(Submit(Work(request="r", prompt=(0,) * 6, media=(span,), attempt=3), ({},)), 0.0)
    (step,) = [each for each in out if isinstance(each, Step)]
    out += core.handle(Stepped(step.id, step.lane), 0.1)
    (offer,) = [each.message for each in out if isinstance(each, Send) and isinstance(each.message, Offer)]
    return core, offer


def test_the_messages_of_a_transfer_are_those_of_its_request() -> None:
    core, offer = offering()
    assert requests_of(offer) == [("r", 3)]
    for message in (Commit(offer.id), Commit("E0:77")):
        assert requests_of(message, core.state) == ([("r", 3)] if message.id == offer.id else [])
    target = InstanceCore(Settings("P0", "PD", {IMAGE: 4, "kv": 40}))
    for event in (target.announcement(), PeerUp("E0", "E", pools={IMAGE: 4}), offer):
        target.handle(event, 0.0)
    assert requests_of(Commit(offer.id), target.state) == [("r", 3)]


class Line:
    """A channel that keeps what it is given."""

    closed = False

    def __init__(self, backlog: int = 0) -> None:
        self.backlog, self.sent = backlog, list[Value]()

    def send(self, frame: bytes) -> None:
        self.sent.append(decode(frame))


async def session(core: InstanceCore, frontend: Line, **peers: Line) -> InstanceWorker:
    made = InstanceWorker(b"s" * 32, "unix:nowhere", asyncio.Event())
    made.host = cast(Any, SimpleNamespace(core=core))
    made.hello = msgspec.structs.replace(made.hello, name=core.settings.name)
    made._frontend, made._peers = cast(Any, frontend), cast(Any, peers)
    return made


async def test_what_cannot_go_to_a_peer_ends_its_request_at_the_front_end() -> None:
    core, offer = offering()
    frontend, peer = Line(), Line()
    made = await session(core, frontend, P0=peer)
    hopeless = msgspec.structs.replace(offer, parts=(Part((2**70,)),))
    for message in (hopeless, Commit(offer.id, (2**70,)), Moved("r", 3, "P0", 1)):
        made.send_to_peer("P0", message)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert peer.sent == [Moved("r", 3, "P0", 1)]
    for found in frontend.sent:
        assert isinstance(found, Finished)
        assert (found.request, found.attempt, found.reason, found.route) == ("r", 3, "error", ("E0", "P0"))
    assert len(frontend.sent) == 2


async def test_a_front_end_that_does_not_read_is_spared_load_reports_alone() -> None:
    core, _ = offering()
    busy = Line(REPORT_BACKLOG + 1)
    made = await session(core, busy)
    made.send_to_frontend([PeerLoad("E0"), Moved("r", 3, "P0", 1)])
    assert busy.sent == [Moved("r", 3, "P0", 1)]
    free = Line()
    made._frontend = cast(Any, free)
    made.send_to_frontend([PeerLoad("E0")])
    assert free.sent == [PeerLoad("E0")]


# ---------------------------------------------------------------- whole pipelines


def emulated(**named: Any) -> Pipeline:
    return Pipeline(MODEL, "1E1P1D", hosting="process", cache=CacheConfig(pools=POOLS), **named)


async def test_a_request_above_the_limit_ends_alone_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = asked()
    large = EmulatedRequest(text_tokens=3400, image_tokens=(576,), max_tokens=2)
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S):
        processes = {name: member.process for name, member in pipe.processes.items()}
        monkeypatch.setattr(channels, "MAX_MESSAGE", 10_000)
        served = asyncio.gather(*(pipe.complete(request) for request in requests))
        for _ in range(3):
            with pytest.raises(RequestTooLarge, match="smaller media"):
                await pipe.complete(large)
        check(list(await served), requests)
        await pipe.wait_idle()
        assert {name: member.process for name, member in pipe.processes.items()} == processes
        assert all(member.alive for member in pipe.processes.values())


async def test_a_request_that_no_message_can_hold_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for door in ("trinity.pipeline.frontend_host", "trinity.emulation.processor"):  # as if they had let it through
        monkeypatch.setattr(f"{door}.check_request", lambda request: request)
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S):
        for sampling in (Sampling(seed=2**64), Sampling(top_k=True), Sampling(stop_token_ids=(2**70,))):
            with pytest.raises(RequestError):
                await pipe.complete(EmulatedRequest(text_tokens=9, max_tokens=2, sampling=sampling))
        request = EmulatedRequest(text_tokens=9, max_tokens=5)
        assert (await pipe.complete(request)).token_ids == right(request)
        assert [member.setup.epoch for member in pipe.processes.values()] == [0, 0, 0]


async def test_more_bytes_than_may_wait_are_refused_and_nobody_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity.preprocess.processor.ProcessedRequest.input_bytes", 100)
    async with emulated(max_waiting_bytes=450) as pipe, asyncio.timeout(LIVENESS_S):
        requests = [EmulatedRequest(text_tokens=9, max_tokens=9) for _ in range(12)]
        found = await asyncio.gather(*(pipe.complete(each) for each in requests), return_exceptions=True)
        refused = [each for each in found if isinstance(each, BaseException)]
        assert refused
        assert all(isinstance(each, Overloaded) and "max_waiting_bytes" in str(each) for each in refused)
        assert len(found) - len(refused) >= 4
        await pipe.wait_idle()
        assert pipe._frontend.core.inputs.waiting_bytes == 0
    async with emulated(max_waiting_bytes=99) as pipe, asyncio.timeout(LIVENESS_S):
        with pytest.raises(RequestTooLarge, match="max_waiting_bytes"):
            await pipe.complete(requests[0])
