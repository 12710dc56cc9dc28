"""Cores broken on purpose: every rule of the design, once not kept, is noticed within a few interleavings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.core_tables import work
from support.scenarios import random_cluster
from support.thinned import thinned
from support.tight_pools import flood
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core.frontend import FrontendCore
from trinity.core.instance import admission, instance_core, lifecycle, peers, steps
from trinity.core.instance import state as core_state
from trinity.core.instance.lanes import DecodeBatch, count_in_flight
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import Cancel, Commit, Forget, Offer, Send, Value
from trinity.core.migration import kv_target, source, target
from trinity.core.migration import source as kv_source
from trinity.core.prefix_cache import prefix_keys
from trinity.core.scheduler import BatchRules

ENOUGH = 1500
Patch = Callable[[pytest.MonkeyPatch], None]
BROKEN: dict[str, Patch] = {}


def broken(patch: Patch) -> Patch:
    BROKEN[patch.__name__] = patch
    return patch


def everywhere(monkeypatch: pytest.MonkeyPatch, name: str, new: Any) -> None:
    """Replace a function of the core in every module that has imported it."""
    for module in (admission, instance_core, kv_source, kv_target, peers, lifecycle, source, steps, target):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, new)


def around(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, after: Callable[..., None]) -> None:
    """Do something more after a function of the core, with its result and its arguments."""
    old = getattr(where, name)

    def new(*args: Any) -> Any:
        result = old(*args)
        after(result, *args)
        return result

    if where is State or where is FrontendCore or where is admission.Candidates:
        monkeypatch.setattr(where, name, new)
        return
    everywhere(monkeypatch, name, new)
    for event, handler in list(instance_core._HANDLERS.items()):
        if handler is old:
            handle(monkeypatch, event, new)


def handle(monkeypatch: pytest.MonkeyPatch, event: type[Value], new: Callable[[State, Any, float], Any]) -> None:
    monkeypatch.setattr(instance_core, "_HANDLERS", {**instance_core._HANDLERS, event: new})


@broken
def blocks_are_given_back_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "in_step", lambda s, request: False)


@broken
def blocks_are_given_back_during_a_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(s: State, state: Any, now: float) -> None:
        if state.ending is not None and state.work.request in s.requests and not s.in_step(state.work.request):
            lifecycle._conclude(s, state, now)

    everywhere(monkeypatch, "conclude_if_quiet", careless)


@broken
def a_block_is_matchable_before_its_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(result: Any, s: State, request: str, start: int, length: int) -> None:
        kv_target.publish_kv(s, s.requests[request], start + length)

    around(monkeypatch, steps, "_prefill_row", early)


@broken
def blocks_are_given_back_while_a_second_step_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "in_step", lambda s, request: count_in_flight(s.lanes)[request] > 1)


@broken
def a_row_that_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(s: State, state: Any, now: float) -> None:
        if state.ending is not None and state.ending.reason == "stop":
            lifecycle._conclude(s, state, now)
        else:
            quiet(s, state, now)

    quiet = lifecycle.conclude_if_quiet
    everywhere(monkeypatch, "conclude_if_quiet", hasty)


@broken
def a_row_is_decoded_beyond_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere(monkeypatch, "next_decodes", lambda s: tuple(s.decoding))


@broken
def a_chunk_begins_where_the_last_ended_one_did(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(result: Any, s: State, row: Any) -> None:
        row.scheduled = row.prefilled

    around(monkeypatch, steps, "_prefill_row", lambda result, s, request, *_: again(result, s, s.requests[request]))


@broken
def a_part_is_pulled_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(result: Any, s: State, event: Offer, now: float) -> None:
        incoming = s.requests[event.work.request].incoming
        assert incoming is not None
        incoming.ready_parts.update(range(len(event.parts)))

    around(monkeypatch, target, "handle_offer", eager)


@broken
def a_migration_goes_on_without_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def assumed(result: Any, s: State, event: Offer, now: float) -> None:
        incoming = s.requests[event.work.request].incoming
        assert incoming is not None
        incoming.commit = Commit(event.id, (1,))

    around(monkeypatch, target, "handle_offer", assumed)


@broken
def a_migration_goes_on_without_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def assumed(result: Any, s: State, event: Offer, now: float) -> None:
        incoming = s.requests[event.work.request].incoming
        assert incoming is not None
        incoming.pulled_parts.add(0)

    around(monkeypatch, target, "handle_offer", assumed)


@broken
def a_prefix_matches_whatever_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_state, "prefix_keys", lambda tokens, media, block, salt: prefix_keys(tokens, (), block))


@broken
def a_prefix_cuts_an_atomic_span(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(s: State, state: Any) -> tuple[int, ...]:
        return s.kv.match(s.prefix_keys(state)[: (len(state.work.prompt) - 1) // s.settings.kv_block_size])

    monkeypatch.setattr(State, "prefix_hits", careless)


@broken
def a_chunk_cuts_an_atomic_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_atomic", lambda state: ())


@broken
def a_hit_covers_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "prefix_hits", lambda s, state: s.kv.match(s.prefix_keys(state)))


@broken
def what_one_admission_counts_on_is_evicted_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission.Candidates, "_pin", lambda self, request, kind, hits, new: new)


@broken
def a_lease_ends_with_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropped(result: Any, s: State, state: Any, now: float) -> None:
        lease = s.outgoing[state.outgoing]
        s.pools[lease.kind].drop(lease.blocks)
        lease.blocks = ()

    around(monkeypatch, lifecycle, "hand_on", dropped)


@broken
def blocks_taken_back_are_used_again_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "allocate", lambda s, kind, count: s.pools[kind].allocate(count))


@broken
def a_silent_target_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request has ended: whoever takes the blocks back must say so, or its target pulls on."""

    def quiet(result: Any, s: State, lease: Any, now: float) -> None:
        s.out = [each for each in s.out if not isinstance(each, Send)]

    around(monkeypatch, peers, "_expired", quiet)


