"""Siblings: instances of one stage, of which one takes what waits at another (EPDServe 3.2, global queues).

An idle instance tells its siblings once that it wants work, as one that is just up does without a word; that stands
until one of them has some. Who has a request that waits, and does not begin with the step that starts now, says so. The
idle one takes it if it is still idle, from one sibling at a time. Only then the request is chosen, and passed on as any
Submit: it waited in a queue, which holds no block, and belongs to one instance at any time. Neither promises anything:
a word that is lost costs time alone.

Where nobody is idle nothing is said, and where nothing waits nothing is said again. A request is handed over once, in
its first life (decision 0091).

Decodes that are offered and wait for room are spoken of likewise, as a kind of their own: who has room for one wants
it, idle or not. They and offered features come from their source (``trinity.core.instance.siblings``): the taker is
told which that is, so that it does not wait for one that is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from trinity.core.instance.admission import pass_on
from trinity.core.instance.lifecycle import blocks_to_reserve, decode_headroom, has_state_room, release
from trinity.core.instance.peer_questions import SiblingWords
from trinity.core.instance.phases import SPAN, Phase
from trinity.core.instance.request_state import PASSED, RequestState
from trinity.core.instance.state import State
from trinity.core.messages import KV, WORK, PeerUp, Said, Spare
from trinity.core.routing.stage_peers import fitting
from trinity.stage_kinds import PREFILL, encoder_of, roles_of, stage_of, taker_of

ABOUT = (WORK, KV)


def handle_spare(s: State, event: Spare, now: float) -> None:
    """Take note of a sibling's word, and answer it."""
    words, name = s.siblings.about(event.kind), event.name
    if event.said == "want":
        words.want(name)
    elif event.said == "have":
        takes = has_room(s, event.blocks) if event.kind == KV else is_free(s)
        words.answer(name, takes, event.blocks)
        _say(s, name, "take" if takes else "no", event.kind, free_blocks(s) if takes and event.kind == KV else 0)
    elif event.said == "take":
        words.told.discard(name)
        _hand_over(s, event, now)
    elif event.said == "no":
        words.told.discard(name)
    elif event.said == "sent":
        words.expect(name, event.source, _is_up(s, event))
    elif words.awaits == name:
        words.came(name)
    else:
        s.siblings.give_up()


def _is_up(s: State, event: Spare) -> bool:
    source = s.router.peers.get(event.source)
    return source is not None and source.epoch == event.epoch and event.source not in s.router.suspects


def _say(s: State, to: str, said: Said, kind: str, blocks: int = 0) -> None:
    s.send(to, Spare(s.settings.name, said, kind, blocks))


def is_free(s: State) -> bool:
    """True where nothing is here, nothing is to come from a sibling, and nobody is to run alone."""
    return s.idle() and not s.siblings.awaits and s.reserved_as is None


def share_work(s: State) -> None:
    """Tell siblings that this instance has nothing to do, or room, or that something waits here which they may have."""
    for kind in ABOUT:
        words = s.siblings.about(kind)
        if has_room(s, max(1, words.refused)) if kind == KV else is_free(s):
            for peer in _siblings(s, kind):
                if peer.name not in words.wanted:
                    words.ask(peer.name)
                    _say(s, peer.name, "want", kind)
        elif words.wanting and (s.kv_offers if kind == KV else s.encode_queue or s.prefill_queue or s.image_offers):
            _tell_waiting(s, kind, words)


def _tell_waiting(s: State, kind: str, words: SiblingWords) -> None:
    """Tell as many siblings as there are requests for them, those first that had nothing to do last."""
    for name in reversed(words.wanting):
        peer = _find_sibling(s, name, kind)
        found = list(_find(s, peer, kind)) if peer is not None else []
        if len(found) > len(words.told):
            words.tell(name)
            _say(s, name, "have", kind, count_need(s, found[0]) if kind == KV else 0)


def _find(s: State, peer: PeerUp, kind: str, room: int | None = None) -> Iterator[RequestState]:
    return find_decodes(s, peer, room) if kind == KV else find_spare(s, peer)


