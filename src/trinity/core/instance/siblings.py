"""Siblings: instances of one stage, of which an idle one takes what waits at another (EPDServe 3.2, global queues).

An idle instance tells its siblings once that it wants work, as one that is just up does without a word; that stands
until one of them has some. Who has a request that waits, and does not begin with the step that starts now, says so. The
idle one takes it if it is still idle, from one sibling at a time. Only then the request is chosen, and passed on as any
Submit: it waited in a queue, which holds no block, and belongs to one instance at any time. Neither promises anything:
a word that is lost costs time alone.

Where nobody is idle nothing is said, and where nothing waits nothing is said again. A request is handed over once, in
its first life (decision 0091).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from trinity.core.instance.arrival import pass_on
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import PeerUp
from trinity.core.spare_work import Said, Spare
from trinity.core.stage_needs import fitting

LOOKED_AT = 8  # waiting requests of a queue: those behind them may stay, and each look costs time
MOSTLY = 0.5  # of a prompt: who has so much of it cached keeps it, as a later life goes there (decision 0085)


def handle_spare(s: State, event: Spare, now: float) -> None:
    """Take note of a sibling's word, and answer it."""
    shared, name = s.siblings, event.name
    if event.said == "want":
        shared.want(name)
    elif event.said == "have":
        shared.wanted.discard(name)
        takes = is_free(s)
        shared.awaits = name if takes else shared.awaits
        _say(s, name, "take" if takes else "no")
    elif event.said == "take":
        shared.told.discard(name)
        _hand_over(s, name, now)
    elif event.said == "no":
        shared.told.discard(name)
    else:
        shared.came(name)


def _say(s: State, to: str, said: Said) -> None:
    s.send(to, Spare(s.settings.name, said))


def is_free(s: State) -> bool:
    """True where nothing is here, nothing is to come from a sibling, and nobody is to run alone."""
    return s.idle() and not s.siblings.awaits and s.reserved_as is None


def share_work(s: State) -> None:
    """Tell siblings that this instance has nothing to do, or that something waits here which they may have."""
    if is_free(s):
        for peer in _siblings(s):
            if peer.name not in s.siblings.wanted:
                s.siblings.wanted.add(peer.name)
                _say(s, peer.name, "want")
    elif s.siblings.wanting and (s.encode_queue or s.prefill_queue):
        _tell_waiting(s)


def _tell_waiting(s: State) -> None:
    """Tell as many siblings as there are requests for them, those first that had nothing to do last."""
    for name in reversed(s.siblings.wanting):
        peer = _find_sibling(s, name)
        found = sum(1 for _ in find_spare(s, peer)) if peer is not None else 0
        if found > len(s.siblings.told):
            s.siblings.tell(name)
            _say(s, name, "have")


def _siblings(s: State) -> Iterator[PeerUp]:
    """List those that encode or prefill as this instance does, and are neither silent nor to end."""
    avoided = {s.settings.name} | s.router.suspects | s.router.leaving
    for peer in s.router.peers.values():
        if peer.name not in avoided and any(each in peer.roles for each in "EP" if each in s.settings.roles):
            yield peer


def _find_sibling(s: State, name: str) -> PeerUp | None:
    peer = next((each for each in _siblings(s) if each.name == name), None)
    return None if peer is None or s.router.is_reserved(name, peer.epoch) else peer


def find_spare(s: State, peer: PeerUp) -> Iterator[RequestState]:
    """Find requests that wait here and that this sibling may have, in the order of their queues."""
    for letter, queue in (("E", s.encode_queue), ("P", s.prefill_queue)):
        for request in islice(queue, LOOKED_AT) if letter in peer.roles else ():
            state = s.requests[request]
            if _may_go(s, state) and any(fitting(letter, state.work, (peer,))):
                yield state


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
        slot.holder or slot.helper or slot.span.content in s.pending or s.cached_media(slot.keys)
        for slot in state.media
    )


def _has_little_text(s: State, state: RequestState) -> bool:
    cached = len(s.prefix_hits(state)) * s.settings.kv_block_size
    return not state.media and cached < MOSTLY * state.prefill_end


def _hand_over(s: State, name: str, now: float) -> None:
    """Pass a request on to a sibling, the first one that waits."""
    peer = _find_sibling(s, name)
    state = next(find_spare(s, peer), None) if peer is not None else None
    if state is None:
        _say(s, name, "none")
    else:
        pass_on(s, state, name, now)
