"""Reads and writes the project's own files, bounded and whole, with typed errors.

A plan, a trace or a profile may come from anybody: it may be a device, a pipe that nobody writes to, or four gigabytes
of zeros in four megabytes of gzip.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import zlib
from pathlib import Path

from trinity.errors import LONGEST_SHOWN, ConfigError, show

MOST_BYTES = 1 << 30  # of one file, and of what it unpacks to: a trace of ten million rows
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib's word for: a gzip header, and the largest window
_FIRST_PIECE, _LARGEST_PIECE = 1 << 8, 1 << 20  # bytes of a member that are unpacked at a time
_ZEROS = re.compile(rb"\0*")


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
        raise error(f"cannot read {name_file(path)}: {_words(why)}") from why
    if not regular:
        raise error(f"cannot read {name_file(path)}: it is no regular file")
    if len(content) > most:
        raise error(f"{name_file(path)} has more than {most:,} bytes, and no more are read")
    return content


def unzip(content: bytes, path: str | Path, error: type[ConfigError] = ConfigError, *, most: int = MOST_BYTES) -> bytes:
    """Unpack gzipped ``content``, of one or more members; other content is returned as it is. Raises ``error``."""
    if not content.startswith(_GZIP_MAGIC):
        return content
    whole, at = bytearray(), 0
    while at < len(content):
        member, size = zlib.decompressobj(wbits=_GZIP_WINDOW), _FIRST_PIECE
        while not member.eof:
            if at == len(content):
                raise error(f"the gzipped {name_file(path)} is cut off or damaged: it ends too soon")
            piece = content[at : at + size]  # what follows a member comes back: little, where members are small
            try:
                whole += member.decompress(piece, most + 1 - len(whole))
            except zlib.error as why:
                raise error(f"the gzipped {name_file(path)} is cut off or damaged: {why}") from why
            if len(whole) > most:
                raise error(f"{name_file(path)} unpacks to more than {most:,} bytes, and no more are read")
            at, size = at + len(piece), min(2 * size, _LARGEST_PIECE)
        at = _end_of_padding(content, at - len(member.unused_data))
    return bytes(whole)


def write_file(path: str | Path, content: bytes) -> None:
    """Write a file that appears whole or not at all; links stay, and a file's permissions.

    What is there and no regular file, a pipe or a device, is written into. Raises ``ConfigError``, for a full disk for
    example, and for a pipe that nobody reads.
    """
    try:
        if not os.path.exists(path) or os.path.isfile(path):
            _replace(os.path.realpath(path), content)
        else:
            _write_into(path, content)
    except (OSError, ValueError, TypeError) as why:  # no folder, a NUL in its name, no path at all
        raise ConfigError(f"cannot write {name_file(path)}: {_words(why)}") from why


def _replace(target: str, content: bytes) -> None:
    scratch = os.path.join(os.path.dirname(target), f".{secrets.token_hex(8)}.part")
    opened = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(opened, "wb") as file:
            if os.path.exists(target):
                os.fchmod(opened, stat.S_IMODE(os.stat(target).st_mode))
            file.write(content)
        os.replace(scratch, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def _write_into(path: str | Path, content: bytes) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a reader would block
    os.set_blocking(opened, True)
    with open(opened, "wb") as file:
        file.write(content)


def _end_of_padding(content: bytes, at: int) -> int:
    """Skip the zeros that may follow a member, as gzip itself does."""
    found = _ZEROS.match(content, at)
    return found.end() if found else at


def _read(opened: int, most: int) -> bytes:
    pieces, left = [], most
    while left and (piece := os.read(opened, min(left, 1 << 24))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _words(why: Exception) -> str:
    return getattr(why, "strerror", None) or str(why)


def name_file(path: object) -> str:
    """Name a file in a message, cut in the middle where its path is long."""
    text = str(path) if isinstance(path, str | os.PathLike) else show(path)
    half = LONGEST_SHOWN // 2 - 2
    return text if len(text) <= LONGEST_SHOWN else f"{text[:half]}...{text[-half:]}"
