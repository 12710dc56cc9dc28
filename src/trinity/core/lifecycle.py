"""A request arrives at an instance, ends there, is handed on, or is cancelled."""

from __future__ import annotations

from collections import deque

from trinity.core.state import Phase, RequestState, State, failure
from trinity.messages import (
    FRONTEND,
    IMAGE,
    KV,
    Cancel,
    Close,
    Failure,
    Finished,
    Forget,
    Release,
    Submit,
    Withdraw,
    Work,
)
from trinity.routing import needs


def submit(s: State, event: Submit, now: float) -> None:
    """A new request from the front end: to the encode queue, or to the prefill queue where no feature is needed."""
    work = event.work
    assert work.request not in s.requests, f"{work.request} is here already"
    state = RequestState(work, Phase.IMAGE_QUEUE, now, event.inputs, route=(s.settings.name,))
    state.deadline = now + work.deadline_s if work.deadline_s is not None else float("inf")
    state.media = s.slots(work)
    s.requests[work.request] = state
    problem = _problem(s, work)
    if problem is not None:
        end(s, state, now, "error", problem)
        return
    state.skip_media = bool(work.media) and "P" in s.settings.roles and not s.needs_media(state)
    if work.media and not state.skip_media:
        s.encode_queue.append(work.request)
    else:
        queue_prefill(s, state, now)


def _problem(s: State, work: Work) -> Failure | None:
    roles, letter = s.settings.roles, "E" if work.media else "P"
    if letter not in roles:
        return failure("StageError", f"instance {s.settings.name} ({roles}) has no stage {letter}", stage=letter)
    need = needs(letter, work, roles, s.settings.media_block, s.settings.kv_block)
    for kind, count in need.items():
        size = s.settings.pools.get(kind, 0)
        if count > size:
            text = f"the request needs {count} {kind} blocks and instance {s.settings.name} has {size}"
            return failure("RequestTooLarge", text)
    return None


def queue_prefill(s: State, state: RequestState, now: float) -> None:
    """Its features are here, or not needed: wait for prefill, ahead of new arrivals if it was migrated."""
    state.enter(Phase.KV_QUEUE, now)
    queue = s.migrated_queue if state.incoming is not None else s.prefill_queue
    queue.append(state.work.request)


def cancel(s: State, event: Cancel, now: float) -> None:
    """Mark the request as ending here, and tell the next hop where it, or a part of it, has gone on."""
    state = s.requests.get(event.request)
    if state is not None:
        if state.outgoing in s.outgoing:
            s.send(s.outgoing[state.outgoing].target, event)
        end(s, state, now, "cancelled")
    elif event.request in s.tombstones:
        s.send(s.tombstones[event.request], event)


def forget(s: State, event: Forget, now: float) -> None:
    """The request has ended everywhere, here too: its target's Release may still be on the way."""
    s.tombstones.pop(event.request, None)
    state = s.requests.get(event.request)
    if state is not None:
        end(s, state, now, "cancelled")


def end(s: State, state: RequestState, now: float, reason: str, why: Failure | None = None) -> None:
    """No further step or transfer includes the request; it is gone once those in flight have ended."""
    if state.ending is not None:
        return
    work = state.work
    state.ending = Finished(request=work.request, attempt=work.attempt, reason=reason, failure=why)
    _leave_queues(s, work.request)
    conclude_if_quiet(s, state, now)


def conclude_if_quiet(s: State, state: RequestState, now: float) -> None:
    if state.ending is not None and not state.pulls and not s.in_step(state.work.request):
        _conclude(s, state, now)


def _conclude(s: State, state: RequestState, now: float) -> None:
    assert state.ending is not None
    ending, request = state.ending, state.work.request
    state.book(now)
    if state.incoming is not None and not state.incoming.released:
        release(s, state, "cancelled" if ending.reason == "cancelled" else "failed")
    if state.outgoing is None:
        s.send(FRONTEND, _report(state, ending))
    elif ending.reason == "error" and state.outgoing in s.outgoing:
        s.send(s.outgoing[state.outgoing].target, Withdraw(state.outgoing, ending.failure))
    drop_all(s, state)
    del s.requests[request]


def _report(state: RequestState, ending: Finished) -> Finished:
    return Finished(
        request=ending.request,
        attempt=ending.attempt,
        reason=ending.reason,
        failure=ending.failure,
        count=len(state.tokens),
        spans=state.spans,
        cached_tokens=state.cached,
        transfers=tuple(state.transfers),
        route=state.route,
    )


def hand_on(s: State, state: RequestState) -> None:
    """Everything was offered and committed: only the lease and a tombstone stay."""
    assert state.outgoing is not None
    request = state.work.request
    _leave_queues(s, request)
    s.tombstones[request] = s.outgoing[state.outgoing].target
    drop_all(s, state)
    del s.requests[request]


def release(s: State, state: RequestState, outcome: str) -> None:
    """Step 4 of a migration: the source may let go. Exactly once per offer."""
    incoming = state.incoming
    assert incoming is not None
    assert not incoming.released
    incoming.released = True
    del s.incoming[incoming.offer.id]
    s.send(incoming.offer.source, Release(incoming.offer.id, outcome))


def drop_all(s: State, state: RequestState) -> None:
    """Give back every reference that the request holds, and tell the stages."""
    drop_media(s, state)
    if state.kv:
        s.pools[KV].drop(state.kv)
    if state.opened:
        s.out.append(Close(state.work.request))


def drop_media(s: State, state: RequestState) -> None:
    """Give back the image-cache blocks, and the request's place among those waiting for their content."""
    for item, slot in enumerate(state.media):
        pending = s.pending.get(slot.span.content)
        if pending is not None and (state.work.request, item) in pending.providers:
            pending.providers.remove((state.work.request, item))
            if not pending.providers:
                del s.pending[slot.span.content]
        if slot.blocks:
            s.pools[IMAGE].drop(slot.blocks)
            slot.blocks, slot.ready = (), False


def _leave_queues(s: State, request: str) -> None:
    queues: tuple[deque[str], ...] = (s.encode_queue, s.prefill_queue, s.migrated_queue, s.image_offers, s.kv_offers)
    for queue in queues:
        if request in queue:
            queue.remove(request)
    for running in (s.encoding, s.prefilling, s.decoding):
        running.pop(request, None)
