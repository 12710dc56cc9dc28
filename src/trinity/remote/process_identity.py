"""Identity of processes: a number may be used again, together with its start it is not."""

from __future__ import annotations

import os
from pathlib import Path

STATE, START = 0, 19  # places in /proc/PID/stat behind the name, which may hold anything
ZOMBIES = ("Z", "X")  # a zombie's memory is gone, once its other threads are


def read_start(process: int) -> int | None:
    """Read when a process was started, in ticks since boot; None if it has ended, or where that cannot be read."""
    fields = _read_fields(process)
    return int(fields[START]) if fields and not _is_ending(process, fields) else None


def has_ended(process: int, start: int | None) -> bool:
    """True if the process of this number and start is gone, with all of its threads and memory."""
    fields = _read_fields(process)
    if not fields:
        return not _exists(process)
    return int(fields[START]) != start or _is_ending(process, fields)


def _read_fields(process: int) -> list[str]:
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _is_ending(process: int, fields: list[str]) -> bool:
    """True for a zombie without other threads: until those have ended, they may write."""
    if fields[STATE] not in ZOMBIES:
        return False
    try:
        return len(os.listdir(f"/proc/{process}/task")) <= 1
    except OSError:
        return True


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
