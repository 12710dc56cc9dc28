"""Two pipelines on the same instances, which run already: each has its own requests, and either may end or die."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from support import paths
from support.buddy_programs import SECRET, listening
from support.emulated_pipelines import LIVENESS_S, MODEL, POOLS, asked, check, right, serve
from trinity.connector import Connector
from trinity.core.messages import PeerUp
from trinity.emulation.model import EmulatedRequest
from trinity.errors import ChangeRefused, ConfigError, LayoutMismatch, OfferRefused
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.channel.channel import Address
from trinity.remote.channel.wire import Hello, InstanceInfo, WeightsDigest, decode, encode
from trinity.remote.fellow_front_ends import Fellows
from trinity.remote.supervision.attached_instances import AttachedInstances
from trinity.remote.supervision.process_config import ProcessConfig, make_setups
from trinity.runtime.loader import ServingConfig
from trinity.timeline import Timeline

LONG = EmulatedRequest(text_tokens=21, image_tokens=(576,), contents=("cat",), max_tokens=300)
FELLOW = """
import asyncio, sys
from msgspec.structs import replace
sys.path.insert(0, {tests!r})
from remote.test_attached_front_ends import LONG, attached
async def main():
    async with attached({addresses!r}) as pipe:
        print("serves", flush=True)
        while True:
            await asyncio.gather(*(pipe.complete(replace(LONG, request_id=f"r{{n}}")) for n in range(4)))
