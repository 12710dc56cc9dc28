"""InstanceCore: dispatches each event to its handler and returns the commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity.core.instance.arrival import handle_submit
from trinity.core.instance.collection import handle_collected
from trinity.core.instance.company import handle_peer_reserved, say_empty
from trinity.core.instance.front_ends import handle_frontend_up, handle_not_taken
from trinity.core.instance.home_features import dispatch_fetched, dispatch_pulled
from trinity.core.instance.lifecycle import handle_cancel, handle_forget
from trinity.core.instance.peers import handle_peer_avoided, handle_peer_load, handle_peer_lost, handle_peer_up
from trinity.core.instance.repeated_step import RepeatedStep, find_repeated
from trinity.core.instance.siblings import handle_spare, share_work
from trinity.core.instance.state import Settings, State
from trinity.core.instance.steps import handle_stepped, pump
from trinity.core.instance.timers import handle_tick, next_timer
from trinity.core.messages import (
    Cancel,
    Caught,
    Collected,
    Commit,
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
    Pulled,
    Ready,
    Release,
    Spare,
    Stepped,
    Submit,
    Tick,
    Value,
    Withdraw,
)
from trinity.core.migration.leases import handle_release
from trinity.core.migration.moves import handle_caught, handle_move, offer_moves
from trinity.core.migration.remote_features import handle_fetch
from trinity.core.migration.source import handle_helped, handle_layers_written
from trinity.core.migration.target import handle_commit, handle_offer, handle_ready, handle_withdraw
from trinity.core.routing.router import RoundRobin, Router, RoutingPolicy
from trinity.core.values import FrontendUp, NotTaken

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
