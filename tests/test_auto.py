"""auto: what is chosen for which peer, what is left out, and what the records say."""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec
import pytest
import torch

from exact_pipelines import check_exact, tokens_of_the_model
from lending import Lending, lending, lent, pool, ready
from trinity.connector import Connector, choice
from trinity.errors import TransportUnavailable, TrinityError
from trinity.instance_process import _typed
from trinity.memory import BlockMemory, BlockShape
from trinity.messages import Pull
from trinity.transport import auto
from trinity.transport.auto import AutoHostTransport, AutoTransport, Descriptor, reaching
from trinity.transport.inproc import InprocTransport
from trinity.transport.shm import ShmTransport
from trinity.transport.ucx import UcxTransport
from trinity.transport.wire import Broken

BLOCKS, BLOCK_BYTES = 32, 16 << 10


@pytest.fixture(autouse=True)
def _ready() -> None:
    ready("auto")


def altered(descriptor: bytes, without: tuple[str, ...] = (), **changed: Any) -> bytes:
    known = msgspec.msgpack.decode(descriptor, type=Descriptor)
    pools = {scheme: each for scheme, each in known.pools.items() if scheme not in without}
    return msgspec.msgpack.encode(msgspec.structs.replace(known, pools=pools, **changed))


async def chosen(descriptor: bytes, schemes: Any = None) -> str:
    """The scheme by which a peer's pool is read; it must bring its blocks."""
    transport, memory = AutoTransport(schemes), pool(BLOCKS, BLOCK_BYTES)
    remote = await transport.attach(descriptor, memory)
    assert await remote.read([3, 1], [1, 30]) == 2 * BLOCK_BYTES
    assert await remote.generation([3]) == 0
    assert torch.equal(memory.tensor[[1, 30]], lent(BLOCKS, BLOCK_BYTES)[[3, 1]])
    await transport.aclose()
    return remote.scheme


