"""How many KV blocks a request is admitted with: its whole need, or its text's and a little (decision 0022)."""

from __future__ import annotations

from trinity.core.block_pool import blocks_for
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import KV, Work
from trinity.core.routing import kv_tokens

EXTRA_BLOCKS = 1  # blocks beyond those of its text that a request is admitted with


def blocks_to_reserve(s: State, state: RequestState, text: int) -> int:
    """KV blocks that a request is admitted with, whose text of so many blocks is prefilled or pulled here."""
    if "D" not in s.settings.roles:
        return text
    whole = blocks_for(kv_tokens(state.work, decodes=True), s.settings.kv_block_size)
    return min(whole, text + EXTRA_BLOCKS) if s.grows and not state.never_preempted else whole


def recomputable(s: State, work: Work) -> bool:
    """Whether some instance could prefill all that the request may come to. One that none could has its whole need
    reserved and is never preempted: sent back, it would wait for blocks that are not there."""
    if "P" in s.settings.roles:
        return True
    longest = len(work.prompt) + work.max_tokens - 1
    there = (peer for peer in s.router.peers.values() if "P" in peer.roles)
    return any(blocks_for(longest, peer.kv_block_size) <= peer.pools.get(KV, 0) for peer in there)


def decode_headroom(s: State) -> int:
    """Blocks that admissions leave alone: one for each request that decodes, which will ask for it soon."""
    return len(s.decoding) if s.grows else 0
