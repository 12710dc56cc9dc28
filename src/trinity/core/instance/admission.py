"""Admission: a request arrives and is queued; the candidates of a schedule get image or KV blocks reserved."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain

from msgspec.structs import replace

from trinity.core.instance.front_ends import find_company, nowhere, refuse_submit
from trinity.core.instance.helpers import call_off, call_off_all, is_near, leave_to_helpers
from trinity.core.instance.lanes import LANE_PARTS, count_in_flight, outstanding
from trinity.core.instance.leading_text import find_leading_chunk
from trinity.core.instance.lifecycle import (
    blocks_to_reserve,
    decode_headroom,
    end,
    has_state_room,
    hold_state,
    queue_prefill,
    release,
)
from trinity.core.instance.phases import Phase
from trinity.core.instance.preemption import hold_features, recompute
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State, failure
from trinity.core.messages import KV, PREEMPTED, WORK, Failure, Open, Submit, Work
from trinity.core.migration.kv_target import cached_record
from trinity.core.migration.prefix_fetch import begin_fetch
from trinity.core.migration.remote_features import skip_cached_remotely
from trinity.core.migration.source import offer_found
from trinity.core.migration.target import ask_for_media
from trinity.core.routing.router import BadChoice
from trinity.core.routing.stage_peers import needs
from trinity.core.scheduler import Batch, EncodeView, PrefillView, View
from trinity.core.values import VIDEO
from trinity.stage_kinds import PREFILL, encoder_of


def handle_submit(s: State, event: Submit, now: float) -> None:
    """Queue a new request for encode, or for prefill where no feature is needed or all are cached here."""
    work = event.work
    s.siblings.about(WORK).came(event.route[-1] if event.route else "")
    if s.settings.is_other_life(event.target_epoch) or refuse_submit(s, event):
        return
    s.newest = max(s.newest, work.number)
    state = RequestState(work, now, event.inputs, stored_tokens=list(event.tokens), asker=event.asker)
    state.route, state.spans = (*event.route, s.settings.name), dict(event.spans)
    s.take_in(state)
    s.set_deadline(state, work.deadline_s, now)
    s.report_soon(now)
    s.list_media(state)
    problem = _problem(s, work) or find_company(s, work)
    if problem is not None:
        end(s, state, now, "error", problem)
        return
    if state.asker and not s.settings.image_cache:
        end(s, state, now, "cancelled")  # nothing of it would be left
    elif work.encode_only:
        s.move(state, Phase.IMAGE_QUEUE, now)
    elif _needs_no_media(s, state, now):
        leave_to_helpers(s, state, event.helpers)
        call_off_all(s, state)
        queue_prefill(s, state, now)
    elif s.encodes(work):
        _queue_encode(s, state, event.helpers, now)
    elif hold_cached(s, state):
        queue_prefill(s, state, now)
    else:
        pass_to_encode(s, state, now)


def _needs_no_media(s: State, state: RequestState, now: float) -> bool:
    """True where it has none, or cached KV covers them, or is to that is fetched: if it does not, it goes back."""
    fetched = begin_fetch(s, state, now)
    return not state.work.media or (s.does.prefills and state.cover(fetched or not s.needs_media(state)))


def _queue_encode(s: State, state: RequestState, helpers: tuple[str, ...], now: float) -> None:
    """Queue it for the encoder, or offer its features at once where other instances hold all of them."""
    skip_cached_remotely(s, state)
    leave_to_helpers(s, state, helpers)
    if all(slot.holder for slot in state.media):
        offer_found(s, state, now)
    else:
        s.move(state, Phase.IMAGE_QUEUE, now)


def _problem(s: State, work: Work) -> Failure | None:
    roles, own = s.settings.roles, encoder_of(work)
    letter = own if own and (own in roles or not s.does.prefills or work.encode_only) else PREFILL.letter
    if letter not in roles:
        return failure("StageError", f"instance {s.settings.name} ({roles}) has no stage {letter}", stage=letter)
    need = needs(letter, work, roles, s.settings.image_block_size, s.settings.kv_block_size)
    for kind, count in need.items():
        size = s.settings.pools.get(kind, 0)
        if count > size:
            text = f"the request needs {count} {kind} blocks and instance {s.settings.name} has {size}"
            return failure("RequestTooLarge", text)
    return None


def hold_cached(s: State, state: RequestState) -> bool:
    """Hold the features of all its media, if all are in the encoder cache here. No block is allocated."""
    found = [s.cached_media(slot) for slot in state.media]
    if not all(found):
        return False
    for slot, blocks in zip(state.media, found, strict=True):
        s.pools[slot.kind].hold(blocks)
        slot.hold(blocks, ready=True)
        state.record(_at_home(slot.kind, s.settings.name))
    return True


def _at_home(kind: str, name: str) -> dict[str, object]:
    nothing = {"bytes": 0, "blocks": 0, "seconds": 0.0}
    return {"kind": kind, "source": name, "target": name, "outcome": "cached", **nothing}


def pass_to_encode(s: State, state: RequestState, now: float) -> None:
    """Pass it on to an encode instance: the features it came for were evicted. It holds nothing here."""
    letter = encoder_of(state.work)
    try:
        target = s.router.choose(letter, state.work)
    except BadChoice as problem:
        end(s, state, now, "error", failure("StageError", str(problem), stage=letter))
        return
    if target is None:
        end(s, state, now, "error", nowhere(s, letter))
        return
    pass_on(s, state, target, now)


def pass_on(s: State, state: RequestState, target: str, now: float) -> None:
    """Have another instance begin a request that waits here and holds nothing."""
    state.book_time(now)
    work = state.work
    if work.deadline_s is not None:
        work = replace(work, deadline_s=max(0.0, state.deadline - now))
    tokens, epoch = tuple(state.tokens), s.router.peers[target].epoch
    s.send(target, Submit(work, state.inputs, state.route, tokens, target_epoch=epoch, spans=state.spans))
    s.leave_tombstone(state, target)
    s.move(state, Phase.GONE, now)


class Candidates:
    """Candidates of one schedule. Prefix-cache and encoder-cache hits are pinned, so that no admission evicts them."""

    def __init__(self, s: State, lane: str, decodes: tuple[str, ...], now: float) -> None:
        self.s, self.now = s, now
        self.hits: dict[str, tuple[int, ...]] = {}
        self.pins: list[tuple[str, str, tuple[int, ...]]] = []
        self.uncovered: list[RequestState] = []
        language, vision = "language" in LANE_PARTS[lane], "vision" in LANE_PARTS[lane]
        self.view = View(
            decoding=decodes,
            prefilling=self._prefilling() if language else (),
            encoding=self._encoding() if vision else (),
            new_prefills=self._new_prefills() if language else (),
            new_encodes=self._new_encodes() if vision else (),
            free_kv=self._free_kv() if language else 0,
            free_media=self._free_media() if vision else {},
            outstanding=outstanding(s.lanes, lane),
        )
        if language and s.leading:
            self.view.find_leading = partial(find_leading_chunk, s, lane)

    def admit(self, batch: Batch) -> list[RequestState]:
        """Reserve blocks for the admitted requests, after dropping the pins of all others."""
        chosen = {*batch.admitted_encodes, *batch.admitted_prefills}
        self._unpin([pin for pin in self.pins if pin[0] not in chosen])
        admitted = [_admit_encode(self.s, request, self.now) for request in batch.admitted_encodes]
        for request in batch.admitted_prefills:
            _admit_prefill(self.s, request, self.hits[request], self.now)
        self._unpin([pin for pin in self.pins if pin[0] in chosen])
        for state in self.uncovered:
            _back_to_media(self.s, state, self.now)
        return admitted

    def _free_kv(self) -> int:
        """Free KV blocks beyond the headroom of decodes; 0 while a migration waits, unless a request was preempted."""
        s = self.s
        if KV not in s.pools or (s.kv_offers and not s.preempted):
            return 0
        return max(0, s.kv.available - decode_headroom(s))

    def _free_media(self) -> dict[str, int]:
        """Free blocks for features, by kind; none while an offer of features waits."""
        s = self.s
        return {} if s.image_offers else {kind: pool.available for kind, pool in s.feature_pools.items()}

    def _unpin(self, pins: list[tuple[str, str, tuple[int, ...]]]) -> None:
        for _, kind, blocks in pins:
            self.s.pools[kind].drop(blocks)

    def _prefilling(self) -> Iterator[PrefillView]:
        for request, state in self.s.prefilling.items():
            if state.scheduled < state.prefill_end and request not in self.s.paused:
                yield PrefillView(request, state.scheduled, state.prefill_end, _atomic(state))

    def _encoding(self) -> Iterator[EncodeView]:
        for request, state in self.s.encoding.items():
            items = own_items(self.s, state)
            if items:
                yield EncodeView(request, items)

    def _new_prefills(self) -> Iterator[PrefillView]:
        s = self.s
        for request in s.preempted if s.kv_offers else chain(s.preempted, s.migrated_queue, s.prefill_queue):
            state = s.requests[request]
            if request == s.leading.running or (s.prefix_fetches and s.prefix_fetches.delay(state)):
                continue  # what a step prefills of it just now, or a pull brings, is cached at the end of that
            if state.skip_media and s.needs_media(state):
                self.uncovered.append(state)
                continue
            hits = s.prefix_hits(state)
            if not has_state_room(s, len(self.hits)):
                return
            blocks = self._pin(request, KV, hits, blocks_to_reserve(s, state, s.prefill_blocks(state)) - len(hits))
            self.hits[request] = hits
            yield PrefillView(request, len(hits) * s.settings.kv_block_size, state.prefill_end, _atomic(state), blocks)

    def _new_encodes(self) -> Iterator[EncodeView]:
        s = self.s
        for request in s.encode_queue:
            items: list[tuple[int, int]] = []
            need: dict[str, int] = {}
            for item, slot in enumerate(s.requests[request].media):
                if slot.holder:
                    continue
                hits = s.cached_media(slot)
                if hits:
                    need[slot.kind] = need.get(slot.kind, 0) + self._pin(request, slot.kind, hits, 0)
                elif slot.span.content not in s.pending:
                    items += [(item, slot.span.tokens)] if not slot.helper else []
                    need[slot.kind] = need.get(slot.kind, 0) + len(slot.keys)
            yield EncodeView(request, _by_image(s.requests[request], items), need)

    def _pin(self, request: str, kind: str, hits: tuple[int, ...], new: int) -> int:
        """Hold the hits during this schedule. Returns the blocks that the reservation takes from those available."""
        pool = self.s.pools[kind]
        before = pool.available
        pool.hold(hits)
        self.pins.append((request, kind, hits))
        return new + before - pool.available


def next_decodes(s: State) -> tuple[str, ...]:
    """Requests with a row in the lane's next step (async scheduling, where a step is in flight).

    A row is planned unless the step in flight ends the request by its length; a stop token is not foreseen. A prompt
    whose last chunk is in flight decodes next: its stage knows the token by then.
    """
    rows = tuple(s.decoding)
    if (
        rows == s.decode_batch.rows
        and not s.prefilling
        and s.decode_batch.ends_none_within(sum(map(len, s.lanes.values())))
    ):
        return rows  # most steps
    flying = count_in_flight(s.lanes)
    found = [each for each, state in s.decoding.items() if state.outputs + flying[each] < state.max_tokens]
    if s.does.decodes:
        found += [request for request, state in s.prefilling.items() if _decodes_next(state)]
    return tuple(found)


def _decodes_next(state: RequestState) -> bool:
    return state.scheduled == state.prefill_end and state.outputs + 1 < state.max_tokens


def _atomic(state: RequestState) -> tuple[tuple[int, int], ...]:
    return tuple(span.uncut for span in state.work.media if span.atomic or span.whole)


def own_items(s: State, state: RequestState) -> tuple[tuple[int, int], ...]:
    """List (item, visual tokens) that this request has to encode and that no step is encoding."""
    request = state.work.request
    owned = []
    for item, slot in enumerate(state.media):
        pending = s.pending.get(slot.span.content)
        idle = pending is not None and not pending.in_step and not slot.ready and not slot.helper
        if idle and pending and pending.providers[0] == (request, item):
            owned.append((item, slot.span.tokens))
    return _by_image(state, owned)


def _by_image(state: RequestState, items: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Count the tokens of an image's strips at the first of them: those that are encoded here are in one step.

    A video's groups of frames are counted each by itself: the steps of an encoder stay bounded.
    """
    counted: list[tuple[int, int]] = []
    firsts: dict[int, int] = {}  # place of that strip, by where its image begins
    for item, tokens in items:
        span = state.media[item].span
        first = firsts.setdefault(item - span.strip, len(counted))
        if first < len(counted) and span.kind != VIDEO:
            counted[first] = (counted[first][0], counted[first][1] + tokens)
            tokens = 0
        counted.append((item, tokens))
    return tuple(counted)


