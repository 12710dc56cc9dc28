"""Handles the arrival of a request: checks it against stages and pools, and queues it."""

from __future__ import annotations

from msgspec.structs import replace

from trinity.core.instance.company import find_company, nowhere
from trinity.core.instance.front_ends import refuse_submit
from trinity.core.instance.helpers import call_off_all, leave_to_helpers
from trinity.core.instance.lifecycle import end, queue_prefill
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State, failure
from trinity.core.messages import WORK, Failure, Submit, Work
from trinity.core.migration.prefix_fetch import begin_fetch
from trinity.core.migration.remote_features import skip_cached_remotely
from trinity.core.migration.source import offer_found
from trinity.core.routing.router import BadChoice
from trinity.core.routing.stage_peers import needs
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
