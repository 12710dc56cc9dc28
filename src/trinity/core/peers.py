"""A peer is gone: what came from it cannot be pulled any more, what was leased to it is free."""

from __future__ import annotations

from trinity.core.lifecycle import end
from trinity.core.state import State, failure
from trinity.messages import PeerLost


def peer_lost(s: State, event: PeerLost, now: float) -> None:
    """End the requests whose blocks are still over there, and take back the leases. The front end ends those that
    were over there themselves: their lease here was all that is left of them."""
    s.router.drop(event.name)
    for request in list(s.incoming.values()):
        state = s.requests[request]
        incoming = state.incoming
        if incoming is not None and incoming.offer.source == event.name and not incoming.released:
            fields = {"source": event.name, "target": s.settings.name, "kind": incoming.offer.kind, "cause": "PeerLost"}
            text = f"instance {event.name} was lost before its {incoming.offer.kind} blocks were here"
            end(s, state, now, "error", failure("MigrationError", text, **fields))
    for offer, lease in list(s.outgoing.items()):
        if lease.target == event.name:
            del s.outgoing[offer]
            s.pools[lease.kind].drop(lease.blocks)
            waiting = s.requests.get(lease.request)
            if waiting is not None and waiting.outgoing == offer:
                end(s, waiting, now, "cancelled")
