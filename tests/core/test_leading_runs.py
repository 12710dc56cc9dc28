"""Requests whose leading text is prefilled ahead, in virtual time and in every order of events.

``leading_cluster(seed, POLICY).run()`` repeats a run. Half of the pools hold one request and little more, so that
whoever kept blocks while it waits would be waited for. After each event all references are counted: who waits for
features has none to a KV block, but for the one whose text is in a step (``support.virtual.checks``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from support.core_tables import work
from support.every_order import Search
from support.leading_clusters import is_leading, leading_cluster
from support.reader_checks import check_readers
from support.spread_clusters import strike
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core.failure_policy import NO_RECOVERY, FailurePolicy
from trinity.core.frontend import Abort
from trinity.core.instance import steps
from trinity.core.instance.leading_text import begin_leading, finish_leading
from trinity.core.instance.queues import LeadingQueue
from trinity.core.instance.state import State
from trinity.core.messages import Open, Prefill, Step, Stepped, Submit, Value
from trinity.core.migration.kv_target import publish_kv
from trinity.core.scheduler import BatchRules, LeadingChunk
from trinity.core.transfers import TransferPolicy

POLICY = FailurePolicy(recoveries=20, wait_s=10.0)
AT_ALL = 30


def run(seed: int, deaths: bool = True, limit: int = 1_000_000) -> VirtualCluster:
    cluster = leading_cluster(seed, POLICY)
    try:
        (strike(cluster, seed) if deaths else cluster).run(limit)
        check_readers(cluster)
    except BaseException as error:
        error.add_note(f"leading_cluster({seed}), {deaths=}")
        raise
    return cluster


def led(cluster: VirtualCluster) -> int:
    """How many chunks of leading text were prefilled."""
    opened = [(name, each) for _, name, each in cluster.commands if isinstance(each, Open)]
    return sum(is_leading(cluster, name, each) for name, each in opened)


def count(cluster: VirtualCluster, seen: Counter[str]) -> None:
    seen["led"] += led(cluster)
    for outcome in cluster.outcomes.values():
        assert outcome.end is not None
        seen[outcome.end.reason] += 1


def test_requests_are_whole_whatever_becomes_of_those_that_wait() -> None:
    seen: Counter[str] = Counter()
    for seed in range(AT_ALL):
        count(run(seed), seen)
    for what in ("led", "length", "cancelled"):
        assert seen[what] > AT_ALL // 10, seen


def test_without_deaths_too() -> None:
    seen: Counter[str] = Counter()
    for seed in range(50_000, 50_000 + AT_ALL // 2):
        count(run(seed, deaths=False), seen)
    assert seen["led"] > AT_ALL // 3, seen


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_many_more_runs_with_leading_text(part: int) -> None:
    """10,000 in all."""
    for seed in range(200_000 + part * 1000, 201_000 + part * 1000):
        run(seed)


# ---------------------------------------------------------------- what comes sooner

ROOM = {"image": 8, "kv": 64}
STEP_S = 1.0
STILL = Durations(lambda *_: 0.001, lambda draw, name, step: STEP_S * _share(step), lambda *_: 0.001)


def _share(step: Step) -> float:
    """An encode takes four seconds, and a prefill a quarter of one a token."""
    return 4.0 * bool(step.encodes) + sum(row.length for row in step.prefills) / 4 + 0.01


def first_token(placement: str, leading: bool, **settings: Any) -> float:
    rules = BatchRules(token_budget=64, image_budget=64, leading_text=leading)
    own = make_settings(placement, ROOM, image_block_size=4, kv_block_size=4, rules=rules, **settings)
    cluster = VirtualCluster(own, durations=STILL)
    cluster.submit(work("r", 12, "cat", 4, max_tokens=1), at=0.0)
    cluster.run()
    return cluster.outcomes["r"].times[0]


@pytest.mark.parametrize("placement", ["E+P+D", "E+PD", "ED+P"])
def test_the_first_token_comes_sooner_by_the_prefill_of_the_text(placement: str) -> None:
    sooner = first_token(placement, leading=False) - first_token(placement, leading=True)
    assert sooner == pytest.approx(12 / 4, abs=0.1)


@pytest.mark.parametrize("placement", ["EP+D", "EPD"])
def test_on_one_instance_it_does_where_encode_has_a_lane_of_its_own(placement: str) -> None:
    dual = {"lanes": ("vision", "language")}
    sooner = first_token(placement, leading=False, **dual) - first_token(placement, leading=True, **dual)
    assert sooner == pytest.approx(12 / 4, abs=0.1)
    assert first_token(placement, leading=False) == first_token(placement, leading=True), "one lane runs one thing"


# ---------------------------------------------------------------- every order

ONE = Submit(work("r", 4, "cat*4", 1, max_tokens=1))
TIGHT = {"image": 2, "kv": 3}  # one request's need of each


def search(placement: str, victim: str, *asked: Value, back: bool = False, early: bool = True) -> Search:
    rules, transfers = BatchRules(token_budget=64, image_budget=64), TransferPolicy(early=early)
    own = make_settings(placement, TIGHT, image_block_size=4, kv_block_size=4, rules=rules, transfers=transfers)
    return Search(own, asked or (ONE,), victim, back, NO_RECOVERY)


def ends(found: Search) -> set[str]:
    return {reason for each in found.ends for _, reason in each}


@pytest.mark.parametrize("victim", ["", "E0", "PD0"])
def test_in_every_order_a_request_ends_and_nothing_is_left(victim: str) -> None:
    found = search("PD+E", victim)
    assert len(found.run()) > (150 if victim else 40)
    assert ends(found) <= {"length", "StageError", "MigrationError", "Overloaded"}
    assert "length" in ends(found)


def test_in_every_order_a_cancel_leaves_nothing_behind() -> None:
    found = search("PD+E", "", ONE, Abort("r", "cancelled"))
    found.run()
    assert ends(found) == {"length", "cancelled"}


def test_in_every_order_two_requests_are_whole_in_pools_of_one() -> None:
    """Each needs all KV blocks and may have led its text in them while the other one waits: nobody waits for ever."""
    other = Submit(work("s", 4, "dog*4", 1, text=500, max_tokens=1))
    found = search("PD+E", "", ONE, other)
    assert len(found.run()) > 1000
    assert ends(found) == {"length"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", ["E0", "PD0"])
def test_in_every_order_two_requests_in_pools_of_one_outlive_a_death(victim: str) -> None:
    other = Submit(work("s", 4, "dog*4", 1, text=500, max_tokens=1))
    found = search("PD+E", victim, ONE, other)
    assert len(found.run()) > 10_000


# ---------------------------------------------------------------- a rule not kept is noticed


def holding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are kept until the request's own prefill."""

    def finish(s: State, step: Step, event: Stepped) -> None:
        s.leading.finish()
        s.close(s.requests[step.prefills[0].request])

    monkeypatch.setattr(steps, "finish_leading", finish)


