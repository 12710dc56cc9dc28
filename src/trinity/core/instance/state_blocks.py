"""Blocks of states: one for each request of a model whose layers keep some, reserved and given back with its KV.

Such a layer keeps one state of a fixed size in place of keys and values (linear attention, Mamba, short convolutions).
A state cannot be cut where another request's text leaves off: an instance with these blocks has no prefix cache.
"""

from __future__ import annotations

from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import STATE


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
