"""Bytes of an image from a file or a URL, bounded in size and time, whatever the path or the server is."""

from __future__ import annotations

import http.client
import os
import reprlib
import socket
import stat
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any
from urllib import request

from trinity.errors import describe_error
from trinity.errors.plain_values import find_scheme, given_path
from trinity.preprocess.media_limits import MediaLimits, MediaProblem

_CHUNK = 1 << 16
_LONGEST_SHOWN = 80  # characters of a path in a message
_MOST_LOOKUPS = 32
_SHORTEST_S = 1e-3  # 0 would mean: do not wait at all
_lookups = threading.BoundedSemaphore(_MOST_LOOKUPS)


def read_file(source: str | os.PathLike[str], limits: MediaLimits) -> bytes:
    """Read a regular file. Raises ``MediaProblem`` for anything else, and for what ``allow_paths`` leaves out.

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
        _check_file(os.stat(real), shown, limits)
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise MediaProblem(f"there is no file {shown}; check the path") from exc
    except (OSError, ValueError) as exc:
        raise MediaProblem(f"cannot read {shown} ({describe_error(exc, 200)})") from exc
    try:
        _check_file(os.fstat(descriptor), shown, limits)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(limits.max_image_bytes + 1)
    except OSError as exc:
        raise MediaProblem(f"cannot read {shown} ({describe_error(exc, 200)})") from exc
    finally:
        os.close(descriptor)
    check_bytes(len(data), limits)
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


def _check_file(found: os.stat_result, shown: str, limits: MediaLimits) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise MediaProblem(f"{shown} is not a regular file")
    check_bytes(found.st_size, limits)
    if found.st_size == 0:
        raise MediaProblem(f"{shown} is empty (0 bytes)")


def check_bytes(size: int, limits: MediaLimits) -> None:
    """Raise ``MediaProblem`` if an image has too many bytes."""
    if size > limits.max_image_bytes:
        raise MediaProblem(f"has {size} bytes or more; the limit max_image_bytes is {limits.max_image_bytes}")


def fetch(url: str, limits: MediaLimits) -> bytes:
    """Fetch what a URL names, within ``url_timeout_s`` from first to last. Raises ``MediaProblem``."""
    shown = reprlib.repr(url)
    if not limits.allow_urls:
        raise MediaProblem(
            f"{shown} is a URL, and URLs are not allowed here: set MediaLimits(allow_urls=True) or give bytes"
        )
    deadline = _Deadline(limits.url_timeout_s)
    try:
        with deadline.opener().open(url, timeout=limits.url_timeout_s) as answer:
            return _read_answer(answer, deadline, limits)
    except MediaProblem:
        raise
    except Exception as exc:  # urllib passes on socket, ssl and http errors
        if deadline.left() <= 0:
            raise deadline.problem() from exc
        raise MediaProblem(f"{shown} cannot be fetched ({describe_error(exc, 200)})") from exc
    finally:
        deadline.close()


def _read_answer(answer: Any, deadline: _Deadline, limits: MediaLimits) -> bytes:
    parts: list[bytes] = []
    size = 0
    while chunk := answer.read1(_CHUNK):  # read() would wait for the whole chunk, however slowly it drips
        parts.append(chunk)
        size += len(chunk)
        check_bytes(size, limits)
    if deadline.left() <= 0:  # a connection that was cut looks like the end of an answer
        raise deadline.problem()
    return b"".join(parts)


class _Deadline:
    """The end of one fetch: no socket of it outlives that, whatever it waits for.

    A socket's own timeout counts from each byte that comes: a server that drips would hold a thread for ever.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._at = seconds, time.monotonic() + seconds
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.name = "trinity-fetch"
        self._timer.daemon = True
        self._timer.start()

    def left(self) -> float:
        return self._at - time.monotonic()

    def problem(self) -> MediaProblem:
        return MediaProblem(f"took longer to fetch than url_timeout_s ({self._seconds:g} s)")

    def close(self) -> None:
        """Stop watching."""
        self._timer.cancel()
        self._timer.join()

    def _cut(self) -> None:
        for each in self._sockets:
            with suppress(OSError):  # closed already
                socket.socket.shutdown(each, socket.SHUT_RDWR)  # under TLS too, whose own shutdown is for one thread

    def watch(self, sock: socket.socket) -> None:
        """Have a socket end with the fetch."""
        self._sockets.append(sock)
        if self.left() <= 0:
            self._cut()

    def connect(self, address: tuple[str, int], *_: Any) -> socket.socket:
        """Connect as ``socket.create_connection``, to any of the name's addresses, each in its share of the time."""
        found = _look_up(address, self.left())
        problem = OSError(f"the name {address[0]} has no address")
        for tried, (*kind, _name, where) in enumerate(found):
            try:
                made = _connect(kind, where, self.left() / (len(found) - tried))
                made.settimeout(max(self.left(), _SHORTEST_S))
                return made
            except OSError as exc:  # also of a family that the system lacks
                problem = exc
        raise problem

    def opener(self) -> Any:
        """Make an opener without file:, ftp: and data:, so that no redirect leads there; its sockets are watched."""
        opener = request.OpenerDirector()
        for handler in (
            request.ProxyHandler(),
            _handler(request.HTTPHandler, http.client.HTTPConnection, "http_open", self),
            _handler(request.HTTPSHandler, http.client.HTTPSConnection, "https_open", self),
            request.HTTPDefaultErrorHandler(),
            request.HTTPRedirectHandler(),
            request.HTTPErrorProcessor(),
            request.UnknownHandler(),
        ):
            opener.add_handler(handler)
        return opener


def _connect(kind: Sequence[int], where: Any, seconds: float) -> socket.socket:
    """Connect a socket of this family, type and protocol. Raises ``OSError``."""
    if seconds <= 0:
        raise TimeoutError("no time is left")
    made = socket.socket(*kind)
    try:
        made.settimeout(seconds)
        made.connect(where)
    except BaseException:
        made.close()
        raise
    return made


def _look_up(address: tuple[str, int], seconds: float) -> list[Any]:
    """Look a host's name up within ``seconds``. Raises ``OSError``.

    Nothing interrupts the system's resolver, so it runs on a thread of its own, which a slow server of names may keep
    for longer. There are at most ``_MOST_LOOKUPS`` of these threads. An address needs none: nobody is asked for it.
    """
    with suppress(OSError, UnicodeError):  # it is a name
        return socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    found: Future[list[Any]] = Future()

    def resolve() -> None:
        try:
            found.set_result(socket.getaddrinfo(*address, type=socket.SOCK_STREAM))
        except Exception as error:
            found.set_exception(error)
        finally:
            _lookups.release()

    if not _lookups.acquire(timeout=max(0.0, seconds)):
        raise TimeoutError(f"{_MOST_LOOKUPS} other names are still being looked up")
    try:
        threading.Thread(target=resolve, name="trinity-lookup", daemon=True).start()
    except RuntimeError as error:  # the system has no thread to give
        _lookups.release()
        raise OSError(str(error)) from error
    return found.result(max(0.0, seconds))


def _handler(kind: Any, connection: Any, opens: str, deadline: _Deadline) -> Any:
    """Derive a handler whose connections are made by ``deadline``."""

    class Watched(connection):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self._create_connection = deadline.connect

        def connect(self) -> None:
            super().connect()
            deadline.watch(self.sock)  # only now: TLS wraps a socket in another

    def open_url(self: Any, asked: Any) -> Any:
        return self.do_open(Watched, asked)

    return type(kind.__name__, (kind,), {opens: open_url})()
