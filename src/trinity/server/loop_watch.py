"""LoopWatch: a thread that notices an event loop which is stuck, and logs what its thread is doing."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Self

logger = logging.getLogger("trinity.server")
LOOP_BEAT_S = 0.2  # s between two calls that the loop is asked to make
STUCK_S = 5.0  # s without one: no callback of a server takes longer, and balancers' probes give up about then


class LoopWatch:
    """Watches the running loop while its block lasts.

    - ``stuck_s`` (s, ``STUCK_S``): time after which a loop that runs no callback is reported, once.

    Attributes: ``stuck``, True while it is; ``stalls``, how often it was; ``longest_s``, the longest time without one.
    A request cannot see the first: no answer leaves a loop that is stuck.
    """

    def __init__(self, stuck_s: float = STUCK_S) -> None:
        self.stuck, self.stalls, self.longest_s = False, 0, 0.0
        self._stuck_s, self._ended = stuck_s, threading.Event()
        self._called = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trinity-loop-watch", daemon=True)

    async def __aenter__(self) -> Self:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._called.set()
        await asyncio.to_thread(self._thread.join)

    def _watch(self) -> None:
        while not self._ended.wait(LOOP_BEAT_S):
            self._called.clear()
            asked = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._called.set)
            except RuntimeError:  # the loop is closed
                return
            if not self._called.wait(self._stuck_s) and not self._ended.is_set():
                self._report()
                self._called.wait()
                logger.warning("the event loop runs again after %.1f s", time.monotonic() - asked)
            self.stuck = False
            self.longest_s = max(self.longest_s, time.monotonic() - asked)

    def _report(self) -> None:
        self.stuck = True
        self.stalls += 1
        frame = sys._current_frames().get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "unknown"
        logger.error(
            "the event loop has run no callback for %g s: no request is answered meanwhile. Its thread is at\n%s",
            self._stuck_s,
            stack,
        )
