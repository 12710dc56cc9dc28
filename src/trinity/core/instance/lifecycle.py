"""A request ends at an instance, is handed on, or is cancelled."""

from __future__ import annotations

from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import FEATURES_GONE, RequestState
from trinity.core.instance.state import State
from trinity.core.messages import (
    FRONTEND,
    IMAGE,
    KV,
    Cancel,
    Commit,
    Failure,
    Finished,
    Forget,
    Moved,
    Release,
    Withdraw,
)


def queue_prefill(s: State, state: RequestState, now: float) -> None:
    """Its features are here, or not needed: wait for prefill, ahead of new arrivals if it was migrated."""
    if state.preemptions or state.attempt:
        s.move(state, Phase.PREEMPTED_QUEUE, now)
    else:
        s.move(state, Phase.KV_QUEUE if state.incoming is None else Phase.MIGRATED_QUEUE, now)


def cancel(s: State, event: Cancel, now: float) -> None:
    """Mark the request as ending here, and tell the next hop where it, or a part of it, has gone on."""
    state = s.requests.get(event.request)
    if state is not None:
        _call_off(s, state, now)
    elif event.request in s.tombstones:
        s.send(s.tombstones[event.request], event)
        if event.request in s.skipped_encodes:  # its target may be giving it back just now
            s.skipped_encodes[event.request].cancelled = True


def forget(s: State, event: Forget, now: float) -> None:
    """The request has ended everywhere, here too: its target's Release may still be on the way."""
    s.forget(event.request)
    state = s.requests.get(event.request)
    if state is not None:
        _call_off(s, state, now)


def _call_off(s: State, state: RequestState, now: float) -> None:
    """End it here and, where a part of it is offered, there: the front end may not know yet that it is."""
    if state.outgoing in s.outgoing:
        s.send(s.outgoing[state.outgoing].target, Cancel(state.work.request))
    end(s, state, now, "cancelled")


def end(s: State, state: RequestState, now: float, reason: str, why: Failure | None = None) -> None:
    """No further step or transfer includes the request; it is gone once those in flight have ended."""
    if state.ending is not None and (state.ending.reason != FEATURES_GONE or reason == FEATURES_GONE):
        return
    work = state.work
    s.begin_to_end(state, Finished(request=work.request, attempt=work.attempt, reason=reason, failure=why))
    conclude_if_quiet(s, state, now)


def conclude_if_quiet(s: State, state: RequestState, now: float) -> None:
    if state.ending is not None and not state.pulls_in_flight and not s.in_step(state.work.request):
        _conclude(s, state, now)


def _conclude(s: State, state: RequestState, now: float) -> None:
    assert state.ending is not None
    ending, request = state.ending, state.work.request
    state.book_time(now)
    if state.incoming is not None and not state.incoming.released:
        release(s, state, {"error": "failed", FEATURES_GONE: FEATURES_GONE}.get(ending.reason, "cancelled"))
    if ending.reason == FEATURES_GONE:
        _give_back(s, state)
    elif state.outgoing is None:
        s.send(FRONTEND, _report(state, ending))
    elif ending.reason == "error" and state.outgoing in s.outgoing:
        s.send(s.outgoing[state.outgoing].target, Withdraw(state.outgoing, ending.failure))
    elif ending.reason != "cancelled" and state.outgoing in s.outgoing:
        commit(s, state, now, ending.reason)  # it ended with its first token: the target reports it
        s.leave_tombstone(request, s.outgoing[state.outgoing].target)
    drop_all(s, state)
    s.move(state, Phase.GONE, now)


def _give_back(s: State, state: RequestState) -> None:
    """The source of its offer has the request again."""
    incoming, work = state.incoming, state.work
    assert incoming is not None
    s.send(FRONTEND, Moved(work.request, work.attempt, incoming.offer.source, len(state.route)))


def commit(s: State, state: RequestState, now: float, ending: str = "") -> None:
    """Tell the target that no part will follow, and all that it must know of the request."""
    offer = state.outgoing
    assert offer is not None
    left = state.deadline - now if state.work.deadline_s is not None else None
    said = Commit(
        offer, tuple(state.tokens), state.cached_tokens or 0, state.spans, tuple(state.transfers), left, ending
    )
    lease = s.outgoing[offer]
    lease.count = state.outputs
    s.send(lease.target, said)


def _report(state: RequestState, ending: Finished) -> Finished:
    return Finished(
        request=ending.request,
        attempt=ending.attempt,
        reason=ending.reason,
        failure=ending.failure,
        count=state.outputs,
        spans=state.spans,
        cached_tokens=state.cached_tokens or 0,
        transfers=tuple(state.transfers),
        route=state.route,
        preemptions=state.preemptions,
    )


def hand_on(s: State, state: RequestState, now: float) -> None:
    """Everything was offered and committed: only the lease and a tombstone stay."""
    assert state.outgoing is not None
    s.leave_tombstone(state.work.request, s.outgoing[state.outgoing].target)
    drop_all(s, state)
    s.move(state, Phase.GONE, now)


def release(s: State, state: RequestState, outcome: str) -> None:
    """Step 4 of a migration: the source may let go. Exactly once per offer."""
    incoming = state.incoming
    assert incoming is not None
    assert not incoming.released
    incoming.released = True
    del s.incoming[incoming.offer.id]
    streams = incoming.offer.kind == KV and s.settings.transfers.kv != "off"
    times = s.pull_times.get(incoming.offer.source) if streams else None
    s.send(incoming.offer.source, Release(incoming.offer.id, outcome, times.cost() if times else None))


def drop_all(s: State, state: RequestState) -> None:
    """Give back every reference that the request holds, and tell the stages."""
    drop_media(s, state)
    if state.block_table:
        s.pools[KV].drop(state.block_table)
    s.close(state)


def drop_media(s: State, state: RequestState) -> None:
    """Give back the image-cache blocks, and the request's place among those waiting for their content."""
    for item, slot in enumerate(state.media):
        s.await_no_more(slot, (state.work.request, item))
        if slot.blocks:
            s.pools[IMAGE].drop(slot.blocks)
            slot.empty()
