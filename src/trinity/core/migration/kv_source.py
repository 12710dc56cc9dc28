"""The source's side of a KV transfer that runs while prefill does (EPD-Serve 3.3): layers and chunks, as written."""

from __future__ import annotations

from collections.abc import Sequence

from trinity.core.block_pool import blocks_for
from trinity.core.instance.lanes import Running
from trinity.core.instance.request_state import KvStream, RequestState
from trinity.core.instance.state import State
from trinity.core.messages import KV, Part, Prefill, Progress, Ready, Step, Stepped
from trinity.core.migration.source import open_offer
from trinity.core.transfers import LEAST_FIXED_S, UNKNOWN_GROUPS, group_layers


def streams(s: State, state: RequestState) -> bool:
    """Whether a request's KV moves while it is prefilled. One that ends with its first token has no need of it."""
    return s.settings.transfers.kv != "off" and "D" not in s.settings.roles and state.work.max_tokens > 1


def open_streams(s: State, step: Step, now: float) -> None:
    """Prefill of some requests begins: a decode instance is chosen, and reserves while it goes on."""
    for row in step.prefills:
        state = s.requests[row.request]
        if state.outgoing is None and state.ending is None and streams(s, state):
            blocks = state.block_table[: s.prefill_blocks(state)]
            if open_offer(s, state, now, "D", KV, (Part(blocks),)):
                state.kv_stream = KvStream(state.prefill_start // s.settings.kv_block_size)
                _tell(s, state, None, (0, state.kv_stream.announced_blocks))


def group_for(s: State, prefills: Sequence[Prefill]) -> int:
    """Layers after which a step with these rows is to tell of its progress; 0 where nobody wants to know."""
    rows = [row for row in prefills if streams(s, s.requests[row.request])]
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


def progressed(s: State, event: Progress, now: float) -> None:
    """A running step has written some more layers of its rows' KV, or must write all of them again."""
    assert s.lanes[event.lane], f"{event} of a lane where nothing runs"
    running = s.lanes[event.lane][0]
    assert running.step.id == event.step, f"{event} during step {running.step.id}"
    running.written = now if event.layers and event.layers[1] == s.settings.layers else None
    for row in running.step.prefills:
        state = s.requests[row.request]
        stream = state.kv_stream
        if stream is None or state.ending is not None:
            continue
        if event.layers is None:
            stream.again = stream.layers > 0
        else:
            assert event.layers[0] == stream.layers < event.layers[1] <= s.settings.layers, f"{event}: layers left out"
            stream.layers = event.layers[1]
            _tell(s, state, event.layers, _whole(s, state, row))


def chunk_done(s: State, state: RequestState, row: Prefill) -> None:
    """A chunk is prefilled: what was not announced in its middle is ready now."""
    stream = state.kv_stream
    if stream is None:
        return
    blocks, layers = _whole(s, state, row), s.settings.layers
    if stream.again:
        _tell(s, state, None, blocks, again=True)
    elif stream.layers < layers:
        _tell(s, state, (stream.layers, layers) if stream.layers else None, blocks)
    stream.announced_blocks, stream.layers, stream.again = blocks[1], 0, False


def measure(s: State, running: Running, event: Stepped, now: float) -> None:
    """How long a step goes on when all of its KV is written."""
    if running.written is not None and not event.failed:
        s.step_tail.add(sum(row.length for row in running.step.prefills), now - running.written)


def _whole(s: State, state: RequestState, row: Prefill) -> tuple[int, int]:
    """The blocks that are full after this chunk and were not before; with the last one the rest of the prompt."""
    assert state.kv_stream is not None
    end = s.prefill_blocks(state) if row.last else (row.start + row.length) // s.settings.kv_block_size
    return state.kv_stream.announced_blocks, end


def _tell(
    s: State, state: RequestState, layers: tuple[int, int] | None, blocks: tuple[int, int], again: bool = False
) -> None:
    offer = state.outgoing
    if offer in s.outgoing and blocks[0] < blocks[1]:
        s.send(s.outgoing[offer].target, Ready(offer, (0,), layers, blocks, again))