@broken
def a_transfer_is_released_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(result: Any, s: State, state: Any, outcome: str) -> None:
        s.out.append(s.out[-1])

    around(monkeypatch, lifecycle, "release", again)


@broken
def a_token_is_emitted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(s: State, *rest: Any) -> Any:
        emits = decoded(s, *rest)
        s.out.extend(Send(owner, emit) for owner, emit in emits.items())
        return emits

    decoded = steps._decoded
    monkeypatch.setattr(steps, "_decoded", twice)


@broken
def a_late_request_counts_a_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: DecodeBatch, request: str, attempt: int, tokens: int, *rest: Any) -> None:
        join(self, request, attempt, tokens + (self.count > 0), *rest)

    join = DecodeBatch.join
    monkeypatch.setattr(DecodeBatch, "join", late)


@broken
def tokens_stay_in_the_columns_of_a_request_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestState, "store_tokens", lambda self: None)


@broken
def a_cancel_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    handle(monkeypatch, Cancel, lambda s, event, now: None)


@broken
def a_cancel_does_not_follow_the_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(s: State, event: Cancel, now: float) -> None:
        state = s.requests.get(event.request)
        if state is not None:
            lifecycle.end(s, state, now, "cancelled")

    handle(monkeypatch, Cancel, alone)


@broken
def a_failed_row_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(s: State, state: Any, now: float) -> None:
        state.outgoing = state.outgoing or ("none" if state.ending.reason == "error" else None)
        quiet(s, state, now)

    quiet = lifecycle._conclude
    everywhere(monkeypatch, "_conclude", silent)


