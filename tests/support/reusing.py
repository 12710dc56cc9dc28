"""A cluster with deaths whose readers use an id again as soon as the front end has ended the request that had it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec.structs import replace

from support.virtual.cluster import VirtualCluster
from trinity.core.frontend.messages import Deliver, End
from trinity.core.messages import FRONTEND, Sampled, Stepped, Submit, Value

FIRST = 1000  # every token is this and the number of the request that it was sampled for


class Reusers:
    """Submits each request of a cluster ``times`` more, and asserts that no token of another one comes."""

    def __init__(self, cluster: VirtualCluster, times: int) -> None:
        self.cluster, self.times, self.reused = cluster, times, Counter[str]()
        self._numbers: dict[str, int] = {}
        self._asked: dict[str, Submit] = {}
        self._ended: set[str] = set()
        cluster.observers = []
        found: Any = cluster
        self._handle = super(VirtualCluster, cluster).handle
        found._sample_token = self._sample
        found.handle, found.carriers = self._take, {**cluster.carriers, Deliver: self._deliver, End: self._end}

    def _sample(self, name: str, request: str) -> Sampled:
        state = self.cluster.cores[name].state.requests.get(request)
        return Sampled(FIRST + (state.work.number if state is not None else 0))

    def _deliver(self, name: str, command: Deliver) -> None:
        assert command.sampled.token == FIRST + self._numbers[command.request], f"{command} is of another request"

    def _end(self, name: str, command: End) -> None:
        self._ended.add(command.request)

    def _take(self, name: str, event: Value) -> None:
        if isinstance(event, Submit) and name == FRONTEND:
            self._numbers[event.work.request] = self.cluster.frontend.taken + 1
            self._asked[event.work.request] = event
        if isinstance(event, Stepped):
            self.cluster._follow(name, event)
        self._handle(name, event)
        if name == FRONTEND:
            self._ask_again()

    def _ask_again(self) -> None:
        for request in sorted(self._ended - set(self.cluster.frontend.entries)):
            self._ended.discard(request)
            asked = self._asked[request]
            if self.reused[request] < self.times:
                self.reused[request] += 1
                self.cluster.post(self.cluster.now, FRONTEND, Submit(replace(asked.work, attempt=0), asked.inputs))