def _siblings(s: State, kind: str) -> Iterator[PeerUp]:
    """List those that have a stage of this kind as this instance does, and are neither silent nor to end."""
    avoided = {s.settings.name} | s.router.suspects | s.router.leaving
    letters = [each for each in s.settings.roles if (KV in stage_of(each).needs) is (kind == KV)]
    for peer in s.router.peers.values():
        if peer.name not in avoided and any(each in peer.roles for each in letters):
            yield peer


def _find_sibling(s: State, name: str, kind: str) -> PeerUp | None:
    peer = next((each for each in _siblings(s, kind) if each.name == name), None)
    return None if peer is None or s.router.is_reserved(name, peer.epoch) else peer


def find_spare(s: State, peer: PeerUp) -> Iterator[RequestState]:
    """Find requests that wait here and that this sibling may have, in the order of their queues."""
    does = roles_of(peer.roles)
    for encodes, queue in ((True, s.encode_queue), (False, s.prefill_queue)):
        for request in islice(queue, LOOKED_AT) if (does.encodes if encodes else does.prefills) else ():
            state = s.requests[request]
            letter = encoder_of(state.work) if encodes else PREFILL.letter
            if letter in peer.roles and _may_go(s, state) and any(fitting(letter, state.work, (peer,))):
                yield state
    yield from find_features(s, peer)


def _may_go(s: State, state: RequestState) -> bool:
    """True of a first life that came from its front end, and of which little is here or on its way here."""
    work = state.work
    first = not (work.attempt or work.alone or state.preemptions or state.asker) and len(state.route) == 1
    if not first or state.led or s.in_step(work.request):
        return False
    return _has_no_features(s, state) if state.phase is Phase.IMAGE_QUEUE else _has_little_text(s, state)


def _has_no_features(s: State, state: RequestState) -> bool:
    """True where none of its items is cached, at a helper, or being encoded here for another request."""
    return not any(
        slot.holder or slot.helper or slot.span.content in s.pending or s.cached_media(slot) for slot in state.media
    )


def _has_little_text(s: State, state: RequestState) -> bool:
    cached = len(s.prefix_hits(state)) * s.settings.kv_block_size
    return not state.media and cached < MOSTLY * state.prefill_end


def _hand_over(s: State, taken: Spare, now: float) -> None:
    """Pass what waits on to a sibling, the first one that it may have."""
    name, kind = taken.name, taken.kind
    peer = _find_sibling(s, name, kind)
    state = next(_find(s, peer, kind, taken.blocks), None) if peer is not None else None
    if state is None:
        _say(s, name, "none", kind)
    elif state.incoming is None:
        pass_on(s, state, name, now)
    else:
        offer = state.incoming.offer
        pass_offer(s, state, name, now)
        s.send(name, Spare(s.settings.name, "sent", kind, 0, offer.source, offer.epoch))


LOOKED_AT = 8  # waiting ones of a queue: those behind them may stay, and each look costs time
MOSTLY = 0.5  # of a prompt: who has so much of it cached keeps it, as a later life goes there (decision 0085)


def free_blocks(s: State) -> int:
    """Count the KV blocks for offers that may come: those beyond what decodes here will need soon."""
    return s.kv.available - decode_headroom(s)


def has_room(s: State, blocks: int) -> bool:
    """True where a decode of so many blocks would begin at once, and nothing is ahead of it or to come."""
    if not s.does.decodes or s.reserved_as is not None or s.siblings.about(KV).awaits:
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
        if fits and _may_pass(state) and any(fitting(taker_of(KV), state.work, (peer,))) and not _has_text(s, state):
            yield state


def find_features(s: State, peer: PeerUp) -> Iterator[RequestState]:
    """Find offered features that this sibling may have, in order."""
    for request in islice(s.image_offers, LOOKED_AT) if roles_of(peer.roles).prefills else ():
        state = s.requests[request]
        known = state.led or s.in_step(request) or any(s.cached_media(slot) for slot in state.media)
        fits = any(fitting(PREFILL.letter, state.work, (peer,)))
        if _may_pass(state) and not known and fits and not _has_text(s, state):
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
