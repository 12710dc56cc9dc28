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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

logger = logging.getLogger("trinity")
MOST_FRAME_BYTES = 64 << 20  # of a frame: 100 bytes for each tensor of a part
PATIENCE_S = 900.0  # for another instance to load a part
LACK_PAUSE_S = 0.1  # after the system has refused a descriptor or a thread


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
        self._listener = threading.Thread(target=self._listen, name="trinity-weights", daemon=True)
        try:
            self._socket.bind(self.path)
            self._socket.listen()
            self._listener.start()
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Let go of all parts, and end the threads. Calling it twice does no harm."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        _shut_down(self._socket)
        self._listener.join()  # from now on there are no new callers
        with self._change:
            callers = dict(self._callers)
        for thread, caller in callers.items():
            _shut_down(caller)
            thread.join()
        while self._parts:
            os.close(self._parts.popitem()[1][1])

    def _listen(self) -> None:
        failing = False
        with self._socket:  # where nobody listens any more, whoever asks is refused at once
            while not self._closed:
                try:
                    self._start_answer(self._socket.accept()[0])
                    failing = False
                except (OSError, RuntimeError, MemoryError) as error:  # descriptors, threads: there may be some later
                    self._pause("" if failing else f"{type(error).__name__}: {error}")
                    failing = True

    def _pause(self, why: str) -> None:
        with self._change:
            if why and not self._closed:
                logger.warning("instances that ask for weights have to wait, or load them alone: %s", why)
            self._change.wait_for(lambda: self._closed, LACK_PAUSE_S)

    def _start_answer(self, caller: socket.socket) -> None:
        """Serve a caller in a thread. Raises ``RuntimeError`` if there is none: the caller gets no answer then."""
        thread = threading.Thread(target=self._serve, args=(caller,), name="trinity-weights", daemon=True)
        try:
            with self._change:
                thread.start()
                self._callers[thread] = caller
        except BaseException:
            caller.close()
            raise

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller, suppress(OSError, EOFError, msgspec.DecodeError):
                with _receive(caller) as (data, _):
                    key = data.decode(errors="replace")
                self._answer(caller, key)
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
            with _receive(caller) as (data, files):
                part = msgspec.msgpack.decode(data, type=SharedPart)
                if files and not self._closed:
                    self._parts[key] = (part, files.pop())
        finally:
            with self._change:
                self._loading.discard(key)
                self._change.notify_all()


def open_shelf(folder: Path) -> WeightShelf | None:
    """Make a shelf in a folder; None, and a word in the log, where it cannot have one."""
    try:
        return WeightShelf(folder / "weights.sock")
    except (OSError, RuntimeError) as error:  # no socket, no thread
        logger.warning("instance processes share no weights: %s", error)
        return None


class Turn:
    """An instance's answer: the ``part`` and its ``file``, or its turn to load it (None) and to ``leave`` it.

    The descriptor is closed as the turn ends: a region that was opened by it has its own.
    """

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

    Where the shelf does not answer, everybody loads for himself.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as shelf, ExitStack() as answer:
        shelf.settimeout(PATIENCE_S)
        try:
            shelf.connect(path)
            _send(shelf, key.encode())
            data, files = answer.enter_context(_receive(shelf))
            turn = Turn(shelf, msgspec.msgpack.decode(data, type=SharedPart), files[0]) if data else Turn(shelf)
        except (OSError, EOFError, LookupError, msgspec.DecodeError) as error:
            logger.warning("weights are loaded for this process alone: %s", error or "no answer")
            turn = Turn(None)
        yield turn


def _shut_down(there: socket.socket) -> None:
    with suppress(OSError):  # it was, or is closed
        there.shutdown(socket.SHUT_RDWR)


def _send(there: socket.socket, data: bytes, files: list[int] | None = None) -> None:
    socket.send_fds(there, [len(data).to_bytes(4, "big")], files or [])
    if data:  # who needs no more may have gone, which even no bytes would be told
        there.sendall(data)


@contextmanager
def _receive(there: socket.socket) -> Iterator[tuple[bytes, list[int]]]:
    """Receive a frame and its descriptors; those that nobody pops from the list are closed in the end.

    Raises ``EOFError`` at the end of the stream, ``OSError`` for a frame that is too long.
    """
    head, files, _, _ = socket.recv_fds(there, 4, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        head += _receive_exactly(there, 4 - len(head)) if head else b""
        size = int.from_bytes(head, "big")
        if not head:
            raise EOFError
        if size > MOST_FRAME_BYTES:
            raise OSError(f"a frame of {size} bytes is above the limit of {MOST_FRAME_BYTES}")
        yield _receive_exactly(there, size), files
    finally:
        for file in files:
            os.close(file)


def _receive_exactly(there: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = there.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
