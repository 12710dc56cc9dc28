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
from trinity.emulation.model import EmulatedRequest
from trinity.errors import ChangeRefused, ConfigError, OfferRefused
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.attached_instances import AttachedInstances
from trinity.remote.supervisor import ProcessConfig
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


async def test_an_instance_that_comes_back_with_other_weights_is_not_taken() -> None:
    """A request would go on there with the tokens of another model."""
    joined: Any = AttachedInstances("frontend:x", cast(Any, None), Timeline(), {}, b"", ProcessConfig())
    client: Any = SimpleNamespace(name="D0", fingerprint="one")
    joined._check_model(client)
    joined._check_model(client)
    client.fingerprint = "another"
    with pytest.raises(ConfigError, match=r"D0 serves other weights.*attach anew"):
        joined._check_model(client)


def test_who_attaches_starts_no_instance() -> None:
    with pytest.raises(ConfigError, match="attach=True\\) starts no instance"):
        _made([Instance("EPD")], attach=True)
