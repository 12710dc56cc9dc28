"""A cluster with deaths whose readers use an id again as soon as the front end has ended the request that had it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec.structs import replace

from trinity.core.frontend_events import Deliver, End
from trinity.core.messages import FRONTEND, Sampled, Stepped, Submit, Value
from trinity.testing.virtual import VirtualCluster

FIRST = 1000  # every token is this and the number of the request that it was sampled for


class Reusers:
    """Submits each request of a cluster ``times`` more, and asserts that no token of another one comes."""

    def __init__(self, cluster: VirtualCluster, times: int) -> None:
        self.cluster, self.times, self.reused = cluster, times, Counter[str]()
        self._numbers: dict[str, int] = {}
        self._asked: dict[str, Submit] = {}
        self._ended: set[str] = set()
        self._stepping = ""
        cluster.observers = []
        found: Any = cluster
        make_result, self._handle = found._make_result, super(VirtualCluster, cluster).handle

        def make_noted_result(name: str, *step: Any) -> Any:
            self._stepping = name
            return make_result(name, *step)

        found._make_result, found._sample_token, found._begin_life = make_noted_result, self._sample, lambda sent: None
        found.handle, found.carriers = self._take, {**cluster.carriers, Deliver: self._deliver, End: self._end}

    def _sample(self, request: str) -> Sampled:
        state = self.cluster.cores[self._stepping].state.requests.get(request)
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
