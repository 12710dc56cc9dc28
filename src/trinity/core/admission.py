"""What the scheduler may choose from, and what an admitted request reserves: image blocks or KV blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from trinity.blocks import blocks_for
from trinity.core.arrival import pass_to_encode
from trinity.core.kv_target import nothing_moved
from trinity.core.lanes import LANES, outstanding
from trinity.core.lifecycle import release
from trinity.core.state import MediaSlot, PendingMedia, Phase, RequestState, State
from trinity.core.target import ask_for_media
from trinity.messages import IMAGE, KV, Open
from trinity.routing import kv_tokens
from trinity.scheduler import Batch, EncodeView, PrefillView, View


class Candidates:
    """The view of one schedule. Cached blocks that it counts on are pinned, so that no admission evicts them."""

    def __init__(self, s: State, lane: str, now: float) -> None:
        self.s, self.now = s, now
        self.hits: dict[str, tuple[int, ...]] = {}
        self.pins: list[tuple[str, str, tuple[int, ...]]] = []
        self.uncovered: list[RequestState] = []
        language, vision = "P" in LANES[lane], "E" in LANES[lane]
        self.view = View(
            decoding=next_decodes(s) if language else (),
            prefilling=self._prefilling() if language else (),
            encoding=self._encoding() if vision else (),
            new_prefills=self._new_prefills() if language else (),
            new_encodes=self._new_encodes() if vision else (),
            free_kv=s.pools[KV].available if KV in s.pools and not s.kv_offers else 0,
            free_media=s.image.available if IMAGE in s.pools and not s.image_offers else 0,
            outstanding=outstanding(s.lanes, lane),
        )

    def admit(self, batch: Batch) -> list[RequestState]:
        """Reserve for those that the schedule admitted; nobody else's pins may stand in their way."""
        chosen = {*batch.admitted_encodes, *batch.admitted_prefills}
        self._unpin([pin for pin in self.pins if pin[0] not in chosen])
        admitted = [_admit_encode(self.s, request, self.now) for request in batch.admitted_encodes]
        for request in batch.admitted_prefills:
            _admit_prefill(self.s, request, self.hits[request], self.now)
        self._unpin([pin for pin in self.pins if pin[0] in chosen])
        for state in self.uncovered:
            _back_to_media(self.s, state, self.now)
        return admitted

    def _unpin(self, pins: list[tuple[str, str, tuple[int, ...]]]) -> None:
        for _, kind, blocks in pins:
            self.s.pools[kind].drop(blocks)

    def _prefilling(self) -> Iterator[PrefillView]:
        for request, state in self.s.prefilling.items():
            if state.scheduled < len(state.work.prompt):
                yield PrefillView(request, state.scheduled, len(state.work.prompt), _atomic(state))

    def _encoding(self) -> Iterator[EncodeView]:
        for request, state in self.s.encoding.items():
            items = own_items(self.s, state)
            if items:
                yield EncodeView(request, items)

    def _new_prefills(self) -> Iterator[PrefillView]:
        s = self.s
        for request in [*s.migrated_queue, *_ordered(s, s.prefill_queue, _prompt_left)]:
            state = s.requests[request]
            if state.skip_media and s.needs_media(state):
                self.uncovered.append(state)
                continue
            hits = s.prefix_hits(state)
            need = self._pin(request, KV, hits, _kv_blocks(s, state) - len(hits))
            self.hits[request] = hits
            yield PrefillView(request, len(hits) * s.settings.kv_block, len(state.work.prompt), _atomic(state), need)

    def _new_encodes(self) -> Iterator[EncodeView]:
        s = self.s
        for request in list(_ordered(s, s.encode_queue, _media_left)):
            items: list[tuple[int, int]] = []
            need = 0
            for item, slot in enumerate(s.requests[request].media):
                if slot.holder:
                    continue
                hits = s.cached_media(slot.keys)
                if hits:
                    need += self._pin(request, IMAGE, hits, 0)
                elif slot.span.content not in s.pending:
                    items.append((item, slot.span.tokens))
                    need += len(slot.keys)
            yield EncodeView(request, tuple(items), need)

    def _pin(self, request: str, kind: str, hits: tuple[int, ...], new: int) -> int:
        """Hold the hits for the length of this schedule; the blocks that reserving takes from what is available."""
        pool = self.s.pools[kind]
        before = pool.available
        pool.hold(hits)
        self.pins.append((request, kind, hits))
        return new + before - pool.available


