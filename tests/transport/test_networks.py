"""Who may ask a source for blocks, and which networks UCX may use."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import msgspec
import pytest

from support.lender import EMPTY, pool, ready
from trinity.connector import Connector
from trinity.errors import ConfigError, TransportUnavailable
from trinity.transport import ucx_environment
from trinity.transport.auto import AutoHostTransport, AutoTransport
from trinity.transport.nixl import transport as nixl_transport
from trinity.transport.nixl.agent import NixlDescriptor, make_agent, pool_region
from trinity.transport.nixl.push import StagingArea
from trinity.transport.nixl.source import PushReply, PushRequest
from trinity.transport.nixl.transport import NixlPushTransport, NixlTransport
from trinity.transport.registry import make_transport
from trinity.transport.sealed_requests import LOGGED_REQUESTS, RequestKey, seal_request
from trinity.transport.ucx import transport as ucx_transport
from trinity.transport.ucx.transport import UcxTransport

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
    sealed = seal_request(mine.value, b"request")
    assert mine.open(sealed) == b"request"
    with caplog.at_level(logging.WARNING):
        for wrong in (b"", b"request", sealed[:-1], sealed + b"x", b"x" + sealed[1:], bytes(16) + b"request"):
            assert mine.open(wrong) is None
        for _ in range(100):
            assert another.open(sealed) is None
    assert len(caplog.records) == 6 + LOGGED_REQUESTS
    assert "another refused a request for blocks that lacks its secret" in caplog.text


async def replies(agent: Any, source: str, seconds: float) -> list[PushReply]:
    """What the source has answered within this time, or its first answer."""
    found: list[PushReply] = []
    async with asyncio.timeout(60):
        for _ in range(int(seconds / 0.01)):
            found += [msgspec.msgpack.decode(each, type=PushReply) for each in agent.get_new_notifs().get(source, [])]
            if found:
                break
            await asyncio.sleep(0.01)
    return found


async def test_a_stranger_gets_nothing_written(caplog: pytest.LogCaptureFixture) -> None:
    """An agent that has reached the source's port and knows all of its descriptor but the key."""
    ready("nixl-push")
    transport, source, memory = NixlPushTransport(), pool(*SIZE), pool(*SIZE)
    source.tensor.fill_(7)
    theirs = msgspec.msgpack.decode(transport.publish(source), type=NixlDescriptor)
    stage = StagingArea(memory)
    whole = stage.region(1)
    agent = make_agent(pool_region(memory))
    agent.register_memory(whole.whole, whole.memory)
    agent.add_remote_agent(theirs.metadata)
    piece = stage.region(SIZE[1])
    request = msgspec.msgpack.encode(PushRequest(agent.get_agent_metadata(), 1, theirs.pool, piece, 0, [0], SIZE[1]))
    for message in (request, seal_request(os.urandom(32), request), b""):
        agent.send_notif(theirs.agent, message)
    assert await replies(agent, theirs.agent, 1.0) == []
    assert not stage._bytes[: SIZE[1]].any()
    assert "refused a request for blocks that lacks its secret" in caplog.text
    agent.send_notif(theirs.agent, seal_request(theirs.key, request))
    assert await replies(agent, theirs.agent, 30.0) == [PushReply(1)]
    assert stage._bytes[: SIZE[1]].any()
    assert bool((memory.tensor == EMPTY).all())
    del agent
    stage.abandon()
    await transport.aclose()
