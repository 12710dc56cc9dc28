"""Optimistic reservation, as in vLLM: block tables grow as requests decode; the youngest is preempted for an older one.

Blocks of a preempted request, those of its outputs included, stay in the prefix cache until they are evicted: then
little is recomputed.
Its next prefill has its prompt and its outputs, ahead of all waiting requests, the oldest first.
"""

from __future__ import annotations

from trinity.core.instance.lanes import count_in_flight
from trinity.core.instance.lifecycle import drop_media, drop_state, end, queue_prefill
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import KV, PREEMPTED, Grow
from trinity.core.migration.kv_target import publish_kv


def age(state: RequestState) -> tuple[int, str]:
    """Sort key: smaller is older."""
    return state.age


def preempt(s: State, state: RequestState, now: float) -> None:
    """Drop its KV blocks. It must have no row in a step and no pull of its KV in flight."""
    prompt = len(state.work.prompt)
    state.leave_decode_batch()
    written = state.prefilled if state.phase is Phase.PREFILLING else prompt + len(state.tokens) - 1
    state.extend_prefill()
    publish_kv(s, state, written)
    s.kv.drop(reversed(state.block_table))  # the end is evicted first: what is left can be matched
    drop_state(s, state)
    s.close(state)
    state.preempt()
    s.preemptions += 1
    recompute(s, state, now)


def recompute(s: State, state: RequestState, now: float) -> None:
    """Queue it for prefill if its features are here or not needed, else for the encoder, else send it back."""
    if not s.does.prefills:
        end(s, state, now, PREEMPTED)
        return
    state.cover(False)
    s.list_media(state)
    if all(slot.ready for slot in state.media) or state.cover(not s.needs_media(state)) or hold_features(s, state):
        queue_prefill(s, state, now)
    elif s.encodes(state.work) and state.incoming is None:
        s.move(state, Phase.IMAGE_QUEUE, now, ahead=True)
    else:  # its inputs are not here
        end(s, state, now, PREEMPTED)


def hold_features(s: State, state: RequestState) -> bool:
    """Hold the features of all its media, if all are in the encoder cache here."""
    found = [s.cached_media(slot) for slot in state.media]
    if not all(found):
        return False
    drop_media(s, state)
    for slot, blocks in zip(state.media, found, strict=True):
        s.pools[slot.kind].hold(blocks)
        slot.hold(blocks, ready=True)
    return True


def grow_tables(s: State, rows: tuple[str, ...], now: float) -> tuple[str, ...]:
    """Allocate blocks for the next step's rows, oldest first. Returns the rows that have a slot for their token."""
    s.paused.clear()
    full = _needs_block(s, rows)
    if not full:
        return rows
    if s.kv.fits(len(full)):  # nearly always
        for state, block in zip(full, s.allocate(KV, len(full)), strict=True):
            state.grow((block,))
        s.command(Grow({state.work.request: state.block_table[-1:] for state in full}))
        return rows
    grown: dict[str, tuple[int, ...]] = {}
    for state in sorted(full, key=age):
        request = state.work.request
        if request in s.paused or not _is_running(s, request):
            continue  # it gives way to an older one
        if _make_room(s, state, now):
            grown[request] = s.allocate(KV, 1)
            state.grow(grown[request])
        else:
            s.paused.add(request)
    if grown:
        s.command(Grow(grown))
    return tuple(each for each in rows if each not in s.paused and _is_running(s, each))


def _is_running(s: State, request: str) -> bool:
    return request in s.decoding or request in s.prefilling


def _needs_block(s: State, rows: tuple[str, ...]) -> list[RequestState]:
    """Requests whose block table has no slot for their next token, counting the rows in flight."""
    size, flying, found = s.settings.kv_block_size, count_in_flight(s.lanes), []
    for request in rows:
        state = s.decoding.get(request)
        if state is not None:
            held = len(state.work.prompt) + state.outputs + flying[request]
        else:
            state = s.prefilling[request]
            held = state.prefill_end + 1
        if held > len(state.block_table) * size:
            found.append(state)
    return found


def _make_room(s: State, state: RequestState, now: float) -> bool:
    """Free one block by preempting younger requests; False where this one must wait.

    A request with a row in a step is not preempted. Waiting ends: older requests, steps and pulls end by themselves.
    """
    while not s.kv.fits(1):
        holding = (each for held in (s.decoding, s.prefilling) for each in held.values())
        youngest = max((each for each in holding if not each.never_preempted), key=age)
        if age(youngest) <= age(state):
            return False
        if s.in_step(youngest.work.request):
            s.paused.add(youngest.work.request)
            return False
        preempt(s, youngest, now)
    return True
