"""Folders of pipelines, and what a program that was killed has left behind, which the next start clears.

A folder has a lock file that its program keeps locked for as long as it lives: the system lets go of the lock when it
ends, however that happens and in whatever container. Only a folder whose lock is free is cleared, and only if it is
this user's alone and its lock file says that trinity made it: a folder ``trinity-results`` of the user's own stays.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trinity.errors import ConfigError

PREFIX, LOCK = "trinity-", ".trinity-pipeline-lock"
_CONTENT = b"trinity: a pipeline's folder of sockets, removed when its program has ended\n"
SHARED_MEMORY = Path("/dev/shm")


class OwnedFolder:
    """A temporary folder of this program (``path``), cleared by the next start of any if this one is killed.

    ``parent`` (None): TMPDIR. Raises ``ConfigError`` if no folder can be made there, as on a disk that is full.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self._lock = -1
        try:
            parent = parent or Path(tempfile.gettempdir())
            clear_leftovers(parent)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # for this user alone: mode 0700
            self._make_lock()
        except OSError as error:
            raise ConfigError(
                f"no folder for the sockets of instances can be made in {parent or 'a temporary directory'}: {error}; "
                "make room there, or set TMPDIR to a directory that can be written"
            ) from error

    def _make_lock(self) -> None:
        unnamed = self.path / "new"
        try:
            self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._lock, _CONTENT)
            unnamed.rename(self.path / LOCK)  # nobody may find it before it is locked and tells whose it is
        except OSError:
            self.remove()
            raise

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
    except ConfigError:
        return None


def clear_leftovers(parent: Path) -> list[Path]:
    """Remove the folders in ``parent`` whose programs have ended; return them.

    Those of others, locked ones, and those that trinity has not made stay.
    """
    removed = []
    for path in list(parent.glob(f"{PREFIX}*")):
        with suppress(OSError), _locked(path / LOCK):
            shutil.rmtree(path)
            removed.append(path)
    return removed


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock. Raises ``OSError`` where somebody else does, or where there is none of this user's and trinity's."""
    folder = path.parent.lstat()
    if folder.st_uid != os.getuid() or stat.S_IMODE(folder.st_mode) != 0o700:
        raise PermissionError(path)
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.pread(lock, len(_CONTENT) + 1, 0) != _CONTENT:
            raise PermissionError(path)
        yield
    finally:
        os.close(lock)
