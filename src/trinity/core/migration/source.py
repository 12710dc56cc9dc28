"""Source side of the pull migration (TriInfer 4.3): offers blocks and leases them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trinity.core.instance.front_ends import nowhere
from trinity.core.instance.helpers import take_answer
from trinity.core.instance.lanes import StepInFlight
from trinity.core.instance.lifecycle import end, hand_on, send_commit
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import KvStream, Lease, MediaSlot, RequestState
from trinity.core.instance.state import State, failure
from trinity.core.messages import (
    KV,
    Failure,
    Helped,
    LayersWritten,
    Offer,
    Part,
    Prefill,
    Ready,
    Step,
    Stepped,
    Work,
)
from trinity.core.migration.remote_features import remember_skipped
from trinity.core.routing.router import BadChoice
from trinity.core.transfers import LEAST_FIXED_S, UNKNOWN_GROUPS, group_layers, is_worth_streaming
from trinity.core.values import blocks_for
from trinity.stage_kinds import DECODE, PREFILL, taker_of


def may_offer(s: State, state: RequestState) -> bool:
    """True where the features may be announced: one is ready, or being encoded (``TransferPolicy.early``)."""
    chosen = s.settings.transfers
    if not chosen.prefetch or any(slot.holder or slot.helper for slot in state.media):  # may have to be encoded here
        return all(slot.ready for slot in state.media)
    return any(slot.ready or (chosen.early and _being_encoded(s, slot)) for slot in state.media)


def _being_encoded(s: State, slot: MediaSlot) -> bool:
    pending = s.pending.get(slot.span.content)
    return pending is not None and pending.in_step


def offer_media(s: State, state: RequestState, now: float) -> None:
    """Announce the features to a prefill instance; commit when all are ready.

    The target reserves for all items at once and pulls each as it is ready (two-stage allocation: vLLM
    encoder separation).
    """
    if state.outgoing is None:
        rows = s.settings.image_block_size
        parts = tuple(Part(slot.blocks, slot.holder, slot.span.tokens % rows) for slot in state.media)
        if not open_offer(s, state, now, state.media[0].kind, parts):
            return
        remember_skipped(s, state)
        ready = tuple(item for item, slot in enumerate(state.media) if slot.ready)
        announce(s, state, ready)
    if all(slot.ready for slot in state.media):
        commit(s, state, now)


def offer_found(s: State, state: RequestState, now: float) -> None:
    """Offer the features of a request that waits for the encoder, all of which other instances have."""
    s.move(state, Phase.ENCODING, now)
    offer_media(s, state, now)


def handle_helped(s: State, event: Helped, now: float) -> None:
    """A helper's answer: offer the features if they are all there."""
    state = take_answer(s, event)
    if state is None:
        return
    if state.phase is Phase.IMAGE_QUEUE and all(slot.holder for slot in state.media):
        offer_found(s, state, now)
    elif state.phase is Phase.ENCODING and state.outgoing is None and may_offer(s, state):
        offer_media(s, state, now)


def offer_kv(s: State, state: RequestState, now: float) -> None:
    """Offer the KV of a prefilled prompt to a decode instance, or commit the offer that streams it."""
    if state.kv_stream is not None:
        announce_states(s, state)
        commit(s, state, now)
        return
    if open_offer(s, state, now, KV, (kv_part(s, state),)):
        announce(s, state, (0,))
        commit(s, state, now)


def kv_part(s: State, state: RequestState) -> Part:
    """The KV blocks that the request's prefill fills."""
    tail = state.prefill_end % s.settings.kv_block_size
    return Part(state.block_table[: s.prefill_blocks(state)], tail=tail)


def announce(s: State, state: RequestState, parts: tuple[int, ...]) -> None:
    """Send Ready for these parts of the request's offer."""
    assert state.outgoing is not None
    if parts:
        s.send(s.outgoing[state.outgoing].target, Ready(state.outgoing, parts))
        announce_states(s, state)


def announce_states(s: State, state: RequestState) -> None:
    """Send Ready for the states that go with its KV: no step here changes them any more."""
    lease = s.outgoing.get(state.outgoing or "")
    if lease is not None and lease.state:
        s.send(lease.target, Ready(lease.id, (), state=True))