def _admit_encode(s: State, request: str, now: float) -> RequestState:
    """Reserve the image blocks of all items: hold cached ones, share those being encoded, allocate the rest."""
    state = s.requests[request]
    for item, slot in enumerate(state.media):
        hits = s.cached_media(slot)
        if slot.holder:
            continue
        if slot.helper and is_near(s, state, slot):
            call_off(s, state, item)
        if hits:
            s.pools[slot.kind].hold(hits)
            slot.hold(hits, ready=True)
        else:
            s.await_media(slot, (request, item))
    s.move(state, Phase.ENCODING, now)
    return state


def _admit_prefill(s: State, request: str, hits: tuple[int, ...], now: float) -> None:
    """Fill its block table: prefix-cache hits, then new blocks. Releases the source of images that the hits cover."""
    state = s.requests[request]
    s.kv.hold(hits)
    state.hold_kv(hits + s.allocate(KV, blocks_to_reserve(s, state, s.prefill_blocks(state)) - len(hits)), len(hits))
    hold_state(s, state)
    state.start_prefill(len(hits) * s.settings.kv_block_size)
    if state.incoming is not None and not state.incoming.released:
        state.record(cached_record(s, state.incoming.offer))
        release(s, state, "cached")
    images = tuple(slot.blocks for slot in state.media)
    tokens = tuple(state.tokens)
    again = bool(tokens)
    said = Open(
        work=state.work,
        blocks=state.block_table,
        images=images,
        cached=state.prefill_start,
        tokens=tokens,
        again=again,
        state=state.state_block,
    )
    s.open(state, said)
    s.move(state, Phase.PREFILLING, now)


def _back_to_media(s: State, state: RequestState, now: float) -> None:
    """Get the image features after all: the cached KV that covered them was evicted while the request waited."""
    if state.incoming is not None and not state.incoming.released:
        ask_for_media(s, state, now)
        return
    if state.preemptions:
        recompute(s, state, now)
        return
    state.cover(False)
    if state.incoming is not None:  # its source was lost, and has its inputs
        if not hold_features(s, state):
            end(s, state, now, PREEMPTED)
        return
    if not s.encodes(state.work):
        pass_to_encode(s, state, now)
        return
    s.move(state, Phase.IMAGE_QUEUE, now)
