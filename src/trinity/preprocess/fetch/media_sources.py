"""Bytes of a media item from a file or a data: URI, bounded in size and time, whatever the path is."""

from __future__ import annotations

import base64
import io
import os
import re
import stat
from collections.abc import Iterator
from urllib.parse import unquote

from trinity.errors import describe_error
from trinity.errors.plain_values import find_scheme, given_path
from trinity.preprocess.media_limits import MediaLimits, MediaProblem

IMAGE_BYTES = "max_image_bytes"  # field of MediaLimits
_PIECE = 256 << 10  # characters of base64 that are decoded at a time: to split them holds the interpreter for 8 ms
_MOST_PADDING = 256  # characters of its last group
_CHARACTER = re.compile(r"%[^89ABab]")  # the escape of a character's first byte in UTF-8
_LONGEST_ESCAPE = 12  # characters
_USUAL_ESCAPES = {
    "%2B": "+",
    "%2b": "+",
    "%2F": "/",
    "%2f": "/",
    "%3D": "=",
    "%3d": "=",
    "%0A": "\n",
    "%0D": "\r",
    "%20": " ",
}
_MOST_ODD_ESCAPES = 64 << 10  # of an item: each takes a third of a microsecond
_LONGEST_SHOWN = 80  # characters of a path in a message


def read_file(source: str | os.PathLike[str], limits: MediaLimits, bound: str = IMAGE_BYTES) -> bytes:
    """Read a regular file. Raises ``MediaProblem`` for anything else, and for what ``allow_paths`` leaves out.

    ``bound``: field of ``limits`` that bounds its bytes.

    What is no file is not opened, since to open a device may already do something. A file is opened without waiting and
    looked at once more: what became a FIFO meanwhile does not block. What the kernel makes up under /proc says that it
    is empty, and is not read.
    """
    path = os.fsdecode(os.fspath(source))
    shown = _show_path(path)
    if scheme := find_scheme(path):
        raise MediaProblem(
            f"{shown} is an address of the scheme {scheme!r}, and only http: and https: are fetched; fetch it and give "
            "its bytes, or the path of a file"
        )
    try:
        real = _allowed(path, shown, limits)
        _check_file(os.stat(real), shown, limits, bound)
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise MediaProblem(f"there is no file {shown}; check the path") from exc
    except (OSError, ValueError) as exc:
        raise MediaProblem(f"cannot read {shown} ({describe_error(exc, 200)})") from exc
    try:
        _check_file(os.fstat(descriptor), shown, limits, bound)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(int(getattr(limits, bound)) + 1)
    except OSError as exc:
        raise MediaProblem(f"cannot read {shown} ({describe_error(exc, 200)})") from exc
    finally:
        os.close(descriptor)
    check_bytes(len(data), limits, bound)
    return data


def _show_path(path: str) -> str:
    """Show a path as it was given; of a long one its end, which tells files apart."""
    given = given_path(path)
    return repr(given if len(given) <= _LONGEST_SHOWN else f"...{given[-_LONGEST_SHOWN:]}")


def _allowed(path: str, shown: str, limits: MediaLimits) -> str:
    """Return the path to open: resolved, where only some directories are allowed."""
    if limits.allow_paths is True:
        return path
    real = os.path.realpath(path)
    for directory in limits.allow_paths or ():
        if os.path.commonpath([real, os.path.realpath(directory)]) == os.path.realpath(directory):
            return real
    raise MediaProblem(f"{shown} is a path that allow_paths of MediaLimits does not allow here; give bytes")


def _check_file(found: os.stat_result, shown: str, limits: MediaLimits, bound: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise MediaProblem(f"{shown} is not a regular file")
    check_bytes(found.st_size, limits, bound)
    if found.st_size == 0:
        raise MediaProblem(f"{shown} is empty (0 bytes)")


def check_bytes(size: int, limits: MediaLimits, bound: str = IMAGE_BYTES) -> None:
    """Raise ``MediaProblem`` if an item has more bytes than the field ``bound`` of ``limits`` allows."""
    most = int(getattr(limits, bound))
    if size > most:
        raise MediaProblem(f"has {size} bytes or more; the limit {bound} is {most}")


def read_data_uri(uri: str, limits: MediaLimits, bound: str = IMAGE_BYTES) -> bytes:
    """Decode a data: URI in base64 (RFC 2397), whatever type it says. Raises ``MediaProblem``.

    Its length tells the size before a byte is decoded. It is decoded in pieces: copies of the whole text would take
    several times the bytes that it makes.
    """
    start = uri.find(",") + 1
    if not start or not uri[: start - 1].lower().endswith(";base64"):
        raise MediaProblem("is a data: URI that is not in base64; give data:image/png;base64,...")
    check_bytes((len(uri) - start) // 4 * 3 - 2, limits, bound)
    made = io.BytesIO()
    try:
        for piece in _base64_pieces(uri, start):
            made.write(base64.b64decode(piece, validate=True))
    except ValueError as exc:
        raise MediaProblem(f"is a data: URI whose base64 is broken ({exc})") from exc
    return made.getvalue()


def _base64_pieces(uri: str, start: int) -> Iterator[str]:
    """Yield the text behind ``start`` in pieces of whole groups, %-escapes read and spaces left out.

    Raises ``ValueError`` for escapes without number that base64 has no use for, and where much follows its padding.
    """
    odd = 0
    escape = rest = ""
    for at in range(start, len(uri), _PIECE):
        piece, last = escape + uri[at : at + _PIECE], at + _PIECE >= len(uri)
        cut = -1 if last else _find_open_escape(piece)
        piece, escape = (piece[:cut], piece[cut:]) if cut >= 0 else (piece, "")
        if "%" in piece:
            for shown, meant in _USUAL_ESCAPES.items():
                piece = piece.replace(shown, meant)
            odd += piece.count("%")
            if odd > _MOST_ODD_ESCAPES:
                raise ValueError(f"more than {_MOST_ODD_ESCAPES} %-escapes of what is no sign of base64")
            piece = unquote(piece)
        text = "".join(piece.split())
        text = rest + text
        padding = text.find("=")  # all from the last group before it on is one piece
        before = len(text) if padding < 0 else padding
        whole = len(text) if last else max(0, before - 1) // 4 * 4
        yield text[:whole]
        rest = text[whole:]
        if len(rest) > _MOST_PADDING:  # it would be joined to each piece that follows
            raise ValueError(f"more than {_MOST_PADDING} characters from its last group on")


def _find_open_escape(piece: str) -> int:
    """Find where the escapes of a character begin that may go on behind this piece; -1 if none does."""
    begun = list(_CHARACTER.finditer(piece, max(0, len(piece) - _LONGEST_ESCAPE)))
    return begun[-1].start() if begun else piece.rfind("%", len(piece) - 2)
