"""Dispatch: sends requests to their first stage, or lets them wait until they can be sent.

They wait for a stage that is away, for instances to be empty where they run isolated, for their turn after a loss, and
for inputs that are prepared again.
"""

from __future__ import annotations

from collections.abc import Sized
from math import inf

from msgspec.structs import replace

from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.frontend.inputs import Inputs
from trinity.core.frontend.isolation import EMPTY_POLL_S, Isolation, stages_of
from trinity.core.frontend.refusals import find_misfit
from trinity.core.frontend.resumption import find_cached, name_holder
from trinity.core.frontend.suspicion import Life
from trinity.core.frontend.turns import Alarms, Turns
from trinity.core.messages import Failure, Send, Submit, Value
from trinity.core.routing.router import BadChoice, Router
from trinity.core.spread import send_spread

ALONE_TEXT = "instances died while they had it, and none was free in time for it to run alone; try again in a while"
TURN_TEXT = "many requests go on after a loss just now, and its turn has not come in the time it may wait; try again"


class Dispatch:
    """Sends a request, or notes that it waits.

    - ``retries``: turns of requests that go on after a loss, until they have a new token.
    - ``losses``: why each instance was lost last, by name.
    - ``spread``: encoders that may encode the media of one request.
    """

    def __init__(
        self,
        router: Router,
        requests: Sized,
        inputs: Inputs,
        isolation: Isolation,
        alarms: Alarms,
        failures: FailurePolicy,
        spread: int,
    ) -> None:
        self._router, self._requests, self._alarms = router, requests, alarms
        self._inputs, self._isolation = inputs, isolation
        self.failures, self.spread = failures, spread
        self.retries = Turns()
        self.losses: dict[str, str] = {}

    def start(self, entry: FrontendRequest, now: float) -> tuple[list[Value], Failure | None]:
        """Send a request to its first stage, or let it wait while it cannot be sent.

        Returns commands, and why it can neither be sent nor wait.
        """
        if now < entry.not_before:
            return [], self._wait_or_refuse(entry, now, _overloaded(ALONE_TEXT), entry.not_before - now)
        is_apart = self._is_apart(entry, now)
        said = self._isolation.announce() if entry.work.alone else []
        if not is_apart:
            pause_s = EMPTY_POLL_S if self._isolation.ward == entry.id else inf
            return said, self._wait_or_refuse(entry, now, _overloaded(ALONE_TEXT), pause_s)
        problem = find_misfit(self._router, entry.work, self.losses)
        if problem is not None:
            self.retries.leave(entry.id)
            if problem.error != "Overloaded" or self.failures.wait_s == 0:
                return said, problem
            return said, self._wait_or_refuse(entry, now, problem, EMPTY_POLL_S if entry.work.alone else inf)
        if not self._has_turn(entry):
            return said, self._wait_or_refuse(entry, now, _overloaded(TURN_TEXT))
        if entry.dropped and not entry.inputs:
            return said + self.prepare(entry, now), None
        try:
            return said + self._send(entry, now), None
        except BadChoice as choice:
            return said, Failure("StageError", str(choice))

    def _is_apart(self, entry: FrontendRequest, now: float) -> bool:
        """True unless it is to run alone, and what it needs for that is not reserved, up and empty yet."""
        suspected = entry.suspicion.stages(entry.delivered) if entry.is_suspect(self.failures) else ""
        alone = "".join(letter for letter in suspected if letter in stages_of(entry.work))
        if alone != entry.work.alone:
            entry.work = replace(entry.work, alone=alone)
        if not alone:
            self._isolation.lift(entry)
            return True
        self.retries.leave(entry.id)  # it waits for its place: a turn that came later would send it once more
        return self._isolation.admits(entry, now)

    def _has_turn(self, entry: FrontendRequest) -> bool:
        """True unless too many go on after a loss just now, or an older one waits to, or may soon.

        When an isolated request has got through, all that wait are tried next, the oldest first: none takes its turn
        before.
        """
        if not entry.former or self.failures.wait_s == 0:
            return True
        entry.watched = True
        if entry.work.alone:
            return True  # as only one does at a time
        if self._isolation.lifted and entry.id not in self.retries.active:
            return False
        return self.retries.take(entry.id, entry.work.number, self.failures.most_retries(len(self._requests)))

    def _send(self, entry: FrontendRequest, now: float) -> list[Send]:
        """Send it. Raises ``BadChoice`` where the routing policy names no instance that fits."""
        first = self._find_cached(entry) or self._router.enter(entry.work, entry.unfit_at)
        assert first is not None
        life = Life(first, self._router.peers[first].epoch)
        sent = Submit(entry.work, entry.inputs, tokens=tuple(entry.tokens), target_epoch=life.epoch)
        commands = send_spread(self._router, first, sent, 1 if entry.suspicion.row or entry.unfit_at else self.spread)
        entry.enter(life, now, self._isolation.empty_places(entry))
        entry.inputs = () if entry.dropped else entry.inputs
        return commands

    def _find_cached(self, entry: FrontendRequest) -> str | None:
        """Find who has most of a request that goes on, and need not compute it again; its work names who has more."""
        if not entry.former or entry.work.encode_only or entry.unfit_at:
            return None
        first = find_cached(self._router, entry.work, entry.tokens, entry.prefilled, entry.blamed)
        entry.work, first = name_holder(self._router, entry.work, entry.tokens, first, entry.blamed)
        return first

    def _wait_or_refuse(
        self, entry: FrontendRequest, now: float, problem: Failure, pause_s: float = inf
    ) -> Failure | None:
        if now >= entry.gives_up_at:
            return problem
        self.wait(entry, now, pause_s)
        return None

    def wait(self, entry: FrontendRequest, now: float, pause_s: float = inf) -> None:
        """Let it wait until an instance comes up, or for so long."""
        waited = entry.waits
        entry.wait(now, now + pause_s, self.failures.wait_s)
        if entry.dropped and not entry.inputs:
            self._inputs.free(entry)
        self._alarms.set(entry.retry_at, entry.id)
        if not waited:
            self._alarms.set(entry.gives_up_at, entry.id)

    def prepare(self, entry: FrontendRequest, now: float) -> list[Value]:
        """Let it wait until its inputs are prepared again."""
        self.wait(entry, now)
        return self._inputs.prepare(entry)

    def note_token(self, entry: FrontendRequest) -> None:
        """Note that this life of a request has a new token: it is like others, once it has got through its stage."""
        if not entry.watched or entry.delivered == entry.base:
            return
        self.retries.leave(entry.id)
        if not entry.work.alone or entry.suspicion.has_passed(entry.delivered):
            entry.watched = False
            entry.suspicion.get_through(alone=bool(entry.work.alone))
            self._isolation.lift(entry)

    def forget(self, entry: FrontendRequest) -> None:
        """Forget a request that has ended."""
        self._isolation.lift(entry)
        self.retries.leave(entry.id)


def _overloaded(text: str) -> Failure:
    return Failure("Overloaded", text)
