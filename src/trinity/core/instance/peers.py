"""Peers of an instance: they arrive, report their loads, fall silent and are lost; leases and offers end with them.

A lease lives for ``Settings.lease_s`` and is renewed by any word from its target. Taking blocks back does not reach a
read in flight over there: a block gets a higher generation before it gets new content, and the reader looks after its
copy (decision 0011).
"""

from __future__ import annotations

from math import inf

from trinity.core.instance.front_ends import lose_frontend, nowhere, untaken
from trinity.core.instance.helpers import lose_helper
from trinity.core.instance.lifecycle import end
from trinity.core.instance.loads import followers
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import FEATURES_GONE, PASSED, REFUSED, UNPULLED, UNTAKEN, Lease, RequestState
from trinity.core.instance.state import State, failure
from trinity.core.messages import (
    Failure,
    Finished,
    Gone,
    PeerDown,
    PeerLeaving,
    PeerLoad,
    PeerSuspect,
    PeerUp,
    Release,
    Withdraw,
)
from trinity.core.migration.kv_target import end_transfer
from trinity.core.migration.moves import LATE, LOST, finish_copy, give_up
from trinity.core.migration.prefix_fetch import give_up_prefixes
from trinity.core.migration.remote_features import encode_after_all, forget_skipped, give_up_fetches, give_up_pulls
from trinity.core.migration.second_offers import offer_again, offer_elsewhere, turn_down
from trinity.core.migration.source import drop_offer, offer_found
from trinity.core.migration.target import outlive_source
from trinity.core.values import is_frontend
from trinity.stage_kinds import taker_of


def handle_release(s: State, event: Release, now: float) -> None:
    """Drop the blocks of a lease that its target released (step 4); nothing if they were taken back before."""
    lease = s.outgoing.pop(event.id, None)
    if lease is None:
        turn_down(s, event)
        return
    s.renew_leases(lease.target, now)
    if event.outcome == PASSED and not offer_elsewhere(s, lease, event, now):
        _report_end(s, lease, nowhere(s, taker_of(lease.kind)))
    for kind, blocks in lease.by_kind:
        s.pools[kind].drop(blocks)
    s.pull_cost = event.cost or s.pull_cost
    if event.outcome == PASSED:
        return
    if event.outcome == FEATURES_GONE:
        found = encode_after_all(s, lease, event.lacks, now)
        if found is not None:
            offer_found(s, found, now)
        return
    if lease.copies:
        finish_copy(s, lease, now, event.outcome)
        return
    forget_skipped(s, lease)
    state = s.requests.get(lease.request)
    if event.outcome == UNTAKEN:
        _report_untaken(s, lease, state, now)
    elif state is not None and state.outgoing == event.id:  # released before the commit: the target gave it up
        give_up(s, state, now, lease.target, event.outcome)
    elif event.outcome in (REFUSED, UNPULLED):
        _report_end(s, lease, _refused(s, lease))


def take_back(s: State, lease: Lease) -> None:
    """End a lease without a Release: its target may still be reading these blocks."""
    del s.outgoing[lease.id]
    forget_skipped(s, lease)
    for kind, blocks in lease.by_kind:
        s.revoked_blocks[kind].update(blocks)
        s.pools[kind].drop(blocks)


def check_leases(s: State, now: float) -> None:
    """End the leases that ran out, and set the time of the next check."""
    if now - s.lease_check > s.settings.lease_s / 2:
        s.awake_since = now  # nobody called for so long: it was this instance that stood still, not its peers
    left = min(give_up_fetches(s, None, now), give_up_prefixes(s, None, now))
    for lease in list(s.outgoing.values()):
        due = _end_of(s, lease)
        if due <= now:
            _expired(s, lease, now)
        else:
            left = min(left, due)
    for state in [s.requests[request] for request in s.incoming.values()]:
        left = min(left, _check_source(s, state, now))
    s.lease_check = left


def _moves(s: State, lease: Lease) -> bool:
    state = s.requests.get(lease.request)
    return state is not None and state.outgoing == lease.id and state.phase is Phase.MOVING


def _end_of(s: State, lease: Lease) -> float:
    """Clock time at which a lease ends. A decode that moves has ``move_s``: it has no row meanwhile."""
    due = s.lease_end(lease.since, lease.target)
    return min(due, lease.since + s.settings.transfers.move_s) if _moves(s, lease) else due


def _expired(s: State, lease: Lease, now: float) -> None:
    """Take back a lease whose target fell silent. Its request ends exactly once, or goes on if it moves: it is here."""
    moves = _moves(s, lease)
    take_back(s, lease)
    why = _silent(s, lease.target, lease.target, s.settings.name, lease.kind)
    s.send(lease.target, Withdraw(lease.id, why))
    state = s.requests.get(lease.request)
    if lease.copies:
        finish_copy(s, lease, now, LATE)
    elif state is not None and moves:
        give_up(s, state, now, lease.target, LATE)
    elif state is not None and state.outgoing == lease.id:
        drop_offer(state)
        end(s, state, now, "error", why)
    else:
        _report_end(s, lease, why)


def _report_untaken(s: State, lease: Lease, state: RequestState | None, now: float) -> None:
    """End a request whose target is not in touch with the owner, and tell that one, as the target cannot."""
    if state is None or state.outgoing != lease.id:
        _report_end(s, lease, untaken(s, lease.target))
    else:
        drop_offer(state)
        end(s, state, now, "error", untaken(s, lease.target))


def _report_end(s: State, lease: Lease, why: Failure) -> None:
    """Report the end of a request that its target does not report, if its owner waits for it."""
    stone = s.tombstones.get(lease.request)
    if stone is not None and (stone.target, stone.attempt) == (lease.target, lease.attempt):  # not forgotten yet
        s.send(stone.owner, _report(lease, why))


def _refused(s: State, lease: Lease) -> Failure:
    """Failure of a decode that its target had given up when the Commit came."""
    fields = {"source": s.settings.name, "target": lease.target, "kind": lease.kind, "cause": "LeaseExpired"}
    return failure("MigrationError", f"instance {lease.target} gave the request up while it moved there", **fields)


def _report(lease: Lease, why: Failure) -> Finished:
    return Finished(
        request=lease.request,
        attempt=lease.attempt,
        reason="error",
        failure=why,
        count=lease.count,
        route=(*lease.route, lease.target),
    )


def _check_source(s: State, state: RequestState, now: float) -> float:
    """Clock time at which the lease of an incoming offer ends; ends the request if it has passed."""
    incoming = state.incoming
    if incoming is None or state.ending is not None:
        return inf
    source = incoming.offer.source
    due = s.lease_end(incoming.since, source)
    if due > now:
        return due
    end_transfer(s, state, now, _silent(s, source, s.settings.name, source, incoming.offer.kind))
    return inf


def _silent(s: State, who: str, target: str, source: str, kind: str) -> Failure:
    fields = {"source": source, "target": target, "kind": kind, "cause": "LeaseExpired"}
    text = f"instance {who} was silent for {s.settings.lease_s:g} s, and the lease on {kind} blocks ran out; try again"
    return failure("MigrationError", text, **fields)


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