def next_decodes(s: State) -> tuple[str, ...]:
    """Rows of the lane's next step. Behind one in flight: all that it does not surely end, a stop token aside.

    A prompt whose last chunk is in flight decodes next. Its stage knows the token by then.
    """
    if s.settings.depth == 1:
        return tuple(s.decoding)
    rows = [request for request, state in s.decoding.items() if len(state.tokens) + state.steps < state.max_tokens]
    if "D" in s.settings.roles:
        rows += [request for request, state in s.prefilling.items() if _ends_prefill(state) and state.max_tokens > 1]
    return tuple(rows)


def _ends_prefill(state: RequestState) -> bool:
    return state.scheduled == len(state.work.prompt)


def _ordered(s: State, queue: Iterable[str], size: Callable[[RequestState], int]) -> Iterable[str]:
    """The waiting queue in the order of the rules: first come, shortest job, or earliest deadline first."""
    order = s.settings.rules.order
    if order == "fcfs":
        return list(queue)
    if order == "sjf":
        return sorted(queue, key=lambda request: size(s.requests[request]))
    return sorted(queue, key=lambda request: s.requests[request].deadline)


def _prompt_left(state: RequestState) -> int:
    return len(state.work.prompt)


def _media_left(state: RequestState) -> int:
    return sum(span.tokens for span in state.work.media)


def _atomic(state: RequestState) -> tuple[tuple[int, int], ...]:
    return tuple((span.offset, span.end) for span in state.work.media if span.atomic)


def _kv_blocks(s: State, state: RequestState) -> int:
    stays = "D" in s.settings.roles
    return blocks_for(kv_tokens(state.work, decodes=stays), s.settings.kv_block)


def own_items(s: State, state: RequestState) -> tuple[tuple[int, int], ...]:
    """(item, visual tokens) that this request is the one to encode, and that no step is encoding."""
    request = state.work.request
    owned = []
    for item, slot in enumerate(state.media):
        pending = s.pending.get(slot.span.content)
        if not slot.ready and pending and not pending.in_step and pending.providers[0] == (request, item):
            owned.append((item, slot.span.tokens))
    return tuple(owned)


def _admit_encode(s: State, request: str, now: float) -> RequestState:
    """Reserve the image blocks of all items: cached ones are held, those under way are shared, the rest is new."""
    state = s.requests[request]
    s.encode_queue.remove(request)
    for item, slot in enumerate(state.media):
        hits = s.cached_media(slot.keys)
        if slot.holder:
            continue
        if hits:
            s.image.hold(hits)
            slot.blocks, slot.ready = hits, True
        else:
            _await_media(s, slot, (request, item))
    state.enter(Phase.ENCODING, now)
    s.encoding[request] = state
    return state


def _await_media(s: State, slot: MediaSlot, provider: tuple[str, int]) -> None:
    """Share the blocks in which its features will be, or be the first to have them encoded."""
    pending = s.pending.get(slot.span.content)
    if pending is None:
        pending = s.pending[slot.span.content] = PendingMedia(s.allocate(IMAGE, len(slot.keys)), [])
    else:
        s.image.hold(pending.blocks)
    slot.blocks = pending.blocks
    pending.providers.append(provider)


def _admit_prefill(s: State, request: str, hits: tuple[int, ...], now: float) -> None:
    """Reserve the whole KV need, keep what is cached, and let the source of covered images go."""
    state = s.requests[request]
    queue = s.migrated_queue if state.incoming is not None else s.prefill_queue
    queue.remove(request)
    s.kv.hold(hits)
    state.kv = hits + s.allocate(KV, _kv_blocks(s, state) - len(hits))
    state.published = len(hits)
    state.done = state.scheduled = state.cached = len(hits) * s.settings.kv_block
    if state.incoming is not None and not state.incoming.released:
        state.transfers.append(nothing_moved(s, state.incoming.offer))
        release(s, state, "cached")
    images = tuple(slot.blocks for slot in state.media)
    s.out.append(Open(work=state.work, blocks=state.kv, images=images, cached=state.cached))
    state.opened = True
    state.enter(Phase.PREFILLING, now)
    s.prefilling[request] = state


def _back_to_media(s: State, state: RequestState, now: float) -> None:
    """The cached KV that covered the images was evicted while the request waited."""
    if state.incoming is not None:
        s.migrated_queue.remove(state.work.request)
        ask_for_media(s, state, now)
        return
    s.prefill_queue.remove(state.work.request)
    state.skip_media = False
    if "E" not in s.settings.roles:
        pass_to_encode(s, state, now)
        return
    state.enter(Phase.IMAGE_QUEUE, now)
    s.encode_queue.append(state.work.request)
