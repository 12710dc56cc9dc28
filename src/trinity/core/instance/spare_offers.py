"""Offers that wait for room here, and that a sibling with room may have.

What waits holds no block here and has no pull; its blocks are leased at its source, which alone decides where they
go. So this instance lets go of it and names the sibling, in the Release; the source offers the same blocks there, as
it does after a loss (``trinity.core.migration.second_offers``). Nothing is computed again, and who waits for room
holds what it held before: blocks at its source, which are not what its siblings wait for (decision 0095).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from trinity.core.instance.lifecycle import release
from trinity.core.instance.phases import SPAN, Phase
from trinity.core.instance.request_state import PASSED, RequestState
from trinity.core.instance.reservation import blocks_to_reserve, decode_headroom
from trinity.core.instance.state import State
from trinity.core.instance.state_blocks import has_state_room
from trinity.core.messages import KV, PeerUp
from trinity.core.routing.stage_needs import fitting

LOOKED_AT = 8  # waiting ones of a queue: those behind them may stay, and each look costs time
MOSTLY = 0.5  # of a prompt: who has so much of it cached keeps it, as a later life goes there (decision 0085)


def free_blocks(s: State) -> int:
    """Count the KV blocks for offers that may come: those beyond what decodes here will need soon."""
    return s.kv.available - decode_headroom(s)


def has_room(s: State, blocks: int) -> bool:
    """True where a decode of so many blocks would begin at once, and nothing is ahead of it or to come."""
    if "D" not in s.settings.roles or s.reserved_as is not None or s.siblings.about(KV).awaits:
        return False
    if s.kv_offers or s.preempted or s.paused or s.migrated_queue or s.prefill_queue:
        return False
    rules = s.settings.rules
    full = rules.limit_decodes and len(s.decoding) + s.arriving[Phase.KV_PULL] >= rules.token_budget
    return not full and free_blocks(s) >= blocks and has_state_room(s)


def count_need(s: State, state: RequestState) -> int:
    """Count the KV blocks that an offered decode takes as it is admitted."""
    assert state.incoming is not None
    return blocks_to_reserve(s, state, len(state.incoming.offer.parts[0].blocks))


def find_decodes(s: State, peer: PeerUp, room: int | None = None) -> Iterator[RequestState]:
    """Find offered decodes that this sibling may have, in order; of those that need no more than ``room``."""
    for request in islice(s.kv_offers, LOOKED_AT):
        state = s.requests[request]
        fits = room is None or count_need(s, state) <= room
        if fits and _may_pass(state) and any(fitting("D", state.work, (peer,))) and not _has_text(s, state):
            yield state


def find_features(s: State, peer: PeerUp) -> Iterator[RequestState]:
    """Find offered features that this sibling may have, in order."""
    for request in islice(s.image_offers, LOOKED_AT) if "P" in peer.roles else ():
        state = s.requests[request]
        known = state.led or s.in_step(request) or any(s.cached_media(slot.keys) for slot in state.media)
        if _may_pass(state) and not known and any(fitting("P", state.work, (peer,))) and not _has_text(s, state):
            yield state


def _may_pass(state: RequestState) -> bool:
    """True the first time, in a first life, of what its source has filled: it is all there, and leased alone."""
    incoming, work = state.incoming, state.work
    if incoming is None or incoming.commit is None or work.attempt or work.alone or state.preemptions:
        return False
    offer = incoming.offer
    return not (offer.moves or offer.passed or incoming.released or any(part.holder for part in offer.parts))


def _has_text(s: State, state: RequestState) -> bool:
    return len(s.prefix_hits(state)) * s.settings.kv_block_size >= MOSTLY * state.prefill_end


def pass_offer(s: State, state: RequestState, to: str, now: float) -> None:
    """Let go of an offer that waits here, and have its source make it to a sibling. A Cancel goes by way of that."""
    incoming = state.incoming
    assert incoming is not None
    assert incoming.commit is not None
    state.book_time(now)
    name = SPAN[state.phase]
    waited = state.spans.get(name, 0.0) - incoming.commit.spans.get(name, 0.0)
    s.leave_tombstone(state, incoming.offer.source)
    release(s, state, PASSED, to=to, waited_s=waited)
    s.move(state, Phase.GONE, now)
