"""FrontendDepartures: has decodes of the front end move away from instances that leave, and says when to look again."""

from __future__ import annotations

from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.departures import Departures
from trinity.core.frontend.frontend_starts import FrontendStarts
from trinity.core.frontend.move_requests import begin_move
from trinity.core.messages import FRONTEND
from trinity.core.peer_exit import PeerLeaving
from trinity.core.routing import RoutingPolicy


class FrontendDepartures(FrontendStarts):
    """Part of ``FrontendCore``. ``departures``: chooses what moves, and when."""

    def __init__(self, policy: RoutingPolicy, failures: FailurePolicy, spread: int = 1, name: str = FRONTEND) -> None:
        super().__init__(policy, failures, spread, name)
        self.departures = Departures(self.router, self.entries)

    def next_timer(self) -> float | None:
        """Clock time at which a Tick is due; None where no deadline is set, and nothing waits for a time."""
        due, look = self._alarms.next(), self.departures.next_look
        return look if due is None or (look is not None and look < due) else due

    def _leaving(self, event: PeerLeaving, now: float) -> None:
        self.router.avoid(event)
        self.departures.look_now()

    def _move_decodes(self, now: float) -> None:
        """Have decodes leave instances that are to end, as far as that is sooner than their own end there."""
        for move in self.departures.choose(now):
            self._out += begin_move(self.entries, self.router, move)
