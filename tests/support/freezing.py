"""Freezes a process: it has stopped when the call returns."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

LIVENESS_S = 60.0


def freeze(process: int) -> None:
    """Stop a process and wait until all its threads have: on a busy machine a signal alone is on its way for long.

    Raises ``TimeoutError`` if it goes on, ``ProcessLookupError`` if it is not there.
    """
    os.kill(process, signal.SIGSTOP)
    until = time.monotonic() + LIVENESS_S
    while not set(thread_states(process)) <= set("TtZX"):
        if time.monotonic() > until:
            raise TimeoutError(f"process {process} goes on: {''.join(thread_states(process))}")
        os.sched_yield()  # for milliseconds: asynchronously it would give what is tested the time to go on


def thread_states(process: int) -> list[str]:
    """List the state of each thread as /proc tells it: "R" runs, "S" sleeps, "T" has stopped."""
    states = []
    for task in Path(f"/proc/{process}/task").glob("*/stat"):
        try:
            states.append(task.read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return states
