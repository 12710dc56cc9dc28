"""Results kept as JSON lines while requests are served, so that a run that was stopped goes on where it was.

A line is written whole, by one call; what a kill or a full disk left torn at the end is cut off by the next run. One
run at a time has the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trinity.errors import ConfigError, RequestError
from trinity.request import Output, Request

SYNC_EVERY_S = 1.0  # a crash of the machine, not of the program, loses what was written since
_PIECE = 1 << 20  # bytes read at a time
_LONGEST = 1 << 28  # bytes of a line
HEAD = b'{"request_id":'
_NOT_CONTENT = ("request_id", "session", "deadline_s", "client")


class KeptOutput(Output, kw_only=True):
    """One line of the file: an output, and a digest of the request that it answers (``request_digest``)."""

    request_digest: str = ""


class Place(NamedTuple):
    """Offset and length of a line in the file, in bytes, and its request's digest."""

    offset: int
    length: int
    digest: str


class LinesFile:
    """A file of JSON lines that one program appends to. Its calls block: make them on a thread.

    - ``path``: made if it is not there. Its folder must be.
    - ``head``: beginning of each line. A torn last line is cut off only if it begins so: others' files are left.

    Raises ``ConfigError`` if it cannot be opened or written, another program has it, or it is another's.
    """

    def __init__(self, path: str | Path, head: bytes) -> None:
        self.path, self._head = str(path), head
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be opened to keep results: {_words(error)}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise OSError("it is no regular file")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end = self._cut_torn()
        except OSError as error:
            self.close()
            busy = isinstance(error, BlockingIOError)
            why = "another run has it; wait for its end, or give another file" if busy else _words(error)
            raise ConfigError(f"{path} cannot keep results: {why}") from error
        self._synced = time.monotonic()

    def _cut_torn(self) -> int:
        """Cut off a last line without an end; return the file's size then."""
        size = end = os.fstat(self._file).st_size
        while end > 0:
            start = max(0, end - _PIECE)
            found = os.pread(self._file, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            torn = os.pread(self._file, len(self._head), end)
            if not (torn.startswith(self._head) or self._head.startswith(torn)):
                raise OSError("it holds something else; give another file")
            os.ftruncate(self._file, end)
        return end

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Iterate over the lines that were there, each with its offset. Raises ``ConfigError`` for one without end."""
        offset, rest = 0, b""
        for start in range(0, self._end, _PIECE):
            *whole, rest = (rest + os.pread(self._file, min(_PIECE, self._end - start), start)).split(b"\n")
            for line in whole:
                yield offset, line
                offset += len(line) + 1
            if len(rest) > _LONGEST:
                raise ConfigError(f"{self.path}: the line at byte {offset} has no end; this is no file of results")

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._file, length, offset)

    def append(self, line: bytes) -> int:
        """Write a line with its end; return its offset. Raises ``ConfigError``, and then leaves no part of it."""
        offset, content = self._end, line + b"\n"
        try:
            written = os.pwrite(self._file, content, offset)
            if written < len(content):
                raise OSError(f"{written} of {len(content)} bytes were written")
            if time.monotonic() - self._synced > SYNC_EVERY_S:
                self.sync()
        except OSError as error:
            os.ftruncate(self._file, offset)
            raise ConfigError(f"a result cannot be written to {self.path}: {_words(error)}") from error
        self._end += len(content)
        return offset

    def sync(self) -> None:
        """Have the disk keep all that was written."""
        os.fsync(self._file)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Have the disk keep all, and let another program have the file. May be called twice."""
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):  # a disk that fails now has said so, or nothing was written
                os.fsync(file)
            os.close(file)


class ResultsFile:
    """Outputs by request id in a ``LinesFile``. Its calls block: make them on a thread.

    ``model`` (""): name of the one that serves; an output of another counts as another request's.

    Raises ``ConfigError`` for a file that holds anything else.
    """

    def __init__(self, path: str | Path, model: str = "") -> None:
        self._model = model
        self._lines = LinesFile(path, HEAD)
        self._places: dict[str, Place] = {}
        try:
            for number, (offset, line) in enumerate(self._lines.lines(), 1):
                kept = self._decode(number, line)
                self._places[kept.request_id] = Place(offset, len(line), kept.request_digest)
        except BaseException:
            self.close()
            raise

    def _decode(self, number: int, line: bytes) -> KeptOutput:
        try:
            return msgspec.json.decode(line, type=KeptOutput)
        except (msgspec.MsgspecError, RecursionError) as error:
            text = f"{self._lines.path}, line {number} is no result of pipe.map ({error}); give another file"
            raise ConfigError(text) from error

    def __len__(self) -> int:
        return len(self._places)

    def find(self, request: Request) -> Output | None:
        """Return the output that is kept for this request; None if there is none.

        Raises ``ConfigError`` if that of another request is kept under its id.
        """
        place = self._places.get(request.request_id)
        if place is None:
            return None
        if place.digest != digest_request(request, self._model):
            text = f"{self._lines.path} has the output of another request or model under the id {request.request_id!r}"
            raise ConfigError(f"{text}; give requests ids of their own (request_id=), or another file")
        kept = msgspec.json.decode(self._lines.read(place.offset, place.length), type=KeptOutput)
        return Output(**{name: getattr(kept, name) for name in Output.__struct_fields__})

    def keep(self, request: Request, output: Output) -> None:
        """Append the output of this request. Raises ``ConfigError`` if it cannot be written."""
        digest = digest_request(request, self._model)
        fields = {name: getattr(output, name) for name in Output.__struct_fields__}
        line = msgspec.json.encode(KeptOutput(**fields, request_digest=digest), enc_hook=str)
        self._places[request.request_id] = Place(self._lines.append(line), len(line), digest)

    def close(self) -> None:
        """Have the disk keep all, and let another program have the file. May be called twice."""
        self._lines.close()


def digest_request(request: Request, model: str = "") -> str:
    """Hash all that an output depends on, the model's name with it.

    Paths and URLs count by name; an object (an open image) by its type alone.

    Raises ``RequestError`` if a field cannot be written as JSON.
    """
    names = (name for name in request.__struct_fields__ if name not in _NOT_CONTENT)
    content = {name: getattr(request, name) for name in names}
    try:
        text = msgspec.json.encode(content, enc_hook=_describe, order="deterministic")
    except Exception as error:  # a foreign object among the messages may raise anything
        raise RequestError(f"the request cannot be told from others: {error}", request.request_id) from error
    return hashlib.blake2b(model.encode(errors="surrogateescape") + b"\0" + text, digest_size=12).hexdigest()


def _describe(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return f"<{type(value).__name__}>"


def _words(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)
