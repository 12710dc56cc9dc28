"""Optimistic reservation: blocks as a request decodes.

A request that decodes gets a block when the next token needs one. Where none
is to be had the youngest gives its own up (``preemption``), never the oldest, so that somebody always goes on.
"""

from __future__ import annotations

from trinity.core.instance.preemption import age, preempt
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import KV, Grow


def grow_tables(s: State, rows: tuple[str, ...], now: float) -> tuple[str, ...]:
    """Those rows of the next step that have a block for the token which they feed; the oldest get theirs first."""
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
    """Whose blocks have no place for the key and value that a row of theirs writes next, behind those in flight."""
    size, flying, found = s.settings.kv_block_size, s.count_in_flight(), []
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
    """One block for this request. Only younger ones are preempted for it, and not while a step has a row of theirs; it
    waits where what is left is older, in flight, or on its way here: all of that ends by itself."""
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
