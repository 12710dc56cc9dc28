"""The process that forks workers: a reply that comes too late is nobody's, and what fails leaves nothing open."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from trinity.preprocess import worker_processes
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.worker import fork_origin
from trinity.preprocess.worker_processes import KillableProcessor, WorkerEnded, WorkerOrigin, WorkerProcess

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def origin(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerOrigin]:
    """One that is forked whenever it is started: to load takes 5 s."""
    monkeypatch.setattr(worker_processes, "FORK_S", 10.0)  # what a busy machine may need
    processor: Any = SimpleNamespace(limits=MediaLimits())
    setup: Any = None
    made = WorkerOrigin(processor, setup)
    yield made
    made.close()


def start(origin: WorkerOrigin) -> WorkerProcess:
    made = WorkerProcess(origin, 0, MediaLimits())
    made.start()
    return made


def forks_again(origin: WorkerOrigin) -> None:
    origin._forks = True


def test_a_reply_that_came_too_late_is_never_read(origin: WorkerOrigin) -> None:
    """At 82dc40f9 the exit code of the worker before, -9, was the next one's process number, and was signalled."""
    worker, other = start(origin), start(origin)
    first, frozen = worker.process, origin.process
    os.kill(frozen, signal.SIGSTOP)
    assert worker.end() == -signal.SIGKILL
    with suppress(ProcessLookupError):  # it was ended
        os.kill(frozen, signal.SIGCONT)
    forks_again(origin)
    worker.start()
    assert worker.process > 0, "how another one ended is no process number"
    assert worker.process not in (first, frozen, other.process)
    assert origin.process != frozen
    os.kill(worker.process, 0)
    assert (worker.end(), origin.reap(os.getpid())) == (-signal.SIGKILL, -signal.SIGKILL)
    other.end()


def test_no_two_processes_read_from_one_socket(origin: WorkerOrigin, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was forked and not told of may live: at 82dc40f9 the next attempt gave its socket to another one."""
    real, sockets = origin._order, list[list[int]]()

    def fail_once(order: bytes, numbers: list[int]) -> int:
        sockets.append([os.fstat(each).st_ino for each in numbers])
        found = real(order, numbers)
        if len(sockets) == 1:
            forks_again(origin)
            raise OSError("told too late")
        return found

    monkeypatch.setattr(origin, "_order", fail_once)
    worker = start(origin)
    monkeypatch.undo()
    assert len(sockets) == 2
    assert not set(sockets[0]) & set(sockets[1])
    worker.end()


@pytest.mark.parametrize("process", [0, -1, -9])
def test_nothing_but_a_process_is_signalled(process: int, monkeypatch: pytest.MonkeyPatch) -> None:
    origin: Any = SimpleNamespace()
    worker, sent = WorkerProcess(origin, 0, MediaLimits()), list[tuple[int, int]]()
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    worker.process = process
    worker.kill()
    assert not sent


def test_a_fork_that_fails_leaves_no_descriptor(origin: WorkerOrigin, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(worker_processes, "fork_origin", refuse)
    monkeypatch.setattr("subprocess.Popen", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerEnded):
        origin.fork(0)
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(worker_processes, "fork_origin", fork_origin)
    forks_again(origin)
    start(origin).end()


def test_a_worker_that_is_taken_back_meanwhile_is_not_hurried() -> None:
    """At 82dc40f9 its name was read twice, and a thread set it to None between."""
    killed = list[object]()

    class Use:
        left = False

        @property
        def worker(self) -> Any:
            self.reads = getattr(self, "reads", 0) + 1
            return SimpleNamespace(kill=killed.append) if self.reads == 1 else None

    use: Any = Use()
    KillableProcessor._hurry(use)
    assert (use.left, killed) == (True, [use])
