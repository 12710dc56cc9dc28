"""Instances are their program's: they outlive the launcher that forked them, and nothing outlives the program."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from remote.test_supervision import emulated, launcher_of, serves
from support.bare_launchers import LIVENESS_S, Births, gone, has_gone
from support.bare_launchers import started as started
from support.emulated_pipelines import asked, check, serve
from support.freezing import freeze
from support.paths import PYTHON_PATH
from trinity.pipeline import Pipeline
from trinity.remote.channel.channel import Address
from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.process_identity import read_start

ROUNDS = 3  # of requests, of which a strike falls into the second


def births_of(pipe: Pipeline) -> Births:
    return {each.process: read_start(each.process) for each in pipe.processes.values()}


async def another_than(pipe: Pipeline, former: Launcher) -> Launcher:
    """Wait for the next launcher to be ready."""
    while launcher_of(pipe) is former:
        await asyncio.sleep(0.01)
    await asyncio.wrap_future(launcher_of(pipe).ready)
    return launcher_of(pipe)


async def strike_under_load(pipe: Pipeline, strike: Callable[[], None]) -> None:
    """Serve rounds of requests, with a strike into the second; all are exact, in their first life."""
    for number in range(ROUNDS):
        requests = asked()
        serving = asyncio.ensure_future(serve(pipe, requests))
        if number == 1:
            await asyncio.sleep(0.05)
            strike()
        outputs = await serving
        check(outputs, requests)
        assert {output.lives for output in outputs} == {1}


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_end_of_a_launcher_ends_no_instance(sent: signal.Signals, started: Births) -> None:
    """At a8f8c7ea every instance died with it."""
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S):
        births, first = births_of(pipe), launcher_of(pipe)
        await strike_under_load(pipe, lambda: os.kill(first._process.pid, sent))
        if sent == signal.SIGKILL:
            await another_than(pipe, first)
        assert births_of(pipe) == births
        assert {(health.state, health.epoch) for health in pipe.health.values()} == {("up", 0)}
        os.kill(pipe.processes["D0"].process, signal.SIGKILL)
        await serves(pipe)
        tried = 1 if sent == signal.SIGKILL else 2  # an order that a frozen one does not take is a launch that failed
        assert {name: health.epoch for name, health in pipe.health.items()} == {"E0": 0, "P0": 0, "D0": tried}
        assert await has_gone(first, started), "a frozen one is not needed"
        births |= births_of(pipe)
    assert gone(births)


async def test_a_launcher_that_freezes_as_it_begins_is_replaced(started: Births) -> None:
    """It was waited for two minutes, as for one that imports on a busy machine."""
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S):
        first = launcher_of(pipe)
        os.kill(first._process.pid, signal.SIGKILL)
        while launcher_of(pipe) is first:
            await asyncio.sleep(0.001)
        second = launcher_of(pipe)
        freeze(second._process.pid)
        assert not second.ready.done()
        os.kill(pipe.processes["P0"].process, signal.SIGKILL)
        await serves(pipe)
        assert await has_gone(second, started)


async def test_the_next_launcher_may_die_as_it_begins(started: Births) -> None:
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S):
        births, first = births_of(pipe), launcher_of(pipe)
        os.kill(first._process.pid, signal.SIGKILL)
        while launcher_of(pipe) is first:
            await asyncio.sleep(0.001)
        second = launcher_of(pipe)
        os.kill(second._process.pid, signal.SIGKILL)
        await serves(pipe)
        assert births_of(pipe) == births
        os.kill(pipe.processes["P0"].process, signal.SIGKILL)
        await serves(pipe)
        assert launcher_of(pipe) not in (first, second)


DIES_AS_IT_FORKS = """
import os, signal, time
from trinity.remote import fork_server
real = os.fork
def fork():
    dies = os.path.exists({die!r})
    if dies:
        os.unlink({die!r})
    found = real()
    if dies and found:
        os.kill(os.getpid(), signal.SIGKILL)
    if dies:
        time.sleep(0.5)
    return found
fork_server.os.fork = fork
fork_server.main()
"""


async def test_a_fork_outlives_a_launcher_that_dies_before_it_has_told_of_it(
    started: Births, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance says itself that it is there: nobody else could."""
    die = tmp_path / "die"
    monkeypatch.setattr(Launcher, "program", ("-c", DIES_AS_IT_FORKS.format(die=str(die)), "--paced"))
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S):
        first = launcher_of(pipe)
        die.touch()
        os.kill(pipe.processes["E0"].process, signal.SIGKILL)
        await serves(pipe)
        assert not die.exists()
        assert pipe.health["E0"].epoch == 1, "the one that was forked serves"
        assert await another_than(pipe, first) is not first
        births = births_of(pipe)
    assert gone(births)


async def test_a_start_that_was_given_up_as_its_launcher_died_leaves_nothing(
    started: Births, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die = tmp_path / "die"
    monkeypatch.setattr(Launcher, "program", ("-c", DIES_AS_IT_FORKS.format(die=str(die)), "--paced"))
    die.touch()
    launcher = Launcher(torch=False)
    try:
        launching = asyncio.ensure_future(launcher.launch(Address("unix", path=str(tmp_path / "a")), b"", ""))
        while not launcher._at_work and not launching.done():
            await asyncio.sleep(0)
        launching.cancel()
        [found] = await asyncio.gather(launching, return_exceptions=True)
        async with asyncio.timeout(LIVENESS_S):
            await asyncio.wrap_future(launcher.ended)
            while children_named(str(tmp_path)):
                await asyncio.sleep(0.01)
        assert isinstance(found, BaseException)
    finally:
        await asyncio.to_thread(launcher.close)


def children_named(word: str) -> list[int]:
    """List the processes with a word on their command line."""
    found = []
    for each in Path("/proc").iterdir():
        with suppress(OSError):
            if each.name.isdigit() and word.encode() in (each / "cmdline").read_bytes():
                found.append(int(each.name))
    return found


# ---------------------------------------------------------------- the end of the program

PROGRAM = """
import asyncio, json, os, sys
from support.emulated_pipelines import MODEL, POOLS
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline

async def main():
    async with Pipeline(MODEL, "1E1P1D", hosting="process", cache=CacheConfig(pools=POOLS)) as pipe:
        instances = [each.process for each in pipe.processes.values()]
        while True:
            launcher, _ = await pipe._served.supervisor.forks.opening
            print(json.dumps([launcher._process.pid, *instances]), flush=True)
            await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""
LAUNCHERS = ("alive", "dead", "frozen", "dying", "replaced")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nothing_outlives_a_program_that_is_killed(launcher: str) -> None:
    """By the kernel, one that is frozen as well: nobody is left to end it."""
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, env=environment, text=True, start_new_session=True
    ) as program:
        births: Births = {}
        try:
            assert program.stdout is not None
            assert program.stdin is not None
            found = json.loads(program.stdout.readline())
            births = {each: read_start(each) for each in found}
            freeze(found[1])
            if launcher == "frozen":
                freeze(found[0])
            elif launcher != "alive":
                os.kill(found[0], signal.SIGKILL)
            if launcher == "replaced":
                until = time.monotonic() + LIVENESS_S
                second = found[0]
                while second == found[0] and time.monotonic() < until:
                    program.stdin.write("\n")
                    program.stdin.flush()
                    second = json.loads(program.stdout.readline())[0]
                births[second] = read_start(second)
            program.kill()
            assert gone(births)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
