"""Target side of the pull migration (TriInfer 4.3): reserves, pulls, releases.

Content in the target's prefix or encoder cache does not move ("no need to send", vLLM encoder separation).
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from trinity.core.instance.front_ends import find_company, refuse_offer
from trinity.core.instance.lifecycle import conclude_if_quiet, end, queue_prefill, release
from trinity.core.instance.phases import Phase
from trinity.core.instance.preemption import hold_features
from trinity.core.instance.queues import Queue
from trinity.core.instance.request_state import COPIED, IncomingTransfer, RequestState
from trinity.core.instance.state import State
from trinity.core.messages import KV, Caught, Commit, Offer, Open, Pulled, Ready, Release, Withdraw
from trinity.core.migration.kv_target import (
    conclude_record,
    end_transfer,
    finish_piece,
    is_kv_here,
    publish_kv,
    pull_pieces,
    queue_pieces,
    reserve_kv,
)
from trinity.core.migration.prefix_fetch import begin_fetch
from trinity.core.migration.remote_features import (
    ask_holder,
    finish_fetch,
    give_back_request,
    pull_features,
    skipped_record,
)
from trinity.core.values import blocks_for


def handle_offer(s: State, event: Offer, now: float) -> None:
    """Take in an offered request (step 1). It waits for blocks here, first in first out among migrations.

    One that is here already has come by another way: it moved here from an instance that was lost with its Release
    unheard, so that the first source offers it once more (``trinity.core.migration.second_offers``).
    """
    s.siblings.note_offer(event)
    if s.settings.is_other_life(event.target_epoch) or refuse_offer(s, event):
        return
    work = replace(event.work, request=event.id) if event.moves else event.work
    if work.request in s.requests:
        s.send(event.source, Release(event.id, "cached"))
        return
    route, told = (*event.route, s.settings.name), list(event.tokens)
    state = RequestState(work, now, route=route, incoming=IncomingTransfer(event, now), stored_tokens=told)
    s.take_in(state)
    s.set_deadline(state, work.deadline_s, now)
    s.renew_leases(event.source, now)
    s.watch_lease(now)
    s.report_soon(now)
    company = find_company(s, work)
    if company is not None and not event.moves:
        end(s, state, now, "error", company)
        return
    if event.kind == KV:
        s.move(state, Phase.KV_OFFER, now)
        if event.moves and (company is not None or len(s.kv_offers) > 1 or not reserve_kv(s, state, now)):
            end(s, state, now, "cancelled")  # its source goes on: nobody waits here who holds blocks elsewhere
        return
    s.list_media(state)
    begin_fetch(s, state, now)
    covered = state.cover(not s.needs_media(state))
    s.move(state, Phase.COVERED if covered else Phase.IMAGE_OFFER, now)


def _state(s: State, offer: str) -> RequestState | None:
    request = s.incoming.get(offer)
    return None if request is None else s.requests[request]


def handle_ready(s: State, event: Ready, now: float) -> None:
    state = _state(s, event.id)
    if state is not None and state.incoming is not None and state.ending is None:
        if state.incoming.offer.kind == KV:
            queue_pieces(state.incoming, event, now)
        else:
            state.incoming.ready_parts.update(event.parts)
        _ask(s, state, now)
        _complete(s, state, now)


def handle_commit(s: State, event: Commit, now: float) -> None:
    state = _state(s, event.id)
    if state is None or state.incoming is None or state.ending is not None:
        return
    if state.incoming.offer.moves and state.incoming.offer.work.request in s.requests:
        end(s, state, now, "cancelled")  # its first source has offered it once more, before this
        return
    state.book_time(now)
    state.incoming.commit = event
    if state.incoming.prefill_ended_at is None:
        state.incoming.prefill_ended_at = now
    state.take_over(event, state.incoming.offer.kind)
    if state.incoming.offer.moves:
        s.adopt(state)
    s.set_deadline(state, event.deadline_s, now)
    s.renew_leases(state.incoming.offer.source, now)
    if event.ending:
        end(s, state, now, event.ending)
        return
    if state.incoming.mismatches:
        end_transfer(s, state, now, state.incoming.mismatches[0][1])
        return
    if state.skip_media:
        queue_prefill(s, state, now)  # cached KV covers every image: wait for prefill, which releases or asks
    _complete(s, state, now)


def handle_withdraw(s: State, event: Withdraw, now: float) -> None:
    state = _state(s, event.id)
    if state is not None:
        end_transfer(s, state, now, event.failure) if event.failure else end(s, state, now, "cancelled")


def admit_offers(s: State, now: float) -> None:
    """Step 2: reserve the whole need of the oldest migration of each kind, as long as it fits."""
    _admit(s, s.image_offers, _reserve_media, now)
    _admit(s, s.kv_offers, reserve_kv, now)


def _admit(s: State, queue: Queue, reserve: Callable[[State, RequestState, float], bool], now: float) -> None:
    while queue and reserve(s, state := s.requests[next(iter(queue))], now):
        _ask(s, state, now)
        _complete(s, state, now)


def _reserve_media(s: State, state: RequestState, now: float) -> bool:
    if not s.settings.transfers.prefetch and _others_ahead(s):
        return False
    assert state.incoming is not None
    kind, rows = state.incoming.offer.kind, s.settings.image_block_size
    pool = s.pools[kind]
    hits = [pool.match(slot.keys) if s.settings.image_cache else () for slot in state.media]
    whole = [found if len(found) == len(slot.keys) else () for found, slot in zip(hits, state.media, strict=True)]
    need = sum(blocks_for(slot.span.tokens, rows) for slot, found in zip(state.media, whole, strict=True) if not found)
    if not pool.fits(need, {block for found in whole for block in found}):
        return False
    for found in whole:
        pool.hold(found)
    for slot, found in zip(state.media, whole, strict=True):
        slot.hold(found or s.allocate(kind, len(slot.keys)), ready=bool(found))
    s.move(state, Phase.IMAGE_PULL, now)
    return True


def _others_ahead(s: State) -> bool:
    """Without prefetch, features move for one request at a time, and only when no migrated one is ahead of it."""
    return bool(s.prefilling or s.migrated_queue) or s.arriving[Phase.IMAGE_PULL] > 0


def _ask(s: State, state: RequestState, now: float) -> None:
    """Step 3: pull each part that is ready and is not here already."""
    if state.phase is Phase.KV_PULL:
        pull_pieces(s, state, now)
    elif state.phase is Phase.IMAGE_PULL:
        _ask_media(s, state, now)


def _ask_media(s: State, state: RequestState, now: float) -> None:
    incoming = state.incoming
    assert incoming is not None
    for part in sorted(incoming.ready_parts - incoming.asked_parts):
        incoming.asked_parts.add(part)
        offer, slot = incoming.offer, state.media[part]
        if slot.ready:
            incoming.pulled_parts.add(part)
            state.record(skipped_record(s, state, part))
            continue
        if offer.parts[part].holder:
            ask_holder(s, state, part, now)
            if state.ending is not None:
                return
            continue
        s.pull(state, pull_features(state, part, offer.source, offer.parts[part].blocks, offer.generation))


def handle_pulled(s: State, event: Pulled, now: float) -> None:
    """A pull ended: its content may be matched from now on."""
    state = _state(s, event.offer)
    assert state is not None, f"a pull of {event.offer} ended after its Release"
    assert state.incoming is not None
    state.end_pull()
    failed, stored = event.failure, event.part in state.incoming.fetched_parts
    if state.phase is Phase.KV_PULL:
        failed = finish_piece(s, state, event, now)
    elif stored:
        finish_fetch(s, state, event)
    elif event.record:
        state.record(event.record)
    if state.ending is not None:
        conclude_if_quiet(s, state, now)
    elif failed is not None and stored:
        give_back_request(s, state, now, state.incoming.lacks)
    elif failed is not None:
        end_transfer(s, state, now, failed)
    else:
        state.incoming.pulled_parts.add(event.part)
        if state.phase is Phase.IMAGE_PULL:
            _publish_media(s, state, event.part)
        _ask(s, state, now)
        _complete(s, state, now)


def _publish_media(s: State, state: RequestState, item: int) -> None:
    slot = state.media[item]
    slot.fill()
    if s.settings.image_cache:
        for block, key in zip(slot.blocks, slot.keys, strict=True):
            s.pools[slot.kind].publish(block, key)


def _all_here(s: State, state: RequestState) -> bool:
    incoming = state.incoming
    if incoming is None or state.phase not in (Phase.IMAGE_PULL, Phase.KV_PULL):
        return False
    if state.phase is Phase.KV_PULL:
        return is_kv_here(s, state) and (incoming.offer.moves or incoming.commit is not None)
    return len(incoming.pulled_parts) == len(incoming.offer.parts) and incoming.commit is not None


def _complete(s: State, state: RequestState, now: float) -> None:
    """All parts are here and committed: release the source and go on to the next stage."""
    incoming = state.incoming
    if not _all_here(s, state) or incoming is None:
        return
    if incoming.offer.copies:
        publish_kv(s, state, len(incoming.offer.parts[0].blocks) * s.settings.kv_block_size)
        end(s, state, now, COPIED)
        return
    if state.uncommitted:
        if not incoming.caught:
            incoming.caught = True
            s.send(incoming.offer.source, Caught(incoming.offer.id, s.settings.name))
        return
    if state.phase is Phase.KV_PULL:
        conclude_record(s, state)
    release(s, state, "pulled" if incoming.moved else "cached")
    if state.phase is Phase.IMAGE_PULL:
        queue_prefill(s, state, now)
    else:
        s.open(state, _opened(state))
        s.start_decoding(state, now)


def _opened(state: RequestState) -> Open:
    return Open(work=state.work, blocks=state.block_table, tokens=tuple(state.tokens), state=state.state_block)


def outlive_source(s: State, state: RequestState, now: float) -> bool:
    """Go on without a lost source: all features are here, or cached KV covers them. Returns False where some are not.

    Its Commit, if it had not come, would have told the outputs so far; a request without any needs none. A pull that
    has not ended may have read another life of the source, and counts for nothing.
    """
    incoming = state.incoming
    if incoming is None or incoming.offer.kind == KV or state.ending is not None or state.pulls_in_flight:
        return False
    if (incoming.commit is None and state.work.outputs) or not _has_all(s, state):
        return False
    incoming.commit = incoming.commit or Commit(incoming.offer.id)
    release(s, state, "pulled" if incoming.moved else "cached")
    if state.phase is Phase.IMAGE_OFFER:
        s.move(state, Phase.IMAGE_PULL, now)
    if state.phase in (Phase.IMAGE_PULL, Phase.COVERED):
        queue_prefill(s, state, now)
    return True


def _has_all(s: State, state: RequestState) -> bool:
    if state.skip_media:
        return not s.needs_media(state)
    if state.phase is Phase.IMAGE_OFFER:
        return hold_features(s, state)
    return all(slot.ready for slot in state.media)


def ask_for_media(s: State, state: RequestState, now: float) -> None:
    """The cached KV that covered the images is gone: reserve image blocks and pull after all."""
    state.cover(False)
    s.move(state, Phase.IMAGE_OFFER, now)
