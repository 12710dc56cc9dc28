"""Reads and writes the project's own files, bounded and whole, with typed errors.

A plan, a trace or a profile may come from anybody: it may be a device, a pipe that nobody writes to, or four gigabytes
of zeros in four megabytes of gzip.
"""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from pathlib import Path

from trinity.errors import ConfigError

MOST_BYTES = 1 << 30  # of one file, and of what it unpacks to: a trace of ten million rows
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib's word for: a gzip header, and the largest window


def read_regular_file(path: str | Path, error: type[ConfigError] = ConfigError, *, most: int = MOST_BYTES) -> bytes:
    """Read a regular file of at most ``most`` bytes. Raises ``error``, which says why it cannot be read."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer would block
        try:
            regular = stat.S_ISREG(os.fstat(opened).st_mode)
            content = _read(opened, most + 1) if regular else b""
        finally:
            os.close(opened)
    except (OSError, ValueError, TypeError) as why:  # no such file, a NUL in its name, no path at all
        raise error(f"cannot read {path}: {_words(why)}") from why
    if not regular:
        raise error(f"cannot read {path}: it is no regular file")
    if len(content) > most:
        raise error(f"{path} has more than {most:,} bytes, and no more are read")
    return content


def unzip(content: bytes, path: str | Path, error: type[ConfigError] = ConfigError, *, most: int = MOST_BYTES) -> bytes:
    """Unpack gzipped ``content``, of one or more members; other content is returned as it is. Raises ``error``."""
    if not content.startswith(_GZIP_MAGIC):
        return content
    whole = bytearray()
    while content:
        member = zlib.decompressobj(wbits=_GZIP_WINDOW)
        try:
            whole += member.decompress(content, most + 1 - len(whole))
        except zlib.error as why:
            raise error(f"the gzipped {path} is cut off or damaged: {why}") from why
        if len(whole) > most:
            raise error(f"{path} unpacks to more than {most:,} bytes, and no more are read")
        if not member.eof:
            raise error(f"the gzipped {path} is cut off or damaged: it ends too soon")
        content = member.unused_data.lstrip(b"\0")  # padding, as gzip itself takes it
    return bytes(whole)


def write_file(path: str | Path, content: bytes) -> None:
    """Write a file that appears whole or not at all. Raises ``ConfigError``, for a disk that is full for example."""
    target = Path(path)
    scratch = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        scratch.write_bytes(content)
        scratch.replace(target)
    except OSError as why:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise ConfigError(f"cannot write {path}: {_words(why)}") from why


def _read(opened: int, most: int) -> bytes:
    pieces, left = [], most
    while left and (piece := os.read(opened, min(left, 1 << 24))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _words(why: Exception) -> str:
    return getattr(why, "strerror", None) or str(why)
