"""Processors that threads are kept on: an instance's lanes, or its whole process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trinity.errors import ConfigError

THREADS = Path("/proc/self/task")


def check_there(cores: Sequence[int], name: str) -> None:
    """Raise ``ConfigError`` where this platform pins no threads, or this process may not use one of ``cores``."""
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"instance {name}: this platform cannot pin threads to cores; leave out cores=")
    there = os.sched_getaffinity(0)
    missing = sorted(set(cores) - there)
    if missing:
        raise ConfigError(
            f"instance {name} asks for core(s) {', '.join(map(str, missing))}, and this process may use "
            f"{', '.join(map(str, sorted(there)))}: give some of these, or run it where the others are allowed"
        )


def pin_thread(cores: Sequence[int]) -> None:
    """Keep the calling thread on ``cores``, and the threads that it starts from now on; without any do nothing."""
    if cores:
        os.sched_setaffinity(0, cores)


@contextmanager
def pinned_process(cores: Sequence[int]) -> Iterator[None]:
    """Keep every thread of this process on ``cores`` within the block, and those that start in it; then as before.

    For a process that is one instance, or one after another: no thread of a user's program is ever touched.
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    _pin_all(cores)
    try:
        yield
    finally:
        _pin_all(before)


def _pin_all(cores: Sequence[int] | set[int]) -> None:
    threads = [int(each.name) for each in THREADS.iterdir()] if THREADS.exists() else [0]
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread, cores)
