"""Identity of processes: a number may be used again, together with its start it is not; and what a new one inherits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

STATUS, START = 0, 19  # places in /proc/PID/stat behind the name, which may hold anything
STOPPED = ("T", "t")
ZOMBIES = ("Z", "X")  # a zombie's memory is gone, once its other threads are
OWN_THREAD = Path("/proc/thread-self")
INHERITED_STATUS = (
    *("Umask", "Uid", "Gid", "Groups", "CapEff", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed"),
    *("SigBlk", "SigIgn"),
)
INHERITED_FILES = ("limits", "cgroup", "oom_score_adj", "timerslack_ns")
PASSING_VARIABLES = ("PYTEST_CURRENT_TEST",)  # written anew all the time, and of no concern to who inherits them


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


def is_stopped(process: int) -> bool:
    """True if a process is stopped, as by SIGSTOP; False where that cannot be read."""
    fields = _read_fields(process)
    return bool(fields) and fields[STATUS] in STOPPED


def describe_inheritance() -> tuple[object, ...]:
    """Describe what a process that the calling thread starts now has from it, by the system's word where there is one.

    Its program, environment, directories, stderr, user and rights, limits, processors, control group, namespaces,
    priority, signals, group and session. Of two processes with equal ones the second would have started as the first.
    """
    status = [
        line for line in _read_text(OWN_THREAD / "status").splitlines() if line.partition(":")[0] in INHERITED_STATUS
    ]
    return (
        os.getpid(),
        os.getpgid(0),
        os.getsid(0),
        (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else 0),
        sys.executable,
        tuple(sorted(each for each in os.environ.items() if each[0] not in PASSING_VARIABLES)),
        tuple(_identify_file(each) for each in ("/", ".", 2)),
        tuple(status),
        tuple(_read_text(OWN_THREAD / name) for name in INHERITED_FILES),
        tuple(_list_namespaces()),
    )


def _list_namespaces() -> list[str]:
    """Read the calling thread's namespaces; none where a sandbox does not show them."""
    try:
        return sorted(os.readlink(each) for each in (OWN_THREAD / "ns").iterdir())
    except OSError:
        return []


def _identify_file(place: str | int) -> tuple[int, int]:
    """Return the device and number of a file; nothing for one that is no more."""
    try:
        found = os.stat(place)
    except OSError:
        return (0, 0)
    return found.st_dev, found.st_ino


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_fields(process: int) -> list[str]:
    return _read_text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()


def _is_ending(process: int, fields: list[str]) -> bool:
    """True for a zombie without other threads: until those have ended, they may write."""
    if fields[STATUS] not in ZOMBIES:
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
