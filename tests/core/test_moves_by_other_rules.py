"""Each rule that moves need, not kept: runs in virtual time, whose every event is checked, notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as replace_lease
from typing import Any

import pytest
from msgspec.structs import replace

from support.moving import commit_on_its_way, run, target_dies, target_stands_still
from support.other_rules import BROKEN as BROKEN_RUN
from support.other_rules import is_noticed
from support.thinned import thinned
from trinity.core.frontend import frontend_core, frontend_request
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.frontend.messages import MoveEnd
from trinity.core.instance import instance_core, lifecycle, peers
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import REFUSED, Lease, RequestState
from trinity.core.instance.state import State
from trinity.core.messages import Commit, Moved, NotMoved, Offer, Ready, Release, Value, Withdraw
from trinity.core.migration import kv_target, moves, source, target

Patch = pytest.MonkeyPatch
Broken = Callable[[Patch], None]
BROKEN: list[Broken] = []


def broken(how: Broken) -> Broken:
    BROKEN.append(how)
    return how


def says(patch: Patch, change: Callable[[State, Value], Value | None]) -> None:
    """Have each message of an instance replaced by what ``change`` makes of it; None for nothing."""

    def send(s: State, to: str, message: Value) -> None:
        changed = change(s, message)
        if changed is not None:
            plain(s, to, changed)

    plain = State.send
    patch.setattr(State, "send", send)


def handles(patch: Patch, kind: type[Value], handle: Callable[..., None]) -> None:
    patch.setitem(instance_core._HANDLERS, kind, handle)


@broken
def an_offer_while_a_step_runs(patch: Patch) -> None:
    plain = State.in_step
    patch.setattr(State, "in_step", lambda s, name: s.requests[name].phase is not Phase.MOVING and plain(s, name))


@broken
def a_commit_with_the_offer(patch: Patch) -> None:
    def offer(s: State, state: RequestState, now: float) -> None:
        plainly(s, state, now)
        if state.outgoing is not None:
            source.commit(s, state, now)

    plainly = moves._offer
    patch.setattr(moves, "_offer", offer)


@broken
def a_target_that_says_too_early_that_it_has_all(patch: Patch) -> None:
    patch.setattr(target, "is_kv_here", lambda s, state: True)


@broken
def a_target_that_has_it_by_its_own_name_at_once(patch: Patch) -> None:
    def offer(s: State, event: Offer, now: float) -> None:
        patch.setattr(target, "replace", lambda work, request: work)
        target.handle_offer(s, event, now)

    handles(patch, Offer, offer)


@broken
def a_target_that_has_it_wait_for_room(patch: Patch) -> None:
    def end(s: State, state: RequestState, *rest: Any) -> None:
        if state.phase is not Phase.KV_OFFER:
            plainly(s, state, *rest)

    plainly = lifecycle.end
    patch.setattr(target, "end", end)


@broken
def a_target_that_tells_the_front_end_at_once(patch: Patch) -> None:
    patch.setattr(RequestState, "uncommitted", False)


@broken
def a_source_that_does_not_say_that_it_goes_on(patch: Patch) -> None:
    says(patch, lambda s, said: None if isinstance(said, NotMoved) and said.request in s.decoding else said)


@broken
def a_source_that_ends_it_with_its_target(patch: Patch) -> None:
    patch.setattr(peers, "give_up", lambda s, state, now, *_: lifecycle.end(s, state, now, "cancelled"))


@broken
def a_source_that_goes_on_and_hands_it_over(patch: Patch) -> None:
    def give_up(s: State, state: RequestState, now: float, to: str, reason: str) -> None:
        offer = state.outgoing
        plainly(s, state, now, to, reason)
        if state.phase is Phase.DECODING:
            s.send(to, Commit(offer or "", tuple(state.tokens)))

    plainly = moves.give_up
    for module in (moves, peers):
        patch.setattr(module, "give_up", give_up)


@broken
def a_source_that_forgets_the_tokens_of_its_last_steps(patch: Patch) -> None:
    def short(s: State, said: Value) -> Value:
        return replace(said, tokens=said.tokens[:-1]) if isinstance(said, Commit) and len(said.tokens) > 2 else said

    says(patch, short)


@broken
def a_source_that_offers_a_block_too_few(patch: Patch) -> None:
    patch.setattr(moves, "blocks_for", lambda rows, size: max(1, rows // size))


@broken
def a_refusal_behind_the_commit_of_which_nobody_hears(patch: Patch) -> None:
    def released(s: State, event: Release, now: float) -> None:
        late = event.outcome not in (REFUSED, "unpulled") or s.outgoing[event.id].request in s.requests
        peers.handle_release(s, event if late else replace(event, outcome="failed"), now)

    def safely(s: State, event: Release, now: float) -> None:
        released(s, event, now) if event.id in s.outgoing else peers.handle_release(s, event, now)

    handles(patch, Release, safely)


@broken
def a_front_end_that_takes_a_lost_sender_for_one_that_is_up(patch: Patch) -> None:
    patch.setattr(frontend_request, "lives_on", lambda router, life: True)


@broken
def a_target_that_does_not_say_that_it_came_by_a_move(patch: Patch) -> None:
    says(patch, lambda s, said: replace(said, start=0) if isinstance(said, Moved) else said)


@broken
def a_front_end_that_lets_moves_lapse(patch: Patch) -> None:
    patch.setattr(frontend_core, "drop_move", lambda entry: [])


@broken
def a_front_end_that_takes_an_old_answer(patch: Patch) -> None:
    patch.setattr(frontend_core, "refuse_move", lambda lives, event: frontend_answer(lives, event))


def frontend_answer(lives: dict[str, FrontendRequest], event: NotMoved) -> list[Value]:
    return [MoveEnd(entry.id, event.failure) for entry in lives.values() if entry.id == event.request]


@broken
def a_lease_that_is_withdrawn_and_not_taken_back(patch: Patch) -> None:
    patch.setattr(peers, "take_back", lambda s, lease: None)


@broken
def a_source_that_decodes_on_without_a_withdraw(patch: Patch) -> None:
    says(patch, lambda s, said: None if isinstance(said, Withdraw) else said)


# ---------------------------------------------------------------- blocks that go ahead


@broken
def a_copy_of_a_block_that_is_not_full(patch: Patch) -> None:
    plainly = source.lend_copy

    def lend(s: State, state: RequestState, now: float, to: str, blocks: int) -> None:
        plainly(s, state, now, to, min(blocks + 1, len(state.block_table)))

    patch.setattr(moves, "lend_copy", lend)


@broken
def a_copy_that_is_cached_before_it_is_there(patch: Patch) -> None:
    plainly = kv_target.queue_pieces

    def ready(incoming: Any, event: Ready, now: float) -> None:
        plainly(incoming, event, now)
        if incoming.offer.copies:
            patch.setattr(target, "is_kv_here", lambda s, state: True)

    patch.setattr(target, "queue_pieces", ready)


@broken
def a_copy_whose_blocks_are_not_leased(patch: Patch) -> None:
    def lend(s: State, lease: Lease) -> None:
        plainly(s, lease)
        if lease.copies:
            s.pools[lease.kind].drop(lease.blocks)
            s.pools[lease.kind].hold(())
            s.outgoing[lease.id] = replace_lease(lease, blocks=())

    plainly = State.lend
    patch.setattr(State, "lend", lend)


@broken
def a_source_that_waits_for_a_copy_that_nobody_has(patch: Patch) -> None:
    patch.setattr(peers, "finish_copy", lambda s, lease, now, outcome: None)


@broken
def a_source_that_moves_a_request_which_is_recomputed(patch: Patch) -> None:
    def finish(s: State, lease: Lease, now: float, outcome: str) -> None:
        state = s.requests.get(lease.request)
        if state is not None and state.copy == lease.id and state.ending is None:
            source.drop_copy(state)
            s.move(state, Phase.MOVING, now)

    patch.setattr(peers, "finish_copy", finish)


SCENES = (commit_on_its_way, target_dies, target_stands_still)
KNOWN: dict[Broken, int] = {
    an_offer_while_a_step_runs: 12,
    a_target_that_has_it_by_its_own_name_at_once: 74,
    a_target_that_has_it_wait_for_room: 12,
    a_front_end_that_takes_a_lost_sender_for_one_that_is_up: 19,
    a_lease_that_is_withdrawn_and_not_taken_back: 154,
    a_source_that_decodes_on_without_a_withdraw: 10,
    a_copy_of_a_block_that_is_not_full: 24,
    a_copy_that_is_cached_before_it_is_there: 24,
    a_copy_whose_blocks_are_not_leased: 24,
    a_source_that_waits_for_a_copy_that_nobody_has: 24,
    a_source_that_moves_a_request_which_is_recomputed: 246,
}
"""The run in which a rule was noticed when this was written; all others are in one of the first few."""


def play(number: int) -> None:
    """Play a scene, or a run at random."""
    run(number - len(SCENES), limit=20_000) if number >= len(SCENES) else SCENES[number]()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "how", thinned(BROKEN, lambda how: KNOWN.get(how, 0) < 20), ids=[how.__name__ for how in BROKEN]
)
def test_a_rule_that_is_not_kept_is_noticed(how: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    how(monkeypatch)
    assert is_noticed(play, range(303), KNOWN.get(how, 0), (*BROKEN_RUN, AttributeError)), how.__name__
