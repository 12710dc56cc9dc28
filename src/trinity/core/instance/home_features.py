"""Brings features that a helper has home to an asker that prefills: its prefill reads its own blocks (decision 0086).

The asker has reserved these blocks since it was admitted, as for items that it encodes itself. It asks the helper for a
lease, pulls, and encodes where either fails. So it waits for an answer that takes no block, by an instance that is up
as far as it knows, and for a pull, which ends. What a pull may still write is not encoded before that.
"""

from __future__ import annotations

from trinity.core.instance.helpers import forget_fetch
from trinity.core.instance.lifecycle import conclude_if_quiet
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.instance.steps import settle_features, show_progress
from trinity.core.messages import Fetched, Pull, Pulled, Release
from trinity.core.migration import prefix_fetch, remote_features, target


def dispatch_fetched(s: State, event: Fetched, now: float) -> None:
    """Pull what a helper has leased, or encode it here; other answers go on to who waits for a text or an offer."""
    asked = s.home_fetches.get(event.id)
    if asked is None:
        if not prefix_fetch.take_fetched(s, event, now):
            remote_features.handle_fetched(s, event, now)
        return
    s.renew_leases(event.holder, now)
    state = s.requests[asked.request]
    if not event.blocks:
        _encode_here(s, state, event.id)
        return
    asked.pulling = True
    offer, _, item = event.id.rpartition("/")
    slot = state.media[int(item)]
    told = (asked.request, event.blocks, slot.blocks, event.generation)
    s.pull(state, Pull(offer, int(item), event.holder, slot.kind, *told, tail=event.tail))


def dispatch_pulled(s: State, event: Pulled, now: float) -> None:
    """End the lease, and go on with the features, or encode them here."""
    id = f"{event.offer}/{event.part}"
    asked = s.home_fetches.get(id)
    if asked is None:
        if not prefix_fetch.take_pulled(s, event):
            target.handle_pulled(s, event, now)
        return
    state = s.requests[asked.request]
    state.end_pull()
    s.send(asked.holder, Release(id, "failed" if event.failure else "pulled"))
    if event.record:
        state.record({**event.record, "outcome": "failed" if event.failure else "store"})
    if state.ending is not None:
        forget_fetch(s, id)
        conclude_if_quiet(s, state, now)
    elif event.failure is not None or asked.void:
        _encode_here(s, state, id)
    else:
        _take_home(s, state, event.part, now)


def _encode_here(s: State, state: RequestState, id: str) -> None:
    forget_fetch(s, id)
    for slot in state.media:
        if slot.fetch == id:
            slot.leave_to("")


def _take_home(s: State, state: RequestState, item: int, now: float) -> None:
    """Note that the features are here, for all that wait for them."""
    own = state.media[item]
    forget_fetch(s, own.fetch)
    for request, items in settle_features(s, own).items():
        waiting = s.requests[request]
        for place in items:
            waiting.media[place].leave_to("")
        if waiting.ending is None:
            show_progress(s, waiting, now)
