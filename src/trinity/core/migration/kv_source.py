"""Source side of a KV transfer during prefill (EPD-Serve 3.3): announces layers and chunks as they are written."""

from __future__ import annotations

from collections.abc import Sequence

from trinity.core.block_pool import blocks_for
from trinity.core.instance.lanes import StepInFlight
from trinity.core.instance.request_state import KvStream, RequestState
from trinity.core.instance.state import State
from trinity.core.messages import KV, LayersWritten, Prefill, Ready, Step, Stepped
from trinity.core.migration.source import kv_part, open_offer
from trinity.core.transfers import LEAST_FIXED_S, UNKNOWN_GROUPS, group_layers, is_worth_streaming


def streams_kv(s: State, state: RequestState) -> bool:
    """True where a request's KV moves during its prefill. One that ends with its first token needs no transfer."""
    mode = s.settings.transfers.kv
    if mode == "off" or "D" in s.settings.roles or state.work.max_tokens <= 1:
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
        if begins and open_offer(s, state, now, "D", KV, (kv_part(s, state),)):
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
    compute, rest = s.rates.seconds("P", tokens) / layers, s.step_tail.seconds(tokens)
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
