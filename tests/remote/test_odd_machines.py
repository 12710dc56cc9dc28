"""A machine that misbehaves under a pipeline of processes: a parent that stands still, a clock that jumps, no shared
memory, no more processes. Requests end right or typed, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from support.emulated_pipelines import MODEL, POOLS, asked, check, serve
from support.freezing import freeze
from support.paths import ROOT
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.supervisor import ProcessConfig

PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
SERVE = """
import asyncio, sys, time
from support.emulated_pipelines import MODEL, POOLS, asked, check, serve
from trinity.emulation.model import EmulatedRequest
from trinity.errors import TrinityError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.supervisor import ProcessConfig

async def main(connector, seconds):
    cache = CacheConfig(pools=POOLS)
    processes = ProcessConfig(silence_s=2.0)
    options = {"hosting": "process", "connector": connector, "cache": cache, "processes": processes}
    async with Pipeline(MODEL, "1E1P1D", **options) as pipe:
        lives = [member.process for member in pipe.processes.values()]
        print("serving", flush=True)
        until = time.monotonic() + seconds
        while True:
            requests = asked()
            check(await serve(pipe, requests), requests)
            if time.monotonic() > until:
                break
        assert lives == [member.process for member in pipe.processes.values()], "an instance was started again"
    print("exact", flush=True)

try:
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
except TrinityError as error:
    print("typed", type(error).__name__, error, flush=True)
"""


SMALL = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=4k none /dev/shm && exec "$@"', "sh")


def begin(connector: str, seconds: float, *around: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": PATHS}
    command = [*around, sys.executable, "-c", SERVE, connector, str(seconds)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def end(child: subprocess.Popen[str]) -> str:
    try:
        out, err = child.communicate(timeout=100)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    assert child.returncode == 0, err[-4000:]
    return out


def test_a_parent_that_stood_still_loses_nobody() -> None:
    """Its own silence, twice as long as it allows its instances, is not theirs: a laptop that slept, a debugger."""
    with begin("shm", 3.0) as child:
        assert child.stdout is not None
        said = child.stdout.readline()
        freeze(child.pid)
        time.sleep(5.0)
        os.kill(child.pid, signal.SIGCONT)
        assert (said, end(child)) == ("serving\n", "exact\n")


async def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Centuries back and forth between any two calls: deadlines, leases and silences run on the monotonic clock."""
    real, calls = time.time, iter(range(1 << 30))
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(calls) * 1e10)
    config = ProcessConfig(silence_s=2.0)
    for hosting in ("thread", "process"):
        processes = config if hosting == "process" else None
        async with Pipeline(
            MODEL,
            "1E1P1D",
            hosting=hosting,
            cache=CacheConfig(pools=POOLS),
            processes=processes,  # type: ignore[arg-type]
        ) as pipe:
            for _ in range(3):
                requests = asked()
                check(await serve(pipe, requests), requests)
            assert len(pipe.trace) == 18


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("connector", ["shm", "auto", "nixl"])
def test_a_full_dev_shm(connector: str) -> None:
    """Pools are memory files of their own, and what needs /dev/shm says so."""
    child = begin(
        connector, 0.0, "unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=4k none /dev/shm && exec "$@"', "sh"
    )
    out = end(child)
    assert out.strip().splitlines()[-1] == "exact" or out.strip().splitlines()[-1].startswith("typed")
