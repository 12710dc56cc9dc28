"""Fails a test whose event loop was blocked.

Two measures, neither of them a wall clock (a busy machine would fail innocent tests): the CPU time that the loop's
thread spends in one callback, garbage collection aside, and calls known to block while a loop runs in the calling
thread. uvloop runs its callbacks in C: there the second measure is the only one. A test that computes does so in a
plain function, a fixture or `asyncio.to_thread`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CALLBACK_CPU_S = 1.0  # a step of a serving loop takes a millisecond, loading a library such as UCX half a second
SOCKET_CALLS = ("accept", "connect", "recv", "recv_into", "recvfrom", "recvmsg", "send", "sendall", "sendmsg")

Function = Callable[..., Any]


class LoopBlocked(AssertionError):
    """A call that blocks was made in the thread of a running event loop."""


_left_out: dict[int, float] = {}  # CPU seconds by thread


@contextmanager
def left_out() -> Iterator[None]:
    """Count no CPU time of what a test needs once on a machine, such as a checkpoint, whoever asks for it first."""
    began = time.thread_time()
    try:
        yield
    finally:
        thread = threading.get_ident()
        _left_out[thread] = _left_out.get(thread, 0.0) + time.thread_time() - began


class Collecting:
    """CPU seconds that garbage collection took in each thread: half a second at a time, with transformers loaded."""

    def __init__(self) -> None:
        self._spent: dict[int, float] = {}

    def spent(self) -> float:
        thread = threading.get_ident()
        return self._spent.get(thread, 0.0) + _left_out.get(thread, 0.0)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        # Between the two calls in one thread, that thread does nothing else.
        change = -time.thread_time() if phase == "start" else time.thread_time()
        thread = threading.get_ident()
        self._spent[thread] = self._spent.get(thread, 0.0) + change


class LoopGuard:
    """A pytest plugin. ``problems`` are those of the phase (set-up, call, tear-down) that runs."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._collecting = Collecting()
        self._armed = False

    def refuse(self, call: str) -> None:
        """Note and raise where a loop runs in this thread: noted as well, lest the code under test swallows it."""
        if self._armed and asyncio._get_running_loop() is not None:
            message = f"{call} blocks the event loop; await its asynchronous form, or use asyncio.to_thread"
            self.problems.append(message)
            raise LoopBlocked(message)

    def pytest_configure(self) -> None:
        self._armed = True
        gc.callbacks.append(self._collecting)
        self._undo.append(lambda: gc.callbacks.remove(self._collecting))
        self._replace(asyncio.Handle, "_run", self._timed)
        self._replace(time, "sleep", self._sleep)
        for name in SOCKET_CALLS:
            self._replace(socket.socket, name, self._socket_call)
        self._replace(threading.Thread, "join", self._join)
        self._replace(threading.Event, "wait", self._wait)
        self._replace(concurrent.futures.Future, "result", self._result)
        self._replace(queue.Queue, "get", self._get)
        self._replace(queue, "SimpleQueue", self._simple_queue)

    def pytest_unconfigure(self) -> None:
        self._armed = False
        while self._undo:
            self._undo.pop()()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        return (yield from self._phase())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        return (yield from self._phase())

    def _phase(self) -> Generator[None, None, None]:
        self.problems.clear()
        yield
        if self.problems:
            pytest.fail("the event loop was blocked:\n  " + "\n  ".join(dict.fromkeys(self.problems)), pytrace=False)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        # An inherited method (socket's are the C class's) is shadowed, and uncovered again at the end.
        own, old = name in vars(owner), getattr(owner, name)
        setattr(owner, name, wrap(old))
        self._undo.append(lambda: setattr(owner, name, old) if own else delattr(owner, name))

    def _timed(self, run: Function) -> Function:
        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time() - self._collecting.spent()
            try:
                run(handle)
            finally:
                spent = time.thread_time() - self._collecting.spent() - began
                if spent > CALLBACK_CPU_S:
                    self.problems.append(f"one callback used {spent:.2f} s of CPU: {_name(handle)}")

        return timed

    def _sleep(self, real: Function) -> Function:
        def sleep(seconds: float) -> None:
            if seconds > 0:  # zero only yields the processor
                self.refuse(f"time.sleep({seconds})")
            real(seconds)

        return sleep

    def _socket_call(self, real: Function) -> Function:
        def call(sock: socket.socket, *args: Any, **kwargs: Any) -> Any:
            if sock.gettimeout() != 0:
                self.refuse(f"{real.__name__} on a blocking socket")
            return real(sock, *args, **kwargs)

        return call

    def _join(self, real: Function) -> Function:
        def join(thread: threading.Thread, timeout: float | None = None) -> None:
            # asyncio joins the thread that has just shut its executor down.
            if thread.is_alive() and timeout != 0 and not _called_from("asyncio.base_events"):
                self.refuse(f"Thread.join of {thread.name}")
            real(thread, timeout)

        return join

    def _wait(self, real: Function) -> Function:
        def wait(event: threading.Event, timeout: float | None = None) -> Any:
            # Thread.start waits until the thread has begun.
            if not event.is_set() and timeout != 0 and not _called_from("threading"):
                self.refuse("threading.Event.wait")
            return real(event, timeout)

        return wait

    def _result(self, real: Function) -> Function:
        def result(future: concurrent.futures.Future[Any], timeout: float | None = None) -> Any:
            if not future.done() and timeout != 0:
                self.refuse("concurrent.futures.Future.result")
            return real(future, timeout)

        return result

    def _get(self, real: Function) -> Function:
        def get(waiting: Any, block: bool = True, timeout: float | None = None) -> Any:
            if block and timeout != 0:
                self.refuse(f"{type(waiting).__name__}.get")
            return real(waiting, block, timeout)

        return get

    def _simple_queue(self, real: type) -> type:
        # The C class takes no new attributes, so that code imported from here on gets a class of its own.
        return type("SimpleQueue", (real,), {"get": self._get(vars(real)["get"])})


def _called_from(module: str) -> bool:
    return bool(sys._getframe(2).f_globals.get("__name__") == module)


def _name(handle: asyncio.Handle) -> str:
    """Name a callback; a task's step by its coroutine."""
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined] # asyncio's own attribute
    return repr(task.get_coro()) if isinstance(task, asyncio.Task) else repr(handle)
