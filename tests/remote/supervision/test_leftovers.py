"""What a killed program leaves is cleared by the next start, and nothing else is."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.emulated_pipelines import MODEL, POOLS
from support.lender import ready
from support.paths import ROOT
from trinity.emulation.model import EmulatedRequest
from trinity.errors import ConfigError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.supervision import leftovers
from trinity.remote.supervision.leftovers import LOCK, OwnedFolder, clear_leftovers, make_shared_folder
from trinity.remote.supervision.process_identity import has_ended, read_start

LIVENESS_S = 60.0
OWNER = """
import os, sys, time
from pathlib import Path
from trinity.remote.supervision.leftovers import OwnedFolder
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
    (tmp_path / "trinity-pointing").mkdir(0o700)
    (tmp_path / "trinity-pointing" / LOCK).symlink_to(elsewhere / "kept")
    make_leftover(tmp_path, "other-1")
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


def make_leftover(parent: Path, name: str = "trinity-gone") -> Path:
    """Leave a folder as a killed program does: trinity's own, its lock free."""
    owned = OwnedFolder(parent)
    os.close(owned._lock)
    return owned.path.rename(parent / name)


def test_a_folder_of_the_users_own_stays_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for index, (name, content, mode) in enumerate(
        [("lock", "", 0o700), (LOCK, "", 0o700), (LOCK, "mine", 0o700), (LOCK, None, 0o755)]
    ):
        results = make_leftover(tmp_path / "other", f"trinity-results-{index}") if content is None else None
        results = results or tmp_path / f"trinity-results-{index}"
        results.mkdir(mode, exist_ok=True)
        results.chmod(mode)
        if content is not None:
            (results / name).write_text(content)
        (results / "paper.csv").write_text("years of work")
    for parent in (tmp_path, tmp_path / "other"):
        assert clear_leftovers(parent) == []
    assert len(list(tmp_path.rglob("paper.csv"))) == 4
    (tmp_path / "other" / "trinity-results-3").chmod(0o700)
    assert clear_leftovers(tmp_path / "other") == [tmp_path / "other" / "trinity-results-3"], "the control"


@pytest.mark.parametrize("fails", ["mkdtemp", "write"])
def test_a_full_disk_is_a_typed_error_that_names_tmpdir(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((tempfile, "mkdtemp") if fails == "mkdtemp" else (os, "write")), full)
    with pytest.raises(ConfigError, match=r"No space left on device; make room there, or set TMPDIR"):
        OwnedFolder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_link_to_one_with_a_free_lock_is_left_alone(tmp_path: Path) -> None:
    target = make_leftover(tmp_path, "target")
    (tmp_path / "trinity-link").symlink_to(target)
    clear_leftovers(tmp_path)
    assert (target / LOCK).exists()


def test_two_programs_that_clear_at_once_do_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_leftover(tmp_path)
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
        assert pipe._served.supervisor is not None
        assert pipe._served.supervisor.forks._shared is not None
        folder = pipe._served.supervisor.forks._shared.path
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
