"""Preempts a request for an older one: its KV blocks are dropped and later recomputed, as in vLLM.

Its blocks, those of its outputs included, stay in the prefix cache until they are evicted: then little is recomputed.
Its next prefill has its prompt and its outputs, ahead of all waiting requests, the oldest first.
"""

from __future__ import annotations

from trinity.core.instance.lifecycle import drop_media, end, queue_prefill
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.instance.state_blocks import drop_state
from trinity.core.messages import PREEMPTED
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
    if "P" not in s.settings.roles:
        end(s, state, now, PREEMPTED)
        return
    state.cover(False)
    s.list_media(state)
    if all(slot.ready for slot in state.media) or state.cover(not s.needs_media(state)) or hold_features(s, state):
        queue_prefill(s, state, now)
    elif "E" in s.settings.roles and state.incoming is None:
        s.move(state, Phase.IMAGE_QUEUE, now, ahead=True)
    else:  # its inputs are not here
        end(s, state, now, PREEMPTED)


def hold_features(s: State, state: RequestState) -> bool:
    """Hold the features of all its media, if all are in the encoder cache here."""
    found = [s.cached_media(slot.keys) for slot in state.media]
    if not all(found):
        return False
    drop_media(s, state)
    for slot, blocks in zip(state.media, found, strict=True):
        s.image.hold(blocks)
        slot.hold(blocks, ready=True)
    return True
