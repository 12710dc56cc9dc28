"""Steps: a free lane gets the next batch of Algorithm 1, and what a step has done moves its requests on."""

from __future__ import annotations

from collections.abc import Sequence

from trinity.core.admission import Candidates, next_decodes, own_items
from trinity.core.growth import placed
from trinity.core.kv_source import chunk_done, group_for, measure, open_streams
from trinity.core.kv_target import publish_kv
from trinity.core.lanes import LANES, Running
from trinity.core.lifecycle import conclude_if_quiet, drop_media, end, queue_prefill
from trinity.core.source import announce, may_offer, offer_kv, offer_media
from trinity.core.state import RequestState, State
from trinity.core.target import admit_offers, start_decoding
from trinity.messages import FRONTEND, Emit, Emitted, Encode, Prefill, Send, Step, Stepped
from trinity.scheduler import Batch, schedule


def pump(s: State, now: float) -> None:
    """Admit migrations and fill lanes until nothing more can start."""
    again = True
    while again:
        if s.image_offers or s.kv_offers:
            admit_offers(s, now)
        again = False
        for lane, flight in s.lanes.items():
            while len(flight) < s.settings.depth:
                before = len(flight)
                again = _fill(s, lane, now) or again
                if len(flight) == before:
                    break


def _fill(s: State, lane: str, now: float) -> bool:
    """Start the lane's next step. True where something changed that may let more be admitted."""
    preempted = s.preemptions
    rows: tuple[str, ...] = ()
    if "D" in LANES[lane]:
        rows = tuple(s.decoding) if s.settings.depth == 1 else next_decodes(s)
        if s.grows:
            rows = placed(s, rows, now)
    if not (s.prefilling or s.encoding or s.encode_queue or s.prefill_queue or s.migrated_queue or s.preempted):
        # Most steps are such. Every policy then takes all decodes and nothing else: no view is needed to know that.
        if rows:
            _start(s, lane, Step(s.steps + 1, lane, decodes=rows), now)
        return False  # a step lets nothing more be admitted
    candidates = Candidates(s, lane, rows, now)
    batch = schedule(candidates.view, s.settings.rules)
    admitted = candidates.admit(batch)
    scheduled = _build(s, lane, batch)
    if scheduled is not None:
        _start(s, lane, scheduled, now)
    for state in admitted:
        _media_progress(s, state, now)
    if scheduled is not None:
        _announce_media(s, scheduled, now)
        open_streams(s, scheduled, now)
    return bool(admitted or candidates.uncovered or s.preemptions > preempted)


def _start(s: State, lane: str, step: Step, now: float) -> None:
    """Run the step on the lane."""
    if s.fresh and step.decodes:
        _first_decodes(s, now)
    s.steps += 1
    running = Running.of(step) if step.encodes or step.prefills else Running(step, step.decodes)
    s.lanes[lane].append(running)
    s.out.append(step)


def _build(s: State, lane: str, batch: Batch) -> Step | None:
    """The batch as a step; None where nothing is in it."""
    encodes = tuple(row for request, items in batch.encodes for row in _encode_rows(s, request, items))
    prefills = tuple(_prefill_row(s, *chosen) for chosen in batch.prefills)
    decodes = tuple(batch.decodes)
    if not (encodes or prefills or decodes):
        return None
    return Step(s.steps + 1, lane, encodes, prefills, decodes, group_for(s, prefills) if prefills else 0)


def _first_decodes(s: State, now: float) -> None:
    for request in s.fresh:
        state = s.decoding.get(request)
        if state is not None:
            state.book(now)
            state.first_decode = True
    s.fresh.clear()


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
    state.scheduled = start + length
    return Prefill(request, start, length, start + length == state.text)


def stepped(s: State, event: Stepped, now: float) -> None:
    """A step ended: tokens go out, blocks become matchable, requests move on or end."""
    flight = s.lanes[event.lane]
    assert flight, f"nothing runs on {event.lane}"
    assert flight[0].step.id == event.id, f"step {event.id} is not running on {event.lane}"
    running = flight.popleft()
    step, failed = running.step, event.failed
    s.rates.learn(step, event.seconds)
    emitted: list[Emitted] = []
    before = len(s.out)
    if step.encodes:
        _encoded(s, step, event, now)
    if step.prefills:
        measure(s, running, event, now)
    for row in step.prefills:
        if row.request not in failed:
            _prefilled(s, row, event, emitted, now)
    _take(s, [each for each in step.decodes if each not in failed] if failed else step.decodes, event, emitted, now)
    if emitted:  # ahead of the ends that these tokens brought about
        s.out.insert(before, Send(FRONTEND, Emit(tuple(emitted))))
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
            pending = s.pending.pop(row.span.content)
            for request, item in pending.providers:
                changed.setdefault(request, []).append(item)
            if s.settings.image_cache:
                keys = s.requests[row.request].media[row.item].keys
                for block, key in zip(row.blocks, keys, strict=True):
                    s.image.publish(block, key)
    for request, items in changed.items():
        state = s.requests[request]
        for item in items:
            state.media[item].ready = True
        if state.ending is None:
            _media_progress(s, state, now, tuple(items))


def _next_provider(s: State, row: Encode) -> None:
    """This request's own inputs failed; it is about to end. Whoever else waits for the same content encodes its own."""
    s.pending[row.span.content].in_step = False


def _media_progress(s: State, state: RequestState, now: float, items: tuple[int, ...] = ()) -> None:
    """Some features are ready: announce them, or go on to prefill here once all are."""
    if "P" not in s.settings.roles:
        if state.outgoing is not None:
            announce(s, state, items)
        if may_offer(s, state):
            offer_media(s, state, now)
    elif all(slot.ready for slot in state.media):
        del s.encoding[state.work.request]
        queue_prefill(s, state, now)


def _announce_media(s: State, step: Step, now: float) -> None:
    """The first features of some requests are about to be made: their target may reserve meanwhile (001)."""
    for row in step.encodes:
        for request, _ in tuple(s.pending[row.span.content].providers):
            state = s.requests[request]
            if "P" not in s.settings.roles and state.outgoing is None and may_offer(s, state):
                offer_media(s, state, now)


def _prefilled(s: State, row: Prefill, event: Stepped, emitted: list[Emitted], now: float) -> None:
    state = s.requests[row.request]
    if state.ending is not None:
        return
    state.done += row.length
    publish_kv(s, state, state.done)
    chunk_done(s, state, row)
    if not row.last:
        return
    del s.prefilling[row.request]
    drop_media(s, state)
    _take(s, (row.request,), event, emitted, now)
    if state.ending is not None:
        return
    if "D" in s.settings.roles:
        start_decoding(s, state, now)
    else:
        offer_kv(s, state, now)


def _take(s: State, requests: Sequence[str], event: Stepped, emitted: list[Emitted], now: float) -> None:
    """Take one token of each of these rows, unless its request is ending."""
    found, states = event.sampled, s.requests
    for request in requests:
        state = states[request]
        if state.ending is not None:
            continue
        sampled = found.get(request)
        assert sampled is not None, f"a row of {request} gave no token"
        tokens, token = state.tokens, sampled.token
        emitted.append(Emitted(request, state.attempt, len(tokens), sampled))
        tokens.append(token)
        if token in state.stop_ids or len(tokens) >= state.max_tokens:
            end(s, state, now, "stop" if token in state.stop_ids else "length")
