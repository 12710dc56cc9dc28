"""Requests that survive a SIGKILL of each instance in turn, and transfers that fail: the tokens of generate().

Sampled ones, with penalties, log-probabilities and a grammar, are compared with the same requests left alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import pytest

import trinity
from support import paths
from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from support.shared_launcher import sharing
from support.thinned import thinned
from trinity import FailurePolicy
from trinity.errors import MigrationError, Overloaded, RequestError, StageError
from trinity.memory.block_memory import BlockMemory
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.request import Output, Request, Sampling, Structured
from trinity.testing.oracle import Oracle
from trinity.transport.base import ByteRange, Remote
from trinity.transport.inproc import InprocTransport

PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))
POOLS = {"image": 24, "kv": 512}
LIVENESS_S = 90.0
LENGTH = 400
MANY = FailurePolicy(recoveries=9)


@pytest.fixture(scope="module", autouse=True)
def launcher(torch_launcher: Launcher) -> Iterator[None]:
    wanted()  # it takes seconds to load, which is not for an event loop
    with sharing(torch_launcher):
        yield


def greedy() -> list[Request]:
    plain = Sampling(ignore_eos=True)
    return [
        Request("<image>\nWhat is this?", images=PHOTOS[:1], max_tokens=LENGTH, sampling=plain),
        Request("Only text, and no picture", max_tokens=LENGTH, sampling=plain),
        Request("<image> and <image>?", images=PHOTOS[1:3], max_tokens=LENGTH, sampling=plain),
    ]


@cache
def wanted() -> list[list[int]]:
    return Oracle(checkpoint("llava")).generate_all(greedy())


def sampled() -> list[Request]:
    drawn: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
    ways = [
        Sampling(seed=1, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.5, **drawn),
        Sampling(seed=2, top_k=40, frequency_penalty=0.4, logprobs=2, **drawn),
        Sampling(seed=3, temperature=0.8, structured=Structured(regex="(yes|no|perhaps)( and (yes|no|perhaps)){80}")),
    ]
    return [Request("<image> Go on.", images=PHOTOS[:1], max_tokens=LENGTH, sampling=way) for way in ways]


@asynccontextmanager
async def pipeline(placement: str, **named: Any) -> AsyncIterator[Pipeline]:
    settings: dict[str, Any] = {"dtype": "float32", "hosting": "process", "pools": POOLS, "failures": MANY, **named}
    async with Pipeline(checkpoint("llava"), placement, **pipeline_options(settings)) as pipe:
        yield pipe


async def serve(pipe: Pipeline, asked: Sequence[Request]) -> list[Output]:
    return list(await asyncio.gather(*map(pipe.complete, asked)))


async def kill(pipe: Pipeline, name: str) -> None:
    """Kill an instance, and wait until its next life is there."""
    victim = pipe.processes[name]
    os.kill(victim.process, signal.SIGKILL)
    async with asyncio.timeout(LIVENESS_S):
        while pipe.processes[name] is victim:
            await asyncio.sleep(0.01)


async def until_decoding(pipe: Pipeline, serving: asyncio.Future[Any], tokens: int, requests: int = 1) -> None:
    """Until each of so many requests has so many tokens, or all are served."""
    async with asyncio.timeout(LIVENESS_S):
        while not serving.done() and (
            len(pipe.streams) < requests or any(each.token_count < tokens for each in pipe.streams)
        ):
            await asyncio.sleep(0.002)


def check_alike(outputs: Sequence[Output], alone: Sequence[Output]) -> None:
    for output, left_alone in zip(outputs, alone, strict=True):
        assert output.token_ids == left_alone.token_ids
        assert output.text == left_alone.text
        assert output.finish_reason == left_alone.finish_reason
        assert output.logprobs == pytest.approx(left_alone.logprobs, abs=1e-3)


def check_lives(output: Output) -> None:
    assert output.attempts == output.lives == 1 + len(output.former_lives)
    assert all(each["tokens"] <= len(output.token_ids) and each["why"] for each in output.former_lives)
    assert bool(output.recomputed_tokens) <= (output.lives > 1)


PLACEMENTS = ["E+P+D"]
MORE = ["EPD", "ED+P", "EP+D", "PD+E", "1E1P2D"]


@pytest.mark.parametrize("placement", [*PLACEMENTS, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
@pytest.mark.timeout(600)
async def test_each_instance_is_killed_in_turn_while_requests_decode(placement: str) -> None:
    """First the one that decodes."""
    async with pipeline(placement) as pipe:
        alone = await serve(pipe, sampled())
        serving = asyncio.ensure_future(serve(pipe, [*greedy(), *sampled()]))
        for number, name in enumerate(sorted(pipe.processes, key=lambda name: "D" not in name)):
            await until_decoding(pipe, serving, 4 + 12 * number, 6)
            await kill(pipe, name)
        outputs = await asyncio.wait_for(serving, LIVENESS_S)
        await asyncio.wait_for(pipe.wait_idle(), LIVENESS_S)
        assert pipe.metrics.summary()["recoveries"] == sum(each.lives - 1 for each in outputs) > 0
    assert [each.token_ids for each in outputs[:3]] == wanted()
    check_alike(outputs[3:], alone)
    for each in outputs:
        check_lives(each)
        assert each.lives > 1, "it was decoding as its instance was killed"


@pytest.mark.parametrize("victim", thinned(("E0", "P0", "D0"), ("P0",).__contains__))
async def test_a_request_that_comes_while_its_stage_is_away_waits_for_it(victim: str) -> None:
    """Nothing is kept of its pixels, and nothing is cached."""
    off = {"prefix_cache": False, "image_cache": False, "failures": FailurePolicy(recoveries=9, kept_bytes=0)}
    async with pipeline("E+P+D", **off) as pipe:
        old = pipe.processes[victim]
        first = asyncio.ensure_future(pipe.complete(greedy()[0]))
        await until_decoding(pipe, first, 1)
        os.kill(old.process, signal.SIGKILL)
        while victim in pipe._frontend.core.router.peers:
            await asyncio.sleep(0.005)
        outputs = await asyncio.wait_for(serve(pipe, greedy()[:2]), LIVENESS_S)
        assert [each.token_ids for each in (*outputs, await first)] == [*wanted()[:2], wanted()[0]]
        assert [each.lives for each in outputs] == [1, 1], "it waited, and was not lost"
        core = pipe._frontend.core
        assert (core.inputs.kept_bytes, core.inputs.waiting_bytes, pipe.processor.room.taken) == (0, 0, 0)
        assert pipe.processes[victim] is not old


async def test_features_survive_too() -> None:
    async with pipeline("E+PD", image_cache=False) as pipe:
        (alone,) = (await pipe.features(PHOTOS[0])).rows
        asked = [asyncio.ensure_future(pipe.features(PHOTOS[0])) for _ in range(20)]
        await asyncio.sleep(0)
        await kill(pipe, "E0")
        for found in await asyncio.wait_for(asyncio.gather(*asked), LIVENESS_S):
            assert (found.rows[0] == alone).all()


async def test_no_recovery_where_none_is_wanted() -> None:
    async with pipeline("EP+D", failures=FailurePolicy(recoveries=0, wait_s=0)) as pipe:
        asked = asyncio.ensure_future(pipe.complete(greedy()[0]))
        await until_decoding(pipe, asked, 2)
        os.kill(pipe.processes["D0"].process, signal.SIGKILL)
        with pytest.raises(StageError, match="D0 was lost"):
            await asked
        with pytest.raises(Overloaded, match="D0 is started again"):
            await pipe.complete(greedy()[1])


async def test_waiting_ends_with_the_deadline_and_with_the_pipeline() -> None:
    async with pipeline("EP+D") as pipe:
        os.kill(pipe.processes["D0"].process, signal.SIGKILL)
        while "D0" in pipe._frontend.core.router.peers:
            await asyncio.sleep(0.005)
        late = Request("Late", max_tokens=4, deadline_s=0.01)
        with pytest.raises(trinity.errors.DeadlineExceeded):
            await pipe.complete(late)
        left = asyncio.ensure_future(pipe.complete(greedy()[1]))
        await asyncio.sleep(0)
    with pytest.raises(trinity.ClosedError):
        await left


def test_a_pipeline_takes_a_policy_and_nothing_else() -> None:
    with pytest.raises(trinity.ConfigError, match="failures"):
        Pipeline(checkpoint("llava"), failures=3)  # type: ignore[arg-type]


# ---------------------------------------------------------------- in threads: transfers that fail


class Failing(Remote):
    """Fails the next ``left`` reads of its transport."""

    def __init__(self, inner: Remote, transport: FailingTransport) -> None:
        self.inner, self.transport = inner, transport

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        if self.transport.left:
            self.transport.left -= 1
            raise trinity.errors.TransferTimeout("this read took too long", "inproc", "E0")
        return await self.inner.read(source, target, within)

    async def generation(self, source: Sequence[int]) -> int:
        return await self.inner.generation(source)

    async def aclose(self) -> None:
        await self.inner.aclose()


class FailingTransport(InprocTransport):
    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    async def attach(self, descriptor: bytes, into: BlockMemory) -> Any:
        return Failing(await super().attach(descriptor, into), self)


@pytest.mark.parametrize(("failing", "recoveries"), [(2, 2), (1, 1), (3, 2)])
async def test_a_transfer_that_fails_is_recovered_from_and_not_for_ever(failing: int, recoveries: int) -> None:
    transport = FailingTransport(failing)
    seen: list[tuple[str, int]] = []
    options: dict[str, Any] = {"failures": FailurePolicy(recoveries=recoveries), "dtype": "float32", "pools": POOLS}
    options |= {"observe": lambda name, index, logits: seen.append((name, index)), "image_cache": False}
    async with Pipeline(checkpoint("llava"), "E+P+D", connector=transport, **pipeline_options(options)) as pipe:
        asked = greedy()[0]
        if failing > recoveries:
            with pytest.raises(MigrationError) as told:
                await pipe.complete(asked)
            assert isinstance(told.value.output, Output)
            assert told.value.output.lives == recoveries + 1
            return
        output = await pipe.complete(asked)
        await pipe.wait_idle()
    assert output.token_ids == wanted()[0]
    assert output.lives == failing + 1
    assert all("too long" in each["why"] for each in output.former_lives)
    assert {name for name, _ in seen} == {asked.request_id}


async def test_an_image_that_is_another_by_now_ends_its_request(tmp_path: Any) -> None:
    file = tmp_path / "image.jpg"
    file.write_bytes(PHOTOS[0].read_bytes())
    options: dict[str, Any] = {"failures": FailurePolicy(kept_bytes=0), "dtype": "float32", "pools": POOLS}
    transport = FailingTransport(1)
    async with Pipeline(checkpoint("llava"), "E+PD", connector=transport, **pipeline_options(options)) as pipe:
        asked = asyncio.ensure_future(pipe.complete(Request("<image>?", images=[file], max_tokens=4)))
        until = time.monotonic() + LIVENESS_S
        while not pipe._frontend.core.entries:
            assert time.monotonic() < until
            await asyncio.sleep(0)
        file.write_bytes(PHOTOS[1].read_bytes())
        with pytest.raises(RequestError, match="others by now"):
            await asked
