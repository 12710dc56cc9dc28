"""Folders of pipelines, and what a program that was killed has left behind, which the next start clears.

A folder has a lock file that its program keeps locked for as long as it lives: the system lets go of the lock when it
ends, however that happens and in whatever container. Only a folder whose lock is free is cleared.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX, LOCK = "trinity-", "lock"
SHARED_MEMORY = Path("/dev/shm")


class OwnedFolder:
    """A temporary folder of this program (``path``), cleared by the next start of any if this one is killed."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        clear_leftovers(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        unnamed = self.path / "new"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path / LOCK)  # nobody may find it before it is locked

    def remove(self) -> None:
        """Remove it with all that is in it; calling it twice does no harm."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def make_shared_folder() -> OwnedFolder | None:
    """Make a folder for what libraries of the instances put into shared memory; None where there is no place for it."""
    try:
        return OwnedFolder(SHARED_MEMORY)
    except OSError:
        return None


def clear_leftovers(parent: Path) -> list[Path]:
    """Remove the folders in ``parent`` whose programs have ended; return them. Others' and locked ones stay."""
    removed = []
    for path in list(parent.glob(f"{PREFIX}*")):
        with suppress(OSError), _locked(path / LOCK):
            shutil.rmtree(path)
            removed.append(path)
    return removed


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock. Raises ``OSError`` where somebody else does, or where there is none of this user."""
    if path.parent.lstat().st_uid != os.getuid():
        raise PermissionError(path)
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
