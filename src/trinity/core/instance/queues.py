"""Queue: keeps waiting requests in the order of the rules, at a cost independent of its length."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

SortKey = Callable[[str], Any]  # something that can be compared
HeapEntry = tuple[Any, int, str]  # what is less comes first; of equal ones the first that came


class Queue:
    """First in first out; with ``key``, the smallest first.

    Coming, leaving from any place and the first take O(1), with ``key`` O(log n); the first k O(k), with ``key``
    O(k log k). A key must not change while its request waits. Not to be changed while it is iterated over.
    """

    def __init__(self, key: SortKey | None = None) -> None:
        self._key = key
        self._places: OrderedDict[str, int] = OrderedDict()
        self._heap: list[HeapEntry] = []  # with those that have left, until they come up or are too many
        self._behind, self._ahead = count(), count(-1, -1)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request: str) -> bool:
        return request in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places) if self._key is None else self._sorted()

    def append(self, request: str) -> None:
        self._put(request, next(self._behind))

    def appendleft(self, request: str) -> None:
        """Ahead of all, with ``key`` of all with an equal one."""
        self._put(request, next(self._ahead))
        self._places.move_to_end(request, last=False)

    def remove(self, request: str) -> None:
        del self._places[request]
        if len(self._heap) > 2 * len(self._places) + 8:
            self._heap = [entry for entry in self._heap if self._waits(entry)]
            heapq.heapify(self._heap)

    def _put(self, request: str, place: int) -> None:
        assert request not in self._places, f"{request} waits here already"
        self._places[request] = place
        if self._key is not None:
            heapq.heappush(self._heap, (self._key(request), place, request))

    def _waits(self, entry: HeapEntry) -> bool:
        return self._places.get(entry[2]) == entry[1]

    def _sorted(self) -> Iterator[str]:
        """In order, as far as somebody looks: the next ones are below those that were looked at."""
        heap = self._heap
        while heap and not self._waits(heap[0]):
            heapq.heappop(heap)
        border = [(heap[0], 0)] if heap else []
        while border:
            entry, at = heapq.heappop(border)
            for below in (2 * at + 1, 2 * at + 2):
                if below < len(heap):
                    heapq.heappush(border, (heap[below], below))
            if self._waits(entry):
                yield entry[2]
