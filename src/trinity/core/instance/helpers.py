"""Helpers: instances that encode some media items of a request that is at another one, the asker (EPDServe 3.2.2).

The asker has the inputs of all items and reserves blocks for all of them, as without helpers. It encodes those that are
left to nobody. Then it recalls the others, one by one, and encodes those that their helpers have not begun. So it waits
for nothing but an answer, which comes at once, and a step that runs, both of an instance that is up. A helper encodes
into its encoder cache, holds nothing beyond that, and waits for nobody. Features that it has are offered like all that
another instance has cached (``trinity.core.migration.remote_features``): their target pulls them there, and where they
are gone the asker encodes. An asker that prefills as well pulls them itself (``dispatch_fetched``).
"""

from __future__ import annotations

from trinity.core.instance.peer_questions import HomeFetch
from trinity.core.instance.request_state import MediaSlot, RequestState
from trinity.core.instance.state import State
from trinity.core.messages import ENCODED, Cancel, Fetch, Finished, Helped, Step
from trinity.core.values import name_help, read_help

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
    return bool(s.cached_media(slot)) or (pending is not None and pending.providers[0][0] != state.work.request)


def recall(s: State) -> bool:
    """Ask for an item of each request that has nothing else to encode. True where one is back at once: nobody answers.

    A helper that has begun keeps it, any other one says no.
    """
    back = False
    for state in s.encoding.values():
        left = [item for item, slot in enumerate(state.media) if slot.helper and not slot.begun]
        if not left or any(slot.recalled for slot in state.media) or _encodes(s, state):
            continue
        slot = state.media[left[0]]
        if _is_up(s, slot.helper):
            slot.recall()
            _cancel(s, state, left[0], slot.helper)
        else:
            call_off(s, state, left[0])
            back = True
    return back


def _encodes(s: State, state: RequestState) -> bool:
    """True where items of it are encoded here, or will be; not where another request's are waited for."""
    for slot in state.media:
        pending = s.pending.get(slot.span.content) if not (slot.ready or slot.helper) else None
        if pending is not None and (pending.in_step or pending.providers[0][0] == state.work.request):
            return True
    return False


def ask_home(s: State) -> None:
    """Ask for a lease of what helpers have of requests that prefill here."""
    for state in s.encoding.values():
        for item, slot in enumerate(state.media):
            if slot.kept and not slot.fetch:
                _ask_home(s, state, item)


def _ask_home(s: State, state: RequestState, item: int) -> None:
    slot, own = state.media[item], s.settings
    life = f"{own.name}.{own.epoch}" if own.epoch else own.name
    id = f"{life}:{name_help(state.work.request, state.attempt, item)}/{item}"
    for each in state.media:
        if each.span.content == slot.span.content:
            each.bring(id)
    s.home_fetches[id] = HomeFetch(state.work.request, slot.helper)
    s.send(slot.helper, Fetch(id, own.name, slot.kind, tuple(slot.keys), slot.span.tokens % own.image_block_size))


def forget_fetch(s: State, id: str) -> None:
    """Forget a fetch: it is over, or its answer will be released."""
    del s.home_fetches[id]


def call_off(s: State, state: RequestState, item: int) -> None:
    """Take an item back from its helper, and all others with its content: the helper has the first of them."""
    slot = state.media[item]
    helper = slot.helper
    if helper:
        if slot.fetch and not s.home_fetches[slot.fetch].pulling:
            forget_fetch(s, slot.fetch)
        for each in state.media:
            if each.span.content == slot.span.content:
                each.leave_to("")
        _cancel(s, state, item, helper)


def _cancel(s: State, state: RequestState, item: int, helper: str) -> None:
    content = state.media[item].span.content
    first = next(place for place, each in enumerate(state.media) if each.span.content == content)
    s.send(helper, Cancel(name_help(state.work.request, state.attempt, first), s.settings.name))


def call_off_all(s: State, state: RequestState) -> None:
    """Take all items back: the request ends."""
    for item in range(len(state.media)):
        call_off(s, state, item)


def lose_helper(s: State, name: str) -> None:
    """Take all items back from an instance that is lost or silent, but for those that a pull may still write."""
    for state in s.requests.values():
        for item, slot in enumerate(state.media):
            fetch = s.home_fetches.get(slot.fetch)
            if slot.helper == name and fetch is not None and fetch.pulling:
                fetch.void = True
            elif slot.helper == name:
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
        if slot.helper == event.helper and not slot.kept:  # a recall that came too late is answered after that
            _take_answer(s, state, (item, slot), event)
    return state if event.said == "ready" and any(slot.holder for _, slot in slots) else None


def _take_answer(s: State, state: RequestState, place: tuple[int, MediaSlot], event: Helped) -> None:
    item, slot = place
    known = _is_up(s, event.helper) and s.router.peers[event.helper].epoch == event.epoch
    if event.said == "begun":
        if known:
            slot.leave_to(event.helper, begun=True)
        return
    home = event.said == "ready" and s.does.prefills
    slot.leave_to(event.helper, kept=True) if home and known else slot.leave_to("")
    if event.said == "ready" and not home:
        s.await_no_more(slot, (state.work.request, item))
        if slot.blocks:
            s.pools[slot.kind].drop(slot.blocks)
            slot.empty()
        slot.find_at(event.helper)


def _is_up(s: State, helper: str) -> bool:
    """True where an answer will be heard, or the loss or the silence of the helper: such news comes once."""
    return helper in s.router.peers and helper not in s.router.suspects


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
