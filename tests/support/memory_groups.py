"""Control groups of memory, in which the kernel kills what takes more than a limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def memory_group() -> Iterator[Path | None]:
    """A control group of its own for memory, of either version, which ends with the block; None where none can be."""
    for base in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        group = base / f"trinity-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / "memory.limit_in_bytes").exists() or (group / "memory.max").exists():
            yield group
            group.rmdir()
            return
        group.rmdir()
    yield None


def limit(group: Path, size: int) -> None:
    old = group / "memory.limit_in_bytes"
    (old if old.exists() else group / "memory.max").write_text(str(size))


def count_kills(group: Path) -> int:
    """Read how many processes of a group the kernel has killed."""
    old = group / "memory.oom_control"
    rows = (old if old.exists() else group / "memory.events").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("oom_kill "))
