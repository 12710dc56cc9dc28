"""Fetches image features from the encoder caches of other instances (EPD-Serve 3.2, the multimodal store).

An encode instance that is asked for an image which another one has cached does not encode it: its offer names the
holder. The target asks the holder, which leases the blocks or says that they are gone. Then the target gives back what
it has reserved, and the encode instance encodes after all: nobody waits for an encoder while holding image blocks.
"""

from __future__ import annotations

from trinity.core.instance.lifecycle import end
from trinity.core.instance.loads import tell_cached
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import FEATURES_GONE, FeatureFetch, Lease, RequestState, SkippedEncode
from trinity.core.instance.state import State
from trinity.core.messages import KV, Fetch, Fetched, Finished, Pull, Pulled, Release
from trinity.core.migration.kv_target import cached_record

# ---------------------------------------------------------------- the encode instance


def skip_cached_remotely(s: State, state: RequestState) -> None:
    """Skip the encoding of images that another instance has cached, by its last report. Local copies come first."""
    if s.settings.transfers.store and not s.does.prefills:
        for slot in state.media:
            if not s.cached_media(slot) and slot.span.content not in s.pending:
                slot.find_at(s.router.holder(slot.span, {s.settings.name, *state.tried}))


def remember_skipped(s: State, state: RequestState) -> None:
    """Remember, until the Release, all that encoding the skipped images would need."""
    if any(slot.holder for slot in state.media):
        s.skipped_encodes[state.work.request] = SkippedEncode(
            state.work, state.inputs, state.route, state.deadline, state.tokens, state.tried
        )


def forget_skipped(s: State, lease: Lease) -> SkippedEncode | None:
    """Forget and return the skipped encode of this lease's attempt. An older attempt's lease may end later."""
    spared = s.skipped_encodes.get(lease.request)
    return s.skipped_encodes.pop(lease.request) if spared is not None and spared.work.attempt == lease.attempt else None


def encode_after_all(s: State, lease: Lease, lacks: str, now: float) -> RequestState | None:
    """Queue a skipped encode: a holder no longer had the features. Returns it where others have all of them.

    Its target may have got some before, and has said so. The holder that lacks what it had reported is not named again.
    """
    spared = forget_skipped(s, lease)
    if spared is None:  # forgotten meanwhile
        return None
    work, name = spared.work, s.settings.name
    route = (*spared.route, lease.target, name)
    if spared.cancelled:
        s.forget(
            work.request, work.attempt
        )  # its target has a tombstone that leads here: a Cancel would go in a circle
        s.send(work.owner, Finished(request=work.request, attempt=work.attempt, reason="cancelled", route=route))
        return None
    named = {part.holder for part in lease.offer.parts if part.holder} if lease.offer is not None else set()
    tried = spared.tried | ({lacks} if lacks else named)
    state = RequestState(work, now, spared.inputs, stored_tokens=spared.tokens, route=route, tried=tried)
    if work.deadline_s is not None:
        s.keep_deadline(state, spared.deadline)
    s.list_media(state)
    s.take_in(state)
    skip_cached_remotely(s, state)
    if all(slot.holder for slot in state.media):
        return state
    s.move(state, Phase.IMAGE_QUEUE, now)
    return None


# ---------------------------------------------------------------- the holder


def handle_fetch(s: State, event: Fetch, now: float) -> None:
    """Lease the blocks with this content, or say that they are not all here; of KV those up to the first one gone."""
    s.renew_leases(event.requester, now)
    found: tuple[int, ...] = ()
    if event.kind in s.pools and (event.kind == KV or s.settings.image_cache):
        found = s.pools[event.kind].match(event.keys)
    if event.kind != KV and len(found) < len(event.keys):
        found = ()
    if found:
        s.lend(Lease(event.id, "", event.requester, event.kind, found, now))
    s.send(event.requester, Fetched(event.id, s.settings.name, found, s.generation, tail=event.tail, kind=event.kind))


# ---------------------------------------------------------------- the target