def open_offer(s: State, state: RequestState, now: float, kind: str, parts: tuple[Part, ...]) -> bool:
    """Choose an instance for the next stage and lease blocks to it. Without one, end the request and return False."""
    letter = taker_of(kind)
    try:
        target = _find_holder(s, kind, state.work) or s.router.choose(letter, state.work)
    except BadChoice as problem:
        end(s, state, now, "error", failure("StageError", str(problem), stage=letter))
        return False
    if target is None:
        end(s, state, now, "error", _nowhere(s, letter, state.work))
        return False
    lend_to(s, state, now, target, kind, parts)
    s.leave_tombstone(state, target)  # already: whatever becomes of the offer, its target reports the end
    return True


def _find_holder(s: State, kind: str, work: Work) -> str:
    """Find the decode instance that has the beginning of its text already, which need not move there; "" for none."""
    peers = s.router.trusted(s.router.fitting(DECODE.letter, work)) if kind == KV and work.holder else ()
    if not any(peer.name == work.holder for peer in peers):
        return ""
    s.router.count(work.holder, DECODE.letter, 1)
    return work.holder


def lend_to(s: State, state: RequestState, now: float, target: str, kind: str, parts: tuple[Part, ...]) -> None:
    """Lease the blocks to this instance, and offer it the request."""
    moves = state.phase is Phase.MOVING
    told = {"moves": moves, "tokens": tuple(state.tokens[:-1]) if moves else ()}
    offer = _offer(s, state, target, kind, parts, **told)
    lease = Lease(offer.id, state.work.request, target, kind, offer_blocks(offer), now, state.attempt, state.route)
    lease.offer, lease.deadline, lease.state = offer, state.deadline, offer.state
    s.lend(lease)
    state.outgoing = offer.id
    s.send(target, offer)


def lend_copy(s: State, state: RequestState, now: float, target: str, blocks: int) -> None:
    """Lease its first full blocks to this instance, to be cached there. It decodes on."""
    outputs = max(0, blocks * s.settings.kv_block_size - len(state.work.prompt))
    told = {"moves": True, "copies": True, "tokens": tuple(state.tokens[:outputs])}
    offer = _offer(s, state, target, KV, (Part(state.block_table[:blocks]),), **told)
    s.lend(Lease(offer.id, state.work.request, target, KV, offer_blocks(offer), now, state.attempt, copies=True))
    state.copy = offer.id
    s.send(target, offer)
    s.send(target, Ready(offer.id, (0,)))


def offer_blocks(offer: Offer) -> tuple[int, ...]:
    return tuple(block for part in offer.parts for block in part.blocks)


def name_offer(s: State) -> str:
    """Make the id of a new offer, which no other one has had in any life of an instance."""
    s.offers += 1
    life = f".{s.settings.epoch}" if s.settings.epoch else ""
    return f"{s.settings.name}{life}:{s.offers}"


def _offer(s: State, state: RequestState, target: str, kind: str, parts: tuple[Part, ...], **told: Any) -> Offer:
    return Offer(
        id=name_offer(s),
        kind=kind,
        source=s.settings.name,
        work=state.work,
        parts=parts,
        route=state.route,
        generation=s.generation,
        epoch=s.settings.epoch,
        target_epoch=s.router.peers[target].epoch,
        state=state.state_block if kind == KV else (),
        **told,
    )


def drop_offer(state: RequestState) -> None:
    """Note that its offer does not stand any more."""
    state.outgoing = None


def drop_copy(state: RequestState) -> None:
    """Note that no copy of its blocks is on its way any more."""
    state.copy = ""


def _nowhere(s: State, letter: str, work: Work) -> Failure:
    if not s.router.has(letter) or s.router.awaits(letter, work):  # gone, or not known yet to one that is just back
        return nowhere(s, letter)
    return failure(
        "RequestTooLarge", f"no instance with stage {letter} has the blocks for this request; enlarge its pools"
    )


def commit(s: State, state: RequestState, now: float) -> None:
    state.book_time(now)
    send_commit(s, state, now)
    hand_on(s, state, now)


def streams_kv(s: State, state: RequestState) -> bool:
    """True where a request's KV moves during its prefill. One that ends with its first token needs no transfer."""
    mode = s.settings.transfers.kv
    if mode == "off" or s.does.decodes or state.work.max_tokens <= 1:
        return False
    return mode != "auto" or state.kv_stream is not None or _is_worth_it(s, state)


