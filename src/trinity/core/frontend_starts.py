"""FrontendStarts: requests of the front end on the way to their first stage: sent, or waiting in the front end.

They wait for a stage that is away, for their turn after a loss, and for inputs that are prepared once more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf

from trinity.core.alarms import Alarms
from trinity.core.failure_policy import FailurePolicy
from trinity.core.front_door import find_misfit
from trinity.core.frontend_events import Prepare, Prepared
from trinity.core.frontend_request import FrontendRequest, Life
from trinity.core.messages import Failure, Submit, Value
from trinity.core.routing import BadChoice, Router, RoutingPolicy
from trinity.core.spread import send_spread
from trinity.core.turns import Turns

PREPARED_AT_ONCE = 8  # inputs that were not kept: each may be hundreds of MB


class FrontendStarts(ABC):
    """Sends requests, and has them wait.

    - ``kept_bytes``: of inputs that are kept for further lives.
    - ``entries``, ``lives``: requests by id, and by the name of their present life.
    - ``losses``: why each instance was lost last.
    - ``retries``: requests that go on after a loss, until they have a new token. ``preparations``: those whose inputs
      are prepared once more.
    - ``spread``: encoders that may encode the media of one request.
    """

    def __init__(self, policy: RoutingPolicy, failures: FailurePolicy, spread: int = 1) -> None:
        self.router, self.failures, self.spread = Router(policy), failures, spread
        self.router.counts = spread > 1
        self.kept_bytes = 0
        self.entries: dict[str, FrontendRequest] = {}
        self.lives: dict[str, FrontendRequest] = {}
        self.losses: dict[str, str] = {}
        self.retries, self.preparations = Turns(), Turns()
        self._alarms = Alarms(self.entries)
        self._out: list[Value] = []

    @abstractmethod
    def _conclude(self, entry: FrontendRequest) -> None:
        """End the request, and drop its record."""

    def _keep_inputs(self, entry: FrontendRequest) -> None:
        """Keep its inputs for a life after this one, if there may be one and there is room."""
        again = self.failures.recoveries > 0 or any(peer.returns for peer in self.router.peers.values())
        if again and self.kept_bytes + entry.input_bytes <= self.failures.kept_bytes:
            entry.kept_bytes = entry.input_bytes
            self.kept_bytes += entry.kept_bytes
        else:
            entry.dropped = bool(entry.inputs)

    def _start(self, entry: FrontendRequest, now: float) -> Failure | None:
        """Send a request to its first stage, or have it wait while it cannot be. Returns why neither."""
        problem = find_misfit(self.router, entry.work, self.losses)
        if problem is not None:
            self.retries.leave(entry.id)
            if problem.error != "Overloaded" or self.failures.wait_s == 0:
                return problem
            return self._wait_or_give_up(entry, now, problem)
        if not self._has_turn(entry):
            return self._wait_or_give_up(entry, now, Failure("Overloaded", TURN_TEXT))
        if entry.dropped and not entry.inputs:
            self._prepare(entry, now)
            return None
        return self._send(entry, now)

    def _has_turn(self, entry: FrontendRequest) -> bool:
        """True unless too many go on after a loss just now, or an older one waits to."""
        if not entry.former or self.failures.wait_s == 0:
            return True
        entry.watched = True
        return self.retries.take(entry.id, entry.work.number, self.failures.most_retries(len(self.entries)))

    def _wait_or_give_up(self, entry: FrontendRequest, now: float, problem: Failure) -> Failure | None:
        if now >= entry.gives_up_at:
            return problem
        self._wait(entry, now)
        return None

    def _prepare(self, entry: FrontendRequest, now: float) -> None:
        """Have its inputs prepared once more, as soon as it has its turn."""
        self._wait(entry, now)
        entry.preparing = True
        if self.preparations.take(entry.id, entry.work.number, PREPARED_AT_ONCE):
            self._out.append(Prepare(entry.id, entry.work.request))

    def _send(self, entry: FrontendRequest, now: float) -> Failure | None:
        try:
            first = self.router.enter(entry.work)
        except BadChoice as choice:
            return Failure("StageError", str(choice))
        assert first is not None
        sent = Submit(entry.work, entry.inputs, tokens=tuple(entry.tokens))
        self._out += send_spread(self.router, first, sent, self.spread)
        entry.enter(Life(first, self.router.peers[first].epoch), now)
        entry.inputs = () if entry.dropped else entry.inputs
        return None

    def _wait(self, entry: FrontendRequest, now: float, pause_s: float = inf) -> None:
        """Let it wait until an instance comes up, or for so long."""
        entry.wait(now, now + pause_s, self.failures.wait_s)
        self._alarms.set(entry.retry_at, entry.id)
        self._alarms.set(entry.gives_up_at, entry.id)

    def _try_again(self, entry: FrontendRequest, now: float) -> None:
        problem = None if entry.preparing else self._start(entry, now)
        if problem is not None:
            self._give_up(entry, problem)

    def _begin_next(self, now: float) -> None:
        """Let those go on for which there is a turn now, the oldest first."""
        while (name := self.retries.next(self.failures.most_retries(len(self.entries)))) is not None:
            self._try_again(self.entries[name], now)
        while (name := self.preparations.next(PREPARED_AT_ONCE)) is not None:
            self._prepare(self.entries[name], now)

    def _give_up(self, entry: FrontendRequest, why: Failure) -> None:
        entry.finish("error", why)
        self._conclude(entry)

    def _has_gone_on(self, entry: FrontendRequest) -> None:
        """Note that this life of a request has had a token: it is no dearer than others from now on."""
        if entry.watched:
            entry.watched = False
            self.retries.leave(entry.id)

    def _leave_turns(self, entry: FrontendRequest) -> None:
        self.retries.leave(entry.id)
        self.preparations.leave(entry.id)

    def _prepared(self, event: Prepared, now: float) -> None:
        """Send a request whose inputs were made once more, unless its media are others by now."""
        entry = self.lives.get(event.life)
        if entry is None or not entry.preparing:
            return
        self.preparations.leave(entry.id)
        entry.inputs, entry.preparing, failure = event.inputs, False, event.failure
        if failure is None and event.contents != tuple(span.content for span in entry.work.media):
            failure = Failure("BadMedia", "an instance was lost with the request, and its media are others by now")
        if failure is None:
            self._try_again(entry, now)
        else:
            self._give_up(entry, failure)


TURN_TEXT = "many requests go on after a loss just now, and its turn has not come in the time it may wait; try again"
