"""LoopThread: an event loop on a thread of its own, for callers that cannot await.

A signal's handler may raise after any call of the thread that waits, also inside ``threading`` and
``concurrent.futures``, whose conditions would then stay locked for the loop as well. So whatever both threads touch is
a ``SimpleQueue`` or the loop's own queue of callbacks: written in C, or left whole by every line.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from trinity.errors import ClosedError, ConfigError, describe_error
from trinity.runtime.exit_hook import end_at_exit

P = ParamSpec("P")
T = TypeVar("T")


class LoopRun:
    """An event loop that serves until it is ended, on the thread that calls ``run``.

    ``ready`` gets one item: None once it serves, or the error that prevents it.
    """

    def __init__(self) -> None:
        self.ready: SimpleQueue[BaseException | None] = SimpleQueue()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._stop, self._ended = asyncio.Event(), False

    def run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self.loop is not None:
                raise
            self.ready.put(error)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ready.put(None)
        if not self._ended:
            await self._stop.wait()

    def post(self, callback: Callable[[], object]) -> None:
        """Have the loop call something; once it is closed, nothing does."""
        if self.loop is not None:
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(callback)

    def end(self) -> None:
        """End the loop and all that runs on it, without waiting; also one that does not serve yet."""
        self._ended = True
        self.post(self._stop.set)


class LoopCall(Generic[T]):
    """One coroutine on the loop, and the thread that waits for it."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self._task: asyncio.Task[T] | None = None
        self._ended: SimpleQueue[asyncio.Task[T]] = SimpleQueue()
        self._left = False

    def begin(self) -> None:
        """Start the coroutine, on the loop's thread, unless the caller has left."""
        if not self._left:
            self._task = asyncio.ensure_future(self._run())
            self._task.add_done_callback(self._end)

    async def _run(self) -> T:
        return await self._make()

    def _end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # looked at: asyncio would log the error of a call that nobody waits for
        self._ended.put(task)

    def wait(self) -> T:
        """Wait for the end; return the result or raise the error. Raises ``ClosedError`` if the loop has ended it."""
        task = self._ended.get()
        self._task = None
        try:
            if task.cancelled():
                raise ClosedError("the pipeline was closed while this call waited")
            return task.result()
        finally:
            del task  # the error that it holds holds this frame

    def leave(self, run: LoopRun | None) -> None:
        """End the coroutine, begun or not: nobody waits any more."""
        self._left = True
        if run is not None:
            run.post(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class LoopThread:
    """Runs coroutines on its loop for any thread. It starts with the first, and holds up no program's end.

    - ``name``: the thread's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # a garbage collection while it is held may close a forgotten pipeline
        self._thread: threading.Thread | None = None
        self._serving: LoopRun | None = None
        self._closed = False
        self._process = 0  # the one that the thread runs in

    @property
    def is_caller(self) -> bool:
        """True on the loop's own thread, which must not wait for it."""
        return threading.current_thread() is self._thread

    def run(self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a coroutine function to its end and return its result, or raise its error.

        Whatever interrupts the caller meanwhile, such as Ctrl-C, ends the coroutine. Raises ``ConfigError`` on the
        loop's own thread, and ``ClosedError`` once closed.
        """
        if self.is_caller:
            text = "this function runs on the pipeline's own thread, which would wait for itself"
            raise ConfigError(f"{text}: call the pipeline from another thread, not from observe= or progress=")
        call = LoopCall(lambda: function(*args, **kwargs))
        try:
            self._post(call.begin)
            return call.wait()
        except BaseException:  # of the coroutine, or of a signal's handler, wherever this thread was
            call.leave(self._serving)
            raise

    def begin(self, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Have a coroutine function run, without waiting for it. Any thread may call.

        Raises ``ClosedError`` once closed, and in a process that was forked from the thread's, where no thread would
        ever answer; ``ConfigError`` if the loop cannot be made.
        """
        self._post(LoopCall(lambda: function(*args, **kwargs)).begin)

    def _post(self, callback: Callable[[], None]) -> None:
        if self._is_forked:
            text = "the pipeline is served by the process that this one was forked from"
            raise ClosedError(f'{text}: make one here, or start processes by "spawn"')
        with self._lock:
            if self._closed:
                raise ClosedError("the pipeline is closed; make a new one")
            (self._serving or self._start()).post(callback)

    @property
    def _is_forked(self) -> bool:
        return self._thread is not None and self._process != os.getpid()

    def _start(self) -> LoopRun:
        """Start the thread, and return its loop once that serves. Interrupted, it leaves neither."""
        serving = LoopRun()
        thread = threading.Thread(target=serving.run, name=self._name, daemon=True)
        try:
            thread.start()
            error = serving.ready.get()
            if error is not None:
                raise error
            self._thread, self._process, self._serving = thread, os.getpid(), serving
            end_at_exit(self)
            return serving
        except BaseException as error:
            self._thread = self._serving = None
            serving.end()
            if not isinstance(error, (OSError, RuntimeError)):
                raise
            text = f"no event loop can be made for the pipeline ({describe_error(error)})"
            raise ConfigError(f"{text}; close files, end threads, or raise their limits") from error

    def end_now(self) -> Sequence[threading.Thread]:
        """As ``Endable``: end the loop and all that runs on it, without waiting."""
        with self._lock:
            self._closed = True
            if self._thread is None or self._serving is None or self._is_forked:
                return ()
            self._serving.end()
            return (self._thread,)

    def close(self) -> None:
        """End the loop and all that runs on it, and wait for that but on its own thread. May be called twice."""
        for thread in self.end_now():
            if not self.is_caller:
                thread.join()
