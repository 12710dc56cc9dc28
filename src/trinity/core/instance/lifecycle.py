"""Reserves blocks for requests; ends, cancels and hands on requests, and releases their blocks."""

from __future__ import annotations

from trinity.core.instance.helpers import call_off_all, tell_end
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import COPIED, FEATURES_GONE, REFUSED, UNPULLED, RequestState
from trinity.core.instance.state import State
from trinity.core.messages import (
    ENCODED,
    KV,
    STATE,
    Cancel,
    Commit,
    Failure,
    Finished,
    Forget,
    Helped,
    Release,
    Withdraw,
    Work,
)
from trinity.core.routing.stage_peers import kv_tokens
from trinity.core.transfers import LEAST_PULLS
from trinity.core.values import blocks_for
from trinity.stage_kinds import roles_of

EXTRA_BLOCKS = 1  # blocks beyond those of its text that a request is admitted with


def blocks_to_reserve(s: State, state: RequestState, text: int) -> int:
    """Count the KV blocks to reserve for a request whose prefill needs ``text`` blocks here."""
    if not s.does.decodes:
        return text
    whole = blocks_for(kv_tokens(state.work, decodes=True), s.settings.kv_block_size)
    return min(whole, text + EXTRA_BLOCKS) if s.grows and not state.never_preempted else whole


def recomputable(s: State, work: Work) -> bool:
    """True where some instance could prefill the request at its greatest length.

    Else its whole need is reserved and it is never preempted: sent back, it would wait for blocks that do not exist.
    """
    if s.does.prefills:
        return True
    longest = len(work.prompt) + work.max_tokens - 1
    there = (peer for peer in s.router.peers.values() if roles_of(peer.roles).prefills)
    return any(blocks_for(longest, peer.kv_block_size) <= peer.pools.get(KV, 0) for peer in there)


def decode_headroom(s: State) -> int:
    """Blocks that admissions leave free (as vLLM's watermark): one per decoding request, which will need it soon."""
    return len(s.decoding) if s.grows else 0


def has_state_room(s: State, taken: int = 0) -> bool:
    """True where one more request can have its states here, beside ``taken`` ones that are about to; or needs none."""
    return STATE not in s.pools or s.pools[STATE].available > taken


def hold_state(s: State, state: RequestState) -> None:
    """Reserve the block of its states, where the model has such; the caller has checked that there is one."""
    if STATE in s.pools:
        state.hold_state(s.allocate(STATE, 1))


def drop_state(s: State, state: RequestState) -> None:
    """Give back the block of its states, if it holds one."""
    if state.state_block:
        s.pools[STATE].drop(state.state_block)
        state.hold_state(())


def queue_prefill(s: State, state: RequestState, now: float) -> None:
    """Queue it for prefill, ahead of new arrivals if it was migrated: its features are here or not needed."""
    if state.preemptions or state.attempt:
        s.move(state, Phase.PREEMPTED_QUEUE, now)
    else:
        s.move(state, Phase.KV_QUEUE if state.incoming is None else Phase.MIGRATED_QUEUE, now)


def handle_cancel(s: State, event: Cancel, now: float) -> None:
    """End the request here, and pass the Cancel on to the instance that it, or a part of it, moved to."""
    state = s.requests.get(event.request)
    if state is not None and state.asker and s.in_step(event.request):
        return  # it is all but done
    if state is not None:
        _call_off(s, state, now)
    elif event.asker:
        s.send(event.asker, Helped(event.request, s.settings.name, "no", s.settings.epoch))
    elif event.request in s.tombstones:
        s.send(s.tombstones[event.request].target, event)
        if event.request in s.skipped_encodes:  # its target may be giving it back just now
            s.skipped_encodes[event.request].cancelled = True


def handle_forget(s: State, event: Forget, now: float) -> None:
    """Drop all that is kept of a request that has ended everywhere; its target's Release may still arrive.

    A later attempt of it may be here already: that stays.
    """
    s.forget(event.request, event.attempt)
    state = s.requests.get(event.request)
    if state is not None and state.attempt <= event.attempt:
        _call_off(s, state, now)


def _call_off(s: State, state: RequestState, now: float) -> None:
    """End it here and at the target of its offer, which the front end may not know of yet."""
    if state.outgoing in s.outgoing and state.phase is not Phase.MOVING:
        s.send(s.outgoing[state.outgoing].target, Cancel(state.work.request))
    end(s, state, now, "cancelled")


def end(s: State, state: RequestState, now: float, reason: str, why: Failure | None = None) -> None:
    """Mark it as ending: no further step or transfer includes it, and it is gone once those in flight have ended."""
    if state.ending is not None and (state.ending.reason != FEATURES_GONE or reason == FEATURES_GONE):
        return
    work = state.work
    call_off_all(s, state)
    s.begin_to_end(state, Finished(request=work.request, attempt=work.attempt, reason=reason, failure=why))
    conclude_if_quiet(s, state, now)


