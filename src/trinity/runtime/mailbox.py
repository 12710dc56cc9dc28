"""Mailbox: passes items from threads to an event loop."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

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
