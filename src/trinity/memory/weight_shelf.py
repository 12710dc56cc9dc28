"""WeightShelf: where instance processes of one host leave weights that they have loaded for the others to take.

A pipeline has one, in its own process. An instance that needs a part of the weights asks for it by a key: it gets the
part, or the turn to load it, while others wait. The turn of one that ends before it has left the part goes to the next.
The shelf holds a descriptor of each part and no byte of it (``shared_regions``), as long as the pipeline lasts: an
instance that starts again takes what is there.

An answer is a frame: its length in 4 bytes, then ``SharedPart`` in msgpack, or nothing for the turn; a part's
descriptor comes along. The socket is in the pipeline's folder, which this user alone may enter.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

logger = logging.getLogger("trinity")
MOST_FRAME_BYTES = 64 << 20  # of a frame: 100 bytes for each tensor of a part
PATIENCE_S = 900.0  # for another instance to load a part


class SharedPart(msgspec.Struct, frozen=True):
    """Weights that were left: the size of their region in bytes, and what is where in it, in words of who loads."""

    size: int
    table: bytes


class WeightShelf:
    """Listens at ``path`` until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._change = threading.Condition()
        self._parts: dict[str, tuple[SharedPart, int]] = {}  # and its descriptor
        self._loading: set[str] = set()
        self._callers: dict[threading.Thread, socket.socket] = {}
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(self.path)
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise
        self._listener = threading.Thread(target=self._listen, name="trinity-weights", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """Let go of all parts, and end the threads. Calling it twice does no harm."""
        with self._change:
            self._closed = True
            callers = dict(self._callers)
            self._change.notify_all()
        for each in (self._socket, *callers.values()):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in (self._listener, *callers):
            thread.join()
        self._socket.close()
        while self._parts:
            os.close(self._parts.popitem()[1][1])

    def _listen(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:  # it was closed
                return
            thread = threading.Thread(target=self._serve, args=(caller,), name="trinity-weights", daemon=True)
            with self._change:
                if self._closed:
                    return caller.close()
                self._callers[thread] = caller
                thread.start()

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller, suppress(OSError, EOFError, msgspec.DecodeError):
                self._answer(caller, _receive(caller)[0].decode(errors="replace"))
        except Exception:
            logger.exception("an instance's question for weights was not answered")
        finally:
            with self._change:
                self._callers.pop(threading.current_thread(), None)

    def _answer(self, caller: socket.socket, key: str) -> None:
        """Hand out a part, or wait for its turn to be taken, and then for the part."""
        with self._change:
            self._change.wait_for(lambda: self._closed or key not in self._loading)
            if self._closed:
                return
            held = self._parts.get(key)
            if held is None:
                self._loading.add(key)
        if held is not None:
            return _send(caller, msgspec.msgpack.encode(held[0]), [held[1]])
        try:
            _send(caller, b"")
            data, files = _receive(caller)
            self._keep(key, msgspec.msgpack.decode(data, type=SharedPart), files)
        finally:
            with self._change:
                self._loading.discard(key)
                self._change.notify_all()

    def _keep(self, key: str, part: SharedPart, files: list[int]) -> None:
        if len(files) == 1 and not self._closed:
            self._parts[key] = (part, files.pop())
        for file in files:
            os.close(file)


def open_shelf(folder: Path) -> WeightShelf | None:
    """Make a shelf in a folder; None, and a word in the log, where it cannot have one."""
    try:
        return WeightShelf(folder / "weights.sock")
    except OSError as error:
        logger.warning("instance processes share no weights: %s", error)
        return None


class Turn:
    """An instance's answer: the ``part`` and its ``file``, or its turn to load it (None) and to ``leave`` it."""

    def __init__(self, shelf: socket.socket | None, part: SharedPart | None = None, file: int = -1) -> None:
        self.part, self.file, self._shelf = part, file, shelf

    def leave(self, size: int, table: bytes, file: int) -> None:
        """Leave what was loaded: its region's descriptor stays the caller's. Nothing happens without a shelf."""
        if self._shelf is not None:
            with suppress(OSError):  # the pipeline has ended
                _send(self._shelf, msgspec.msgpack.encode(SharedPart(size, table)), [file])


@contextmanager
def take_turn(path: str, key: str) -> Iterator[Turn]:
    """Ask the shelf at ``path`` for a part, and wait until it is there or is this process's to load.

    Whoever is handed a descriptor closes it. Where the shelf does not answer, everybody loads for himself.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as shelf:
        shelf.settimeout(PATIENCE_S)
        try:
            shelf.connect(path)
            _send(shelf, key.encode())
            data, files = _receive(shelf)
            turn = Turn(shelf, msgspec.msgpack.decode(data, type=SharedPart), files[0]) if data else Turn(shelf)
        except (OSError, EOFError, LookupError, msgspec.DecodeError) as error:
            logger.warning("weights are loaded for this process alone: %s", error or "no answer")
            turn = Turn(None)
        yield turn


def _send(there: socket.socket, data: bytes, files: list[int] | None = None) -> None:
    socket.send_fds(there, [len(data).to_bytes(4, "big")], files or [])
    there.sendall(data)


def _receive(there: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a frame and its descriptors. Raises ``EOFError`` at the end, ``OSError`` for a frame that is too long."""
    head, files, _, _ = socket.recv_fds(there, 4, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        head += _receive_exactly(there, 4 - len(head)) if head else b""
        size = int.from_bytes(head, "big")
        if not head:
            raise EOFError
        if size > MOST_FRAME_BYTES:
            raise OSError(f"a frame of {size} bytes is above the limit of {MOST_FRAME_BYTES}")
        return _receive_exactly(there, size), files
    except BaseException:
        for file in files:
            os.close(file)
        raise


def _receive_exactly(there: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = there.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
