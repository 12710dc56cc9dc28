"""The end of launchers: of one that nobody takes, that imports still, that was killed, and of those of a program."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from support.bare_launchers import BARE, LIVENESS_S, Births, gone, has_gone, leave, take, take_and_leave
from support.bare_launchers import bare as bare
from support.bare_launchers import started as started
from support.paths import PYTHON_PATH
from trinity.remote.supervision import warm_launchers
from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.fork_supply import InstanceForks
from trinity.remote.supervision.process_identity import read_start
from trinity.remote.supervision.warm_launchers import take_launcher


async def test_one_that_nobody_takes_ends(started: Births, bare: None) -> None:
    launcher = await leave(await take(), 0.05)
    assert await has_gone(launcher, started)
    assert await take_and_leave() is not launcher


async def test_the_time_of_one_that_was_taken_does_not_run_out(started: Births, bare: None) -> None:
    launcher = await leave(await take(), 0.2)
    assert await take() is launcher
    await asyncio.sleep(0.4)
    assert await launcher.wakes()
    await asyncio.to_thread(launcher.close)


async def test_one_that_was_killed_is_not_held(started: Births, bare: None) -> None:
    """Its descriptors and its thread are let go at once, not by the next pipeline."""
    launcher = await take_and_leave()
    os.kill(launcher._process.pid, signal.SIGKILL)
    async with asyncio.timeout(LIVENESS_S):
        while warm_launchers._idle or launcher._process.returncode is None:
            await asyncio.sleep(0.01)


async def test_one_that_imports_still_ends_at_once(started: Births, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not hear that its stdin has ended: a program that failed early took five seconds to end."""
    monkeypatch.setattr(Launcher, "program", ("-c", "import time; time.sleep(1000)"))
    launcher, _ = await take_launcher(torch=False)
    async with asyncio.timeout(LIVENESS_S):
        await asyncio.to_thread(launcher.close)
    assert await has_gone(launcher, started)


READY_AND_GONE = """import os; os.write(1, b'{"ready": 1}\\n')"""


async def test_of_those_that_end_as_soon_as_they_are_ready_one_is_replaced(
    started: Births, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 were started in three seconds; the third waits for a fork that needs it."""
    monkeypatch.setattr(Launcher, "program", ("-c", READY_AND_GONE))
    real, told = InstanceForks._replace, list[Launcher]()

    def replace(forks: InstanceForks, ended: Launcher) -> None:
        real(forks, ended)
        told.append(ended)

    monkeypatch.setattr(InstanceForks, "_replace", replace)
    forks = InstanceForks()
    async with asyncio.timeout(LIVENESS_S):
        first, _ = await forks._open()
        while len(told) < 2:
            await asyncio.sleep(0.01)
        assert told[0] is first
        assert told[1] is not first
        assert forks.opening is not None
        assert (await forks.opening)[0] is told[1], "a third was started"
        third, _ = await forks._open()
        assert third not in told
        await forks.close()


# ---------------------------------------------------------------- the end of the program

PROGRAM = """
import asyncio, os, sys, time
from trinity.remote.supervision import fork_client
from trinity.remote.supervision import warm_launchers

async def main():
    launcher, _ = await warm_launchers.take_launcher(torch=False)
    await asyncio.wrap_future(launcher.ready)
    warm_launchers.leave_launcher(launcher)

fork_client.Launcher.program = ("-c", sys.argv[1])
asyncio.run(main())
(idle,) = warm_launchers._idle.values()
print(idle._process.pid, flush=True)
"""
COPY = """
kept = fork_client.kept_launcher(torch=False).__enter__()
kept.ready.result()
if not os.fork():
    print(warm_launchers._idle, fork_client.find_kept(torch=False), flush=True)
    time.sleep(1000)
kept.close()
"""
ENDS = {
    "as it should": "",
    "at once": "os._exit(0)",
    "by an error": "raise RuntimeError",
    "at once, with a copy that lives on": COPY + "os._exit(0)",
    "as it should, with a copy that lives on": COPY,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_leaves_no_launcher(end: str) -> None:
    """A copy holds the launcher's stdin open, so that it must be told to end, or see that its program has."""
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + ENDS[end], BARE],
        stdout=pipe,
        stderr=pipe,
        env=environment,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            assert program.stdout is not None
            launcher = int(program.stdout.readline())
            births = {launcher: read_start(launcher)}
            if "copy" in end:
                assert program.stdout.readline() == "{} None\n", "the copy has no launcher"
            assert gone(births)
            program.wait(LIVENESS_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
