"""Helpers: instances that encode some media items of a request that is at another one, the asker (EPDServe 3.2.2).

The asker has the inputs of all items and reserves blocks for all of them, as without helpers. It encodes those that are
left to nobody. Then it takes the others, but for those that a helper has begun. So it waits for nothing but a step
that runs on an instance that is up. A helper encodes into its encoder cache, holds nothing beyond that, and waits for
nobody. Features that it has are offered like all that another instance has cached
(``trinity.core.migration.remote_features``): their target pulls them there, and where they are gone the asker encodes.
"""

from __future__ import annotations

from trinity.core.instance.request_state import MediaSlot, RequestState
from trinity.core.instance.state import State
from trinity.core.life_names import name_help, read_help
from trinity.core.messages import ENCODED, IMAGE, Cancel, Finished, Helped, Step

# ---------------------------------------------------------------- the asker


def leave_to_helpers(s: State, state: RequestState, helpers: tuple[str, ...]) -> None:
    """Leave the items to those that the front end has asked, but for what is here or at others, or comes to be."""
    for slot, helper in zip(state.media, helpers, strict=False):
        slot.leave_to(helper)
    for item, slot in enumerate(state.media):
        if slot.helper and (slot.ready or is_near(s, state, slot)):
            call_off(s, state, item)


def is_near(s: State, state: RequestState, slot: MediaSlot) -> bool:
    """True where the features are cached here, or being encoded for another request."""
    pending = s.pending.get(slot.span.content)
    return bool(s.cached_media(slot.keys)) or (pending is not None and pending.providers[0][0] != state.work.request)


def left_items(state: RequestState) -> set[int]:
    """Media items not to encode here now: a helper has begun with them, or others are still to be encoded here."""
    busy = any(not slot.ready and not slot.helper for slot in state.media)
    left = (busy or slot.begun for slot in state.media)
    return {item for item, each in enumerate(left) if each and state.media[item].helper}


def call_off(s: State, state: RequestState, item: int) -> None:
    """Take an item back from its helper, and all others with its content: the helper has the first of them."""
    slot = state.media[item]
    helper = slot.helper
    if helper:
        same = [place for place, each in enumerate(state.media) if each.span.content == slot.span.content]
        for place in same:
            state.media[place].leave_to("")
        s.send(helper, Cancel(name_help(state.work.request, state.attempt, same[0])))


def call_off_all(s: State, state: RequestState) -> None:
    """Take all items back: the request ends."""
    for item in range(len(state.media)):
        call_off(s, state, item)


def lose_helper(s: State, name: str) -> None:
    """Take all items back from an instance that is lost or silent."""
    for state in s.requests.values():
        for item, slot in enumerate(state.media):
            if slot.helper == name:
                call_off(s, state, item)


def take_answer(s: State, event: Helped) -> RequestState | None:
    """Note what a helper says of an item, unless that was taken back. Returns the request whose features are found."""
    request, attempt, first = read_help(event.help)
    state = s.requests.get(request)
    if state is None or state.attempt != attempt or state.ending is not None or first >= len(state.media):
        return None
    content = state.media[first].span.content
    slots = [(item, each) for item, each in enumerate(state.media) if each.span.content == content]
    for item, slot in slots:
        if slot.helper == event.helper:
            _take_answer(s, state, (item, slot), event)
    return state if event.said == "ready" and any(slot.holder for _, slot in slots) else None


def _take_answer(s: State, state: RequestState, place: tuple[int, MediaSlot], event: Helped) -> None:
    item, slot = place
    if event.said == "begun":
        if _is_up(s, event):
            slot.leave_to(event.helper, begun=True)
        return
    slot.leave_to("")
    if event.said == "ready":
        s.await_no_more(slot, (state.work.request, item))
        if slot.blocks:
            s.pools[IMAGE].drop(slot.blocks)
            slot.empty()
        slot.find_at(event.helper)


def _is_up(s: State, event: Helped) -> bool:
    """True where the end of the step will be heard, or the loss of this life of its instance."""
    peer = s.router.peers.get(event.helper)
    return peer is not None and peer.epoch == event.epoch and event.helper not in s.router.suspects


# ---------------------------------------------------------------- the helper


def tell_begun(s: State, step: Step) -> None:
    """Tell the askers of items that a step encodes that they are."""
    for row in step.encodes:
        for request, _ in s.pending[row.span.content].providers:
            state = s.requests[request]
            if state.asker and state.ending is None:
                s.send(state.asker, Helped(request, s.settings.name, "begun", s.settings.epoch))


def tell_end(s: State, state: RequestState, ending: Finished) -> None:
    """Tell the asker how the item ended: its features are in the cache here, or it must encode itself."""
    ready = ending.reason == ENCODED and s.settings.image_cache
    said = Helped(state.work.request, s.settings.name, "ready" if ready else "no", s.settings.epoch)
    s.send(state.asker, said)
