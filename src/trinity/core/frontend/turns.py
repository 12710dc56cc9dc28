"""Requests that wait: Alarms, when each wants to be looked at, and Turns, who may do what is costly for all."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from math import inf
from typing import Protocol

SPARE = 64  # alarms beside four of each sleeper, before those that mean nothing are dropped


class Sleeper(Protocol):
    """Has alarms. ``is_due(at)``: one at this clock time still means something to it."""

    def is_due(self, at: float) -> bool: ...


class Alarms:
    """Alarms by the name of who set them; those that mean nothing any more are passed over."""

    def __init__(self, sleepers: Mapping[str, Sleeper]) -> None:
        self._sleepers = sleepers
        self._heap: list[tuple[float, str]] = []

    def set(self, at: float, name: str) -> None:
        """Set an alarm, also for one who is not among the sleepers before the event has been handled."""
        if at < inf:
            heapq.heappush(self._heap, (at, name))

    def _is_due(self, at: float, name: str) -> bool:
        return name in self._sleepers and self._sleepers[name].is_due(at)

    def next(self) -> float | None:
        """Clock time of the next alarm; None for none."""
        if len(self._heap) > SPARE + 4 * len(self._sleepers):  # most are of those that have ended
            self._heap = [each for each in self._heap if self._is_due(*each)]
            heapq.heapify(self._heap)
        while self._heap:
            at, name = self._heap[0]
            if self._is_due(at, name):
                return at
            heapq.heappop(self._heap)  # of one that has ended, whose name may be in use again
        return None

    def pop(self, now: float) -> str | None:
        """Take the next alarm that is due. Returns who set it."""
        at = self.next()
        return heapq.heappop(self._heap)[1] if at is not None and at <= now else None


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