@broken
def a_failed_source_does_not_withdraw(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(result: Any, s: State, state: Any, now: float) -> None:
        s.out = [each for each in s.out if not (isinstance(each, Send) and type(each.message).__name__ == "Withdraw")]

    around(monkeypatch, lifecycle, "_conclude", forgetful)


@broken
def the_others_do_not_take_over_what_its_owner_failed_to_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_next_provider", lambda s, row: None)


@broken
def nothing_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    handle(monkeypatch, Forget, lambda s, event, now: None)


@broken
def a_forget_ahead_of_the_release_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    handle(monkeypatch, Forget, lambda s, event, now: s.tombstones.pop(event.request, None))


@broken
def image_blocks_are_kept_after_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "drop_media", lambda s, state: setattr(state, "media", []))


@broken
def the_front_end_forgets_before_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(result: Any, self: FrontendCore, event: Any, now: float) -> None:
        entry = self.entries.get(event.request)
        if entry is not None:
            entry.delivered = max(entry.delivered, event.count)
            result += self._settle(entry, now)

    around(monkeypatch, FrontendCore, "_finished", hasty)


@broken
def the_front_end_does_not_order_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_order(self: FrontendCore, entry: Any, index: int, *rest: Any) -> list[Value]:
        entry.delivered = index
        return old(self, entry, index, *rest)

    old = FrontendCore._emitted
    monkeypatch.setattr(FrontendCore, "_emitted", any_order)


@pytest.mark.parametrize("how", thinned(BROKEN, [*BROKEN][::2].__contains__))
def test_a_broken_core_is_noticed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[how](monkeypatch)
    for seed in range(ENOUGH):
        try:
            random_cluster(seed).run(20_000)
        except (AssertionError, KeyError, ValueError, IndexError):
            return
    pytest.fail(f"{ENOUGH} interleavings did not notice that {how.replace('_', ' ')}")


def test_a_limit_shared_by_the_stages_of_ed_p_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap that rule 4 names: the decode side waits for a place that the encode side's leases have taken."""
    reserve = kv_target.reserve_kv

    def limited(s: State, state: Any, now: float) -> bool:
        decoding = sum(each.phase in (Phase.KV_PULL, Phase.DECODING) for each in s.requests.values())
        return len(s.outgoing) + decoding < 4 and reserve(s, state, now)

    monkeypatch.setattr(target, "reserve_kv", limited)
    with pytest.raises(AssertionError, match=r"no Release of|no end of"):
        roomy("ED+P")


def test_reserving_features_one_by_one_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of three images each, halves of both in a target pool that holds one of them."""

    def piecemeal(s: State, state: Any, now: float) -> bool:
        for part, slot in enumerate(state.media):
            if part in state.incoming.ready_parts and not slot.blocks:
                if not s.pools["image"].fits(len(slot.keys)):
                    return False
                slot.blocks = s.pools["image"].allocate(len(slot.keys))
        if not all(slot.blocks for slot in state.media):
            s.image_offers.remove(state.work.request)
            s.image_offers.append(state.work.request)
            return False
        s.move(state, Phase.IMAGE_PULL, now)
        return True

    monkeypatch.setattr(target, "_reserve_media", piecemeal)
    with pytest.raises(AssertionError, match=r"no Release of|no end of"):
        flood("2E1P1D", 6, images=3, rules=BatchRules(token_budget=64, image_budget=1), image_cache=False)


def roomy(placement: str) -> None:
    """Eight requests, image blocks for all of them at E, for one at P."""
    configured = [
        each if each.name != "ED0" else type(each)(**{**vars(each), "pools": {"image": 24, "kv": 32}})
        for each in make_settings(
            placement, {"image": 3, "kv": 4}, image_block_size=4, kv_block_size=4, prefix_cache=False
        )
    ]
    cluster = VirtualCluster(configured, durations=Durations(step=lambda draw, name, step: 0.01))
    for number in range(8):
        cluster.submit(work(f"r{number}", f"r{number}*12", 1, max_tokens=4))
    cluster.run()


def test_without_that_limit_the_same_load_is_served() -> None:
    roomy("ED+P")
