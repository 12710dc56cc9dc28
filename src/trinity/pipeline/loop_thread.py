"""LoopThread: an event loop on a thread of its own, for callers that cannot await."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from trinity.errors import ClosedError, ConfigError, describe_error

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on its loop for any thread. It starts with the first, and holds up no program's end.

    - ``name``: the thread's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # a garbage collection while it is held may close a forgotten pipeline
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._closed = False
        self._process = 0  # the one that the thread runs in

    @property
    def is_caller(self) -> bool:
        """True on the loop's own thread, which must not wait for it."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result, or raise its error. Ctrl-C cancels it.

        Raises ``ConfigError`` on the loop's own thread, and ``ClosedError`` once closed.
        """
        if self.is_caller:
            coroutine.close()
            text = "this function runs on the pipeline's own thread, which would wait for itself"
            raise ConfigError(f"{text}: call the pipeline from another thread, not from observe= or progress=")
        future = self.begin(coroutine)
        try:
            return future.result()
        except BaseException:  # of the coroutine, or KeyboardInterrupt while this thread waits
            future.cancel()
            raise

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Have a coroutine run, without waiting for it. Any thread may call.

        Raises ``ClosedError`` once closed, and in a process that was forked from the thread's, where no thread would
        ever answer; ``ConfigError`` if the loop cannot be made.
        """
        if self._is_forked:
            coroutine.close()
            text = "the pipeline is served by the process that this one was forked from"
            raise ClosedError(f'{text}: make one here, or start processes by "spawn"')
        with self._lock:
            if self._closed:
                coroutine.close()
                raise ClosedError("the pipeline is closed; make a new one")
            if self._thread is None:
                try:
                    self._start()
                except BaseException:
                    coroutine.close()
                    raise
            assert self._loop is not None
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def _is_forked(self) -> bool:
        return self._thread is not None and self._process != os.getpid()

    def _start(self) -> None:
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name=self._name, daemon=True)
        self._process = os.getpid()
        self._thread.start()
        try:
            ready.result()
        except OSError as error:
            self._thread = None
            text = f"no event loop can be made for the pipeline ({describe_error(error)})"
            raise ConfigError(f"{text}; close files that are open, or raise their limit") from error

    def _run(self, ready: Future[None]) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve(ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)  # whoever starts the thread waits for one or the other

    async def _serve(self, ready: Future[None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        ready.set_result(None)
        await self._stop.wait()

    def close(self) -> None:
        """End the loop and all that runs on it, and wait for that but on its own thread. May be called twice."""
        if self._is_forked:
            return
        with self._lock:
            self._closed = True
            if self._loop is not None and self._stop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None and not self.is_caller:
            self._thread.join()
