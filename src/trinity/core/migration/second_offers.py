"""Offers that are made again to another instance: the target was lost before it had the blocks, or had no room.

The source has these blocks leased until the Release. So the loss of a decode instance before that costs no prefill, and
that of a prefill instance no encoding: the request goes on in the same life. Its source says that it has it again
(``Moved``), where it would else say that it is gone (``Gone``), and the front end waits for the one or the other.

After a loss once, and in the first life of a request: it may be what its targets die of, and the front end is to see
that (``trinity.core.frontend.dispatch``). For want of room once as well: that target has named a sibling, which has
some.
"""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from trinity.core.instance.phases import SPAN, Phase
from trinity.core.instance.request_state import Lease, RequestState, Tombstone
from trinity.core.instance.state import State
from trinity.core.messages import KV, Commit, Moved, Offer, Ready, Release, Spare, Work
from trinity.core.migration.source import close_stream, drop_offer, may_offer, name_offer, offer_media
from trinity.core.routing.router import BadChoice
from trinity.stage_kinds import taker_of


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
    visits = lease.route.count(s.settings.name) - offer.passed
    first = not offer.work.attempt and not offer.work.alone and visits == 1
    return _stands(s, lease) and first and not (offer.moves or any(part.holder for part in offer.parts))


def _stands(s: State, lease: Lease) -> bool:
    """True where a request is at the target of this lease, as far as is known, and has not ended."""
    stone = s.tombstones.get(lease.request)
    return stone is not None and (stone.target, stone.attempt) == (lease.target, lease.attempt)


def offer_elsewhere(s: State, lease: Lease, passed: Release, now: float) -> bool:
    """Offer what its target has no room for to the sibling that it names, or to another if that is not up any more.

    The sibling hears if it is not to come. Returns False for a request that goes with its target: there is no other.
    """
    offer, target = lease.offer, None
    if offer is not None and lease.said is not None and _stands(s, lease):
        target = passed.to if _may_have(s, offer, passed.to) else _find_target(s, offer)
        if target is not None:
            lease.said = _add_wait(lease.said, offer, passed.waited_s)
            _lend_again(s, lease, offer, target, now, passed=True)
    if target != passed.to:
        turn_down(s, passed)
    return target is not None or not _stands(s, lease)


def _add_wait(said: Commit, offer: Offer, seconds: float) -> Commit:
    span = SPAN[Phase.KV_OFFER if offer.kind == KV else Phase.IMAGE_OFFER]
    return replace(said, spans={**said.spans, span: said.spans.get(span, 0.0) + seconds})


def turn_down(s: State, passed: Release) -> None:
    """Tell the sibling that a target has named that nothing is to come from here."""
    if passed.to:
        s.send(passed.to, Spare(s.settings.name, "none"))


def _may_have(s: State, offer: Offer, name: str) -> bool:
    found = s.router.trusted(s.router.fitting(taker_of(offer.kind), offer.work))
    return any(peer.name == name for peer in found)


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
        return s.router.choose(taker_of(offer.kind), offer.work)
    except BadChoice:
        return None


def _lend_again(s: State, lease: Lease, offer: Offer, target: str, now: float, passed: bool = False) -> None:
    """Lease the same blocks to another instance, with all that the first one was told."""
    said, route = lease.said, (*lease.route, lease.target, s.settings.name)
    assert said is not None
    fresh = replace(
        offer,
        id=name_offer(s),
        route=route,
        generation=s.generation,
        target_epoch=s.router.peers[target].epoch,
        passed=offer.passed or passed,
    )
    left = None if lease.deadline == inf else max(0.0, lease.deadline - now)
    commit = replace(said, id=fresh.id, deadline_s=left)
    again = Lease(fresh.id, lease.request, target, lease.kind, lease.blocks, now, lease.attempt, route, lease.count)
    again.offer, again.said, again.deadline, again.state = fresh, commit, lease.deadline, lease.state
    s.lend(again)
    _say(s, offer.work, route, passed=passed)
    s.tombstones[lease.request] = Tombstone(target, lease.attempt, len(route), offer.work.owner)
    states = (Ready(fresh.id, (), state=True),) if fresh.state else ()
    for message in (fresh, Ready(fresh.id, tuple(range(len(fresh.parts)))), *states, commit):
        s.send(target, message)


def _say(s: State, work: Work, route: tuple[str, ...], passed: bool = False) -> None:
    own = s.settings
    s.send(work.owner, Moved(work.request, work.attempt, own.name, len(route) - 1, own.epoch, passed=passed))
