"""The target's side of the pull migration (TriInfer 4.3): reserve, pull, release; or nothing moves (001)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from trinity.blocks import blocks_for
from trinity.core.lifecycle import conclude_if_quiet, end, queue_prefill, release
from trinity.core.state import Incoming, Phase, RequestState, State
from trinity.messages import IMAGE, KV, Commit, Offer, Open, Part, Pull, Pulled, Ready, Withdraw
from trinity.routing import kv_tokens


def offered(s: State, event: Offer, now: float) -> None:
    """Step 1: a request with blocks elsewhere. It waits for blocks here, first in first out among migrations."""
    work = event.work
    assert work.request not in s.requests, f"{work.request} is here already"
    state = RequestState(work, Phase.IMAGE_OFFER, now, route=(*event.route, s.settings.name))
    state.incoming = Incoming(event)
    s.incoming[event.id] = work.request
    s.requests[work.request] = state
    s.tombstones.pop(work.request, None)  # it has come back: two tombstones would hand a late Cancel round and round
    if event.kind == KV:
        state.phase = Phase.KV_OFFER
        s.kv_offers.append(work.request)
        return
    state.media = s.slots(work)
    state.skip_media = not s.needs_media(state)
    if not state.skip_media:
        s.image_offers.append(work.request)


def _state(s: State, offer: str) -> RequestState | None:
    request = s.incoming.get(offer)
    return None if request is None else s.requests[request]


def ready(s: State, event: Ready, now: float) -> None:
    state = _state(s, event.id)
    if state is not None and state.incoming is not None and state.ending is None:
        state.incoming.ready.update(event.parts)
        _ask(s, state)


def committed(s: State, event: Commit, now: float) -> None:
    state = _state(s, event.id)
    if state is None or state.incoming is None or state.ending is not None:
        return
    state.book(now)
    state.incoming.commit = event
    state.tokens = list(event.tokens)
    state.cached = event.cached_tokens
    state.transfers.extend(event.transfers)
    for name, seconds in event.spans.items():
        state.spans[name] = state.spans.get(name, 0.0) + seconds
    if event.deadline_s is not None:
        state.deadline = now + event.deadline_s
    if state.skip_media:
        queue_prefill(s, state, now)  # cached KV covers every image: wait for prefill, which releases or asks
    _complete(s, state, now)


def withdrawn(s: State, event: Withdraw, now: float) -> None:
    state = _state(s, event.id)
    if state is not None:
        end(s, state, now, "error" if event.failure else "cancelled", event.failure)


def admit_offers(s: State, now: float) -> None:
    """Step 2: reserve the whole need of the oldest migration of each kind, as long as it fits."""
    _admit(s, s.image_offers, _reserve_media, now)
    _admit(s, s.kv_offers, _reserve_kv, now)


def _admit(s: State, queue: deque[str], reserve: Callable[[State, RequestState, float], bool], now: float) -> None:
    while queue and reserve(s, s.requests[queue[0]], now):
        state = s.requests[queue.popleft()]
        _ask(s, state)
        _complete(s, state, now)


def _reserve_media(s: State, state: RequestState, now: float) -> bool:
    pool, rows = s.image, s.settings.media_block
    hits = [pool.match(slot.keys) if s.settings.image_cache else () for slot in state.media]
    whole = [found if len(found) == len(slot.keys) else () for found, slot in zip(hits, state.media, strict=True)]
    need = sum(blocks_for(slot.span.tokens, rows) for slot, found in zip(state.media, whole, strict=True) if not found)
    if not pool.fits(need, {block for found in whole for block in found}):
        return False
    for found in whole:
        pool.hold(found)
    for slot, found in zip(state.media, whole, strict=True):
        slot.blocks = found or pool.allocate(len(slot.keys))
        slot.ready = bool(found)
    state.enter(Phase.IMAGE_PULL, now)
    return True


def _reserve_kv(s: State, state: RequestState, now: float) -> bool:
    if len(s.decoding) + _pulling(s) >= s.settings.rules.tokens:
        return False
    total = blocks_for(kv_tokens(state.work, decodes=True), s.settings.kv_block)
    hits = s.kv.match(s.prefix_keys(state))
    if not s.kv.fits(total - len(hits), hits):
        return False
    s.kv.hold(hits)
    state.kv = hits + s.kv.allocate(total - len(hits))
    state.done = len(hits)
    state.published = len(hits)
    state.enter(Phase.KV_PULL, now)
    return True


def _pulling(s: State) -> int:
    """Requests whose KV is on its way: they will be rows of the decode batch."""
    return sum(1 for request in s.incoming.values() if s.requests[request].phase is Phase.KV_PULL)


def _ask(s: State, state: RequestState) -> None:
    """Step 3: pull each part that is ready and is not here already."""
    incoming = state.incoming
    if incoming is None or state.phase not in (Phase.IMAGE_PULL, Phase.KV_PULL):
        return
    for part in sorted(incoming.ready - incoming.asked):
        incoming.asked.add(part)
        source, target = _missing(state, part, incoming.offer.parts[part])
        if not source:
            incoming.pulled.add(part)
            state.transfers.append(_nothing_moved(s, incoming.offer))
            continue
        state.pulls += 1
        incoming.moved = True
        offer = incoming.offer
        s.out.append(Pull(offer.id, part, offer.source, offer.kind, state.work.request, source, target))


def _missing(state: RequestState, index: int, part: Part) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(source blocks, target blocks) that still have to move."""
    if state.phase is Phase.KV_PULL:
        return part.blocks[state.done :], state.kv[state.done : len(part.blocks)]
    slot = state.media[index]
    return ((), ()) if slot.ready else (part.blocks, slot.blocks)


