"""What a killed program leaves is cleared by the next start, and nothing else is."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.emulated_pipelines import MODEL, POOLS
from support.lender import ready
from support.paths import ROOT
from trinity.emulation.model import EmulatedRequest
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote import leftovers
from trinity.remote.leftovers import LOCK, OwnedFolder, clear_leftovers, make_shared_folder
from trinity.remote.process_identity import has_ended, read_start

LIVENESS_S = 60.0
OWNER = """
import os, sys, time
from pathlib import Path
from trinity.remote.leftovers import OwnedFolder
owned = OwnedFolder(Path(sys.argv[1]))
(owned.path / "D0.sock").touch()
if "--fork" in sys.argv and os.fork() == 0:
    time.sleep(1000)
print(owned.path, flush=True)
time.sleep(1000)
"""


@contextmanager
def owner(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A program with a folder of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", OWNER, str(folder), *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as program:
        assert program.stdout is not None
        try:
            yield program, Path(program.stdout.readline().strip())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def test_the_folder_of_a_living_program_stays_and_that_of_a_killed_one_goes(tmp_path: Path) -> None:
    with owner(tmp_path) as (program, path):
        assert clear_leftovers(tmp_path) == []
        assert path.is_dir()
        program.kill()
        program.wait(LIVENESS_S)
        mine = OwnedFolder(tmp_path)  # whose start clears it
        assert not path.exists()
        assert clear_leftovers(tmp_path) == []
        mine.remove()
        mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_program_whose_children_live_on_is_not_taken_for_ended(tmp_path: Path) -> None:
    with owner(tmp_path, "--fork") as (program, path):
        program.kill()
        program.wait(LIVENESS_S)
        assert clear_leftovers(tmp_path) == []
        assert path.is_dir()


def test_only_what_is_provably_nobodys_is_cleared(tmp_path: Path) -> None:
    named = tmp_path / "trinity-4711"
    named.mkdir()
    (tmp_path / "trinity-file").write_text("somebody's")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (tmp_path / "trinity-link").symlink_to(elsewhere)
    (tmp_path / "trinity-pointing").mkdir()
    (tmp_path / "trinity-pointing" / LOCK).symlink_to(elsewhere / "kept")
    other = tmp_path / "other-1"
    other.mkdir()
    (other / LOCK).touch()
    assert clear_leftovers(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "elsewhere",
        "other-1",
        "trinity-4711",
        "trinity-file",
        "trinity-link",
        "trinity-pointing",
    ]
    assert (elsewhere / "kept").exists()


def test_a_folder_that_is_a_link_to_one_with_a_free_lock_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / LOCK).touch()
    (tmp_path / "trinity-link").symlink_to(target)
    clear_leftovers(tmp_path)
    assert (target / LOCK).exists()


def test_two_programs_that_clear_at_once_do_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trinity-gone").mkdir()
    (tmp_path / "trinity-gone" / LOCK).touch()
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [path / "trinity-gone", path / "trinity-gone"])
    assert clear_leftovers(tmp_path) == [tmp_path / "trinity-gone"]


# ---------------------------------------------------------------- shared memory


def test_without_a_place_in_shared_memory_there_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path / "nowhere")
    assert make_shared_folder() is None


async def test_what_ucx_keeps_in_shared_memory_is_in_the_folder_that_is_cleared() -> None:
    """A file of UCX stays if its process is killed between making and unlinking it: its name tells of nobody."""
    ready("ucx")
    options: dict[str, Any] = {"connector": "ucx", "cache": CacheConfig(pools=POOLS)}
    async with Pipeline(MODEL, "1EP1D", hosting="process", **options) as pipe, asyncio.timeout(LIVENESS_S):
        await pipe.complete(EmulatedRequest(text_tokens=18, image_tokens=(576,), max_tokens=5))
        assert pipe._processes is not None
        assert pipe._processes._shared is not None
        folder = pipe._processes._shared.path
        opened = [name for member in pipe.processes.values() for name in opened_by(member.process)]
        kept = [name for name in opened if "ucx_shm_posix" in name]
        assert kept
        assert all(name.startswith(f"{folder}/") for name in kept)
    assert not folder.exists()


def opened_by(process: int) -> list[str]:
    names = []
    for path in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            names.append(os.readlink(path))
    return names


# ---------------------------------------------------------------- processes


def test_a_process_is_known_by_its_number_and_start() -> None:
    start = read_start(os.getpid())
    assert start is not None
    assert not has_ended(os.getpid(), start)
    assert has_ended(os.getpid(), start - 1)  # the number was another's
    assert has_ended(1 << 30, 5)
    assert read_start(1 << 30) is None


async def test_a_stopped_process_has_not_ended_and_a_zombie_has() -> None:
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    start = read_start(program.pid)
    try:
        program.send_signal(signal.SIGSTOP)
        assert not has_ended(program.pid, start)
        assert read_start(program.pid) == start
    finally:
        program.kill()
    async with asyncio.timeout(LIVENESS_S):
        while not has_ended(program.pid, start):  # nobody has reaped it
            await asyncio.sleep(0.01)
    assert Path(f"/proc/{program.pid}").exists()
    assert read_start(program.pid) is None
    program.wait()
    assert has_ended(program.pid, start)
