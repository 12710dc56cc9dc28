"""Instances that run already: a pipeline attaches to them, leaves them as they were, and finds them again."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.checkpoint_files import checkpoint
from support.running_instances import LIVENESS_S, POOLS, SECRET, ByHand, by_hand, pipeline, recovered, request, tcp
from support.shared_launcher import sharing
from trinity.errors import RequestError
from trinity.instance import Instance
from trinity.remote.channel.channel import Address
from trinity.remote.supervision.fork_client import Launcher
from trinity.testing.oracle import Oracle


@pytest.fixture(scope="module")
def launcher(torch_launcher: Launcher) -> Iterator[Launcher]:
    wanted()
    with sharing(torch_launcher):
        yield torch_launcher


@cache
def wanted() -> list[int]:
    return Oracle(checkpoint("llava")).generate(request())


async def test_started_and_attached_ones_serve_together(launcher: Launcher, tmp_path: Path) -> None:
    async with by_hand(launcher, tcp(), Address("unix", path=str(tmp_path / "D"))) as (prefill, decode):
        async with pipeline(Instance("E"), prefill.instance("P"), decode.instance("D")) as pipe:
            output = await pipe.complete(request())
            assert output.token_ids == wanted()
            assert {name: member.process > 0 for name, member in pipe.processes.items()} == {
                "E0": True,
                "P0": False,
                "D0": False,
            }
        pulled = [record for record in output.transfers if record["outcome"] == "pulled"]
        assert {(each["source"], each["target"], each["scheme"]) for each in pulled} == {
            ("E0", "P0", "shm"),
            ("P0", "D0", "shm"),
        }
        assert not prefill.life.has_ended()
        assert not decode.life.has_ended()


async def test_one_pipeline_after_another(launcher: Launcher) -> None:
    async with by_hand(launcher, tcp(), tcp()) as (one, two):
        before = one.descriptors()
        async with pipeline(one.instance("EP"), two.instance("D")) as pipe:
            assert (await pipe.complete(request())).token_ids == wanted()
        for roles in (("E", "PD"), ("PD", "E"), ("EP", "D")):
            async with pipeline(one.instance(roles[0]), two.instance(roles[1])) as pipe:
                assert (await pipe.complete(request())).token_ids == wanted()
        await one.settled(before)


async def test_a_pipeline_that_vanishes_leaves_it_free_for_the_next(launcher: Launcher) -> None:
    async with by_hand(launcher, tcp()) as (one,):
        before = one.descriptors()
        async with pipeline(one.instance("EPD")) as pipe:
            tasks = [asyncio.ensure_future(pipe.complete(request(900))) for _ in range(3)]
            async with pipe.stream(request(900)) as tokens:
                await anext(tokens)
            pipe.processes["EPD0"]._stopping = True
            pipe.processes["EPD0"]._channel.abort()  # type: ignore[union-attr]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            async with pipeline(one.instance("EPD")) as other:
                assert (await other.complete(request())).token_ids == wanted()
            pipe._frontend.core.entries.clear()
        await one.settled(before)


async def test_one_that_dies_is_found_again_when_it_is_back(launcher: Launcher) -> None:
    async with by_hand(launcher, tcp()) as (decode,), pipeline(Instance("EP"), decode.instance("D")) as pipe:
        reading = asyncio.ensure_future(pipe.complete(request(900)))
        async with pipe.stream(request(900)) as tokens:
            await anext(tokens)
            await decode.kill()
            with pytest.raises(RequestError):
                await asyncio.wait_for(reading, LIVENESS_S)
        model = str(checkpoint("llava"))
        back = await launcher.launch(decode.address, SECRET.encode(), model, once=False)
        again = ByHand(decode.address, back)  # the pipeline may connect before anybody else has seen it listen
        try:
            assert (await recovered(pipe, request())).token_ids == wanted()
            assert pipe.processes["D0"].setup.epoch, "another life: the second, or a later one, as it took to be back"
            await asyncio.wait_for(pipe.wait_idle(), LIVENESS_S)
        finally:
            await again.kill()


@pytest.fixture
def command() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``python -m trinity.instance``, told of this machine's directory of the model."""
    environment = {**os.environ, "TRINITY_SECRET": SECRET}
    arguments = ["--listen", "tcp:127.0.0.1:0", "--once", "--model", str(checkpoint("llava"))]
    run = subprocess.Popen(
        [sys.executable, "-m", "trinity.instance", *arguments], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert run.stdout is not None
    try:
        yield run, json.loads(run.stdout.readline())["listening"]
    finally:
        run.kill()
        run.wait()
        run.stdout.close()


async def test_the_command(
    command: tuple[subprocess.Popen[str], str], monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    run, address = command
    monkeypatch.setenv("TRINITY_SECRET", SECRET)
    async with pipeline(Instance("EPD", address=address, pools=POOLS), secret=None) as pipe:
        assert (await pipe.complete(request())).token_ids == wanted()
    assert await asyncio.to_thread(run.wait, LIVENESS_S) == 0