async def test_in_one_process_it_is_inproc(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trinity")
    transport, memory = AutoTransport(), pool(BLOCKS, BLOCK_BYTES)
    memory.tensor.copy_(lent(BLOCKS, BLOCK_BYTES))
    descriptor = transport.publish(memory)
    assert await chosen(descriptor) == "inproc"
    assert "kv blocks of process" in caplog.text
    assert "come by inproc" in caplog.text
    assert await chosen(altered(descriptor, process=1)) == "shm", "the number is another process's"
    await transport.aclose()


async def test_between_processes_and_hosts(peer: Lending) -> None:
    found = msgspec.msgpack.decode(peer.descriptor, type=Descriptor)
    assert set(found.pools) >= {"inproc", "shm", "nixl"}, "published under every scheme that it has"
    assert "ucx" not in found.pools, "one copy of UCX in a process"
    assert await chosen(peer.descriptor) == "shm"
    assert await chosen(altered(peer.descriptor, ("shm",))) == "nixl"
    assert await chosen(altered(peer.descriptor, host="another")) == "nixl"
    with pytest.raises(TransportUnavailable, match="no transport reaches"):
        await chosen(altered(peer.descriptor, ("nixl",), host="another"))


async def test_ucx_where_nixl_is_not_installed() -> None:
    def absent() -> Any:
        raise TransportUnavailable("it is not installed", "nixl")

    schemes = {"nixl": absent, "ucx": UcxTransport}
    transport, memory = AutoTransport(schemes), pool(BLOCKS, BLOCK_BYTES)
    memory.tensor.copy_(lent(BLOCKS, BLOCK_BYTES))
    assert await chosen(transport.publish(memory), schemes) == "ucx"
    await transport.aclose()


@pytest.fixture
async def peer() -> Any:
    async with lending("auto", BLOCKS, BLOCK_BYTES) as process:
        yield process


async def test_none_left_says_why() -> None:
    def absent() -> Any:
        raise TransportUnavailable("nothing like it is installed", "fancy")

    transport, memory = AutoTransport({"fancy": absent}), pool(BLOCKS, BLOCK_BYTES)
    with pytest.raises(TransportUnavailable, match=r"kv pool .*fancy: nothing like it"):
        transport.publish(memory)
    here = AutoHostTransport()
    descriptor = altered(here.publish(memory), host="another")
    with pytest.raises(TransportUnavailable, match=r"no transport reaches process \d+, which has inproc, shm"):
        await here.attach(descriptor, memory)
    await here.aclose()
    await transport.aclose()


async def test_what_a_pool_cannot_do_is_left_out() -> None:
    transport = AutoTransport({"shm": ShmTransport, "inproc": InprocTransport})
    private = BlockMemory(BlockShape("kv", (8,), torch.int64), 4)
    assert set(msgspec.msgpack.decode(transport.publish(private), type=Descriptor).pools) == {"inproc"}
    await transport.aclose()


def test_an_unknown_host_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert auto.this_host() == auto.this_host()

    def unreadable(path: object) -> str:
        raise OSError

    monkeypatch.setattr(os, "readlink", unreadable)
    assert auto.this_host().startswith("process ")


@pytest.mark.parametrize(
    ("scheme", "addresses", "named"),
    [
        ("auto", [None, None], "auto-host"),
        ("auto", [None, "unix:/run/p0"], "auto-host"),
        ("auto", [None, "tcp:10.0.0.7:7000"], "auto"),
        ("nixl", [None, None], "nixl"),
    ],
)
def test_who_stays_on_a_host_listens_on_no_network(scheme: str, addresses: list[str | None], named: str) -> None:
    assert reaching(scheme, addresses) == named


def test_what_is_used_where_nobody_says() -> None:
    assert choice(None, "thread") == choice("auto", "thread") == "inproc"
    assert choice(None, "process") == choice("auto", "process") == "auto"
    assert choice("nixl", "process") == "nixl"
    assert not AutoHostTransport().network
    assert AutoTransport().network


async def test_a_connector_records_what_was_chosen(peer: Lending) -> None:
    connector = Connector("auto")
    connector.bind("D0", {"kv": pool(BLOCKS, BLOCK_BYTES)})
    for descriptor, scheme in ((peer.descriptor, "shm"), (altered(peer.descriptor, ("shm",)), "nixl")):
        connector.introduce("P0", {"kv": descriptor})
        record = (await connector.pull("D0", Pull("P0:1", 0, "P0", "kv", "r", (1, 2, 5), (3, 4, 0)))).record
        assert (record["scheme"], record["bytes"], record["pieces"]) == (scheme, 3 * BLOCK_BYTES, 2)
        assert record["gb_s"] == record["bytes"] / record["seconds"] / 1e9
    await peer.revoke(1, 7)
    answer = await connector.pull("D0", Pull("P0:1", 0, "P0", "kv", "r", (1,), (3,)))
    assert answer.failure is not None
    assert (answer.failure.fields["reason"], answer.record["scheme"]) == ("stale", "nixl")
    await connector.aclose()


@pytest.mark.parametrize("error", ["UnknownName", "TransportUnavailable", "ConfigError", "KeyError"])
def test_what_an_instance_could_not_do_is_told_in_its_words(error: str) -> None:
    made = _typed(Broken(error, "unknown transport 'auto-host'; known: inproc"))
    assert str(made) == "unknown transport 'auto-host'; known: inproc"
    assert isinstance(made, TrinityError)


@pytest.fixture(scope="module")
def wanted() -> list[tuple[int, ...]]:
    return tokens_of_the_model()


@pytest.mark.parametrize(("hosting", "says"), [("process", "shm"), ("thread", "inproc")])
async def test_pipelines_are_exact_and_say_which(hosting: str, says: str, wanted: list[tuple[int, ...]]) -> None:
    await check_exact("E+P+D", "auto", wanted, hosting=hosting, says=says)