def _nothing_moved(s: State, offer: Offer) -> dict[str, object]:
    names = {"kind": offer.kind, "source": offer.source, "target": s.settings.name}
    return {**names, "outcome": "cached", "bytes": 0, "blocks": 0, "seconds": 0.0}


def pulled(s: State, event: Pulled, now: float) -> None:
    """A pull ended: its content may be matched from now on."""
    state = _state(s, event.offer)
    assert state is not None, f"a pull of {event.offer} ended after its Release"
    assert state.incoming is not None
    state.pulls -= 1
    if event.record:
        state.transfers.append(event.record)
    if state.ending is not None:
        conclude_if_quiet(s, state, now)
    elif event.failure is not None:
        end(s, state, now, "error", event.failure)
    else:
        state.incoming.pulled.add(event.part)
        _publish(s, state, event.part)
        _complete(s, state, now)


def _publish(s: State, state: RequestState, part: int) -> None:
    if state.phase is Phase.IMAGE_PULL:
        _publish_media(s, state, part)
    else:
        publish_kv(s, state, len(state.work.prompt))


def _publish_media(s: State, state: RequestState, item: int) -> None:
    slot = state.media[item]
    slot.ready = True
    if s.settings.image_cache:
        for block, key in zip(slot.blocks, slot.keys, strict=True):
            s.pools[IMAGE].publish(block, key)


def publish_kv(s: State, state: RequestState, tokens: int) -> None:
    """Make the full blocks of the first ``tokens`` prompt positions matchable."""
    if not s.settings.prefix_cache:
        return
    keys = s.prefix_keys(state)
    for index in range(state.published, min(tokens // s.settings.kv_block, len(keys))):
        s.kv.publish(state.kv[index], keys[index])
        state.published = index + 1


def _complete(s: State, state: RequestState, now: float) -> None:
    """All parts are here and committed: release the source and go on to the next stage."""
    incoming = state.incoming
    if incoming is None or state.phase not in (Phase.IMAGE_PULL, Phase.KV_PULL):
        return
    if incoming.commit is None or len(incoming.pulled) < len(incoming.offer.parts):
        return
    release(s, state, "pulled" if incoming.moved else "cached")
    if state.phase is Phase.IMAGE_PULL:
        queue_prefill(s, state, now)
    else:
        _start_decoding(s, state, now)


def _start_decoding(s: State, state: RequestState, now: float) -> None:
    state.enter(Phase.DECODING, now)
    s.out.append(Open(work=state.work, blocks=state.kv, tokens=tuple(state.tokens)))
    state.opened = True
    s.decoding[state.work.request] = state


def ask_for_media(s: State, state: RequestState, now: float) -> None:
    """The cached KV that covered the images is gone: reserve image blocks and pull after all."""
    state.skip_media = False
    state.enter(Phase.IMAGE_OFFER, now)
    s.image_offers.append(state.work.request)
