"""CoreThread: runs an instance's core, one event after another; Mailbox: passes items from threads to an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from trinity.core import InstanceCore
from trinity.core.messages import Tick, Value
from trinity.runtime.cpu_affinity import pin_thread

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Calls ``take`` on the loop's thread for each item that was put, in order.

    Does what ``call_soon_threadsafe`` does, with less work for the thread that puts: one write to an eventfd, where the
    system has that.
    """

    def __init__(self, take: Callable[[T], None]) -> None:
        self._take, self._items = take, deque[T]()
        self._bell: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Attach to a loop, on its thread, before anything is put."""
        self._loop = loop
        if hasattr(os, "eventfd"):
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            # closes the eventfd of a mailbox whose loop ends without close(), too
            self._give_back = weakref.finalize(self, os.close, self._bell)
            loop.add_reader(self._bell, self._on_wake)

    def put(self, item: T) -> None:
        """Pass an item, from any thread; never blocks. Raises ``RuntimeError`` if the loop is closed."""
        self._items.append(item)
        assert self._loop is not None
        if self._bell is None:
            self._loop.call_soon_threadsafe(self.drain)
        elif self._loop.is_closed():
            raise RuntimeError("Event loop is closed")
        else:
            os.eventfd_write(self._bell, 1)

    def drain(self) -> None:
        """Take all items that are there, on the loop's thread."""
        while self._items:
            self._take(self._items.popleft())

    def close(self) -> None:
        """Take what is left and detach, on the loop's thread, once no thread puts any more. May be called twice."""
        if self._loop is not None and self._bell is not None:
            self._loop.remove_reader(self._bell)
            self._give_back()
        self._loop = self._bell = None
        self.drain()

    def _on_wake(self) -> None:
        assert self._bell is not None
        os.eventfd_read(self._bell)
        try:
            self.drain()
        finally:
            if self._items and self._bell is not None:  # take() raised: the items behind it are not lost
                os.eventfd_write(self._bell, 1)


@dataclass(frozen=True)
class StopCore:
    """Ends a core once it is idle, or ``at_once``."""

    at_once: bool


class CoreThread:
    """Calls ``handle(event, now)`` for one event after another, in the order of their posts, and for Ticks when due.

    The thread that holds the lock calls it: this one, or one that has nothing to do before the core has answered
    (``decide``). The latter saves waking a thread, and its processor has in its caches what the decision reads.

    - ``core``: asked for its next timer.
    - ``handle``: called with an event and ``time.monotonic()``.
    - ``failed``: called with the error if ``handle`` raises, which ends the core.
    - ``ended``: called when the thread ends.
    - ``cores`` (any): processors to keep the thread on.
    """

    def __init__(
        self,
        core: InstanceCore,
        handle: Callable[[Value, float], None],
        failed: Callable[[BaseException], None],
        ended: Callable[[], None],
        cores: Sequence[int] = (),
    ) -> None:
        self._core, self._handle, self._failed, self._ended, self._cores = core, handle, failed, ended, tuple(cores)
        self._inbox: deque[Value | StopCore] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()  # rung when the thread has something to do
        self._lock = threading.Lock()
        self._due = inf  # when the thread wakes by itself
        self._stopping = self._over = False
        self.thread = threading.Thread(target=self._run, name=f"trinity-{core.settings.name}-core", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def join(self) -> None:
        if self.thread.ident is not None:
            self.thread.join()

    def is_alive(self) -> bool:
        return self.thread.is_alive()

    def post(self, event: Value | StopCore) -> None:
        """Queue an event for the core; never blocks."""
        self._inbox.append(event)
        self._bell.put(None)

    def decide(self, event: Value) -> None:
        """Queue an event and have the core decide on it at once, on this thread, unless another thread is deciding.

        Events that come after it are left to the core's thread.
        """
        self._inbox.append(event)
        if not self._lock.acquire(False):
            self._bell.put(None)
            return
        ring = True
        try:
            while not self._over and self._inbox and self._take() is not event:
                pass  # empty if the core's thread has decided on it meanwhile
            due = self._core.next_timer()
            ring = self._over or (due is not None and due < self._due)
        finally:
            self._lock.release()
            if ring:
                self._bell.put(None)

    def _run(self) -> None:
        try:
            pin_thread(self._cores)
            while not self._over:
                with self._lock:
                    left = self._drain()
                if not self._over:
                    with suppress(Empty):
                        self._bell.get(timeout=None if left == inf else left)
        except BaseException as error:
            self._failed(error)
        finally:
            self._ended()

    def _drain(self) -> float:
        """Decide on all queued events. Returns the seconds until the next Tick is due."""
        while not self._over:
            due = self._core.next_timer()
            self._due = inf if due is None else due
            left = self._due - time.monotonic()
            if left <= 0:
                self._inbox.appendleft(Tick())
            elif not self._inbox:
                return left
            self._take()
        return inf

    def _take(self) -> Value | StopCore:
        """Decide on the oldest event."""
        event = self._inbox.popleft()
        try:
            if isinstance(event, StopCore):
                self._stopping, self._over = True, event.at_once
            else:
                self._handle(event, time.monotonic())
            self._over = self._over or (self._stopping and self._core.idle())
        except BaseException:
            self._over = True
            raise
        return event
