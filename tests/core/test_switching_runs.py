"""Instances that switch roles: in virtual time beside deaths, in every order of events, and rules not kept.

``switching_cluster(seed, POLICY).run()`` repeats a run. A switch ends a life with what is left there, at any time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from core.test_recovery_runs import AT_ALL, IMAGE, POLICY, POOLS, ROOM, STILL
from support.core_tables import make_core, make_frontend, sent, work
from support.deadly import switching_cluster
from support.every_order import Search
from support.reader_checks import check_readers
from support.virtual.cluster import VirtualCluster, make_settings
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.instance.settings import Settings
from trinity.core.messages import (
    FRONTEND,
    Fetch,
    Fetched,
    Offer,
    PeerDown,
    PeerLeaving,
    PeerRemoved,
    PeerUp,
    Send,
    Submit,
)
from trinity.core.routing.router import Router
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy


def run(seed: int, *, deaths: bool = True, limit: int = 200_000) -> VirtualCluster:
    cluster = switching_cluster(seed, POLICY, deaths)
    try:
        cluster.run(limit)
        check_readers(cluster)
    except BaseException as error:
        error.add_note(f"switching_cluster({seed}, POLICY, {deaths})")
        raise
    return cluster


def test_nothing_is_lost_when_roles_switch_beside_deaths() -> None:
    seen: Counter[str] = Counter()
    for seed in range(AT_ALL):
        cluster = run(seed)
        for outcome in cluster.outcomes.values():
            assert outcome.end is not None
            seen["survived"] += bool(outcome.end.former)
            why = outcome.end.failure.message if outcome.end.failure is not None else ""
            seen["lost"] += "was lost while" in why
    assert seen["survived"] > AT_ALL, seen
    assert not seen["lost"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_many_more_runs_with_switches(part: int) -> None:
    """20,000 in all."""
    for seed in range(400_000 + part * 2000, 402_000 + part * 2000):
        run(seed)


# ---------------------------------------------------------------- one at a time


def cluster_of(placement: str, failures: FailurePolicy = POLICY) -> VirtualCluster:
    settings = make_settings(placement, POOLS, image_block_size=4, kv_block_size=4)
    return VirtualCluster(settings, durations=STILL, failures=failures)


def become(settings: Settings, roles: str) -> Settings:
    kinds = {"image": "EP", "kv": "PD"}
    return replace(settings, roles=roles, pools={kind: POOLS[kind] for kind in POOLS if set(kinds[kind]) & set(roles)})


PAIRS = [(one, other) for one in "EPD" for other in "EPD" if one != other]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_of_two_each_may_switch_at_any_time(one: str, other: str) -> None:
    """What it is amid is recovered, and that is not counted; what comes later goes past it."""
    placement = "+".join(f"{2 if letter == one else 1}{letter}" for letter in "EPD")
    for tenth in range(0, 130, 3):
        cluster = cluster_of(placement, FailurePolicy(recoveries=1))
        for number in range(3):
            cluster.submit(work(f"r{number}", "cat", 1, max_tokens=9), at=number / 2)
        name = f"{one}{tenth % 2}"
        cluster.switch(name, tenth / 10, become(cluster.cores[name].settings, other), drain_s=0.5)
        cluster.run()
        for outcome in cluster.outcomes.values():
            assert outcome.end is not None
            assert (outcome.end.reason, outcome.tokens) == ("length", list(range(1, 10))), (name, tenth)
        assert cluster.cores[name].settings.roles == other


def test_new_work_goes_past_one_that_leaves() -> None:
    cluster = cluster_of("E+P+2D")
    cluster.switch("D0", 0.0, become(cluster.cores["D0"].settings, "E"), drain_s=100.0)
    for number in range(6):
        cluster.submit(work(f"r{number}", 1, max_tokens=3), at=1.0 + number)
    cluster.run()
    ends = [outcome.end for outcome in cluster.outcomes.values()]
    assert {end.finished.route for end in ends if end is not None and end.finished is not None} == {("P0", "D1")}


# ---------------------------------------------------------------- tables


def test_a_router_goes_past_one_that_leaves_while_it_can() -> None:
    core = make_core("P0", peers="D0 D1")
    core.handle(PeerLeaving("D0", 0, leaving=True), 0.0)
    asked = work("r", 3)
    assert {core.state.router.choose("D", asked) for _ in range(4)} == {"D1"}
    core.handle(PeerLeaving("D1", 0, leaving=True), 0.0)
    assert {core.state.router.choose("D", asked) for _ in range(4)} == {"D0", "D1"}
    core.handle(PeerLeaving("D0", 0, leaving=False), 0.0)
    assert {core.state.router.choose("D", asked) for _ in range(4)} == {"D0"}


@pytest.mark.parametrize("said", [PeerLeaving("D0", 1, True), PeerLeaving("X", 0, True)])
def test_of_another_life_or_of_nobody_a_router_hears_nothing(said: PeerLeaving) -> None:
    core = make_core("P0", peers="D0 D1")
    core.handle(said, 0.0)
    assert {core.state.router.choose("D", work("r", 3)) for _ in range(4)} == {"D0", "D1"}
    assert not core.state.router.leaving


def test_one_that_is_gone_leaves_no_more() -> None:
    core = make_core("P0", peers="D0 D1")
    core.handle(PeerLeaving("D0", 0, leaving=True), 0.0)
    core.handle(PeerDown("D0", planned=True), 0.0)
    assert not core.state.router.leaving
    core.handle(PeerLeaving("D0", 0, leaving=True), 0.0)  # it comes late: that one is dead
    assert "D0" not in core.state.router.peers
    assert not core.state.router.leaving


def test_one_that_is_removed_is_waited_for_no_more() -> None:
    """Before that its stage is away; then there is none, for requests that wait as well."""
    core = make_frontend("E0 P0 D0", failures=FailurePolicy())
    core.handle(PeerDown("E0", planned=True), 1.0)
    core.handle(Submit(work("r", "cat", 1)), 1.0)
    (entry,) = core.entries.values()
    assert entry.waits
    assert core.handle(PeerRemoved("E0", 0), 2.0)[0].failure.error == "RequestTooLarge"  # type: ignore[attr-defined]
    assert not core.entries
    assert not core.router.lost
    assert core.next_timer() is None


def test_the_end_of_a_former_one_of_the_name_removes_nothing() -> None:
    core = make_core("P0", peers="D0 D1")
    core.handle(PeerUp("D1", "D", 3, {"kv": 40}), 0.0)
    core.handle(PeerRemoved("D1", 2), 1.0)
    assert "D1" in core.state.router.peers
    core.handle(PeerDown("D1"), 2.0)
    core.handle(PeerRemoved("D1", 2), 3.0)
    assert "D1" in core.state.router.lost
    core.handle(PeerRemoved("D1", 3), 4.0)
    assert "D1" not in core.state.router.lost


@pytest.mark.parametrize(("planned", "counted"), [(True, 0), (False, 1)])
def test_a_planned_end_is_not_counted(planned: bool, counted: int) -> None:
    core = make_frontend(failures=FailurePolicy())
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    core.handle(PeerDown("E0", planned=planned), 1.0)
    (entry,) = core.entries.values()
    assert entry.recoveries == counted
    assert entry.lives == 2 - entry.waits or entry.waits


def test_work_for_another_life_is_dropped_without_a_word() -> None:
    encoder = make_core("E0", peers="P0")
    assert encoder.handle(Submit(work("r", "cat", 1), target_epoch=3), 0.0) == []
    assert encoder.handle(Submit(work("r", "cat", 1), target_epoch=0), 0.0) != []
    offer = Offer(id="P9:1", kind="kv", source="P9", work=work("s", 1), parts=(), target_epoch=1)
    assert encoder.handle(offer, 0.0) == []
    assert "s" not in encoder.state.requests


def test_features_are_not_there_where_no_image_pool_is() -> None:
    decoder = make_core("D0", peers="P0")
    (answer,) = sent(decoder.handle(Fetch("x", "P0", "image", (b"key",)), 0.0), Fetched)
    assert answer.blocks == ()


# ---------------------------------------------------------------- every order


def switch_search(placement: str, name: str, roles: str, failures: FailurePolicy) -> Search:
    rules, transfers = BatchRules(token_budget=64, image_budget=64), TransferPolicy(early=False)
    own = make_settings(
        placement, ROOM, image_block_size=4, kv_block_size=4, prefix_cache=False, rules=rules, transfers=transfers
    )
    former = next(each for each in own if each.name == name)
    return Search(own, (IMAGE,), name, back=True, failures=failures, becomes=become(former, roles))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("placement", "name", "roles"),
    [("2EP+D", "EP1", "D"), pytest.param("EP+2D", "D0", "EP", marks=pytest.mark.slow)],
)
def test_a_switch_in_every_order_ends_well(placement: str, name: str, roles: str) -> None:
    found = switch_search(placement, name, roles, FailurePolicy(recoveries=1, wait_s=0.0))
    assert len(found.run()) > 500
    assert {reason for each in found.ends for _, reason in each} == {"length"}


# ---------------------------------------------------------------- a rule not kept is noticed


def taking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A life takes in what was meant for a former one."""
    monkeypatch.setattr(Settings, "is_other_life", lambda self, epoch: False)


def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planned end counts as a loss."""
    count = FrontendRequest.count_loss

    def always(self: FrontendRequest, finished: object, waits: bool, planned: bool) -> float | None:
        return count(self, finished, waits, False)  # type: ignore[arg-type]

    monkeypatch.setattr(FrontendRequest, "count_loss", always)


def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work goes on to those that leave."""
    monkeypatch.setattr(Router, "avoid", lambda self, event: None)


def check_all() -> None:
    for seed in range(3000):
        cluster = run(seed)
        sent_on = [each.message for _, name, each in cluster.commands if name == FRONTEND and isinstance(each, Send)]
        assert sent_on or not cluster.outcomes


NOTICED: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], object]] = {
    taking: check_all,
    counting: lambda: test_a_planned_end_is_not_counted(True, 0),
    undecided: test_new_work_goes_past_one_that_leaves,
}


@pytest.mark.parametrize("broken", NOTICED, ids=lambda each: each.__name__)
@pytest.mark.timeout(600)
def test_each_rule_is_needed(broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        NOTICED[broken]()
