"""Instances in processes of their own: exact tokens over shared memory, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest

import trinity
from support import paths
from support.checkpoint_files import checkpoint
from support.freezing import freeze
from support.pipeline_options import pipeline_options
from support.shared_launcher import sharing
from support.thinned import thinned
from support.wrapped_transports import WrappedTransport
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.transfers import TransferPolicy
from trinity.errors import ConfigError, DeadlineExceeded, RequestError, StageError
from trinity.memory.digests import Verify
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.process_identity import has_ended, read_start
from trinity.request import Output, Request, Sampling
from trinity.testing.oracle import Oracle
from trinity.transport.shm import ShmTransport

PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))
GREEDY = Sampling(ignore_eos=True)
POOLS = {"image": 16, "kv": 256}
LIVENESS_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def launcher(torch_launcher: Launcher) -> Iterator[None]:
    oracle()  # it takes seconds to load, which is not for an event loop
    with sharing(torch_launcher):
        yield


@cache
def oracle() -> Oracle:
    return Oracle(checkpoint("llava"))


def requests() -> list[Request]:
    return [
        Request("Only text, and no picture", max_tokens=32, sampling=GREEDY),
        Request("<image>\nWhat is this?", images=PHOTOS[:1], max_tokens=40, sampling=GREEDY),
        Request("<image> and <image>, but <image>?", images=PHOTOS[:3], max_tokens=33, sampling=GREEDY),
        Request("<image>\nWhat is this?", images=PHOTOS[:1], max_tokens=40, sampling=GREEDY),
    ]


def long_request() -> Request:
    return Request("<image>\nTell me all of it.", images=PHOTOS[1:2], max_tokens=900, sampling=GREEDY)


@asynccontextmanager
async def pipeline(placement: str, **named: Any) -> AsyncIterator[Pipeline]:
    settings: dict[str, Any] = {"dtype": "float32", "hosting": "process", "pools": POOLS, **named}
    async with Pipeline(checkpoint("llava"), placement, **pipeline_options(settings)) as pipe:
        yield pipe


async def test_processes_have_the_names_of_their_instances() -> None:
    async with pipeline("ED+P") as pipe:
        shown = {name: Path(f"/proc/{each.process}/comm").read_text().strip() for name, each in pipe.processes.items()}
    assert shown == {"ED0": "trinity:ED0", "P0": "trinity:P0"}


PLACEMENTS = ("EPD", "EP+D", "ED+P", "E+P+D", "PD+E", "2E2P2D")


async def serve(pipe: Pipeline, asked: list[Request]) -> list[Output]:
    return list(await asyncio.gather(*(pipe.complete(request) for request in asked)))


@pytest.mark.parametrize("placement", thinned(PLACEMENTS, ("EPD", "ED+P", "E+P+D").__contains__))
async def test_tokens_equal_generate(placement: str) -> None:
    wanted = oracle().generate_all(requests())
    async with pipeline(placement) as pipe:
        outputs = await serve(pipe, requests())
        assert [output.token_ids for output in outputs] == wanted
        pulled = [record for output in outputs for record in output.transfers if record["outcome"] == "pulled"]
    assert bool(pulled) == (placement != "EPD")
    assert {record["scheme"] for record in pulled} <= {"shm"}
    assert all(record["bytes"] > 0 for record in pulled)
    assert len(pipe.timeline) > 0


@pytest.mark.parametrize(("verify", "verified"), [("always", True), (None, False)])
async def test_blocks_are_verified_between_processes_where_asked_for(verify: Verify | None, verified: bool) -> None:
    wanted = oracle().generate_all(requests()[:2])
    async with pipeline("EP+D", verify=verify) as pipe:
        outputs = await serve(pipe, requests()[:2])
    assert [output.token_ids for output in outputs] == wanted
    pulled = [record for output in outputs for record in output.transfers if record["outcome"] == "pulled"]
    assert pulled
    assert all(("digest_s" in record) is verified for record in pulled)


async def test_every_process_ends_with_the_pipeline() -> None:
    async with pipeline("E+P+D") as pipe:
        members = list(pipe.processes.values())
        births = {member.process: read_start(member.process) for member in members}
        assert len({*births, os.getpid()}) == 4
        await pipe.complete(requests()[1])
        folder = pipe._served.supervisor._folder.path if pipe._served.supervisor else None
    assert folder is not None
    assert not folder.exists()
    assert all(has_ended(process, born) for process, born in births.items())  # who reaps them is not our business


async def recovered(pipe: Pipeline, request: Request) -> Output:
    """The first answer after a loss; until the instance is back, requests are refused with a typed error."""
    async with asyncio.timeout(LIVENESS_S):
        while True:
            try:
                return await pipe.complete(request)
            except RequestError:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("victim", thinned(("E0", "P0", "D0"), ("D0",).__contains__))
async def test_a_killed_instance_fails_its_requests_and_is_started_again(victim: str) -> None:
    wanted = oracle().generate(requests()[1])
    async with pipeline("E+P+D", failures=NO_RECOVERY) as pipe:
        tasks = [asyncio.ensure_future(pipe.complete(long_request())) for _ in range(3)]
        async with pipe.stream(long_request()) as tokens:
            await anext(tokens)  # it decodes by now
            process = pipe.processes[victim].process
            os.kill(process, signal.SIGKILL)
            async with asyncio.timeout(LIVENESS_S):
                ended = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in ended:
            assert isinstance(outcome, (Output, RequestError)), outcome
        if victim == "D0":
            assert any(isinstance(outcome, StageError) for outcome in ended)
        assert (await recovered(pipe, requests()[1])).token_ids == wanted
        again = pipe.processes[victim]
        assert again.process != process
        assert again.setup.epoch == 1
        await asyncio.wait_for(pipe.wait_idle(), LIVENESS_S)


async def test_one_of_two_is_killed_and_the_other_goes_on() -> None:
    wanted = oracle().generate(requests()[1])
    async with pipeline("1E1P2D") as pipe:
        os.kill(pipe.processes["D1"].process, signal.SIGKILL)
        outputs = [await recovered(pipe, requests()[1]) for _ in range(4)]
        assert [output.token_ids for output in outputs] == [wanted] * 4


async def test_a_frozen_instance_does_not_hold_a_deadline_up() -> None:
    async with pipeline("E+P+D") as pipe:
        process = pipe.processes["D0"].process
        freeze(process)
        request = Request("<image>?", images=PHOTOS[:1], max_tokens=32, sampling=GREEDY, deadline_s=0.5)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(pipe.complete(request), LIVENESS_S)
        os.kill(process, signal.SIGCONT)
        await asyncio.wait_for(pipe.wait_idle(), LIVENESS_S)
        assert (await pipe.complete(requests()[1])).token_ids == oracle().generate(requests()[1])


async def test_a_lease_ends_a_request_whose_peer_says_nothing() -> None:
    """Long before supervision would kill the peer; it has no deadline of its own."""
    async with pipeline("E+P+D", transfers=TransferPolicy(lease_s=1.0), failures=NO_RECOVERY) as pipe:
        process = pipe.processes["D0"].process
        freeze(process)
        with pytest.raises(RequestError, match="D0"):
            await asyncio.wait_for(pipe.complete(requests()[1]), 120)
        os.kill(process, signal.SIGCONT)
        await asyncio.wait_for(pipe.wait_idle(), LIVENESS_S)
        assert (await pipe.complete(requests()[1])).token_ids == oracle().generate(requests()[1])
        assert pipe.processes["D0"].process == process


async def test_leaving_a_stream_gives_everything_back() -> None:
    async with pipeline("E+P+D") as pipe:
        for _ in range(8):
            async with pipe.stream(long_request()) as tokens:
                await anext(tokens)
        await asyncio.wait_for(pipe.wait_idle(), LIVENESS_S)
        outputs = await serve(pipe, [*requests(), *requests()])
        assert [output.token_ids for output in outputs] == oracle().generate_all(requests()) * 2


async def test_what_cannot_travel_is_refused() -> None:
    model = checkpoint("llava")
    with pytest.raises(ConfigError, match="hosting"):
        Pipeline(model, hosting=cast(Any, "cloud"))
    with pytest.raises(ConfigError, match="inproc"):
        Pipeline(model, hosting="process", connector="inproc")
    with pytest.raises(ConfigError, match="by name"):
        Pipeline(model, hosting="process", connector=trinity.Connector(WrappedTransport(ShmTransport())))
    with pytest.raises(ConfigError, match="observe= is an object"):
        async with pipeline("EPD", observe=print):
            pass


async def test_an_instance_that_cannot_start_says_why() -> None:
    with pytest.raises(ConfigError, match="are missing"):
        async with pipeline("E+P+D", pools={"image": 16, "kv": 1 << 40}):
            pass
