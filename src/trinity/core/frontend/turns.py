"""Requests that wait: when each wants to be looked at, who may do what costs all, and the bytes of their inputs."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from math import inf
from typing import Any, Protocol

from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.frontend.messages import Prepare, Prepared
from trinity.core.messages import Failure, Value
from trinity.core.routing.router import Router

SPARE = 64  # alarms beside four of each sleeper, before those that mean nothing are dropped
PREPARED_AT_ONCE = 8  # inputs that were not kept: each may be hundreds of MB


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


class Inputs:
    """Counts the inputs of all requests, and has those that were not kept prepared again.

    - ``waiting_bytes``: of inputs that no encoder has taken yet. ``kept_bytes``: of those kept for a retry.
    - ``preparations``: turns of the requests whose inputs are prepared again.
    """

    def __init__(self, router: Router, failures: FailurePolicy) -> None:
        self._router, self.failures = router, failures
        self.kept_bytes = self.waiting_bytes = 0
        self.preparations = Turns()

    def add(self, entry: FrontendRequest, inputs: tuple[Any, ...], input_bytes: int) -> None:
        """Take the inputs of a new request."""
        entry.inputs, entry.input_bytes = inputs, input_bytes
        self.waiting_bytes += input_bytes
        self._keep(entry)

    def _keep(self, entry: FrontendRequest) -> None:
        """Keep the inputs of a request for a retry, if there may be one and there is room."""
        again = self.failures.recoveries > 0 or self._router.returns
        if again and self.kept_bytes + entry.input_bytes <= self.failures.kept_bytes:
            entry.kept_bytes = entry.input_bytes
            self.kept_bytes += entry.kept_bytes
        else:
            entry.dropped = bool(entry.inputs)

    def free(self, entry: FrontendRequest) -> None:
        """Count the inputs of a request as waiting no longer."""
        self.waiting_bytes -= entry.input_bytes
        entry.input_bytes = 0

    def forget(self, entry: FrontendRequest) -> None:
        """Forget a request that has ended."""
        self.free(entry)
        self.preparations.leave(entry.id)
        self.kept_bytes -= entry.kept_bytes

    def prepare(self, entry: FrontendRequest) -> list[Value]:
        """Have the inputs of a request that waits prepared again, as soon as it has its turn."""
        entry.preparing = True
        has_turn = self.preparations.take(entry.id, entry.work.number, PREPARED_AT_ONCE)
        return [Prepare(entry.id, entry.work.request)] if has_turn else []

    def next(self) -> str | None:
        """Take the id of the oldest request that waits for a turn which is free now; None for none."""
        return self.preparations.next(PREPARED_AT_ONCE)

    def take(self, entry: FrontendRequest, event: Prepared) -> Failure | None:
        """Take inputs that were prepared again. Returns why the request cannot go on with them."""
        self.preparations.leave(entry.id)
        entry.inputs, entry.preparing = event.inputs, False
        self.free(entry)
        entry.input_bytes = event.input_bytes
        self.waiting_bytes += event.input_bytes
        if event.failure is None and event.contents != tuple(span.content for span in entry.work.media):
            return Failure("BadMedia", "an instance was lost with the request, and its media are others by now")
        return event.failure
