"""Pins threads to processors: an instance's lanes, or its whole process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trinity.errors import ConfigError

THREADS_DIR = Path("/proc/self/task")


def check_cores(cores: Sequence[int], name: str) -> None:
    """Raise ``ConfigError`` if this platform cannot pin threads, or this process may not use one of ``cores``."""
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"instance {name}: this platform cannot pin threads to cores; leave out cores=")
    allowed = os.sched_getaffinity(0)
    missing = sorted(set(cores) - allowed)
    if missing:
        raise ConfigError(
            f"instance {name} asks for core(s) {', '.join(map(str, missing))}, but this process may only use "
            f"{', '.join(map(str, sorted(allowed)))}: give some of these, or run it where the others are allowed"
        )


def pin_thread(cores: Sequence[int]) -> None:
    """Keep the calling thread and the threads that it starts from now on to ``cores``; with none, do nothing."""
    if cores:
        os.sched_setaffinity(0, cores)


@contextmanager
def pin_process(cores: Sequence[int]) -> Iterator[None]:
    """Keep every thread of this process on ``cores`` within the block, new ones too, and restore the affinity after it.

    For a process that only runs one instance at a time: threads of a user's program are never touched.
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
    threads = [int(each.name) for each in THREADS_DIR.iterdir()] if THREADS_DIR.exists() else [0]
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread, cores)
