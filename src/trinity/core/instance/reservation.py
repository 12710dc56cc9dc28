"""Blocks that an admission reserves: all of the KV, or the prefill's and ``EXTRA_BLOCKS`` (decision 0022); a state."""

from __future__ import annotations

from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import KV, STATE, Work
from trinity.core.routing.stage_peers import kv_tokens
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
