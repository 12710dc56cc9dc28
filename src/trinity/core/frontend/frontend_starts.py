"""FrontendStarts: requests of the front end on the way to their first stage: sent, or waiting in the front end.

They wait for a stage that is away, for their turn after a loss, and for inputs that are prepared once more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import inf

from msgspec.structs import replace

from trinity.core.alarms import Alarms
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.frontend_request import FrontendRequest, Life
from trinity.core.frontend.isolation import EMPTY_POLL_S, Isolation, stages_of
from trinity.core.frontend.messages import Prepare, Prepared
from trinity.core.frontend.refusals import find_misfit
from trinity.core.messages import FRONTEND, Failure, PeerLoad, PeerReserved, Send, Submit, Value
from trinity.core.peer_exit import PeerRemoved
from trinity.core.resumption import find_cached, name_holder
from trinity.core.routing import BadChoice, Router, RoutingPolicy
from trinity.core.spread import send_spread
from trinity.core.turns import Turns

PREPARED_AT_ONCE = 8  # inputs that were not kept: each may be hundreds of MB


class FrontendStarts(ABC):
    """Sends requests, and has them wait.

    - ``kept_bytes``: of inputs that are kept for further lives. ``waiting_bytes``: of those that an encoder is yet to
      have, prepared once more or not.
    - ``entries``, ``lives``: requests by id, and by the name of their present life.
    - ``losses``: why each instance was lost last.
    - ``retries``: requests that go on after a loss, until they have a new token. ``preparations``: those whose inputs
      are prepared once more.
    - ``spread``: encoders that may encode the media of one request.
    - ``taken``: number of the last request.
    - ``name``: of this front end. The first one alone has requests run alone: two that did might wait for each other.
    """

    def __init__(self, policy: RoutingPolicy, failures: FailurePolicy, spread: int = 1, name: str = FRONTEND) -> None:
        self.name, self.taken = name, 0
        self.router, self.failures, self.spread = Router(policy), failures, spread
        self.router.counts = spread > 1
        self.kept_bytes = self.waiting_bytes = 0
        self.entries: dict[str, FrontendRequest] = {}
        self.lives: dict[str, FrontendRequest] = {}
        self.losses: dict[str, str] = {}
        self.retries, self.preparations = Turns(), Turns()
        self.isolation = Isolation(self.router, self.entries)
        self._alarms = Alarms(self.entries)
        self._out: list[Value] = []

    @abstractmethod
    def _conclude(self, entry: FrontendRequest) -> None:
        """End the request, and drop its record."""

    def _keep_inputs(self, entry: FrontendRequest) -> None:
        """Keep its inputs for a life after this one, if there may be one and there is room."""
        again = self.failures.recoveries > 0 or self.router.returns
        if again and self.kept_bytes + entry.input_bytes <= self.failures.kept_bytes:
            entry.kept_bytes = entry.input_bytes
            self.kept_bytes += entry.kept_bytes
        else:
            entry.dropped = bool(entry.inputs)

    def _start(self, entry: FrontendRequest, now: float) -> Failure | None:
        """Send a request to its first stage, or have it wait while it cannot be. Returns why neither."""
        if now < entry.not_before:
            return self._wait_or_give_up(entry, now, Failure("Overloaded", ALONE_TEXT), entry.not_before - now)
        if not self._is_apart(entry, now):
            pause_s = EMPTY_POLL_S if self.isolation.ward == entry.id else inf
            return self._wait_or_give_up(entry, now, Failure("Overloaded", ALONE_TEXT), pause_s)
        problem = find_misfit(self.router, entry.work, self.losses)
        if problem is not None:
            self.retries.leave(entry.id)
            if problem.error != "Overloaded" or self.failures.wait_s == 0:
                return problem
            return self._wait_or_give_up(entry, now, problem, EMPTY_POLL_S if entry.work.alone else inf)
        if not self._has_turn(entry):
            return self._wait_or_give_up(entry, now, Failure("Overloaded", TURN_TEXT))
        if entry.dropped and not entry.inputs:
            self._prepare(entry, now)
            return None
        return self._send(entry, now)

    def _has_turn(self, entry: FrontendRequest) -> bool:
        """True unless too many go on after a loss just now, or an older one waits to, or may soon.

        Who ran alone till now opens what others wait for: all of them are tried next, this one among them, by age.
        """
        if not entry.former or self.failures.wait_s == 0:
            return True
        entry.watched = True
        if entry.work.alone:
            return True  # as only one does at a time
        if self.isolation.lifted and entry.id not in self.retries.active:
            return False
        return self.retries.take(entry.id, entry.work.number, self.failures.most_retries(len(self.entries)))

    def _is_apart(self, entry: FrontendRequest, now: float) -> bool:
        """True unless it is to run alone, and what it needs for that is not reserved, up and empty yet."""
        suspect = entry.is_suspect(self.failures)
        alone = "".join(letter for letter in entry.suspected if letter in stages_of(entry.work)) if suspect else ""
        if alone != entry.work.alone:
            entry.work = replace(entry.work, alone=alone)
        if not alone:
            self.isolation.lift(entry)
            return True
        self.retries.leave(entry.id)  # it waits for its place: a turn that came later would send it once more
        apart = self.isolation.admits(entry, now)
        self._tell(self.router.peers)
        return apart

    def _tell(self, names: Iterable[str]) -> None:
        """Tell instances what is reserved and what no longer is."""
        for message in self.isolation.take_said():
            self._out.extend(Send(name, message) for name in names)

    def _wait_or_give_up(
        self, entry: FrontendRequest, now: float, problem: Failure, pause_s: float = inf
    ) -> Failure | None:
        if now >= entry.gives_up_at:
            return problem
        self._wait(entry, now, pause_s)
        return None

    def _prepare(self, entry: FrontendRequest, now: float) -> None:
        """Have its inputs prepared once more, as soon as it has its turn."""
        self._wait(entry, now)
        entry.preparing = True
        if self.preparations.take(entry.id, entry.work.number, PREPARED_AT_ONCE):
            self._out.append(Prepare(entry.id, entry.work.request))

    def _send(self, entry: FrontendRequest, now: float) -> Failure | None:
        try:
            first = self._find_cached(entry) or self.router.enter(entry.work, entry.unfit_at)
        except BadChoice as choice:
            return Failure("StageError", str(choice))
        assert first is not None
        life = Life(first, self.router.peers[first].epoch)
        sent = Submit(entry.work, entry.inputs, tokens=tuple(entry.tokens), target_epoch=life.epoch)
        self._out += send_spread(self.router, first, sent, 1 if entry.row or entry.unfit_at else self.spread)
        entry.enter(life, now, self.isolation.empty_places(entry))
        entry.inputs = () if entry.dropped else entry.inputs
        return None

    def _find_cached(self, entry: FrontendRequest) -> str | None:
        """Find who has most of a request that goes on, and need not compute it again; its work names who has more."""
        if not entry.former or entry.work.encode_only or entry.unfit_at:
            return None
        first = find_cached(self.router, entry.work, entry.tokens, entry.prefilled, entry.blamed)
        entry.work, first = name_holder(self.router, entry.work, entry.tokens, first, entry.blamed)
        return first

    def _wait(self, entry: FrontendRequest, now: float, pause_s: float = inf) -> None:
        """Let it wait until an instance comes up, or for so long."""
        waited = entry.waits
        entry.wait(now, now + pause_s, self.failures.wait_s)
        if entry.dropped and not entry.inputs:
            self._free_inputs(entry)
        self._alarms.set(entry.retry_at, entry.id)
        if not waited:
            self._alarms.set(entry.gives_up_at, entry.id)

    def _free_inputs(self, entry: FrontendRequest) -> None:
        self.waiting_bytes -= entry.input_bytes
        entry.input_bytes = 0

    def _try_again(self, entry: FrontendRequest, now: float) -> None:
        problem = None if entry.preparing else self._start(entry, now)
        if problem is not None:
            self._give_up(entry, problem)

    def _begin_next(self, now: float) -> None:
        """Let those go on for which there is a turn or an instance now, the oldest first."""
        most = self.failures.most_retries(len(self.entries))
        self._reopen(now)
        while (name := self.retries.next(most)) is not None:
            self._try_again(self.entries[name], now)
            self._reopen(now)
        while (name := self.preparations.next(PREPARED_AT_ONCE)) is not None:
            self._prepare(self.entries[name], now)

    def _reopen(self, now: float) -> None:
        """Tell all that others may go where one ran alone, and try those that wait."""
        while self.isolation.lifted:
            self.isolation.lifted = False
            self._tell(self.router.peers)
            self._retry_waiting(now)

    def _retry_waiting(self, now: float) -> None:
        """Try all again that wait for an instance: the one that runs alone first, then the oldest."""
        ward = self.isolation.ward
        waiting = [each for each in self.entries.values() if each.waits and (each.retry_at == inf or each.work.alone)]
        for entry in sorted(waiting, key=lambda each: (each.id != ward, each.work.number)):
            self._try_again(entry, now)

    def _loaded(self, event: PeerLoad, now: float) -> None:
        """Take a report. Requests are counted on from the highest number of any front end, as all are of one age."""
        self.router.take(event)
        self.taken = max(self.taken, event.newest)

    def _reserved(self, event: PeerReserved, now: float) -> None:
        """Route past an instance that the first front end has reserved, or no longer."""
        self.router.reserve(event)
        if not event.reserved:
            self._retry_waiting(now)

    def _removed(self, event: PeerRemoved, now: float) -> None:
        """Forget an instance. Those that wait for it alone are told so, and wait no longer."""
        self.router.forget(event)
        self.losses.pop(event.name, None)
        self._retry_waiting(now)

    def _give_up(self, entry: FrontendRequest, why: Failure) -> None:
        entry.finish("error", why)
        self._conclude(entry)

    def _has_gone_on(self, entry: FrontendRequest) -> None:
        """Note that this life of a request has a new token: it is like others, once it has passed."""
        if not entry.watched or entry.delivered == entry.base:
            return
        self.retries.leave(entry.id)
        if not entry.work.alone or entry.has_passed:
            entry.watched, entry.row = False, 0 if entry.work.alone else entry.row
            entry.alone_at = frozenset()
            self.isolation.lift(entry)

    def _leave_turns(self, entry: FrontendRequest) -> None:
        self.isolation.lift(entry)
        self.retries.leave(entry.id)
        self.preparations.leave(entry.id)

    def _prepared(self, event: Prepared, now: float) -> None:
        """Send a request whose inputs were made once more, unless its media are others by now."""
        entry = self.lives.get(event.life)
        if entry is None or not entry.preparing:
            return
        self.preparations.leave(entry.id)
        entry.inputs, entry.preparing, failure = event.inputs, False, event.failure
        self._free_inputs(entry)
        entry.input_bytes = event.input_bytes
        self.waiting_bytes += event.input_bytes
        if failure is None and event.contents != tuple(span.content for span in entry.work.media):
            failure = Failure("BadMedia", "an instance was lost with the request, and its media are others by now")
        if failure is None:
            self._try_again(entry, now)
        else:
            self._give_up(entry, failure)


ALONE_TEXT = "instances died while they had it, and none was free in time for it to run alone; try again in a while"
TURN_TEXT = "many requests go on after a loss just now, and its turn has not come in the time it may wait; try again"
