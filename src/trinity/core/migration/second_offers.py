"""Offers that are made again, once, to another instance: the target was lost before it had the blocks.

The source has these blocks leased until the Release. So the loss of a decode instance before that costs no prefill, and
that of a prefill instance no encoding: the request goes on in the same life. Its source says that it has it again
(``Moved``), where it would else say that it is gone (``Gone``), and the front end waits for the one or the other.

Once, and in the first life of a request: it may be what its targets die of, and the front end is to see that
(``trinity.core.isolation``).
"""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import Lease, RequestState, Tombstone
from trinity.core.instance.state import State
from trinity.core.messages import KV, Moved, Offer, Ready, Work
from trinity.core.migration.kv_source import close_stream
from trinity.core.migration.source import drop_offer, may_offer, name_offer, offer_media
from trinity.core.routing import BadChoice


def offer_again(s: State, lease: Lease, now: float) -> bool:
    """Take a request back from a lost target, and offer it to another one. Returns False where it goes with it.

    One whose prefill or encoding is under way here is offered as that goes on.
    """
    offer = lease.offer
    if offer is None or not _may_be_again(s, lease, offer):
        return False
    state = s.requests.get(lease.request)
    if state is not None and state.outgoing == lease.id:
        return _take_back(s, state, lease, now)
    target = _find_target(s, offer) if lease.said is not None and not lease.said.ending else None
    if target is None:
        return False
    _lend_again(s, lease, offer, target, now)
    return True


def _may_be_again(s: State, lease: Lease, offer: Offer) -> bool:
    """True in a first life, the first time, where it has not ended everywhere and all blocks are here."""
    stone = s.tombstones.get(lease.request)
    stands = stone is not None and (stone.target, stone.attempt) == (lease.target, lease.attempt)
    first = not offer.work.attempt and not offer.work.alone and lease.route.count(s.settings.name) == 1
    return stands and first and not (offer.moves or any(part.holder for part in offer.parts))


def _take_back(s: State, state: RequestState, lease: Lease, now: float) -> bool:
    if state.ending is not None or state.phase is Phase.MOVING:
        return False
    state.come_back(lease.target, s.settings.name)
    drop_offer(state)
    close_stream(state)
    del s.tombstones[lease.request]
    _say(s, state.work, state.route)
    if state.phase is Phase.ENCODING and may_offer(s, state):
        offer_media(s, state, now)
    return True


def _find_target(s: State, offer: Offer) -> str | None:
    try:
        return s.router.choose("D" if offer.kind == KV else "P", offer.work)
    except BadChoice:
        return None


def _lend_again(s: State, lease: Lease, offer: Offer, target: str, now: float) -> None:
    """Lease the same blocks to another instance, with all that the first one was told."""
    said, route = lease.said, (*lease.route, lease.target, s.settings.name)
    assert said is not None
    fresh = replace(
        offer,
        id=name_offer(s),
        route=route,
        generation=s.generation,
        target_epoch=s.router.peers[target].epoch,
    )
    left = None if lease.deadline == inf else max(0.0, lease.deadline - now)
    commit = replace(said, id=fresh.id, deadline_s=left)
    again = Lease(fresh.id, lease.request, target, lease.kind, lease.blocks, now, lease.attempt, route, lease.count)
    again.offer, again.said, again.deadline = fresh, commit, lease.deadline
    s.lend(again)
    _say(s, offer.work, route)
    s.tombstones[lease.request] = Tombstone(target, lease.attempt, len(route), offer.work.owner)
    for message in (fresh, Ready(fresh.id, tuple(range(len(fresh.parts)))), commit):
        s.send(target, message)


def _say(s: State, work: Work, route: tuple[str, ...]) -> None:
    s.send(work.owner, Moved(work.request, work.attempt, s.settings.name, len(route) - 1, s.settings.epoch))
