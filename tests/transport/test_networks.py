"""Who may ask a source for blocks, and which networks UCX may use."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.lender import EMPTY, pool, ready
from trinity.connector import Connector
from trinity.errors import ConfigError, TransferTimeout, TransportUnavailable
from trinity.transport import ucx_environment
from trinity.transport.auto import AutoHostTransport, AutoTransport
from trinity.transport.nixl import transport as nixl_transport
from trinity.transport.nixl.agent import NixlDescriptor, load_nixl, make_agent, pool_region
from trinity.transport.nixl.push import StagingArea
from trinity.transport.nixl.source import PushReply, PushRequest, PushWriter
from trinity.transport.nixl.transport import NixlPushTransport, NixlTransport
from trinity.transport.registry import make_transport
from trinity.transport.sealed_requests import LOGGED_MESSAGES, WINDOW, LinkSeal, RequestKey
from trinity.transport.ucx import transport as ucx_transport
from trinity.transport.ucx.transport import UcxTransport
from trinity.transport.ucx_environment import DEVICES_VARIABLE, find_interface, take_interface_of

SIZE = (32, 16 << 10)


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies of UCX cannot be loaded by one process: here none is."""
    monkeypatch.setattr(nixl_transport, "load_nixl", lambda: None)
    monkeypatch.setattr(ucx_transport, "load_ucxx", lambda: None)


