"""Keeps what was measured in the user's cache folder: small files that spare a later start the time.

None of them is needed. One that is missing, damaged, too long, or no regular file counts as not there; where nothing
can be written, nothing is kept. A file appears whole or not at all, so that no reader or writer needs a lock.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from trinity.errors import ConfigError
from trinity.errors.files import read_regular_file

CACHE_OFF = "off"  # TRINITY_CACHE=off: nothing is kept
MOST_CACHED_BYTES = 1 << 20  # of one file
_OWN_NAME = re.compile(r"[0-9a-f]{32,64}\.json|tmp\w+\.part")  # a digest, or what was left half written


def cache_folder() -> Path:
    """Folder of trinity's caches: $TRINITY_CACHE, else ``trinity`` in the platform's cache folder.

    Where nothing is to be kept it is one that cannot be.
    """
    if chosen := os.environ.get("TRINITY_CACHE"):
        return Path(os.devnull if chosen == CACHE_OFF else chosen)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "trinity"
    try:
        home = Path.home()
    except RuntimeError:  # a user without one, as in containers
        return Path(os.devnull)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home) / "trinity"
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "trinity"


def read_cached(path: Path, most: int = MOST_CACHED_BYTES) -> bytes | None:
    """Read a cached file of at most ``most`` bytes; None if there is none that can be read."""
    try:
        return read_regular_file(path, most=most)
    except ConfigError:
        return None


def write_cached(path: Path, content: bytes, files: int | None = None) -> bool:
    """Write a cached file whole, in place of any other. Returns False where that cannot be done.

    ``files`` (None): the most files of such a name that the folder keeps; the oldest are removed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".part")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(scratch, path)
    except OSError:
        with suppress(OSError):
            os.unlink(scratch)
        return False
    if files is not None:
        _remove_oldest(path.parent, files)
    return True


def _remove_oldest(folder: Path, files: int) -> None:
    """Remove the oldest beyond ``files``, of those alone that this module may have written."""
    with suppress(OSError):
        found = sorted((each for each in folder.iterdir() if _OWN_NAME.fullmatch(each.name)), key=_age)
        for each in found[: max(0, len(found) - files)]:
            with suppress(OSError):
                each.unlink()


def _age(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:  # removed just now
        return 0.0
