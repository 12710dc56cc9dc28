"""Threads that a program leaves running when it ends, at work inside native code."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from trinity.runtime import exit_hook

LIVENESS_S = 60.0

# Without the hook the thread is frozen, or aborts the process if it is in native code that cannot be unwound.
LEFT = """
import os, sys, threading, numpy
from trinity.runtime.exit_hook import end_at_exit
numbers, stop, begun = numpy.ones(200_000), threading.Event(), threading.Event()

def work():
    while not stop.is_set():
        numpy.sort(numbers)
        begun.set()
    print("ended", flush=True)

class Owner:
    def __init__(self):
        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()
        end_at_exit(self)

    def end_now(self):
        stop.set()
        return [self.thread]

owner = Owner()
begun.wait()
if "fork" in sys.argv and not os.fork():
    sys.exit(3)  # its handlers run, and find nothing to wait for
if "fork" in sys.argv:
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
print("exits", flush=True)
"""


def run(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", LEFT, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIVENESS_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_threads_end_before_the_interpreter_does() -> None:
    assert run() == "exits\nended\n"


def test_a_fork_ends_by_itself() -> None:
    assert run("fork") == "3\nexits\nended\n"


class Owner:
    def __init__(self, end: Callable[[], None], thread: threading.Thread) -> None:
        self._end, self._thread = end, thread

    def end_now(self) -> list[threading.Thread]:
        self._end()
        return [self._thread]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_hook, "_running", weakref.WeakSet())


def test_all_are_asked_before_any_is_waited_for() -> None:
    """Threads may need each other to end."""
    asked = [threading.Event(), threading.Event()]
    threads = [threading.Thread(target=other.wait, daemon=True) for other in reversed(asked)]
    owners = [Owner(each.set, thread) for each, thread in zip(asked, threads, strict=True)]
    for owner, thread in zip(owners, threads, strict=True):
        thread.start()
        exit_hook.end_at_exit(owner)
    exit_hook._end_all()
    assert not any(thread.is_alive() for thread in threads)


def test_one_that_does_not_end_is_waited_for_no_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_hook, "EXIT_S", 0.05)
    end = threading.Event()
    stuck, never = threading.Thread(target=end.wait), threading.Thread(target=end.wait)
    stuck.start()
    owners = [Owner(lambda: None, stuck), Owner(lambda: None, never)]  # the latter was never started
    for owner in owners:
        exit_hook.end_at_exit(owner)
    begun = time.monotonic()
    exit_hook._end_all()
    assert stuck.is_alive()
    assert time.monotonic() - begun < LIVENESS_S
    end.set()
    stuck.join()