def _is_worth_it(s: State, state: RequestState) -> bool:
    if s.pull_cost is None:
        return False
    fixed, cell = s.pull_cost
    return is_worth_streaming(fixed + cell * s.settings.layers * s.prefill_blocks(state))


def open_streams(s: State, step: Step, now: float) -> None:
    """Offer the KV of requests whose prefill begins, so that a decode instance reserves meanwhile."""
    for row in step.prefills:
        state = s.requests[row.request]
        begins = state.outgoing is None and state.ending is None and streams_kv(s, state)
        if begins and open_offer(s, state, now, KV, (kv_part(s, state),)):
            state.kv_stream = KvStream(state.prefilled // s.settings.kv_block_size, step.id)
            _tell(s, state, None, (0, state.kv_stream.announced_blocks))


def close_stream(state: RequestState) -> None:
    """Note that no target pulls its KV any more while its prefill runs; another one may from its next chunk on."""
    state.kv_stream = None


def layers_per_group(s: State, prefills: Sequence[Prefill]) -> int:
    """Layers between two LayersWritten of a step with these rows; 0 where no KV is streamed."""
    rows = [row for row in prefills if streams_kv(s, s.requests[row.request])]
    if not rows:
        return 0
    if s.settings.transfers.kv == "layer":
        return 1
    layers, cost = s.settings.layers, s.pull_cost
    tokens = sum(row.length for row in prefills)
    compute, rest = s.rates.seconds(PREFILL.letter, tokens) / layers, s.step_tail.seconds(tokens)
    if cost is None or not compute:
        return -(-layers // UNKNOWN_GROUPS)
    blocks = sum(blocks_for(row.length, s.settings.kv_block_size) for row in rows)
    return group_layers(layers, compute, max(cost[0], LEAST_FIXED_S) * len(rows), cost[1] * blocks, rest)


def handle_layers_written(s: State, event: LayersWritten, now: float) -> None:
    """Announce the layers that a running step has written, or note that it writes all of them again."""
    assert s.lanes[event.lane], f"{event} of a lane where nothing runs"
    running = s.lanes[event.lane][0]
    assert running.step.id == event.step, f"{event} during step {running.step.id}"
    running.written = now if event.layers and event.layers[1] == s.settings.layers else None
    for row in running.step.prefills:
        state = s.requests[row.request]
        stream = state.kv_stream
        if stream is None or state.ending is not None or event.step < stream.first_step:
            continue
        if event.layers is None:
            stream.again = stream.layers > 0
        else:
            assert event.layers[0] == stream.layers < event.layers[1] <= s.settings.layers, f"{event}: layers left out"
            stream.layers = event.layers[1]
            _tell(s, state, event.layers, _whole(s, state, row))


def finish_chunk(s: State, state: RequestState, row: Prefill) -> None:
    """Announce the layers of a finished chunk that were not announced during its step."""
    stream = state.kv_stream
    if stream is None:
        return
    blocks, layers = _whole(s, state, row), s.settings.layers
    if stream.again:
        _tell(s, state, None, blocks, again=True)
    elif stream.layers < layers:
        _tell(s, state, (stream.layers, layers) if stream.layers else None, blocks)
    stream.announced_blocks, stream.layers, stream.again = blocks[1], 0, False


def measure_step_tail(s: State, running: StepInFlight, event: Stepped, now: float) -> None:
    """Record the seconds from a step's last KV write to its end."""
    if running.written is not None and not event.failed:
        s.step_tail.add(sum(row.length for row in running.step.prefills), now - running.written)


def _whole(s: State, state: RequestState, row: Prefill) -> tuple[int, int]:
    """Range of blocks that this chunk completes; the last chunk also completes the partial block."""
    assert state.kv_stream is not None
    end = s.prefill_blocks(state) if row.last else (row.start + row.length) // s.settings.kv_block_size
    return state.kv_stream.announced_blocks, end


def _tell(
    s: State, state: RequestState, layers: tuple[int, int] | None, blocks: tuple[int, int], again: bool = False
) -> None:
    offer = state.outgoing
    if offer in s.outgoing and blocks[0] < blocks[1]:
        s.send(s.outgoing[offer].target, Ready(offer, (0,), layers, blocks, again))
