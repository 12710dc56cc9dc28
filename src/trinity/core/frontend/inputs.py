"""Inputs: bytes of the requests' inputs that wait or are kept for retries, and inputs that are prepared again."""

from __future__ import annotations

from typing import Any

from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.frontend.messages import Prepare, Prepared
from trinity.core.frontend.turns import Turns
from trinity.core.messages import Failure, Value
from trinity.core.routing.router import Router

PREPARED_AT_ONCE = 8  # inputs that were not kept: each may be hundreds of MB


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
