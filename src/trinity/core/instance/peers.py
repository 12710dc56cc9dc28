"""What is heard of peers. One is gone: what came from it cannot be pulled any more, what was leased to it is free."""

from __future__ import annotations

from trinity.core.instance.lifecycle import end
from trinity.core.instance.loads import followers
from trinity.core.instance.state import State, failure
from trinity.core.messages import PeerLoad, PeerLost, PeerUp
from trinity.core.migration.leases import take_back
from trinity.core.migration.remote_features import give_up_fetches


def peer_up(s: State, event: PeerUp, now: float) -> None:
    """An instance is there, perhaps this one itself: from now on, say how things stand here."""
    s.router.add(event)
    s.has_load_listeners = bool(followers(s))
    s.begin_reports(now)


def peer_load(s: State, event: PeerLoad, now: float) -> None:
    s.renew_leases(event.name, now)
    s.router.take(event)


def peer_lost(s: State, event: PeerLost, now: float) -> None:
    """End the requests whose blocks are still over there, and take back the leases. The front end ends those that
    were over there themselves: their lease here was all that is left of them."""
    s.router.drop(event.name)
    s.has_load_listeners = bool(followers(s))
    s.last_heard.pop(event.name, None)
    give_up_fetches(s, event.name, now)
    for request in list(s.incoming.values()):
        state = s.requests[request]
        incoming = state.incoming
        if incoming is not None and incoming.offer.source == event.name and not incoming.released:
            fields = {"source": event.name, "target": s.settings.name, "kind": incoming.offer.kind, "cause": "PeerLost"}
            text = f"instance {event.name} was lost before its {incoming.offer.kind} blocks were here"
            end(s, state, now, "error", failure("MigrationError", text, **fields))
    for lease in list(s.outgoing.values()):
        if lease.target == event.name:
            take_back(s, lease)
            waiting = s.requests.get(lease.request)
            if waiting is not None and waiting.outgoing == lease.id:
                end(s, waiting, now, "cancelled")
