"""Steps: a free lane gets the next batch of Algorithm 1, and what a step has done moves its requests on."""

from __future__ import annotations

from trinity.core.instance.admission import Candidates, next_decodes, own_items
from trinity.core.instance.collection import collect_features
from trinity.core.instance.helpers import ask_home, recall, tell_begun
from trinity.core.instance.lanes import LANE_PARTS, StepInFlight
from trinity.core.instance.leading_text import begin_leading, finish_leading
from trinity.core.instance.lifecycle import conclude_if_quiet, drop_media, end, queue_prefill
from trinity.core.instance.preemption import grow_tables
from trinity.core.instance.request_state import MediaSlot, RequestState
from trinity.core.instance.state import State
from trinity.core.messages import ENCODED, Emit, Encode, Prefill, Sampled, Step, Stepped
from trinity.core.migration.kv_target import publish_kv
from trinity.core.migration.source import (
    announce,
    finish_chunk,
    layers_per_group,
    may_offer,
    measure_step_tail,
    offer_kv,
    offer_media,
    open_streams,
)
from trinity.core.migration.target import admit_offers
from trinity.core.scheduler import Batch, schedule

FirstToken = tuple[str, int, int, Sampled]  # request, attempt, index and sample


def pump(s: State, now: float) -> None:
    """Admit migrations and fill lanes until nothing more can start."""
    again = True
    while again:
        if s.waiting_offers:
            admit_offers(s, now)
        again = False
        for lane, flight in s.lanes.items():
            while len(flight) < s.depth:
                before = len(flight)
                again = _fill(s, lane, now) or again
                if len(flight) == before:
                    break
        again = (bool(s.encoding) and recall(s)) or again
    if s.encoding:
        ask_home(s)


def _fill(s: State, lane: str, now: float) -> bool:
    """Start the lane's next step. True where a change may let more requests be admitted."""
    preempted = s.preemptions
    rows: tuple[str, ...] = ()
    if "language" in LANE_PARTS[lane]:
        rows = tuple(s.decoding) if s.depth == 1 else next_decodes(s)
        if s.grows:
            rows = grow_tables(s, rows, now)
    if not s.before_decode and not s.leading:
        # Most steps are such. Every policy then takes all decodes and nothing else: no view is needed to know that.
        if rows:
            s.start(StepInFlight(Step(s.steps + 1, lane, (), (), rows), rows), now)
        return False  # a step lets nothing more be admitted
    candidates = Candidates(s, lane, rows, now)
    batch = schedule(candidates.view, s.settings.rules)
    admitted = candidates.admit(batch)
    scheduled = _build(s, lane, batch)
    if scheduled is not None:
        s.start(StepInFlight.of(scheduled), now)
    for state in admitted:
        show_progress(s, state, now)
    if scheduled is not None:
        tell_begun(s, scheduled)
        _announce_media(s, scheduled, now)
        if batch.prefills:
            open_streams(s, scheduled, now)
    return bool(admitted or candidates.uncovered or s.preemptions > preempted)


def _build(s: State, lane: str, batch: Batch) -> Step | None:
    """Convert the batch into a step; None for an empty batch."""
    encodes = tuple(row for request, items in batch.encodes for row in _encode_rows(s, request, items))
    prefills = tuple(_prefill_row(s, *chosen) for chosen in batch.prefills)
    decodes, group = tuple(batch.decodes), layers_per_group(s, prefills) if prefills else 0
    if batch.leading is not None:
        prefills = (begin_leading(s, batch.leading),)
    if not (encodes or prefills or decodes):
        return None
    return Step(s.steps + 1, lane, encodes, prefills, decodes, group)


def _encode_rows(s: State, request: str, items: tuple[int, ...]) -> list[Encode]:
    state = s.requests[request]
    mine = {item for item, _ in own_items(s, state)}
    rows = []
    for item in items:
        if item in mine:
            slot = state.media[item]
            s.pending[slot.span.content].in_step = True
            inputs = state.inputs[item] if state.inputs else None
            rows.append(Encode(request, item, slot.span, slot.blocks, inputs))
    return rows


def _prefill_row(s: State, request: str, start: int, length: int) -> Prefill:
    state = s.requests[request]
    state.schedule(start + length)
    return Prefill(request, start, length, start + length == state.prefill_end)


def handle_stepped(s: State, event: Stepped, now: float) -> None:
    """Handle the end of a step: emit tokens, publish blocks, move requests on or end them."""
    flight = s.lanes[event.lane]
    assert flight, f"nothing runs on {event.lane}"
    assert flight[0].step.id == event.id, f"step {event.id} is not running on {event.lane}"
    running = flight.popleft()
    step, failed = running.step, event.failed
    s.rates.learn(step, event.seconds)
    before = len(s.out)
    if step.encodes:
        _encoded(s, step, event, now)
    emits: dict[str, Emit] = {}
    if step.prefills and step.prefills[0].request == s.leading.running:
        finish_leading(s, step, event)
    elif step.prefills:
        emits = _prefilled(s, running, event, now)
    if step.decodes:
        decoded = _decoded(s, step.decodes, event, now)
        emits = _joined(emits, decoded) if emits else decoded
    for place, (owner, emit) in enumerate(emits.items()):  # ahead of the ends that these tokens brought about
        s.send_ahead(before + place, owner, emit)
    for request, why in failed.items():
        end(s, s.requests[request], now, "error", why)
    for request in running.requests if s.leaving else ():
        left = s.requests.get(request)
        if left is not None and left.ending is not None:
            conclude_if_quiet(s, left, now)


