"""InstanceCore: dispatches each event to its handler, and returns the commands; timers, and the step that repeats.

The asker has reserved these blocks since it was admitted, as for items that it encodes itself. It asks the helper for a
lease, pulls, and encodes where either fails. So it waits for an answer that takes no block, by an instance that is up
as far as it knows, and for a pull, which ends. What a pull may still write is not encoded before that.

Between two events nothing of a core changes. So once a step is decided it is known whether the one behind it has the
same rows, for as long as no other event comes and no row ends. A forward leaves nothing of the core in the CPU's
caches: an answer takes as long as it touches functions and objects, and this one touches few (decision 0062).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from math import inf
from operator import attrgetter
from typing import Any

from trinity.core.instance.admission import handle_submit
from trinity.core.instance.collection import handle_collected
from trinity.core.instance.front_ends import handle_frontend_up, handle_not_taken, handle_peer_reserved, say_empty
from trinity.core.instance.helpers import forget_fetch
from trinity.core.instance.lanes import StepInFlight
from trinity.core.instance.lifecycle import conclude_if_quiet, end, handle_cancel, handle_forget
from trinity.core.instance.loads import report
from trinity.core.instance.peers import (
    check_leases,
    handle_peer_avoided,
    handle_peer_load,
    handle_peer_lost,
    handle_peer_up,
    handle_release,
)
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.siblings import handle_spare, share_work
from trinity.core.instance.state import Settings, State, failure
from trinity.core.instance.steps import handle_stepped, pump, settle_features, show_progress
from trinity.core.messages import (
    Cancel,
    Caught,
    Collected,
    Commit,
    Emit,
    Fetch,
    Fetched,
    Forget,
    Helped,
    LayersWritten,
    Move,
    Offer,
    PeerDown,
    PeerLeaving,
    PeerLoad,
    PeerRemoved,
    PeerReserved,
    PeerSuspect,
    PeerUp,
    Pull,
    Pulled,
    Ready,
    Release,
    Send,
    Spare,
    Step,
    Stepped,
    Submit,
    Tick,
    Value,
    Withdraw,
)
from trinity.core.migration import prefix_fetch, remote_features, target
from trinity.core.migration.moves import handle_caught, handle_move, offer_moves
from trinity.core.migration.remote_features import handle_fetch
from trinity.core.migration.source import handle_helped, handle_layers_written
from trinity.core.migration.target import handle_commit, handle_offer, handle_ready, handle_withdraw
from trinity.core.routing.router import RoundRobin, Router, RoutingPolicy
from trinity.core.values import FrontendUp, NotTaken

_token = attrgetter("token")


def next_timer(s: State) -> float | None:
    """Clock time at which a Tick is due; None for never."""
    due = s.report_at
    if s.lease_check < due and (s.outgoing or s.incoming or s.fetches or s.prefix_fetches):
        due = s.lease_check
    while s.deadlines:
        at, request = s.deadlines[0]
        state = s.requests.get(request)
        if state is not None and state.deadline == at and state.ending is None:
            due = min(due, at)
            break
        heapq.heappop(s.deadlines)
    return due if due < inf else None


def handle_tick(s: State, event: Tick, now: float) -> None:
    """End late requests, check leases and report the load, whichever is due."""
    _end_late(s, now)
    if now >= s.lease_check:
        check_leases(s, now)
    if now >= s.report_at:
        report(s, now)


def _end_late(s: State, now: float) -> None:
    """End requests past their deadline, in case no Cancel comes from the front end."""
    while s.deadlines and s.deadlines[0][0] <= now:
        due, request = heapq.heappop(s.deadlines)
        state = s.requests.get(request)
        if state is not None and state.deadline == due:
            text = f"the deadline passed while the request was at {s.settings.name}"
            end(s, state, now, "error", failure("DeadlineExceeded", text))


def dispatch_fetched(s: State, event: Fetched, now: float) -> None:
    """Pull what a helper has leased, or encode it here; other answers go on to who waits for a text or an offer."""
    asked = s.home_fetches.get(event.id)
    if asked is None:
        if not prefix_fetch.take_fetched(s, event, now):
            remote_features.handle_fetched(s, event, now)
        return
    s.renew_leases(event.holder, now)
    state = s.requests[asked.request]
    if not event.blocks:
        _encode_here(s, state, event.id)
        return
    asked.pulling = True
    offer, _, item = event.id.rpartition("/")
    slot = state.media[int(item)]
    told = (asked.request, event.blocks, slot.blocks, event.generation)
    s.pull(state, Pull(offer, int(item), event.holder, slot.kind, *told, tail=event.tail))


def dispatch_pulled(s: State, event: Pulled, now: float) -> None:
    """End the lease, and go on with the features, or encode them here."""
    id = f"{event.offer}/{event.part}"
    asked = s.home_fetches.get(id)
    if asked is None:
        if not prefix_fetch.take_pulled(s, event):
            target.handle_pulled(s, event, now)
        return
    state = s.requests[asked.request]
    state.end_pull()
    s.send(asked.holder, Release(id, "failed" if event.failure else "pulled"))
    if event.record:
        state.record({**event.record, "outcome": "failed" if event.failure else "store"})
    if state.ending is not None:
        forget_fetch(s, id)
        conclude_if_quiet(s, state, now)
    elif event.failure is not None or asked.void:
        _encode_here(s, state, id)
    else:
        _take_home(s, state, event.part, now)


def _encode_here(s: State, state: RequestState, id: str) -> None:
    forget_fetch(s, id)
    for slot in state.media:
        if slot.fetch == id:
            slot.leave_to("")


def _take_home(s: State, state: RequestState, item: int, now: float) -> None:
    """Note that the features are here, for all that wait for them."""
    own = state.media[item]
    forget_fetch(s, own.fetch)
    for request, items in settle_features(s, own).items():
        waiting = s.requests[request]
        for place in items:
            waiting.media[place].leave_to("")
        if waiting.ending is None:
            show_progress(s, waiting, now)


class RepeatedStep:
    """Decode steps in flight on a lane, behind which the same rows decode again.

    It holds until the core handles any event that it does not ``answer``.

    - ``due``: the core's next timer (clock time, None for never), which does not change meanwhile.
    """

    __slots__ = (
        *("_s", "_columns", "_flight", "_rates", "_owner"),
        *("_id", "_lane", "_rows", "_attempts", "_starts", "_stops", "_ends", "due"),
    )

    def __init__(self, s: State, flight: deque[StepInFlight]) -> None:
        first, columns = flight[0].step, s.decode_batch
        self._s, self._flight, self._columns, self._rates = s, flight, columns, s.rates
        self._id, self._lane, self._rows = first.id, first.lane, columns.rows
        self._attempts, self._starts, self._stops = columns.attempts, columns.starts, columns.stops
        self._owner = columns.owner
        self._ends = columns.due - len(flight)
        self.due = next_timer(s)

    def answer(self, event: Stepped) -> list[Value] | None:
        """Return the commands of ``handle_stepped`` and ``pump``; None, and nothing has changed, where these must."""
        columns, rows, flight = self._columns, self._rows, self._flight
        count = columns.count
        if event.id != self._id or count >= self._ends or event.failed or event.lane != self._lane:
            return None
        try:
            chosen = tuple(map(event.sampled.__getitem__, rows))
        except KeyError:
            return None
        if self._stops and not self._stops.isdisjoint(map(_token, chosen)):
            return None
        columns.keep(chosen)
        self._rates.learn_decodes(len(rows), event.seconds)
        s: State = self._s
        s.steps += 1
        step = Step(s.steps, event.lane, (), (), rows)
        flight.rotate(-1)
        flight[-1].step = step
        self._id = flight[0].step.id
        if not self._owner:
            return [*[Send(owner, emit) for owner, emit in columns.emits(chosen, count).items()], step]
        return [Send(self._owner, Emit(rows, self._attempts, self._starts, chosen, count)), step]


def find_repeated(s: State) -> RepeatedStep | None:
    """Find the decode steps in flight that the next one repeats; None where something else comes first.

    It does where nothing waits or ends, no block table grows, every row is among those that decode, and none but these
    steps are in flight.
    """
    if s.before_decode or s.waiting_offers or s.leaving or s.grows or s.new_decodes or not s.decode_batch.rows:
        return None
    if s.leading:
        return None
    flights = [flight for flight in s.lanes.values() if flight]
    if len(flights) != 1 or len(flights[0]) != s.depth:
        return None
    rows = s.decode_batch.rows
    if any(running.step.decodes != rows or running.step.prefills or running.step.encodes for running in flights[0]):
        return None
    return RepeatedStep(s, flights[0]) if tuple(s.decoding) == rows else None


_HANDLERS: dict[type[Value], Callable[[State, Any, float], None]] = {
    Submit: handle_submit,
    Cancel: handle_cancel,
    Forget: handle_forget,
    Move: handle_move,
    Offer: handle_offer,
    Ready: handle_ready,
    Caught: handle_caught,
    Commit: handle_commit,
    Withdraw: handle_withdraw,
    Release: handle_release,
    LayersWritten: handle_layers_written,
    Stepped: handle_stepped,
    Pulled: dispatch_pulled,
    Collected: handle_collected,
    PeerUp: handle_peer_up,
    PeerLoad: handle_peer_load,
    PeerSuspect: handle_peer_avoided,
    PeerLeaving: handle_peer_avoided,
    PeerRemoved: lambda s, event, now: s.router.forget(event),
    PeerReserved: handle_peer_reserved,
    PeerDown: handle_peer_lost,
    FrontendUp: handle_frontend_up,
    NotTaken: handle_not_taken,
    Fetch: handle_fetch,
    Fetched: dispatch_fetched,
    Helped: handle_helped,
    Spare: handle_spare,
    Tick: handle_tick,
}


class InstanceCore:
    """The decisions of one instance: admission, Algorithm 1, blocks, migration, cancel, failure.

    ``handle(event, now)`` takes one message or result and returns the commands to carry out, in order. ``now`` is any
    monotonic clock in seconds: live time, or a simulator's.
    """

    def __init__(self, settings: Settings, policy: RoutingPolicy | None = None) -> None:
        settings.rules.check_cost()
        self.settings = settings
        self.state = State(settings, Router(policy or RoundRobin(), settings.name, settings.host))
        self._repeated: RepeatedStep | None = None

    def handle(self, event: Value, now: float) -> list[Value]:
        kind, repeated = type(event), self._repeated
        if repeated is not None and isinstance(event, Stepped):
            answer = repeated.answer(event)
            if answer is not None:
                return answer
        s, self._repeated = self.state, None
        s.out = []
        _HANDLERS[kind](s, event, now)
        if s.moving:
            offer_moves(s, now)
        if kind is not PeerUp and kind is not PeerLoad:
            pump(s, now)
            if s.settings.transfers.hand_over:
                share_work(s)
        if s.reserved_as is not None:
            say_empty(s)
        self._repeated = find_repeated(s)
        return s.out

    def next_timer(self) -> float | None:
        """Clock time at which a Tick is due; None for never."""
        repeated = self._repeated
        return next_timer(self.state) if repeated is None else repeated.due

    def idle(self) -> bool:
        """True where no request, step, transfer or lease is here."""
        return self.state.idle()

    def announcement(self) -> PeerUp:
        """Describe this instance to the other cores."""
        own = self.settings
        sizes, returns = (own.image_block_size, own.kv_block_size), own.reservation == "optimistic"
        return PeerUp(own.name, own.roles, own.epoch, dict(own.pools), *sizes, returns, own.host)

    def check(self) -> None:
        """Assert the invariants of the pools and of what is held; for tests and after failures."""
        for pool in self.state.pools.values():
            pool.check()
        if self.idle():
            for pool in self.state.pools.values():
                assert not pool.held, f"{self.settings.name}: {pool.held} {pool.kind} blocks leaked"
            assert not self.state.pending, f"{self.settings.name}: pending media leaked"
