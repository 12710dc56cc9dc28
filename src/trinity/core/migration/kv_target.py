"""Target side of a KV transfer: reserves at once, pulls each piece when ready, keeps what a broken one has brought.

Where a prompt streams while it is prefilled, its first blocks are at the target long before the prefill ends. A source
that is lost then takes the request with it, but not these: each is published under the key of its text once all its
layers are here and its source has no more to write in it, and is reported ahead of the end, so that the next life of
the request finds it (decision 0094). A pull that has not ended counts for nothing, as in ``outlive_source``.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from trinity.core.instance.lifecycle import (
    blocks_to_reserve,
    decode_headroom,
    end,
    has_state_room,
    hold_state,
    recomputable,
)
from trinity.core.instance.loads import tell_cached
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import IncomingTransfer, Piece, PullProgress, RequestState
from trinity.core.instance.state import State
from trinity.core.messages import KV, STATE, Failure, Offer, Pull, Pulled, Ready
from trinity.core.transfers import PullTimes, merge_records, overlap_ratio

STATE_PULL = -1  # number of the pull of states; those of KV are counted from 0


def reserve_kv(s: State, state: RequestState, now: float) -> bool:
    """Reserve the blocks of a request to decode here, less its prefix-cache hits; False where they do not fit."""
    rules = s.settings.rules
    if rules.limit_decodes and len(s.decoding) + s.arriving[Phase.KV_PULL] >= rules.token_budget:
        return False
    assert state.incoming is not None
    state.never_preempted = s.grows and not recomputable(s, state.work)
    offer = state.incoming.offer
    text = len(offer.parts[0].blocks)
    total = text if offer.copies else blocks_to_reserve(s, state, text)
    hits = s.kv.match(s.prefix_keys(state))
    if s.preempted or not has_state_room(s) or not s.kv.fits(total - len(hits) + decode_headroom(s), hits):
        return False
    s.kv.hold(hits)
    state.hold_kv(hits + s.allocate(KV, total - len(hits)), len(hits))
    hold_state(s, state)
    incoming = state.incoming
    assert incoming is not None
    incoming.progress = PullProgress(len(incoming.offer.parts[0].blocks), s.settings.layers, len(hits))
    s.move(state, Phase.KV_PULL, now)
    return True


def queue_pieces(incoming: IncomingTransfer, event: Ready, now: float) -> None:
    """Queue a piece that is ready. With ``again``, earlier pieces of the same blocks are dropped from the queue.

    Where all layers of the last block are ready at once, prefill has ended: its Commit is the next message. So it has
    where the states are ready.
    """
    if event.state:
        incoming.states, incoming.prefill_ended_at = "ready", now
        return
    whole = event.blocks is None or event.blocks[1] == len(incoming.offer.parts[0].blocks)
    if event.layers is None and whole and not event.again:
        incoming.prefill_ended_at = now
    if event.again:
        incoming.mismatches = [each for each in incoming.mismatches if not _covers(event, each[0])]
        incoming.ready_queue = deque(each for each in incoming.ready_queue if each.blocks != event.blocks)
    incoming.ready_queue.append(event)


def pull_pieces(s: State, state: RequestState, now: float) -> None:
    """Pull the pieces in the queue. One written again waits until the pulls of its first version have ended."""
    incoming = state.incoming
    assert incoming is not None
    cells = incoming.progress
    assert cells is not None
    while incoming.ready_queue and not (incoming.ready_queue[0].again and state.pulls_in_flight):
        ready = incoming.ready_queue.popleft()
        if ready.again:
            cells.invalidate(ready.blocks or (0, cells.blocks))
        piece = cells.request(ready)
        incoming.from_ended_steps = incoming.from_ended_steps and ready.layers is None
        incoming.largest_group = max(incoming.largest_group, piece.layers[1] - piece.layers[0])
        if piece.cells:
            _pull(s, state, incoming, piece, now)
    if incoming.states == "ready":
        _pull_states(s, state, incoming, now)


def _pull_states(s: State, state: RequestState, incoming: IncomingTransfer, now: float) -> None:
    """Pull the block of states, which is written no more."""
    incoming.states = "asked"
    if not state.pulls_in_flight:
        incoming.busy_since = now
    pull = Pull(
        offer=incoming.offer.id,
        part=STATE_PULL,
        source=incoming.offer.source,
        kind=STATE,
        request=state.work.request,
        source_blocks=incoming.offer.state,
        target_blocks=state.state_block,
        generation=incoming.offer.generation,
    )
    s.pull(state, pull)


def _pull(s: State, state: RequestState, incoming: IncomingTransfer, piece: Piece, now: float) -> None:
    offer, span, number = incoming.offer, slice(*piece.blocks), len(incoming.asked_parts)
    incoming.asked_parts.add(number)
    incoming.kv_pulls[number] = (piece, now)
    if not state.pulls_in_flight:
        incoming.busy_since = now
    layers = None if piece.layers == (0, s.settings.layers) else piece.layers
    part = offer.parts[0]
    pull = Pull(
        offer=offer.id,
        part=number,
        source=offer.source,
        kind=KV,
        request=state.work.request,
        source_blocks=part.blocks[span],
        target_blocks=state.block_table[span],
        generation=offer.generation,
        layers=layers,
        tail=part.tail if piece.blocks[1] == len(part.blocks) else 0,
    )
    s.pull(state, pull)


def finish_piece(s: State, state: RequestState, event: Pulled, now: float) -> Failure | None:
    """Handle the end of a pull. Returns its failure, unless the piece may be written and announced again."""
    incoming = state.incoming
    assert incoming is not None
    assert incoming.progress is not None
    if not state.pulls_in_flight:
        incoming.busy_s += now - incoming.busy_since
        incoming.last_pull_at = now
    if event.part == STATE_PULL:
        incoming.states = "here" if event.failure is None else "asked"
        if event.record:
            state.record(event.record)
        return event.failure
    piece, since = incoming.kv_pulls.pop(event.part)
    if event.record:
        _record(state, incoming, event.record)
    if event.failure is None:
        incoming.progress.note_arrival(piece)
        s.pull_times.setdefault(incoming.offer.source, PullTimes()).add(piece.cells, now - since)
    elif _may_come_again(incoming, event.failure, piece):
        incoming.progress.note_loss(piece)
        return None
    return event.failure


def _may_come_again(incoming: IncomingTransfer, failure: Failure, piece: Piece) -> bool:
    """True where a digest mismatch may be due to a step that runs again; the source announces that before Commit."""
    if failure.fields.get("cause") != "IntegrityError" or incoming.from_ended_steps:
        return False
    if any(_covers(each, piece) for each in incoming.ready_queue):
        return True
    if incoming.commit is None:
        incoming.mismatches.append((piece, failure))
    return incoming.commit is None


def _covers(event: Ready, piece: Piece) -> bool:
    """True where this announces the piece again."""
    blocks = event.blocks
    return event.again and blocks is not None and blocks[0] <= piece.blocks[0] and piece.blocks[1] <= blocks[1]


def _record(state: RequestState, incoming: IncomingTransfer, record: dict[str, Any]) -> None:
    """Merge the record of a pull into the one record of its transfer."""
    if incoming.record:
        incoming.record.update(merge_records(incoming.record, record))
    else:
        incoming.record = {**record, "pulls": 1}
        state.record(incoming.record)


def is_kv_here(s: State, state: RequestState) -> bool:
    """True where all of the KV is here. Publishes it once it cannot be written again."""
    incoming = state.incoming
    assert incoming is not None
    here = incoming.progress is not None and not incoming.progress.missing
    here = here and (not incoming.offer.state or incoming.states == "here")
    if here and not incoming.ready_queue and (incoming.from_ended_steps or incoming.commit is not None):
        publish_kv(s, state, len(state.work.prompt))
    return here


def conclude_record(s: State, state: RequestState) -> None:
    """Add the overlap with prefill to the record: exposed seconds are those after its end (EPD-Serve table 4)."""
    incoming = state.incoming
    assert incoming is not None
    assert incoming.progress is not None
    if not incoming.moved:
        state.record(cached_record(s, incoming.offer))
    elif incoming.record:
        assert incoming.prefill_ended_at is not None
        exposed = max(0.0, incoming.last_pull_at - incoming.prefill_ended_at)
        incoming.record |= {
            "mode": _mode_of(s, incoming),
            "group": incoming.largest_group,
            "blocks": incoming.progress.blocks - incoming.progress.cached,
            "busy_s": incoming.busy_s,
            "exposed_s": exposed,
            "overlap": overlap_ratio(exposed, incoming.busy_s),
        }


def _mode_of(s: State, incoming: IncomingTransfer) -> str:
    """Name the mode of a transfer; of "auto", the one that its source took."""
    mode = s.settings.transfers.kv
    return mode if mode != "auto" else "off" if incoming.from_ended_steps else "grouped"


def cached_record(s: State, offer: Offer) -> dict[str, Any]:
    """Record of a transfer that the target's caches made needless."""
    names = {"kind": offer.kind, "source": offer.source, "target": s.settings.name}
    return {**names, "outcome": "cached", "bytes": 0, "blocks": 0, "seconds": 0.0}


def publish_kv(s: State, state: RequestState, tokens: int) -> None:
    """Publish the full blocks of the first ``tokens`` positions to the prefix cache."""
    if not s.settings.prefix_cache:
        return
    keys = s.prefix_keys(state)
    for index in range(state.published_blocks, min(tokens // s.settings.kv_block_size, len(keys))):
        s.kv.publish(state.block_table[index], keys[index])
        state.published_blocks = index + 1


def end_transfer(s: State, state: RequestState, now: float, why: Failure) -> None:
    """End a request whose transfer to here broke off, and report what of it is cached here ahead of that."""
    keep_whole_blocks(s, state)
    tell_cached(s, state)
    end(s, state, now, "error", why)


def keep_whole_blocks(s: State, state: RequestState) -> None:
    """Publish the first blocks of an incoming prompt that are here as a whole, and are not written again."""
    incoming = state.incoming
    if incoming is None or incoming.released or incoming.progress is None:
        return
    publish_kv(s, state, incoming.progress.count_whole() * s.settings.kv_block_size)