@pytest.mark.usefixtures("no_libraries")
@pytest.mark.parametrize("devices", ["eth0", "lo,eth0", "all", "", "mlx5_0:1"])
@pytest.mark.parametrize("scheme", ["nixl", "nixl-push", "ucx"])
def test_a_network_has_to_be_trusted_in_words(scheme: str, devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", devices)
    with pytest.raises(ConfigError, match=r"options=\{'trusted_network': True\}"):
        Connector(scheme)
    trusted = Connector(scheme, options={"trusted_network": True})
    assert {route.options["trusted_network"] for route in trusted.routes.values()} == {True}
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    make_transport(scheme)
    monkeypatch.delenv("UCX_NET_DEVICES")
    make_transport(scheme)


@pytest.mark.usefixtures("no_libraries")
def test_auto_hands_the_word_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    memory = pool(*SIZE)
    with pytest.raises(ConfigError, match="trusted_network"):
        AutoTransport()._transport("nixl", memory)
    assert isinstance(AutoTransport(trusted_network=True)._transport("nixl", memory), NixlTransport)
    assert isinstance(AutoTransport(trusted_network=True)._transport("ucx", memory), UcxTransport)
    assert "nixl" not in AutoHostTransport(trusted_network=True)._schemes


@pytest.mark.usefixtures("no_libraries")
async def test_auto_does_without_a_network_that_nobody_trusts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pools of one host need none; only where nothing else reaches the pool is it an error, with the way out."""
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    source, target = pool(*SIZE), pool(*SIZE)
    transport = AutoTransport()
    remote = await transport.attach(transport.publish(source), target)
    assert remote.scheme == "inproc"
    assert {name for name, why in transport._unavailable.items() if "trusted_network" in why} == {"nixl", "ucx"}
    await transport.aclose()
    far = AutoTransport({name: make for name, make in transport._schemes.items() if name in ("nixl", "ucx")})
    with pytest.raises(TransportUnavailable, match=r"no transport reaches .*options=\{'trusted_network': True\}"):
        far.publish(source)


def test_the_loopback_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    ucx_environment.check_network("ucx", False)
    ucx_environment.set_ucx_defaults()
    assert os.environ["UCX_NET_DEVICES"] == "lo"


# ---------------------------------------------------------------- requests without the key


def test_a_request_has_the_tag_of_its_source(caplog: pytest.LogCaptureFixture) -> None:
    mine, another = RequestKey("mine"), RequestKey("another")
    number, sealed = LinkSeal(mine.value, "mine").seal(b"request")
    opened = mine.open(sealed)
    assert opened is not None
    assert opened[1:] == (number, b"request")
    with caplog.at_level(logging.WARNING):
        for wrong in (b"", b"request", sealed[:-1], sealed + b"x", b"x" + sealed[1:], bytes(40) + b"request"):
            assert mine.open(wrong) is None
        for _ in range(100):
            assert another.open(sealed) is None
    assert len(caplog.records) == 6 + LOGGED_MESSAGES
    assert "another refused a request for blocks that lacks its secret" in caplog.text


@functools.cache
def sealed_messages() -> tuple[bytes, list[bytes]]:
    """A key, and the requests of one connection in the order in which they were sealed."""
    link = LinkSeal(key := os.urandom(32), "source")
    return key, [link.seal(b"request")[1] for _ in range(3 * WINDOW)]


@given(st.lists(st.integers(0, 3 * WINDOW - 1), max_size=60))
def test_no_request_is_believed_twice(sent: list[int]) -> None:
    """In whatever order they come: those within the window are all taken, once; of those behind it none."""
    source = RequestKey("source")
    source.value, messages = sealed_messages()
    taken: set[int] = set()
    for place in sent:
        wanted = place not in taken and place > max(taken, default=0) - WINDOW
        assert (source.open(messages[place]) is not None) == wanted
        taken |= {place} if wanted else set()


def test_a_reply_is_that_of_its_request(caplog: pytest.LogCaptureFixture) -> None:
    source = RequestKey("source")
    link, other = LinkSeal(source.value, "source"), LinkSeal(source.value, "source")
    number, sealed = link.seal(b"request")
    request = source.open(sealed)
    assert request is not None
    reply = source.seal_reply(request, b"reply")
    assert link.open(reply) == (number, b"reply")
    for wrong in (sealed, b"", reply[:-1], RequestKey("another").seal_reply(request, b"reply")):
        assert link.open(wrong) is None
    assert other.open(reply) is None
    assert source.open(reply) is None, "nor does a reply pass for a request"
    assert "a connection to source refused a reply" in caplog.text


async def until(said: Callable[[], bool]) -> None:
    """Wait for what a thread of nixl says or does."""
    async with asyncio.timeout(60):
        while not said():
            await asyncio.sleep(0.01)


async def test_a_stranger_gets_nothing_written(caplog: pytest.LogCaptureFixture) -> None:
    """An agent that has reached the source's port and knows all of its descriptor but the key."""
    ready("nixl-push")
    source, memory, answers = pool(*SIZE), pool(*SIZE), list[bytes]()
    async with aclosing(NixlPushTransport()) as transport:
        source.tensor.fill_(7)
        theirs = msgspec.msgpack.decode(transport.publish(source), type=NixlDescriptor)
        stage = StagingArea(memory)
        whole = stage.region(1)
        agent = make_agent(pool_region(memory).gpu)
        agent.register_memory(whole.whole, whole.memory)
        agent.add_remote_agent(theirs.metadata)

        def listen() -> list[bytes]:
            """All that was answered so far. The agent has no thread: what it was told to send, it sends here."""
            answers.extend(agent.get_new_notifs().get(theirs.agent, []))
            return answers

        piece = stage.region(SIZE[1])
        asked = PushRequest(agent.get_agent_metadata(), theirs.pool, piece, 0, [0], SIZE[1])
        request = msgspec.msgpack.encode(asked)
        for message in (request, LinkSeal(os.urandom(32), "").seal(request)[1], b""):
            agent.send_notif(theirs.agent, message)
        await until(lambda: bool(listen()) or caplog.text.count("request for blocks that lacks its secret") == 3)
        assert answers == []
        assert not stage._bytes[: SIZE[1]].any()
        link = LinkSeal(theirs.key, theirs.agent)
        number, message = link.seal(request)
        agent.send_notif(theirs.agent, message)
        await until(lambda: bool(listen()))
        assert [link.open(each) for each in answers] == [(number, msgspec.msgpack.encode(PushReply()))]
        assert stage._bytes[: SIZE[1]].any()
        assert bool((memory.tensor == EMPTY).all())
        stage._bytes[:] = 0
        agent.send_notif(theirs.agent, message)
        await until(lambda: len(listen()) > 1 or "has come before" in caplog.text)
        number, message = link.seal(msgspec.msgpack.encode(msgspec.structs.replace(asked, units=[SIZE[0]])))
        agent.send_notif(theirs.agent, message)
        await until(lambda: len(listen()) > 1)
        opened = link.open(answers[1])
        assert opened is not None
        assert opened[0] == number, "it was answered a second time"
        assert not stage._bytes.any(), "nor is it written a second time"
        stage.abandon()


class Held:
    """Requests that the source has taken and not begun; all happens on the thread of its agent, which alone may use it.

    A write that is begun elsewhere is looked at before it is posted, and dropped as one that failed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[tuple[PushWriter, str, bytes]] = []
        self.go = threading.Event()
        self._begin, self._poll = PushWriter.start_write, PushWriter.poll
        monkeypatch.setattr(PushWriter, "start_write", lambda *given: self.requests.append(given))
        monkeypatch.setattr(PushWriter, "poll", lambda writer: self._begin_then_poll(writer))

    def _begin_then_poll(self, writer: PushWriter) -> None:
        while self.go.is_set() and self.requests:
            self._begin(*self.requests.pop(0))
        self._poll(writer)


async def test_a_forged_reply_ends_no_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An agent under the source's name says that all is written, while the source has not begun."""
    ready("nixl-push")
    held, source, memory = Held(monkeypatch), pool(*SIZE), pool(*SIZE)
    source.tensor.fill_(7)
    async with aclosing(NixlPushTransport(timeout_s=300.0)) as transport:
        remote = await transport.attach(transport.publish(source), memory)
        link: Any = await remote.link()
        reading = asyncio.create_task(remote.read([0], [0]))
        await until(lambda: bool(held.requests))
        _, name, request = held.requests[0]
        api = load_nixl()
        forger = api.nixl_agent(link.peer, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        forger.add_remote_agent(link._metadata)
        for forged in (msgspec.msgpack.encode({"number": 1}), request, b"", bytes(60)):
            forger.send_notif(name, forged)

        def arrived() -> bool:
            forger.get_new_notifs()  # it has no thread: what it was told to send, it sends here
            return reading.done() or caplog.text.count("a reply that lacks its secret") == 4

        await until(arrived)
        await remote.generation([0])  # by the same thread, which has looked at every read since
        assert not reading.done()
        assert bool((memory.tensor == EMPTY).all())
        held.go.set()
        assert await reading == SIZE[1]
        assert bool((memory.tensor[0] == 7).all())


async def test_a_source_that_never_writes_costs_a_read_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read fails in its time; the next one has a link of its own, and nothing outlives the close."""
    ready("nixl-push")
    held, source, memory = Held(monkeypatch), pool(*SIZE), pool(*SIZE)
    before = set(threading.enumerate())
    source.tensor.fill_(7)
    async with aclosing(NixlPushTransport()) as transport:
        remote = await transport.attach(transport.publish(source), memory)
        remote._timeout_s = 0.2
        with pytest.raises(TransferTimeout, match="did not deliver 1 blocks in time"):
            await remote.read([0], [0])
        assert bool((memory.tensor == EMPTY).all())
        remote._timeout_s = 300.0
        held.go.set()
        assert await remote.read([1], [1]) == SIZE[1]
        assert bool((memory.tensor[1] == 7).all())
        assert bool((memory.tensor[0] == EMPTY).all()), "what was asked for first came after all"
    await until(lambda: not any("nixl" in each.name for each in {*threading.enumerate()} - before))


def test_the_interface_of_an_address_is_found_and_taken_where_none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_interface("127.0.0.1") == "lo"
    for other in ("203.0.113.9", "::1", "no address"):
        assert find_interface(other) is None
    for known, address, then in (("", "127.0.0.1", "lo"), ("", "203.0.113.9", ""), ("eth7", "127.0.0.1", "eth7")):
        monkeypatch.setattr(os, "environ", {DEVICES_VARIABLE: known} if known else {})
        take_interface_of(address)
        assert os.environ.get(DEVICES_VARIABLE, "") == then
