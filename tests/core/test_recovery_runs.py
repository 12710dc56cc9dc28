"""Runs in virtual time in which requests survive deaths, each checked after every event; and rules that they need.

``deadly_cluster(seed, failures=POLICY).run()`` repeats a run. Every order of events of one request is searched as well:
where another instance has each stage of the lost one, the request is always complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from support.core_tables import work
from support.deadly import deadly_cluster
from support.every_order import Search
from support.other_rules import is_noticed
from support.reader_checks import check_readers
from support.thinned import thinned
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import FrontendCore, frontend_core, frontend_request
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.messages import FRONTEND, Forget, Gone, Moved, Send, Submit, Value
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy

POLICY = FailurePolicy(recoveries=20, wait_s=10.0)
AT_ALL = 45
POOLS = {"image": 16, "kv": 32}
STILL = Durations(lambda *_: 0.01, lambda *_: 1.0, lambda *_: 0.1)


def run(seed: int, failures: FailurePolicy = POLICY, limit: int = 1_000_000) -> VirtualCluster:
    cluster = deadly_cluster(seed, failures=failures)
    try:
        cluster.run(limit)
        check_readers(cluster)
    except BaseException as error:
        error.add_note(f"deadly_cluster({seed}, failures={failures})")
        raise
    assert (cluster.frontend.inputs.waiting_bytes, cluster.frontend.inputs.kept_bytes) == (0, 0)
    return cluster


def count(cluster: VirtualCluster, seen: Counter[str]) -> None:
    seen["death"] += cluster.lives.kills
    for outcome in cluster.outcomes.values():
        assert outcome.end is not None
        seen["survived" if outcome.end.former and outcome.end.reason in ("length", "stop") else "other"] += 1
        seen[outcome.end.failure.error if outcome.end.failure else outcome.end.reason] += 1
        if outcome.end.failure is not None and "was lost while" in outcome.end.failure.message:
            seen["lost"] += 1
    sent = [each.message for _, name, each in cluster.commands if name == FRONTEND and isinstance(each, Send)]
    seen["with tokens"] += sum(isinstance(each, Submit) and len(each.tokens) > 0 for each in sent)


def test_requests_survive_deaths_with_all_invariants() -> None:
    """Nothing is lost but what its deadline, its reader, its own rows and the policy's bounds end."""
    seen: Counter[str] = Counter()
    for seed in range(AT_ALL):
        count(run(seed), seen)
    assert seen["survived"] > AT_ALL // 2, seen
    assert seen["with tokens"] > AT_ALL // 4, seen
    assert not seen["lost"], "twenty recoveries are enough for six deaths and all faults of a run"


