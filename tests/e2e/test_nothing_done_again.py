"""SIGKILL of instances in processes: what another one has still is not computed again (decision 0085), exactly."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import pytest

from support import paths
from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from support.shared_launcher import sharing
from trinity import FailurePolicy
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.request import Output, Request, Sampling
from trinity.testing.oracle import Oracle

PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))
LENGTH, PADDING = 200, "and this is said of it, at length, so that there is much to prefill; " * 6
LIVENESS_S = 90.0
KV_BLOCK = 16

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def launcher(torch_launcher: Launcher) -> Iterator[None]:
    wanted()
    with sharing(torch_launcher):
        yield


def asked() -> Request:
    greedy = Sampling(ignore_eos=True)
    return Request(f"<image>\n{PADDING} What is it?", images=PHOTOS[:1], max_tokens=LENGTH, sampling=greedy)


@cache
def wanted() -> list[int]:
    return Oracle(checkpoint("llava")).generate_all([asked()])[0]


@asynccontextmanager
async def pipeline(placement: str) -> AsyncIterator[Pipeline]:
    pools = {"image": 24, "kv": 512}
    settings: dict[str, Any] = {"dtype": "float32", "hosting": "process", "pools": pools, "failures": FailurePolicy()}
    async with Pipeline(checkpoint("llava"), placement, **pipeline_options(settings)) as pipe:
        yield pipe


def strike(pipe: Pipeline, name: str, sign: signal.Signals) -> None:
    os.kill(pipe.processes[name].process, sign)


async def until(pipe: Pipeline, tokens: int) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while not pipe.streams or pipe.streams[0].token_count < tokens:
            await asyncio.sleep(0.002)


def check(output: Output, lives: int) -> None:
    assert output.token_ids == wanted()
    assert output.lives == lives, output.former_lives


async def test_a_decode_that_is_lost_recomputes_its_outputs_and_no_prompt() -> None:
    async with pipeline("1E2P2D") as pipe:
        serving = asyncio.ensure_future(pipe.complete(asked()))
        await until(pipe, 20)
        (entry,) = pipe._frontend.core.entries.values()
        assert entry.place is not None
        strike(pipe, entry.place.name, signal.SIGKILL)
        output = await serving
    check(output, lives=2)
    assert output.former_lives[0]["tokens"] < LENGTH
    assert 0 < output.recomputed_tokens <= output.former_lives[0]["tokens"] + KV_BLOCK, "no prompt"
    assert (output.route[3], output.route[4][0]) == (output.route[1], "D"), "whoever prefilled it"
    assert output.route[4] != output.route[2]


async def test_kv_that_was_on_its_way_to_a_lost_instance_goes_to_another_in_the_same_life() -> None:
    """Both stand still as one is offered the KV, so that it has not released it when it dies."""
    async with pipeline("1E2P2D") as pipe:
        for name in ("D0", "D1"):
            strike(pipe, name, signal.SIGSTOP)
        serving = asyncio.ensure_future(pipe.complete(asked()))
        await until(pipe, 1)
        await asyncio.sleep(0.2)  # either may have it: the one that dies is offered nothing by the next request
        strike(pipe, "D0", signal.SIGKILL)
        strike(pipe, "D1", signal.SIGCONT)
        output = await serving
    check(output, lives=1)
    assert output.recomputed_tokens == 0
    source = output.route[1]
    assert output.route in (["E0", source, "D0", source, "D1"], ["E0", source, "D1"])


async def test_features_for_a_lost_prefill_instance_go_to_another_in_the_same_life() -> None:
    async with pipeline("1E2P1D") as pipe:
        strike(pipe, "P0", signal.SIGSTOP)
        serving = asyncio.ensure_future(pipe.complete(asked()))
        async with asyncio.timeout(LIVENESS_S):
            while not pipe.streams:
                await asyncio.sleep(0.002)
        await asyncio.sleep(0.5)
        strike(pipe, "P0", signal.SIGKILL)
        output = await serving
    check(output, lives=1)
    assert output.recomputed_tokens == 0


async def test_an_encoder_that_is_lost_behind_its_commit_is_not_missed() -> None:
    async with pipeline("2E1P1D") as pipe:
        serving = asyncio.ensure_future(pipe.complete(asked()))
        await until(pipe, 1)
        strike(pipe, "E0", signal.SIGKILL)
        output = await serving
    check(output, lives=1)
    assert [each["outcome"] for each in output.transfers if each["kind"] == "image"] == ["pulled"]
