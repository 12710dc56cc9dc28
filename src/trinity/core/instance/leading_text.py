"""Leading text: what stands before a request's first image is prefilled while the image's features are to come.

It is prefilled into the prefix cache. Its blocks are held while the step runs that writes them, and no longer: then
they are cached like those of any prompt, and the request finds them when its own prefill begins. So nobody holds a KV
block while it waits for features, and what becomes of the request leaves nothing to give back (decision 0087).
"""

from __future__ import annotations

from trinity.core.instance.lifecycle import decode_headroom
from trinity.core.instance.queues import leading_blocks
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import KV, Open, Prefill, Step, Stepped
from trinity.core.migration.kv_target import publish_kv
from trinity.core.scheduler import LeadingChunk


def find_leading_chunk(s: State, lane: str, room: int) -> LeadingChunk | None:
    """Choose leading text of at most ``room`` tokens for the lane's next step: of who waits longest.

    None where something else waits for prefill, or runs on this lane beside decodes: it must not wait for this.
    """
    if s.leading.running or _is_wanted(s, lane):
        return None
    block = s.settings.kv_block_size
    while (state := s.leading.first()) is not None and not s.prefix_fetches.delay(state):
        whole = leading_blocks(state.work, block)
        hits = s.kv.match(s.prefix_keys(state)[:whole])
        if len(hits) < whole and len(hits) * block >= state.led_to:
            return _cut(s, state, hits, min(whole, len(hits) + room // block))
        s.leading.leave(state)  # what was prefilled ahead and evicted since is not prefilled ahead again
    return None


def _is_wanted(s: State, lane: str) -> bool:
    """True where the step or its blocks are of use to others."""
    waiting = s.prefilling or s.prefill_queue or s.migrated_queue or s.preempted or s.kv_offers or s.paused
    return bool(waiting) or any(running.step.prefills or running.step.encodes for running in s.lanes[lane])


def _cut(s: State, state: RequestState, hits: tuple[int, ...], end: int) -> LeadingChunk | None:
    """Cut the blocks behind what is cached, up to block ``end``; None where there is no room, in the step or the pool.

    Nobody is skipped, so that a step asks for one request alone, however many wait.
    """
    start, block = len(hits), s.settings.kv_block_size
    if start == end or not s.kv.fits(end - start + decode_headroom(s), hits):
        return None
    return LeadingChunk(state.work.request, start * block, (end - start) * block)


def begin_leading(s: State, chunk: LeadingChunk) -> Prefill:
    """Hold the blocks of a chunk and those before it, for its step. Returns its row."""
    state, block = s.requests[chunk.request], s.settings.kv_block_size
    hits = s.kv.match(s.prefix_keys(state)[: chunk.start // block])
    s.kv.hold(hits)
    state.hold_kv(hits + s.allocate(KV, chunk.length // block), len(hits))
    s.leading.begin(chunk.request)
    s.open(state, Open(work=state.work, blocks=state.block_table, cached=chunk.start))
    return Prefill(chunk.request, chunk.start, chunk.length, last=False)


def finish_leading(s: State, step: Step, event: Stepped) -> None:
    """Publish the blocks of a chunk whose step has ended, and let go of them; of one that failed there is nothing."""
    (row,) = step.prefills
    state, end = s.requests[row.request], row.start + row.length
    s.leading.finish()
    if row.request not in event.failed:
        publish_kv(s, state, end)
        state.lead(row.start, end)
    s.kv.drop(reversed(state.block_table))  # the end is evicted first: what is left can be matched
    state.hold_kv((), 0)
    s.close(state)
