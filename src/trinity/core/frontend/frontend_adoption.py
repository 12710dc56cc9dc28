"""FrontendAdoption: goes on with requests of another front end that was lost, as with its own after a loss."""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.frontend_departures import FrontendDepartures
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.frontend.messages import Adopt
from trinity.core.life_names import name_life
from trinity.core.messages import FRONTEND
from trinity.core.routing import RoutingPolicy


class FrontendAdoption(FrontendDepartures):
    """Part of ``FrontendCore``. ``waiting``: requests that have no token yet."""

    def __init__(self, policy: RoutingPolicy, failures: FailurePolicy, spread: int = 1, name: str = FRONTEND) -> None:
        super().__init__(policy, failures, spread, name)
        self.waiting = 0

    def _adopt(self, event: Adopt, now: float) -> None:
        """Begin a life of it here. No queue is too long for it, which was let in once; its turn comes as after a loss.

        It is the youngest: by how its former front end counted nobody here is older or younger.
        """
        self.taken += 1
        entry = _make_entry(event, self.taken, self.name, now)
        self.entries[entry.id] = self.lives[entry.work.request] = entry
        self.waiting += not entry.delivered
        self.waiting_bytes += entry.input_bytes
        self._alarms.set(entry.deadline, entry.id)
        if entry.said:
            entry.finish(entry.said)
            self._conclude(entry)
            return
        self._keep_inputs(entry)
        entry.dropped = entry.dropped or event.unread
        problem = self._start(entry, now)
        if problem is not None:
            self._give_up(entry, problem)


def _make_entry(event: Adopt, number: int, owner: str, now: float) -> FrontendRequest:
    work, count = event.work, len(event.tokens)
    life = name_life(work.request, number, 1, owner)
    left = work.deadline_s
    entry = FrontendRequest(
        work.request,
        replace(work, request=life, number=number, owner=owner, attempt=1, outputs=count, alone=""),
        inf if left is None else now + left,
        delivered=count,
        tokens=list(event.tokens),
        inputs=event.inputs,
        input_bytes=event.input_bytes,
        base=count,
    )
    entry.former, entry.was_prefilled = (event.former,), count > 0
    return entry
