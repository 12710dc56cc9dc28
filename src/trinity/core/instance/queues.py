"""Queues of waiting requests: in the order of the rules, and those that prefill text while features are to come."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.settings import Settings
from trinity.core.messages import KV, Work
from trinity.stage_kinds import roles_of

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


AWAITS_FEATURES = frozenset({Phase.IMAGE_QUEUE, Phase.ENCODING, Phase.IMAGE_OFFER, Phase.IMAGE_PULL})


class LeadingQueue:
    """Requests that wait for features, in the order in which they began to, as long as text is left to prefill.

    - ``running``: the request that has such text in a step in flight; "" for none.
    """

    def __init__(self, settings: Settings) -> None:
        self._requests: dict[str, RequestState] = {}
        self._block = settings.kv_block_size if _is_on(settings) else 0
        self.running = ""

    def __bool__(self) -> bool:
        return bool(self._requests)

    def first(self) -> RequestState | None:
        """Return the one that waits longest."""
        return next(iter(self._requests.values()), None)

    def requests(self) -> tuple[RequestState, ...]:
        """List those that wait, the first one first."""
        return tuple(self._requests.values())

    def follow(self, state: RequestState, before: Phase) -> None:
        """Keep pace with a request that has moved on from the phase ``before``."""
        if state.phase not in AWAITS_FEATURES:
            self.leave(state)
        elif before not in AWAITS_FEATURES and self._block and leading_blocks(state.work, self._block):
            self._requests[state.work.request] = state

    def leave(self, state: RequestState) -> None:
        """Take a request out, if it is here: it has its features, it ends, or nothing of its text is left."""
        self._requests.pop(state.work.request, None)

    def begin(self, request: str) -> None:
        """Note that a step prefills text of this request."""
        assert not self.running, f"text of {self.running} is in a step, and {request} begins"
        self.running = request

    def finish(self) -> None:
        """Note that this step has ended."""
        self.running = ""


def _is_on(settings: Settings) -> bool:
    rules = settings.rules
    caches = settings.prefix_cache and KV in settings.pools
    return rules.leading_text and rules.chunked and caches and roles_of(settings.roles).prefills


def leading_blocks(work: Work, block: int) -> int:
    """Count the whole blocks of ``block`` positions ahead of the first image and of what sees it; 0 for nothing."""
    return work.media[0].uncut[0] // block if work.media and not work.encode_only else 0