def _encoded(s: State, step: Step, event: Stepped, now: float) -> None:
    changed: dict[str, list[int]] = {}
    for row in step.encodes:
        if row.request in event.failed:
            _next_provider(s, row)
        else:
            for request, items in settle_features(s, s.requests[row.request].media[row.item]).items():
                changed.setdefault(request, []).extend(items)
    for request, items in changed.items():
        state = s.requests[request]
        if state.ending is None and request not in event.failed:  # it might find no prefill instance, and end twice
            show_progress(s, state, now, tuple(items))


def settle_features(s: State, slot: MediaSlot) -> dict[str, list[int]]:
    """Note that features are in the blocks of this slot. Returns the items that waited for them, by request."""
    found: dict[str, list[int]] = {}
    for request, item in s.pending.pop(slot.span.content).providers:
        found.setdefault(request, []).append(item)
        s.requests[request].media[item].fill()
    if s.settings.image_cache:
        for block, key in zip(slot.blocks, slot.keys, strict=True):
            s.pools[slot.kind].publish(block, key)
    return found


def _next_provider(s: State, row: Encode) -> None:
    """Let another request encode the same content: this one's inputs failed, and it is about to end."""
    s.pending[row.span.content].in_step = False


def show_progress(s: State, state: RequestState, now: float, items: tuple[int, ...] = ()) -> None:
    """Announce features that are ready, or queue for prefill here once all are, or collect them for their reader."""
    if state.asker:
        if all(slot.ready for slot in state.media):
            end(s, state, now, ENCODED)
    elif state.work.encode_only:
        if all(slot.ready for slot in state.media):
            collect_features(s, state, now)
    elif not s.does.prefills:
        if state.outgoing is not None:
            announce(s, state, items)
        if may_offer(s, state):
            offer_media(s, state, now)
    elif all(slot.ready for slot in state.media):
        queue_prefill(s, state, now)


def _announce_media(s: State, step: Step, now: float) -> None:
    """Announce the features that are made next: their target may reserve meanwhile (vLLM encoder separation)."""
    for row in step.encodes:
        for request, _ in tuple(s.pending[row.span.content].providers):
            state = s.requests.get(request)
            if state is None or state.ending is not None:  # it found no prefill instance for the same image before
                continue
            offers = not s.does.prefills and not state.work.encode_only
            if offers and state.outgoing is None and may_offer(s, state):
                offer_media(s, state, now)


def _prefilled(s: State, running: StepInFlight, event: Stepped, now: float) -> dict[str, Emit]:
    """Advance the step's chunks. Returns the first tokens of the prompts that are complete, by owner."""
    measure_step_tail(s, running, event, now)
    firsts: dict[str, list[FirstToken]] = {}
    for row in running.step.prefills:
        if row.request not in event.failed:
            _chunk(s, row, event, firsts, now)
    return {owner: _emit(found) for owner, found in firsts.items()}


def _emit(firsts: list[FirstToken]) -> Emit:
    requests, attempts, starts, sampled = zip(*firsts, strict=True)
    return Emit(requests, attempts, starts, sampled)


def _chunk(s: State, row: Prefill, event: Stepped, firsts: dict[str, list[FirstToken]], now: float) -> None:
    state = s.requests[row.request]
    if state.ending is not None:
        return
    state.prefilled += row.length
    publish_kv(s, state, state.prefilled)
    finish_chunk(s, state, row)
    if not row.last:
        return
    drop_media(s, state)
    sampled = event.sampled.get(row.request)
    assert sampled is not None, f"a row of {row.request} gave no token"
    first = (row.request, state.attempt, len(state.stored_tokens), sampled)
    firsts.setdefault(state.work.owner, []).append(first)
    state.take_token(sampled.token)
    if sampled.token in state.stop_ids or len(state.stored_tokens) >= state.max_tokens:
        end(s, state, now, "stop" if sampled.token in state.stop_ids else "length")
    elif s.does.decodes:
        s.start_decoding(state, now)
    else:
        offer_kv(s, state, now)


def _decoded(s: State, rows: tuple[str, ...], event: Stepped, now: float) -> dict[str, Emit]:
    """Take one token of each of these rows, unless its request is ending or has failed. Returns them by owner."""
    columns = s.decode_batch
    if rows != columns.rows or event.failed or s.leaving:
        rows = tuple([each for each in rows if each not in event.failed and s.requests[each].ending is None])
        _gather(s, rows)
        if not rows:
            return {}
    try:
        emits, more = columns.add_column(event.sampled)
    except KeyError as missing:
        raise AssertionError(f"a row of {missing.args[0]} gave no token") from None
    if more:
        for request, reason in columns.ends():
            end(s, s.requests[request], now, reason)
        if columns.full():
            for request in columns.members:
                s.requests[request].store_tokens()
            columns.clear()
    return emits


def _gather(s: State, rows: tuple[str, ...]) -> None:
    """Have these requests, and no other, decode together from the next column on."""
    new, gone = s.decode_batch.changes(rows)
    for request in gone:
        s.requests[request].leave_decode_batch()
    for request in new:
        s.requests[request].join_decode_batch(s.decode_batch)
    if rows:
        s.decode_batch.arrange(rows)


def _joined(firsts: dict[str, Emit], rest: dict[str, Emit]) -> dict[str, Emit]:
    """Join the first tokens of prompts and the tokens of decode rows of each owner, in this order."""
    both = {owner: _join_rows(first, rest[owner]) for owner, first in firsts.items() if owner in rest}
    return {**firsts, **rest, **both}


def _join_rows(firsts: Emit, rest: Emit) -> Emit:
    return Emit(
        firsts.requests + rest.requests,
        firsts.attempts + rest.attempts,
        firsts.starts + tuple([start + rest.behind for start in rest.starts]),
        firsts.sampled + rest.sampled,
    )
