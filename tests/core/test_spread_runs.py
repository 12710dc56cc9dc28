"""Requests whose images several encoders share, in virtual time and in every order of events.

``spread_cluster(seed, POLICY).run()`` repeats a run. Whatever becomes of a helper, the request goes on: no loss of one
costs a recovery. Pools hold one request and little more in half of the runs, so that what waits for blocks waits long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from support.core_tables import brief, done, make_core, sent, work
from support.every_order import Search
from support.reader_checks import check_readers
from support.spread_clusters import spread_cluster, strike
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core import InstanceCore
from trinity.core.failure_policy import NO_RECOVERY, FailurePolicy
from trinity.core.frontend import Abort
from trinity.core.instance import helpers, peers, steps
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import Cancel, Fetch, Helped, Send, Submit, Value
from trinity.core.migration import source
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.core.values import name_help

POLICY = FailurePolicy(recoveries=20, wait_s=10.0)
AT_ALL = 30


def run(seed: int, deaths: bool = True, limit: int = 1_000_000) -> VirtualCluster:
    cluster = spread_cluster(seed, POLICY)
    try:
        (strike(cluster, seed) if deaths else cluster).run(limit)
        check_readers(cluster)
    except BaseException as error:
        error.add_note(f"spread_cluster({seed}), {deaths=}")
        raise
    return cluster


def count(cluster: VirtualCluster, seen: Counter[str]) -> None:
    sent = [(name, each.message) for _, name, each in cluster.commands if isinstance(each, Send)]
    seen["asked"] += sum(isinstance(each, Submit) and bool(each.asker) for _, each in sent)
    seen["fetched"] += sum(isinstance(each, Fetch) for _, each in sent)
    seen.update(each.said for _, each in sent if isinstance(each, Helped))
    for outcome in cluster.outcomes.values():
        assert outcome.end is not None
        seen[outcome.end.reason] += 1


def test_requests_are_whole_whatever_becomes_of_their_helpers() -> None:
    seen: Counter[str] = Counter()
    for seed in range(AT_ALL):
        count(run(seed), seen)
    for what in ("asked", "begun", "ready", "no", "fetched", "length", "cancelled"):
        assert seen[what] > AT_ALL // 12, seen


def test_without_deaths_too() -> None:
    for seed in range(50_000, 50_000 + AT_ALL // 2):
        run(seed, deaths=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_many_more_runs_with_helpers(part: int) -> None:
    """10,000 in all."""
    for seed in range(200_000 + part * 1000, 201_000 + part * 1000):
        run(seed)


# ---------------------------------------------------------------- what is encoded, and when

STILL = Durations(lambda *_: 0.001, lambda *_: 1.0, lambda *_: 0.01)
ONE_A_STEP = BatchRules(token_budget=64, image_budget=1)


def at_rest(encoders: int, spread: int = 9, **settings: Any) -> VirtualCluster:
    """A step takes a second and encodes one image; a message takes a thousandth of that."""
    own = make_settings(
        f"{encoders}E1PD", {"image": 16, "kv": 64}, rules=ONE_A_STEP, image_block_size=4, kv_block_size=4, **settings
    )
    return VirtualCluster(own, durations=STILL, spread=spread)


def images(count: int, request: str = "r", **fields: Any) -> Any:
    return work(request, *(f"{request}{item}*4" for item in range(count)), 1, max_tokens=1, **fields)


@pytest.mark.parametrize("encoders", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
def test_images_are_encoded_side_by_side(encoders: int, count: int) -> None:
    """In as many rounds as the formula has, and each image once."""
    cluster = at_rest(encoders)
    cluster.submit(images(count), at=0.0)
    cluster.run()
    encodes = Counter(row.item for _, name, step in cluster.commands for row in getattr(step, "encodes", ()))
    rounds = -(-count // encoders)
    assert cluster.outcomes["r"].times[0] == pytest.approx(rounds + 1, abs=0.2)
    assert encodes.total() == count, "each image once"


def test_a_helper_that_dies_costs_its_images_and_no_recovery() -> None:
    for tenth in range(0, 60):
        cluster = at_rest(3)
        cluster.submit(images(6), at=0.0)
        cluster.kill("E1", at=tenth / 20, back_s=None)
        cluster.run()
        end = cluster.outcomes["r"].end
        assert end is not None
        assert (end.reason, end.lives, end.attempts) == ("length", 1, 1), tenth


def test_two_encoders_that_help_each_other_with_room_for_one_request_each_both_go_on() -> None:
    """Each request holds all blocks of its own encoder, while the other one is asked for a block."""
    own = make_settings(
        "2E1PD", {"image": 4, "kv": 64}, rules=ONE_A_STEP, image_block_size=4, kv_block_size=4, prefix_cache=False
    )
    cluster = VirtualCluster(own, durations=STILL, spread=2)
    for request in "rstu":
        cluster.submit(images(4, request), at=0.0)
    cluster.run()
    assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"length"}


# ---------------------------------------------------------------- every order

ROOM = {"image": 4, "kv": 8}
PAIR = Submit(work("r", "cat*4", "dog*4", 1, max_tokens=1))


def search(victim: str, *asked: Value, back: bool = False, room: dict[str, int] = ROOM) -> Search:
    rules, transfers = BatchRules(token_budget=64, image_budget=64), TransferPolicy(early=False)
    own = make_settings(
        "2E1PD", room, image_block_size=4, kv_block_size=4, prefix_cache=False, rules=rules, transfers=transfers
    )
    return Search(own, asked or (PAIR,), victim, back, NO_RECOVERY, spread=2)


def ends(found: Search) -> set[str]:
    return {reason for each in found.ends for _, reason in each}


@pytest.mark.parametrize("victim", ["", "E1"])
def test_in_every_order_a_request_outlives_its_helper(victim: str) -> None:
    """Without any recovery."""
    found = search(victim)
    assert len(found.run()) > (5000 if victim else 700)
    assert ends(found) == {"length"}


@pytest.mark.parametrize("victim", ["E0", "PD0"])
def test_in_every_order_the_loss_of_another_leaves_nothing_behind(victim: str) -> None:
    found = search(victim)
    assert len(found.run()) > 4000
    assert ends(found) <= {"length", "MigrationError", "StageError", "Overloaded"}


def test_in_every_order_a_cancel_leaves_nothing_behind() -> None:
    found = search("", PAIR, Abort("r", "cancelled"))
    assert len(found.run()) > 1000
    assert ends(found) == {"length", "cancelled"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_in_every_order_a_request_outlives_a_helper_that_comes_back() -> None:
    found = search("E1", back=True)
    assert len(found.run()) > 200_000
    assert ends(found) == {"length"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_in_every_order_two_requests_that_help_each_other_with_room_for_one_are_whole() -> None:
    other = Submit(work("s", "owl*4", "fox*4", 1, max_tokens=1))
    found = search("", PAIR, other, room={"image": 2, "kv": 8})
    assert len(found.run()) > 10_000
    assert ends(found) == {"length"}


# ---------------------------------------------------------------- a rule not kept is noticed


def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left to a helper is waited for, also where it has not begun."""
    monkeypatch.setattr(steps, "recall", lambda s: False)