def ask_holder(s: State, state: RequestState, part: int, now: float) -> None:
    """Ask for features that the offer says another instance has."""
    incoming = state.incoming
    assert incoming is not None
    holder = incoming.offer.parts[part].holder
    if holder not in s.router.peers or holder == s.settings.name:
        give_back_request(s, state, now, holder)
        return
    id = f"{incoming.offer.id}/{part}"
    s.fetches[id] = FeatureFetch(state.work.request, incoming.offer.id, part, holder, now)
    s.watch_lease(now)
    slot = state.media[part]
    s.send(holder, Fetch(id, s.settings.name, slot.kind, tuple(slot.keys), incoming.offer.parts[part].tail))


def handle_fetched(s: State, event: Fetched, now: float) -> None:
    """The holder's answer: pull, or give up. Of a request that has ended meanwhile, only the lease is left."""
    s.renew_leases(event.holder, now)
    asked = s.fetches.pop(event.id, None)
    state = waiting_request(s, asked) if asked is not None else None
    if asked is None or state is None:
        if event.blocks:
            s.send(event.holder, Release(event.id, "cancelled"))
        return
    if not event.blocks:
        give_back_request(s, state, now, event.holder)
        return
    incoming = state.incoming
    assert incoming is not None
    incoming.fetched_parts[asked.part] = event
    s.pull(state, pull_features(state, asked.part, event.holder, event.blocks, event.generation))


def pull_features(state: RequestState, part: int, source: str, blocks: tuple[int, ...], generation: int) -> Pull:
    """The pull of one media item's features from ``blocks`` of ``source``."""
    assert state.incoming is not None
    offer = state.incoming.offer
    slot, tail = state.media[part], offer.parts[part].tail
    return Pull(offer.id, part, source, slot.kind, state.work.request, blocks, slot.blocks, generation, tail=tail)


def waiting_request(s: State, asked: FeatureFetch) -> RequestState | None:
    """The request of this fetch, if it still waits for the features."""
    state = s.requests.get(asked.request)
    if state is None or state.ending is not None or state.incoming is None:
        return None
    return state if state.incoming.offer.id == asked.offer and not state.incoming.released else None


def give_back_request(s: State, state: RequestState, now: float, lacks: str) -> None:
    """End it here with ``FEATURES_GONE``: it must hold no image block while an encoder works for it."""
    assert state.incoming is not None
    state.incoming.lacks = lacks
    tell_cached(s, state)
    end(s, state, now, FEATURES_GONE)


def give_up_fetches(s: State, asked_of: str | None, now: float) -> float:
    """Give up fetches from a lost holder, or (None) from silent ones. Returns the clock time of the next check."""
    left = float("inf")
    for id, asked in list(s.fetches.items()):
        due = s.lease_end(asked.since, asked.holder)
        if asked.holder == asked_of or (asked_of is None and due <= now):
            del s.fetches[id]
            state = waiting_request(s, asked)
            if state is not None:
                give_back_request(s, state, now, asked.holder)
        else:
            left = min(left, due)
    return left


def give_up_pulls(s: State, holder: str, now: float) -> None:
    """Give back requests that pull from a lost holder: its next life, with other content, may be read."""
    for state in [s.requests[request] for request in s.incoming.values()]:
        incoming = state.incoming
        if incoming is not None and any(answer.holder == holder for answer in incoming.fetched_parts.values()):
            give_back_request(s, state, now, holder)


def finish_fetch(s: State, state: RequestState, event: Pulled) -> None:
    """Release the holder after a pull."""
    incoming = state.incoming
    assert incoming is not None
    answer = incoming.fetched_parts.pop(event.part)
    incoming.lacks = answer.holder if event.failure else ""
    s.send(answer.holder, Release(answer.id, "failed" if event.failure else "pulled"))
    if event.record:
        state.record({**event.record, "outcome": "failed" if event.failure else "store"})


def skipped_record(s: State, state: RequestState, part: int) -> dict[str, object]:
    """Record of features that did not move; outcome "store" where another instance holds them too."""
    incoming = state.incoming
    assert incoming is not None
    holder = incoming.offer.parts[part].holder
    record = cached_record(s, incoming.offer)
    return {**record, "source": holder, "outcome": "store"} if holder else record