def conclude_if_quiet(s: State, state: RequestState, now: float) -> None:
    """Let go of a request that is ending, once nothing of its blocks is read or written for it any more."""
    busy = state.pulls_in_flight or state.collecting
    if state.ending is not None and not busy and not s.in_step(state.work.request):
        _conclude(s, state, now)


def _conclude(s: State, state: RequestState, now: float) -> None:
    assert state.ending is not None
    ending = state.ending
    state.book_time(now)
    ours = not state.uncommitted
    if state.incoming is not None and not state.incoming.released:
        failed, left = ("failed", "cancelled") if ours else (UNPULLED, REFUSED)
        release(s, state, {"error": failed, FEATURES_GONE: FEATURES_GONE, COPIED: "pulled"}.get(ending.reason, left))
    if ending.reason == FEATURES_GONE:
        _give_back(s, state)
    elif state.asker:
        tell_end(s, state, ending)
    elif state.phase is Phase.MOVING or state.outgoing is None:
        _tell_end(s, state, ending, ours)
    elif ending.reason == "error" and state.outgoing in s.outgoing:
        s.send(s.outgoing[state.outgoing].target, Withdraw(state.outgoing, ending.failure))
    elif ending.reason != "cancelled" and state.outgoing in s.outgoing:
        send_commit(s, state, now, ending.reason)  # it ended with its first token: the target reports it
    drop_all(s, state)
    s.move(state, Phase.GONE, now)


def _tell_end(s: State, state: RequestState, ending: Finished, ours: bool) -> None:
    """Report the end, unless it is the source's to tell; the target of a decode that moves lets go of it."""
    if state.outgoing in s.outgoing:
        s.send(s.outgoing[state.outgoing].target, Withdraw(state.outgoing))
    if ours:
        s.send(state.work.owner, _report(state, ending))


def _give_back(s: State, state: RequestState) -> None:
    """Hand the request back to the source of its offer, which takes it in as it hears the Release."""
    incoming = state.incoming
    assert incoming is not None
    s.leave_tombstone(state, incoming.offer.source)


def send_commit(s: State, state: RequestState, now: float, ending: str = "") -> None:
    """Send the target the Commit: no part will follow, and the state of the request."""
    offer = state.outgoing
    assert offer is not None
    left = state.deadline - now if state.work.deadline_s is not None else None
    said = Commit(
        offer, tuple(state.tokens), state.cached_tokens or 0, state.spans, tuple(state.transfers), left, ending
    )
    lease = s.outgoing[offer]
    lease.count, lease.said = state.outputs, said
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
        rows=state.rows if ending.reason == ENCODED else (),
    )


def hand_on(s: State, state: RequestState, now: float) -> None:
    """Drop a request whose blocks are offered and committed: only the lease and a tombstone stay."""
    drop_all(s, state)
    s.move(state, Phase.GONE, now)


def release(s: State, state: RequestState, outcome: str, to: str = "", waited_s: float = 0.0) -> None:
    """Send the Release (step 4 of a migration), exactly once per offer; of one that is passed, ``to`` whom."""
    incoming = state.incoming
    assert incoming is not None
    assert not incoming.released
    incoming.released = True
    del s.incoming[incoming.offer.id]
    mode = s.settings.transfers.kv if incoming.offer.kind == KV else "off"
    times = s.pull_times.get(incoming.offer.source) if mode != "off" else None
    lacks = incoming.lacks if outcome == FEATURES_GONE else ""
    told = times is not None and (mode != "auto" or times.pulls >= LEAST_PULLS)
    cost = times.cost() if times and told else None
    s.send(incoming.offer.source, Release(incoming.offer.id, outcome, cost, lacks, to, waited_s))


def drop_all(s: State, state: RequestState) -> None:
    """Drop every block reference of the request, and close it at the stages.

    Of one that failed the end is evicted first, so that what is left can be matched: it may go on.
    """
    drop_media(s, state)
    if state.block_table:
        failed = state.ending is not None and state.ending.reason == "error"
        s.pools[KV].drop(reversed(state.block_table) if failed else state.block_table)
    drop_state(s, state)
    s.close(state)


def drop_media(s: State, state: RequestState) -> None:
    """Drop its encoder-cache blocks, and its place among those waiting for their content."""
    for item, slot in enumerate(state.media):
        s.await_no_more(slot, (state.work.request, item))
        if slot.blocks:
            s.pools[slot.kind].drop(slot.blocks)
            slot.empty()
