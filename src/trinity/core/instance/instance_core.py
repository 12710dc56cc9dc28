"""InstanceCore: one event in, commands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity.core.instance.arrival import submit
from trinity.core.instance.lifecycle import cancel, forget
from trinity.core.instance.peers import peer_load, peer_lost, peer_up
from trinity.core.instance.state import Settings, State
from trinity.core.instance.steps import pump, stepped
from trinity.core.instance.timers import next_timer, tick
from trinity.core.messages import (
    Cancel,
    Commit,
    Fetch,
    Fetched,
    Forget,
    Offer,
    PeerLoad,
    PeerLost,
    PeerUp,
    Progress,
    Pulled,
    Ready,
    Release,
    Stepped,
    Submit,
    Tick,
    Value,
    Withdraw,
)
from trinity.core.migration.kv_source import progressed
from trinity.core.migration.leases import released
from trinity.core.migration.remote_features import fetch, fetched
from trinity.core.migration.target import committed, offered, pulled, ready, withdrawn
from trinity.core.routing import RoundRobin, Router, RoutingPolicy

_HANDLERS: dict[type[Value], Callable[[State, Any, float], None]] = {
    Submit: submit,
    Cancel: cancel,
    Forget: forget,
    Offer: offered,
    Ready: ready,
    Commit: committed,
    Withdraw: withdrawn,
    Release: released,
    Progress: progressed,
    Stepped: stepped,
    Pulled: pulled,
    PeerUp: peer_up,
    PeerLoad: peer_load,
    PeerLost: peer_lost,
    Fetch: fetch,
    Fetched: fetched,
    Tick: tick,
}


class InstanceCore:
    """The decisions of one instance: admission, Algorithm 1, blocks, migration, cancel, failure.

    ``handle(event, now)`` takes one message or result and returns the commands to carry out, in order. ``now`` is any
    monotonic clock in seconds: live time, or a simulator's.
    """

    def __init__(self, settings: Settings, policy: RoutingPolicy | None = None) -> None:
        settings.rules.check_cost()
        self.settings = settings
        self.state = State(settings, Router(policy or RoundRobin(), settings.name))

    def handle(self, event: Value, now: float) -> list[Value]:
        s = self.state
        s.out = []
        kind = type(event)
        _HANDLERS[kind](s, event, now)
        if kind is not PeerUp and kind is not PeerLoad:
            pump(s, now)
        return s.out

    def next_timer(self) -> float | None:
        """When a Tick is due."""
        return next_timer(self.state)

    def idle(self) -> bool:
        """Whether no request, step, transfer or lease is here."""
        return self.state.idle()

    def announcement(self) -> PeerUp:
        """What the other cores must know of this one."""
        own = self.settings
        returns = own.reservation == "optimistic"
        return PeerUp(own.name, own.roles, own.epoch, dict(own.pools), own.image_block_size, own.kv_block_size, returns)

    def check(self) -> None:
        """Assert the invariants of the pools and of what is held; for tests and after failures."""
        for pool in self.state.pools.values():
            pool.check()
        if self.idle():
            for pool in self.state.pools.values():
                assert not pool.held, f"{self.settings.name}: {pool.held} {pool.kind} blocks leaked"
            assert not self.state.pending, f"{self.settings.name}: pending media leaked"
