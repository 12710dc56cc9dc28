"""InstanceCore: one event in, commands out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity.core.lifecycle import cancel, forget, submit
from trinity.core.peers import peer_lost
from trinity.core.source import released
from trinity.core.state import Settings, State
from trinity.core.steps import pump, stepped
from trinity.core.target import committed, offered, pulled, ready, withdrawn
from trinity.messages import (
    Cancel,
    Commit,
    Forget,
    Offer,
    PeerLost,
    PeerUp,
    Pulled,
    Ready,
    Release,
    Stepped,
    Submit,
    Value,
    Withdraw,
)
from trinity.routing import RoundRobin, Router, RoutingPolicy

_HANDLERS: dict[type[Value], Callable[[State, Any, float], None]] = {
    Submit: submit,
    Cancel: cancel,
    Forget: forget,
    Offer: offered,
    Ready: ready,
    Commit: committed,
    Withdraw: withdrawn,
    Release: released,
    Stepped: stepped,
    Pulled: pulled,
    PeerLost: peer_lost,
}


class InstanceCore:
    """The decisions of one instance: admission, Algorithm 1, blocks, migration, cancel, failure.

    ``handle(event, now)`` takes one message or result and returns the commands to carry out, in order. ``now`` is any
    monotonic clock in seconds: live time, or a simulator's.
    """

    def __init__(self, settings: Settings, policy: RoutingPolicy | None = None) -> None:
        settings.rules.check_cost()
        self.settings = settings
        self.state = State(settings, Router(policy or RoundRobin()))

    def handle(self, event: Value, now: float) -> list[Value]:
        s = self.state
        s.out = []
        if isinstance(event, PeerUp):
            s.router.add(event)
        else:
            _HANDLERS[type(event)](s, event, now)
            pump(s, now)
        return s.out

    def idle(self) -> bool:
        """Whether no request, step, transfer or lease is here."""
        return self.state.idle()

    def announcement(self) -> PeerUp:
        """What the other cores must know of this one."""
        own = self.settings
        return PeerUp(own.name, own.roles, own.epoch, dict(own.pools), own.media_block, own.kv_block)

    def check(self) -> None:
        """Assert the invariants of the pools and of what is held; for tests and after failures."""
        for pool in self.state.pools.values():
            pool.check()
        if self.idle():
            for pool in self.state.pools.values():
                assert not pool.held, f"{self.settings.name}: {pool.held} {pool.kind} blocks leaked"
            assert not self.state.pending, f"{self.settings.name}: pending media leaked"
