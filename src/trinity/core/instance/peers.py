"""Handles the arrival, load reports and loss of peers."""

from __future__ import annotations

from trinity.core.instance.front_ends import lose_frontend
from trinity.core.instance.helpers import lose_helper
from trinity.core.instance.loads import followers
from trinity.core.instance.state import State, failure
from trinity.core.messages import Gone, PeerDown, PeerLeaving, PeerLoad, PeerSuspect, PeerUp
from trinity.core.migration.kv_target import end_transfer
from trinity.core.migration.leases import take_back
from trinity.core.migration.moves import LOST, finish_copy, give_up
from trinity.core.migration.prefix_fetch import give_up_prefixes
from trinity.core.migration.remote_features import give_up_fetches, give_up_pulls
from trinity.core.migration.second_offers import offer_again
from trinity.core.migration.target import outlive_source
from trinity.core.values import is_frontend


def handle_peer_up(s: State, event: PeerUp, now: float) -> None:
    """Add an instance, perhaps this one itself, and start to report the load."""
    s.router.add(event)
    s.siblings.meet(event.name)
    s.has_load_listeners = bool(followers(s))
    s.begin_reports(now)


def handle_peer_load(s: State, event: PeerLoad, now: float) -> None:
    s.renew_leases(event.name, now)
    s.router.take(event)


def handle_peer_avoided(s: State, event: PeerSuspect | PeerLeaving, now: float) -> None:
    """Route past a peer that is silent or is to end; what is under way with it goes on."""
    s.router.avoid(event)
    s.siblings.avoid(event.name)
    if event.name in s.router.suspects:
        lose_helper(s, event.name)


def handle_peer_lost(s: State, event: PeerDown, now: float) -> None:
    """End the requests whose blocks are at the lost peer, take back its leases, and say which requests went there.

    Their owners end these, unless they know that they have gone on: they may not have heard of them from the peer.
    """
    if is_frontend(event.name):
        lose_frontend(s, event.name, now)
        return
    lost = s.router.drop(event.name) or s.router.lost.get(event.name)
    epoch = lost.epoch if lost is not None else 0
    s.has_load_listeners = bool(followers(s))
    s.siblings.drop(event.name)
    name = s.settings.name
    s.last_heard.pop(event.name, None)
    give_up_fetches(s, event.name, now)
    give_up_pulls(s, event.name, now)
    give_up_prefixes(s, event.name, now)
    lose_helper(s, event.name)
    for request in list(s.incoming.values()):
        state = s.requests[request]
        incoming = state.incoming
        if incoming is not None and incoming.offer.source == event.name and not incoming.released:
            if outlive_source(s, state, now):
                continue
            fields = {"source": event.name, "target": name, "kind": incoming.offer.kind, "cause": "PeerLost"}
            text = f"instance {event.name} was lost before its {incoming.offer.kind} blocks were here"
            end_transfer(s, state, now, failure("MigrationError", text, **fields))
    for lease in list(s.outgoing.values()):
        if lease.target == event.name:
            if offer_again(s, lease, now):
                take_back(s, lease)
                continue
            take_back(s, lease)
            if lease.copies:
                finish_copy(s, lease, now, LOST)
            waiting = s.requests.get(lease.request)
            if waiting is not None and waiting.outgoing == lease.id:
                give_up(s, waiting, now, event.name, LOST)
    for request, stone in s.tombstones.items():
        if stone.target == event.name:
            s.send(stone.owner, Gone(request, stone.attempt, name, event.name, stone.hop, epoch))
