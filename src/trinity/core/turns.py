"""Turns: so many requests at once do what is costly for all; the others wait, the oldest first."""

from __future__ import annotations

import heapq


class Turns:
    """Names that have a turn, and those that wait for one.

    - ``active``: names of those that have one.
    - ``waiting``: ages of the others by name; a lower one is older.
    """

    def __init__(self) -> None:
        self.active: set[str] = set()
        self.waiting: dict[str, int] = {}
        self._queue: list[tuple[int, str]] = []  # with names that have left since

    def take(self, name: str, age: int, most: int) -> bool:
        """Give it a turn where fewer than ``most`` have one and nobody older waits; else it waits. False: it does."""
        if name in self.active:
            return True
        oldest = self._oldest()
        if len(self.active) < most and (oldest is None or (age, name) <= oldest):
            self.active.add(name)
            self.waiting.pop(name, None)
            return True
        if self.waiting.get(name) != age:
            self.waiting[name] = age
            heapq.heappush(self._queue, (age, name))
        return False

    def leave(self, name: str) -> None:
        """End its turn, or its wait for one."""
        self.active.discard(name)
        self.waiting.pop(name, None)

    def next(self, most: int) -> str | None:
        """Take the oldest that waits off the list, where there is a turn for it; it has to ``take`` that then."""
        oldest = self._oldest() if len(self.active) < most else None
        return None if oldest is None else self._drop(oldest[1])

    def _drop(self, name: str) -> str:
        heapq.heappop(self._queue)
        del self.waiting[name]
        return name

    def _oldest(self) -> tuple[int, str] | None:
        while self._queue:
            age, name = self._queue[0]
            if self.waiting.get(name) == age:
                return age, name
            heapq.heappop(self._queue)
        return None
