"""Grows block tables as requests decode (optimistic reservation, as vLLM's slot allocation).

A request gets a block when its next token needs one. Where none is free the youngest request is preempted
(``preemption``), never the oldest, so that some request always makes progress.
"""

from __future__ import annotations

from trinity.core.instance.lanes import count_in_flight
from trinity.core.instance.preemption import age, preempt
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import KV, Grow


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
