"""Launchers that are busy, frozen, chatty or cannot fork: each costs the launches that it must, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.running_instances import LIVENESS_S
from trinity.errors import ConfigError
from trinity.remote.channel.channel import Address
from trinity.remote.supervision import fork_client
from trinity.remote.supervision.fork_client import SILENT_S, Launcher, LauncherSilent, find_kept
from trinity.remote.supervision.process_identity import read_start
from trinity.remote.supervision.supply import InstanceProcess

NOWHERE = Address("unix", path="nowhere")
START = """
import json, os, sys, time
def say(**words): os.write(1, json.dumps(words).encode() + b"\\n")
def order(): return json.loads(sys.stdin.readline())["id"]
say(ready=1)
"""
BUSY = """
one = order(); say(taken=one); time.sleep({at_work}); say(id=one, process=5_000_000, born=1)
time.sleep({slow}); two = order(); say(taken=two); say(id=two, process=5_000_001, born=1); sys.stdin.readline()
"""
FROZEN_AT_WORK = "say(taken=order()); time.sleep(1000)"
CANNOT_READ = """
import subprocess
one = order(); say(taken=one)
child = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
say(id=one, process=child.pid, born=None); child.wait(); sys.stdin.readline()
"""
CHATTY = """
print("a module says hello", flush=True); print("[1, 2]", flush=True)
one = order(); say(taken=one); say(id=one, process=5_000_000, born=1); sys.stdin.readline()
"""


@asynccontextmanager
async def launcher_of(*program: str) -> AsyncIterator[Launcher]:
    made = type("ScriptedLauncher", (Launcher,), {"program": program})(torch=False)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


def launch(launcher: Launcher, address: Address = NOWHERE) -> asyncio.Task[InstanceProcess]:
    return asyncio.ensure_future(launcher.launch(address, b"", ""))


async def test_a_launcher_that_has_just_been_at_work_is_not_frozen() -> None:
    """At 19bbccc the second order's time was counted from its write, through the work on the first."""
    work = BUSY.format(at_work=1.95 * SILENT_S, slow=0.15 * SILENT_S)
    async with launcher_of("-c", START + work) as launcher, asyncio.timeout(LIVENESS_S):
        started = await asyncio.gather(launch(launcher), launch(launcher))
        assert [each.number for each in started] == [5_000_000, 5_000_001]
        assert not launcher.silent


async def test_one_that_freezes_at_work_is_given_up_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 19bbccc every later launch waited for ever for the end of its work."""
    monkeypatch.setattr(fork_client, "INSTANCE_START_S", 1.5)
    async with launcher_of("-c", START + FROZEN_AT_WORK) as launcher, asyncio.timeout(LIVENESS_S):
        monkeypatch.setattr(fork_client, "_kept", [launcher])
        assert find_kept(torch=False) is launcher
        found = await asyncio.gather(launch(launcher), launch(launcher), return_exceptions=True)
        assert [type(each) for each in found] == [LauncherSilent] * 2
        assert launcher.silent
        assert find_kept(torch=False) is None


async def test_one_whose_only_order_was_given_up_holds_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "INSTANCE_START_S", 1.5)
    async with launcher_of("-c", START + FROZEN_AT_WORK) as launcher, asyncio.timeout(LIVENESS_S):
        first = launch(launcher)
        while not launcher._at_work:
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        with pytest.raises(LauncherSilent):
            await launch(launcher)
        assert launcher.silent


async def test_a_line_that_is_no_answer_is_passed_over() -> None:
    async with launcher_of("-c", START + CHATTY) as launcher, asyncio.timeout(LIVENESS_S):
        assert (await launch(launcher)).number == 5_000_000


async def test_one_that_cannot_read_a_start_has_its_fork_ended_all_the_same() -> None:
    """For lack of descriptors, say: a live process counted as one that had ended, and was never killed."""
    async with launcher_of("-c", START + CANNOT_READ) as launcher, asyncio.timeout(LIVENESS_S):
        process = await launch(launcher)
        assert not process.has_ended()
        await process.end()
        assert read_start(process.number) is None


# ---------------------------------------------------------------- the real one

FAILS_ONCE = """
import os, sys
from trinity.remote import fork_server
real, forks = os.fork, []
def fork():
    forks.append(1)
    if len(forks) == 2:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return real()
fork_server.os.fork = fork
fork_server.main()
"""
PRINTS = """
import os
from trinity.remote import fork_server
real = fork_server.fork_instance
def fork_instance(*given):
    print("a plugin says hello", flush=True)
    os.write(1, b"and so does its C library\\n")
    return real(*given)
fork_server.fork_instance = fork_instance
fork_server.main()
"""

FAILS_TO_SERVE = """
from trinity.remote import fork_server, server
def serve_instance(*given, **named): raise RuntimeError("no loop here")
server.serve_instance = serve_instance
fork_server.main()
"""


async def test_a_fork_that_fails_costs_its_own_launch_alone(tmp_path: Path) -> None:
    """At 19bbccc the launcher ended, and every healthy instance with it."""
    async with launcher_of("-c", FAILS_ONCE, "--paced") as launcher, asyncio.timeout(LIVENESS_S):
        first = await launch(launcher, Address("unix", path=str(tmp_path / "a")))
        with pytest.raises(ConfigError, match="Resource temporarily unavailable"):
            await launch(launcher, Address("unix", path=str(tmp_path / "b")))
        third = await launch(launcher, Address("unix", path=str(tmp_path / "c")))
        assert not first.has_ended()
        assert not third.has_ended()
        assert not launcher.ended.done()
        await first.end()
        await third.end()


async def test_what_a_launcher_prints_is_no_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with launcher_of("-c", PRINTS, "--paced") as launcher, asyncio.timeout(LIVENESS_S):
        await (await launch(launcher, Address("unix", path=str(tmp_path / "a")))).end()
    said = capfd.readouterr().err
    assert "a plugin says hello" in said
    assert "and so does its C library" in said


async def test_an_instance_that_fails_before_it_serves_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with launcher_of("-c", FAILS_TO_SERVE, "--paced") as launcher, asyncio.timeout(LIVENESS_S):
        await (await launch(launcher, Address("unix", path=str(tmp_path / "a")))).wait()
    assert "RuntimeError: no loop here" in capfd.readouterr().err


# ---------------------------------------------------------------- cancels


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancel_that_comes_with_the_answer_ends_the_launch(turns: int) -> None:
    """Python 3.11's wait_for swallows it, and the launch went on for as long as an instance loads."""
    answer: Future[int] = Future()
    went_on = False

    async def wait() -> None:
        nonlocal went_on
        await launcher._within(answer, "late")
        for _ in range(8):
            await asyncio.sleep(0)
        went_on = True

    async with launcher_of("-c", "input()") as launcher:
        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(0.01)
        answer.set_result(1)
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert not went_on