def polite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recall goes also to those whose loss was heard before."""
    monkeypatch.setattr(helpers, "_is_up", lambda s, helper: True)


def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said of what is not known."""
    cancel = InstanceCore.handle

    def handle(self: InstanceCore, event: Value, now: float) -> list[Value]:
        unknown = isinstance(event, Cancel) and event.asker and event.request not in self.state.requests
        return [] if unknown else cancel(self, event, now)

    monkeypatch.setattr(InstanceCore, "handle", handle)


def faithful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost helper is waited for."""
    monkeypatch.setattr(peers, "lose_helper", lambda s, name: None)


def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features are offered while some are left to helpers."""

    def may(s: State, state: RequestState) -> bool:
        return any(slot.ready for slot in state.media)

    monkeypatch.setattr(source, "may_offer", may)


def holding_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has found the features at a helper goes on as the one that encodes them for others here."""
    monkeypatch.setattr(State, "await_no_more", lambda s, slot, provider: None)


@pytest.mark.parametrize("broken", [trusting, polite, silent, faithful, hasty, holding_on])
def test_a_rule_that_is_not_kept_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    for seed in range(2000):
        try:
            run(seed, limit=20_000)
        except (AssertionError, KeyError, ValueError, RecursionError):
            return
    pytest.fail(f"2000 runs did not notice: {broken.__doc__}")


def crossing() -> list[list[str]]:
    """Two requests, as two front ends may send them: each is at one encoder with room for one, and helped by the other.

    Returns what each encoder does from the end of its own image on.
    """
    rules, cores = BatchRules(token_budget=64, image_budget=4), {}
    for name, peer in (("E0", "E1"), ("E1", "E0")):
        cores[name] = make_core(name, image=2, peers=f"{peer} P0", rules=rules)
        cores[name].handle(Submit(work(f"at{name}", f"{name}a*4", f"{name}b*4", 1), helpers=("", peer)), 0.0)
    for name, peer in (("E0", "E1"), ("E1", "E0")):
        help = work(name_help(f"at{name}", 0, 1), f"{name}b*4", encode_only=True)
        assert cores[peer].handle(Submit(help, asker=name), 0.0) == [], "it waits for a block"
    does = {name: brief(core.handle(done(1), 1.0)) for name, core in cores.items()}
    for name, peer in (("E0", "E1"), ("E1", "E0")):
        for line in [each for each in does[name] if each.startswith(f"{peer}: cancel")]:
            answers = sent(cores[peer].handle(Cancel(line.split()[-1], name), 2.0), Helped)
            does[name] += [line for each in answers for line in brief(cores[name].handle(each, 3.0))]
    return list(does.values())


def test_two_encoders_that_help_each_other_do_not_wait_for_each_other() -> None:
    for lines in crossing():
        assert any("encode" in line for line in lines), lines


def test_waiting_for_what_has_not_begun_would_be_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: both have nothing more to do, and nobody else will ever say anything to them."""
    trusting(monkeypatch)
    assert crossing() == [[], []]
