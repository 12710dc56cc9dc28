"""Mailbox: what threads hand to an event loop."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Has ``take`` called on the loop's thread for everything that was put, in order.

    As ``call_soon_threadsafe``, with less for the thread that puts: one write to an eventfd, where the system has that.
    """

    def __init__(self, take: Callable[[T], None]) -> None:
        self._take, self._items = take, deque[T]()
        self._bell: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the loop's thread, before anything is put."""
        self._loop = loop
        if hasattr(os, "eventfd"):
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            # of one whose loop ends without close() as well
            self._give_back = weakref.finalize(self, os.close, self._bell)
            loop.add_reader(self._bell, self._rung)

    def put(self, item: T) -> None:
        """From any thread; never blocks. Raises ``RuntimeError`` where the loop is closed."""
        self._items.append(item)
        assert self._loop is not None
        if self._bell is None:
            self._loop.call_soon_threadsafe(self.empty)
        elif self._loop.is_closed():
            raise RuntimeError("Event loop is closed")
        else:
            os.eventfd_write(self._bell, 1)

    def empty(self) -> None:
        """Take all that is there; on the loop's thread."""
        while self._items:
            self._take(self._items.popleft())

    def close(self) -> None:
        """On the loop's thread, once nobody puts any more: what is there is taken. Again is harmless."""
        if self._loop is not None and self._bell is not None:
            self._loop.remove_reader(self._bell)
            self._give_back()
        self._loop = self._bell = None
        self.empty()

    def _rung(self) -> None:
        assert self._bell is not None
        os.eventfd_read(self._bell)
        try:
            self.empty()
        finally:
            if self._items and self._bell is not None:  # one of them raised: those behind it are not lost
                os.eventfd_write(self._bell, 1)