@pytest.mark.parametrize("failures", [FailurePolicy(wait_s=10.0), FailurePolicy(recoveries=1, wait_s=0.0)], ids=str)
def test_other_policies_keep_the_invariants(failures: FailurePolicy) -> None:
    for seed in range(50_000, 50_000 + AT_ALL // 3):
        run(seed, failures)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_many_more_runs_with_recovery(part: int) -> None:
    """20,000 in all."""
    for seed in range(200_000 + part * 2000, 202_000 + part * 2000):
        run(seed)


def test_requests_for_features_alone_survive_too() -> None:
    survived = 0
    for seed in range(300_000, 300_000 + AT_ALL // 3):
        cluster = deadly_cluster(seed, encode_only=0.7, failures=POLICY)
        cluster.run()
        ends = [outcome.end for outcome in cluster.outcomes.values() if outcome.end]
        survived += sum(end.reason == "encoded" and bool(end.former) for end in ends)
    assert survived > 1


def cluster_of(placement: str, failures: FailurePolicy = POLICY) -> VirtualCluster:
    settings = make_settings(placement, POOLS, image_block_size=4, kv_block_size=4)
    return VirtualCluster(settings, durations=STILL, failures=failures)


@pytest.mark.parametrize("placement", ["E+P+D", "EP+D", "ED+P", "PD+E", "EPD"])
def test_each_instance_may_die_at_any_time_and_comes_back(placement: str) -> None:
    """The only instance of its stages: the request waits for it, and is complete."""
    for name, _ in [(each.name, 0) for each in make_settings(placement, POOLS)]:
        for tenth in range(0, 130, 3):
            cluster = cluster_of(placement)
            cluster.submit(work("r", "cat", 1, max_tokens=9))
            cluster.kill(name, at=tenth / 10, back_s=1.0)
            cluster.run()
            (outcome,) = cluster.outcomes.values()
            assert outcome.end is not None
            assert (outcome.end.reason, outcome.tokens) == ("length", list(range(1, 10))), (name, tenth)


def test_cached_features_and_prefixes_spare_the_recomputation() -> None:
    cluster = cluster_of("E+P+2D")
    cluster.submit(work("r", "cat", 9, max_tokens=9))
    cluster.kill("D0", at=6.0, back_s=None)
    cluster.run()
    end = cluster.outcomes["r"].end
    assert end is not None
    assert end.reason == "length"
    lengths = [row.length for _, _, step in cluster.commands for row in getattr(step, "prefills", ())]
    assert lengths[0] == 13
    assert end.recomputed == sum(lengths[1:]) < 13
    assert sum(len(getattr(step, "encodes", ())) for _, _, step in cluster.commands) == 1


# ---------------------------------------------------------------- every order

ROOM = {"image": 4, "kv": 8}
IMAGE = Submit(work("r", 1, "cat*4", max_tokens=3))


def search(placement: str, victim: str, back: bool = False, recoveries: int = 1) -> Search:
    rules, transfers = BatchRules(token_budget=64, image_budget=64), TransferPolicy(early=False)
    own = make_settings(
        placement, ROOM, image_block_size=4, kv_block_size=4, prefix_cache=False, rules=rules, transfers=transfers
    )
    return Search(own, (IMAGE,), victim, back, FailurePolicy(recoveries=recoveries, wait_s=0.0))


def ends(found: Search) -> set[str]:
    return {reason for each in found.ends for _, reason in each}


@pytest.mark.parametrize(("placement", "victim"), [("EP+2D", "D0"), ("2EPD", "EPD0")])
def test_with_a_sibling_of_the_lost_one_every_order_ends_well(placement: str, victim: str) -> None:
    found = search(placement, victim)
    assert len(found.run()) > 100
    assert ends(found) == {"length"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("placement", "victim"), [("2EP+D", "EP0"), ("ED+2P", "P0"), ("E+P+2D", "D0"), ("PD+2E", "E0")]
)
def test_with_a_sibling_of_the_lost_one_many_more_orders_end_well(placement: str, victim: str) -> None:
    found = search(placement, victim)
    assert len(found.run()) > 1000
    assert ends(found) == {"length"}


@pytest.mark.parametrize(("placement", "victim"), [("EP+D", "EP0"), ("EP+D", "D0")])
def test_a_death_and_a_return_in_every_order_leave_nothing_behind(placement: str, victim: str) -> None:
    found = search(placement, victim, back=True)
    assert len(found.run()) > 2500
    assert "length" in ends(found)


# ---------------------------------------------------------------- a rule not kept is noticed


def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each life keeps the first one's name."""
    monkeypatch.setattr(frontend_core, "name_life", lambda request, number, attempt, owner: request)


def unforgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instances of a former life go on with it."""
    kept = FrontendCore._forget

    def forget(self: FrontendCore, request: str, *rest: Any) -> list[Value]:
        return kept(self, request, *rest) if request not in self.lives or self.lives[request].lost is None else []

    monkeypatch.setattr(FrontendCore, "_forget", forget)


def unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes in a former life, after all others were told to forget it, hears nothing."""

    disown = FrontendCore._disown

    def say_nothing(self: FrontendCore, event: Moved | Gone, *rest: Any) -> list[Value]:
        forget = Forget(event.request, event.attempt)
        return [each for each in disown(self, event, *rest) if not (isinstance(each, Send) and each.message == forget)]

    monkeypatch.setattr(FrontendCore, "_disown", say_nothing)


def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request goes on although its last token is out."""
    monkeypatch.setattr(FrontendRequest, "said", "")


def blank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next life begins without the tokens that are out."""
    begin = FrontendRequest.next_attempt

    def forgetful(self: FrontendRequest, now: float, name: str) -> None:
        begin(self, now, name)
        self.tokens = []

    monkeypatch.setattr(FrontendRequest, "next_attempt", forgetful)


def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a former life that came ahead of a missing one are kept for the next."""
    end = FrontendRequest.end_life

    def keeping(self: FrontendRequest, *rest: Any) -> None:
        early = dict(self.early)
        end(self, *rest)
        self.early.update(early)

    monkeypatch.setattr(FrontendRequest, "end_life", keeping)


def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request goes back at once to an instance that does not know yet who is up."""
    monkeypatch.setattr(frontend_request, "PAUSE_S", 0.0)


def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits does not go on as its instance comes back."""
    monkeypatch.setattr(FrontendCore, "_try_again", lambda self, entry, now: [])


def unwaiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request at no instance counts as one at a lost instance."""
    wait = FrontendRequest.wait

    def lost(self: FrontendRequest, *times: float) -> None:
        hops = self.hops
        wait(self, *times)
        self.waits, self.hops = False, hops

    monkeypatch.setattr(FrontendRequest, "wait", lost)


RULES: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    nameless: 3,
    unforgotten: 14,
    unanswered: 416,
    unsaid: 195,
    blank: 0,
    mixed: 150,
    hasty: 35,
    deaf: 0,
    unwaiting: 0,
}
"""And the seed at which each was noticed, when this was written."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("broken", thinned(RULES, lambda rule: RULES[rule] < 10), ids=lambda each: each.__name__)
def test_a_rule_that_is_not_kept_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert is_noticed(lambda seed: run(seed, limit=20_000), range(2000), RULES[broken]), broken.__doc__