asyncio.run(main())
"""


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    """Where two instances listen, that serve one pipeline after another."""
    with listening(2) as found:
        yield found


def instances(addresses: list[str], roles: tuple[str, str] = ("EP", "D")) -> list[Instance]:
    return [Instance(letters, address=address) for letters, address in zip(roles, addresses, strict=True)]


@asynccontextmanager
async def first(addresses: list[str]) -> AsyncIterator[Pipeline]:
    async with _made(instances(addresses)) as pipe:
        yield pipe


@asynccontextmanager
async def attached(addresses: list[str], roles: tuple[str, str] = ("EP", "D")) -> AsyncIterator[Pipeline]:
    async with _made(instances(addresses, roles), attach=True) as pipe:
        yield pipe


def _made(placement: list[Instance], **terms: Any) -> Pipeline:
    config = ProcessConfig(secret=SECRET, **terms)
    return Pipeline(MODEL, placement, hosting="process", processes=config, cache=CacheConfig(pools=POOLS))


async def test_two_pipelines_serve_side_by_side_and_the_first_may_leave(addresses: list[str]) -> None:
    async with attached_beside(addresses) as (one, other):
        requests = asked()  # with the same ids
        for each in await asyncio.gather(serve(one, requests), serve(other, requests)):
            check(each, requests)
        assert other.health["D0"].state == "up"
        with pytest.raises(ChangeRefused, match="attached"):
            await other.switch("D0", "P")
        reading = asyncio.ensure_future(other.complete(LONG))
        await asyncio.sleep(0.2)
        await one.aclose()
        assert (await asyncio.wait_for(reading, LIVENESS_S)).token_ids == right(LONG)
        check(await serve(other, requests), requests)
    async with first(addresses) as again:
        check(await serve(again, requests), requests)


@asynccontextmanager
async def attached_beside(addresses: list[str]) -> AsyncIterator[tuple[Pipeline, Pipeline]]:
    async with first(addresses) as one, attached(addresses) as other:
        yield one, other


async def test_the_kill_of_one_harms_nobody_of_the_other(addresses: list[str]) -> None:
    program = FELLOW.format(tests=str(paths.TESTS), addresses=addresses)
    async with first(addresses) as one:
        for _ in range(2):
            child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None
            assert (await asyncio.to_thread(child.stdout.readline)).strip() == "serves"
            requests = [replace(LONG, request_id=f"r{number}") for number in range(4)]  # the other one's ids
            reading = [asyncio.ensure_future(one.complete(request)) for request in requests]
            await asyncio.sleep(0.2)
            child.send_signal(signal.SIGKILL)
            child.wait()
            child.stdout.close()
            outputs = await asyncio.wait_for(asyncio.gather(*reading), LIVENESS_S)
            assert [each.token_ids for each in outputs] == [right(each) for each in requests]
            assert all(each.lives == 1 for each in outputs), "none had to be sent again"
        requests = asked()
        check(await serve(one, requests), requests)


async def test_who_attaches_needs_a_pipeline_that_serves_and_the_same_instances(addresses: list[str]) -> None:
    with pytest.raises(OfferRefused, match="start the pipeline that sets it up first"):
        async with attached(addresses):
            pass
    async with first(addresses):
        with pytest.raises(ConfigError, match=r"is EP0 \(EP\), not E0 \(E\)"):
            async with attached(addresses, ("E", "PD")):
                pass


class Answering:
    """A channel to an instance that has loaded this, and says nothing more."""

    closed = False

    def __init__(self, hello: Hello) -> None:
        self._up = PeerUp("D0", "D", hello.epoch)
        self._hello, self._gone = hello, asyncio.Event()

    def send(self, frame: bytes) -> None: ...

    async def receive(self) -> bytes:
        return encode(InstanceInfo(self._up, self._hello, {}, "tcp:127.0.0.1:1"))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await self._gone.wait()
        return
        yield

    def abort(self) -> None:
        self._gone.set()

    async def aclose(self) -> None:
        self.abort()


async def test_an_instance_that_comes_back_with_other_weights_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request would go on there with the tokens of another model."""
    said = [Hello("D0", "one")]

    async def connect(*given: Any) -> Answering:
        return Answering(said[-1])

    monkeypatch.setattr("trinity.remote.supervision.attached_instances.connect_by_hand", connect)
    config = ServingConfig(model=MODEL, cache=CacheConfig(pools=POOLS))
    setup = replace(make_setups([Instance("D", "D0")], config, Connector("shm"), "round_robin")[0], model="the/model")
    lost = list[str]()
    watcher: Any = SimpleNamespace(on_lost=lambda name, why, planned: lost.append(why))
    where = {"D0": Address.parse("tcp:127.0.0.1:1")}
    joined = AttachedInstances("frontend:x", watcher, Timeline(), where, SECRET.encode(), ProcessConfig())
    members = await joined.start([setup])
    members["D0"]._take(WeightsDigest("a" * 64))
    members["D0"].cut()
    for other in (Hello("D0", "another", epoch=1), Hello("D0", "one", weights="b" * 64, epoch=1)):
        said.append(other)
        with pytest.raises(LayoutMismatch, match=r"instance D0 has .*: the files have changed under the running"):
            await joined._reach("D0")
    said.append(Hello("D0", "one", epoch=1))
    with pytest.raises(ConfigError, match="has not read all of its weights"):
        await joined._reach("D0")
    said.append(Hello("D0", "one", weights="a" * 64, epoch=1))
    joined.members["D0"] = back = await joined._reach("D0")
    back.cut()
    joined.members["D0"] = alone = await joined._reach("D0")
    alone._weights.forget("D0", 1)
    alone._take(WeightsDigest("b" * 64))
    assert "those that it began with" in joined.health()["D0"].why
    assert not alone.alive
    await joined.aclose()


def test_who_attaches_later_is_told_the_digest_that_was_found_meanwhile() -> None:
    sent = list[Any]()
    channel: Any = SimpleNamespace(closed=False, backlog=0, send=lambda frame: sent.append(decode(frame)))
    fellows = Fellows("tcp:127.0.0.1:1")
    fellows.note_weights(WeightsDigest("a" * 64))  # nobody may attach yet
    info = InstanceInfo(PeerUp("D0", "D", 0), Hello("D0", "one"), {}, "tcp:127.0.0.1:1")
    fellows.open(cast(Any, None), info, "")
    fellows.channels["frontend:x"] = channel
    fellows.note_weights(WeightsDigest("a" * 64))
    assert sent == [WeightsDigest("a" * 64)]
    assert fellows._served is not None
    assert fellows._served[1].hello == Hello("D0", "one", weights="a" * 64)


def test_who_attaches_starts_no_instance() -> None:
    with pytest.raises(ConfigError, match="attach=True\\) starts no instance"):
        _made([Instance("EPD")], attach=True)
