"""The source's side of the pull migration (TriInfer 4.3): offers, leases, withdrawal."""

from __future__ import annotations

from trinity.core.lifecycle import end, hand_on
from trinity.core.state import Outgoing, RequestState, State, failure
from trinity.messages import FRONTEND, IMAGE, KV, Commit, Failure, Moved, Offer, Part, Ready, Release


def offer_media(s: State, state: RequestState, now: float) -> None:
    """Announce the features to a prefill instance as soon as one item is ready; commit when all are.

    The target reserves for all items at once and pulls each as it is ready (001: two-stage allocation).
    """
    if state.outgoing is None:
        parts = tuple(Part(slot.blocks) for slot in state.media)
        if not _open_offer(s, state, now, "P", IMAGE, parts):
            return
        ready = tuple(item for item, slot in enumerate(state.media) if slot.ready)
        announce(s, state, ready)
    if all(slot.ready for slot in state.media):
        _commit(s, state, now)


def offer_kv(s: State, state: RequestState, now: float) -> None:
    """The prompt is prefilled: offer its KV to a decode instance."""
    blocks = state.kv[: s.prompt_blocks(state)]
    if _open_offer(s, state, now, "D", KV, (Part(blocks),)):
        announce(s, state, (0,))
        _commit(s, state, now)


def announce(s: State, state: RequestState, parts: tuple[int, ...]) -> None:
    """These parts of the request's offer hold their content now."""
    assert state.outgoing is not None
    if parts:
        s.send(s.outgoing[state.outgoing].target, Ready(state.outgoing, parts))


def _open_offer(s: State, state: RequestState, now: float, letter: str, kind: str, parts: tuple[Part, ...]) -> bool:
    target = s.router.choose(letter, state.work)
    if target is None:
        end(s, state, now, "error", _nowhere(s, letter))
        return False
    s.offers += 1
    life = f".{s.settings.epoch}" if s.settings.epoch else ""
    offer = Offer(
        id=f"{s.settings.name}{life}:{s.offers}",
        kind=kind,
        source=s.settings.name,
        work=state.work,
        parts=parts,
        route=state.route,
    )
    blocks = tuple(block for part in parts for block in part.blocks)
    s.pools[kind].hold(blocks)  # the lease: the offer's own reference
    s.outgoing[offer.id] = Outgoing(offer.id, state.work.request, target, kind, blocks)
    state.outgoing = offer.id
    s.send(target, offer)
    s.send(FRONTEND, Moved(state.work.request, state.work.attempt, target, len(state.route)))
    return True


def _nowhere(s: State, letter: str) -> Failure:
    if s.router.misses(letter):
        return failure("MigrationError", f"no instance with stage {letter} is up just now", source=s.settings.name)
    return failure(
        "RequestTooLarge", f"no instance with stage {letter} has the blocks for this request; enlarge its pools"
    )


def _commit(s: State, state: RequestState, now: float) -> None:
    assert state.outgoing is not None
    state.book(now)
    left = state.deadline - now if state.work.deadline_s is not None else None
    commit = Commit(
        state.outgoing,
        tuple(state.tokens),
        state.cached,
        state.spans,
        tuple(state.transfers),
        left,
    )
    s.send(s.outgoing[state.outgoing].target, commit)
    hand_on(s, state)


def released(s: State, event: Release, now: float) -> None:
    """Step 4: the target is done with the blocks."""
    lease = s.outgoing.pop(event.id)
    s.pools[lease.kind].drop(lease.blocks)
    state = s.requests.get(lease.request)
    if state is not None and state.outgoing == event.id:  # released before the commit: the target gave it up
        end(s, state, now, "cancelled")