def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are forgotten and not dropped."""

    def finish(s: State, step: Step, event: Stepped) -> None:
        state = s.requests[step.prefills[0].request]
        s.kv.hold(state.block_table)
        finish_leading(s, step, event)

    monkeypatch.setattr(steps, "finish_leading", finish)


def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks can be matched before they are written."""

    def begin(s: State, chunk: LeadingChunk) -> Prefill:
        row = begin_leading(s, chunk)
        publish_kv(s, s.requests[chunk.request], chunk.start + chunk.length)
        return row

    monkeypatch.setattr(steps, "begin_leading", begin)


def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who ends, or has its features, goes on being led."""
    monkeypatch.setattr(LeadingQueue, "leave", lambda self, state: None)


def unaligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits are not held with what is behind them."""

    def begin(s: State, chunk: LeadingChunk) -> Prefill:
        row = begin_leading(s, chunk)
        state = s.requests[chunk.request]
        s.kv.drop(state.block_table[: chunk.start // s.settings.kv_block_size])
        return row

    monkeypatch.setattr(steps, "begin_leading", begin)


@pytest.mark.parametrize("broken", [holding, forgetful, hasty, lasting, unaligned])
def test_a_rule_that_is_not_kept_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    for seed in range(1000):
        try:
            run(seed, limit=20_000)
        except (AssertionError, KeyError, ValueError, AttributeError):
            return
    pytest.fail(f"1000 runs did not notice: {broken.__doc__}")


def test_holding_through_the_wait_would_be_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the two in pools of one: each keeps the block of its text, and neither gets the rest."""
    holding(monkeypatch)
    own = make_settings("PD+E", {"image": 4, "kv": 3}, image_block_size=4, kv_block_size=4)
    cluster = VirtualCluster(own, durations=STILL, observers=[])
    cluster.submit(work("r", 4, "cat", 1, max_tokens=1), at=0.0)
    cluster.submit(work("s", 4, "dog", 1, text=500, max_tokens=1), at=0.0)
    cluster.run()
    assert {outcome.end for outcome in cluster.outcomes.values()} == {None}
