"""Alarms: the clock times at which requests of the front end want to be looked at."""

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
        if at < inf:
            heapq.heappush(self._heap, (at, name))
        if len(self._heap) > SPARE + 4 * len(self._sleepers):  # most are of those that have ended
            self._heap = [each for each in self._heap if self._is_due(*each)]
            heapq.heapify(self._heap)

    def _is_due(self, at: float, name: str) -> bool:
        return name in self._sleepers and self._sleepers[name].is_due(at)

    def next(self) -> float | None:
        """Clock time of the next alarm; None for none."""
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
