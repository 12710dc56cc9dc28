"""A machine that misbehaves under a pipeline of processes: a parent that stands still, a clock that jumps, no shared
memory, a full disk, a limit of memory, no more processes. Requests end right or typed, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.emulated_pipelines import LIVENESS_S, MODEL, POOLS, asked, check, serve
from support.freezing import freeze
from support.memory_groups import limit, memory_group
from support.paths import ROOT
from trinity.core.failure_policy import NO_RECOVERY
from trinity.errors import RequestError, TrinityError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.supervision.process_config import ProcessConfig

PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
SERVE = """
import asyncio, sys, time
from support.emulated_pipelines import MODEL, POOLS, asked, check, serve
from trinity.emulation.model import EmulatedRequest
from trinity.errors import TrinityError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.supervision.process_config import ProcessConfig

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

DESCRIPTORS = """
import os, resource
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (4096 if limit == resource.RLIM_INFINITY else min(4096, limit), limit))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
"""
ENDS_WITH_A_PIPE = """
import time
from trinity.errors.parent_process import die_with_holder
from trinity.preprocess.worker import end_with_parent
lifeline, end = os.pipe()
{ends}(lifeline)
print("lives", flush=True)
os.close(end)
time.sleep(1000)
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


def test_a_program_of_many_descriptors_starts_its_instances() -> None:
    """``select`` takes none of 1024 or more, so that no pipeline started in a server with as many connections."""
    command = [sys.executable, "-c", DESCRIPTORS + SERVE, "shm", "0"]
    environment = {**os.environ, "PYTHONPATH": PATHS}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "serving\nexact\n"), done.stderr[-4000:]


@pytest.mark.parametrize(
    ("ends", "by"), [("die_with_holder", signal.SIGKILL), ("end_with_parent", signal.SIGIO)], ids=["instance", "worker"]
)
def test_by_whatever_descriptor_a_process_ends_with_its_program(ends: str, by: signal.Signals) -> None:
    command = [sys.executable, "-c", DESCRIPTORS + ENDS_WITH_A_PIPE.format(ends=ends)]
    environment = {**os.environ, "PYTHONPATH": PATHS}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.returncode) == ("lives\n", -by), done.stderr[-4000:]


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
    out = end(begin(connector, 0.0, *SMALL))
    assert out.strip().splitlines()[-1] == "exact" or out.strip().splitlines()[-1].startswith("typed")


FULL_DISK = """
import asyncio, itertools, os, signal, sys, tempfile
from contextlib import suppress
from pathlib import Path
from support.emulated_pipelines import MODEL, POOLS, asked, check, serve
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline

async def main():
    folder = Path(tempfile.gettempdir())
    async with Pipeline(MODEL, "1E1P1D", hosting="process", cache=CacheConfig(pools=POOLS)) as pipe:
        check(await serve(pipe, requests := asked()), requests)
        with suppress(OSError):
            (folder / "bytes").write_bytes(bytes(2 << 20))
        with suppress(OSError):
            for number in itertools.count():
                (folder / f"inode-{number}").touch()
        for name in ("E0", "P0", "D0", "D0"):
            os.kill(pipe.processes[name].process, signal.SIGKILL)
            check(await serve(pipe, requests := asked()), requests)
    print("exact", flush=True)

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_an_instance_comes_back_on_a_disk_without_a_free_inode(tmp_path: Path) -> None:
    """The socket file of its former life makes room for that of the next one."""
    around = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m,nr_inodes=64 none "$0" && exec "$@"', tmp_path)
    environment = {**os.environ, "PYTHONPATH": PATHS, "TMPDIR": str(tmp_path)}
    command = [*map(str, around), sys.executable, "-c", FULL_DISK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "exact\n"), done.stderr[-4000:]


@pytest.fixture(name="memory_group")
def own_memory_group() -> Iterator[Path]:
    with memory_group() as group:
        if group is None:
            pytest.skip("no control group of memory may be made here")
        yield group


async def test_an_instance_that_its_control_group_kills(memory_group: Path) -> None:
    """The kernel's own kill, in the middle of a copy or wherever it writes: typed, and started again outside of it."""
    cache, processes = CacheConfig(pools=POOLS), ProcessConfig(silence_s=2.0)
    options = {"connector": "shm", "cache": cache, "processes": processes, "failures": NO_RECOVERY}
    async with Pipeline(MODEL, "1E1P1D", hosting="process", **options) as pipe:  # type: ignore[arg-type]
        check(await serve(pipe, requests := asked()), requests)
        (memory_group / "cgroup.procs").write_text(str(pipe.processes["D0"].process))
        limit(memory_group, 1 << 16)
        failed: list[TrinityError] = []
        until = time.monotonic() + LIVENESS_S
        while not failed or pipe.processes["D0"].setup.epoch == 0:
            assert time.monotonic() < until, "it lives on"
            for outcome in await asyncio.gather(*map(pipe.complete, requests := asked()), return_exceptions=True):
                if isinstance(outcome, BaseException):
                    assert isinstance(outcome, RequestError)
                    failed.append(outcome)
            await asyncio.sleep(0.05)
        while time.monotonic() < until:
            try:
                check(await serve(pipe, requests := asked()), requests)
                break
            except TrinityError:
                await asyncio.sleep(0.05)
        assert any("D0" in str(each) for each in failed)
    assert not (memory_group / "cgroup.procs").read_text()


LARGE = """
import asyncio, os, sys
from pathlib import Path
from support.emulated_pipelines import MODEL
from trinity.errors import ConfigError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline

Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))

async def main(hosting):
    async with Pipeline(MODEL, "1E1P1D", hosting=hosting, cache=CacheConfig(pools={"image": 12, "kv": 1 << 18})):
        print("it started")

for hosting in ("thread", "process"):
    try:
        asyncio.run(main(hosting))
    except ConfigError as error:
        print("typed", error)
"""


def test_pools_beyond_the_limit_of_a_control_group_are_refused(memory_group: Path) -> None:
    """Before they are written: the kernel would kill the instance at its first requests."""
    limit(memory_group, 600 << 20)
    command = [sys.executable, "-c", LARGE, str(memory_group)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": PATHS}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["typed", "typed"], lines
    assert all("memory" in line or "bytes" in line for line in lines)
