"""No storm after the loss of a host: so many requests go on at once, the others wait in order of age."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from core.test_recovery_runs import run
from support.core_tables import brief, peer_up, work
from support.deadly import deadly_cluster
from support.other_rules import is_noticed
from support.reader_checks import check_readers
from support.recovering import emit, end_of, quiet, recovering, told
from support.storms import watch_storms
from support.thinned import thinned
from support.virtual.cluster import VirtualCluster, make_settings
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import Abort, FrontendCore, frontend_core, turns
from trinity.core.frontend.messages import Prepare, Prepared
from trinity.core.frontend.suspicion import Life
from trinity.core.frontend.turns import Turns
from trinity.core.messages import NOWHERE, Finished, PeerDown, PeerEmpty, Submit, Tick, Value
from trinity.errors import ConfigError

NARROW = {"retry_share": 1e-9, "retry_floor": 2, "deaths": 9, "alone_after": 8}


def with_four(**policy: Any) -> FrontendCore:
    """Requests a to d have been sent to P0."""
    core = recovering("E0 P0 D0", **{**NARROW, **policy})
    for name in "abcd":
        core.handle(Submit(work(name, 4, max_tokens=9)), 0.0)
    core.handle(PeerDown("P0"), 1.0)
    return core


def back(core: FrontendCore, now: float = 2.0) -> list[str]:
    return brief(core.handle(replace(peer_up("P0"), epoch=1), now))


def test_the_oldest_go_on_and_each_that_has_a_token_lets_the_next_one() -> None:
    core = with_four()
    assert back(core) == ["P0: submit a~1.1", "P0: submit b~2.1"]
    assert brief(core.handle(emit("b~2.1", 1, (0, 5)), 3.0)) == ["deliver b#0=5", "P0: submit c~3.1"]
    assert brief(core.handle(emit("b~2.1", 1, (1, 6)), 3.0)) == ["deliver b#1=6"]
    out = brief(core.handle(Finished(request="a~1.1", attempt=1, reason="length", count=0, route=("P0",)), 3.0))
    assert out[-1] == "P0: submit d~4.1"


def test_new_requests_do_not_wait_for_a_turn() -> None:
    core = with_four()
    back(core)
    assert brief(core.handle(Submit(work("e", 4)), 2.5)) == ["P0: submit e"]


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_one_that_its_reader_leaves_keeps_nobody_waiting(how: str) -> None:
    core = with_four()
    back(core)
    core.handle(Abort("c", how), 3.0)
    core.handle(Abort("a", how), 3.0)
    assert brief(core.handle(told("a~1.1", 1, "RequestError"), 3.5))[-1] == "P0: submit d~4.1"


def test_one_that_is_lost_again_goes_behind_older_ones_and_ahead_of_younger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_core, "NEWS_S", 0.0)
    core = with_four(recoveries=9)
    back(core)
    out = brief(core.handle(told("b~2.1", 1), 3.0))
    assert out == ["P0: forget b~2.1", "P0: submit b~2.2"], "it is the oldest of those that wait"
    core.handle(emit("b~2.2", 2, (0, 5)), 3.5)
    assert core.dispatch.retries.active == {"a", "c"}
    out = brief(core.handle(told("c~3.1", 1), 4.0))
    assert out == ["P0: forget c~3.1", "P0: submit c~3.2"]


def test_one_that_waits_for_its_stage_has_no_turn_meanwhile() -> None:
    core = with_four(recoveries=9)
    assert core.dispatch.retries.active == set()
    back(core)
    core.handle(told("a~1.1", 1, cause=NOWHERE), 3.0)
    assert core.dispatch.retries.active == {"b", "c"}, "it makes a pause"
    core.handle(PeerDown("P0"), 3.0)
    assert (core.dispatch.retries.active, core.dispatch.retries.waiting) == (set(), {}), (
        "nor has one whose stage is away"
    )
    core.handle(Tick(), 3.2)
    assert brief(core.handle(replace(peer_up("P0"), epoch=2), 4.0)) == ["P0: submit a~1.2", "P0: submit b~2.2"]


def test_of_those_whose_pauses_end_at_once_the_oldest_goes_first() -> None:
    """Alarms of one moment are in order of names: the first by its name took the turn that an older one waited for."""
    core = recovering("E0 P0 D0", **NARROW, recoveries=9)
    for name in "dcba":
        core.handle(Submit(work(name, 4, max_tokens=9)), 0.0)
    for name in "abcd":
        core.handle(told(name, 0, cause=NOWHERE), 1.0)
    out = brief(core.handle(Tick(), 1.1))
    assert out == ["P0: submit d~1.1", "P0: submit c~2.1"]


def test_one_that_runs_alone_no_more_takes_no_turn_ahead_of_older_ones_that_waited_for_its_place() -> None:
    """It took the turn first and then let the others hear that its encoder is open: seven of 20,000 runs saw that."""
    core = recovering("E0 P0 D0", **{**NARROW, "retry_floor": 1, "deaths": 3, "alone_after": 1}, recoveries=9)
    for name in "ab":
        core.handle(Submit(work(name, "cat", 1, max_tokens=9)), 0.0)
    core.handle(unread("b", 0), 1.0)
    assert core.isolation.ward == "b"
    assert brief(core.handle(told("a", 0), 2.0)) == ["E0: forget a"], "it waits for the encoder"
    said = PeerEmpty("E0", 0, core.isolation._count)
    assert brief(core.handle(said, 3.0)) == ["E0: submit b~2.1"]
    out = [line for line in brief(core.handle(unread("b~2.1", 1), 4.0)) if "submit" in line]
    assert out == ["E0: submit a~1.1"], "the death is withdrawn: it is like others now, and younger"
    assert core.dispatch.retries.waiting == {"b": 2}
    out = brief(core.handle(emit("a~1.1", 1, (0, 5)), 5.0))
    assert out == ["deliver a#0=5", "E0: submit b~2.2"]


def test_one_that_waits_for_a_turn_and_is_to_run_alone_then_waits_for_no_turn() -> None:
    """Its turn came while it ran, and the same life was sent a second time."""
    core = with_four(retry_floor=1, deaths=3, alone_after=2)
    back(core)
    assert core.dispatch.retries.waiting == {"b": 2, "c": 3, "d": 4}
    entry = core.entries["b"]
    entry.suspicion.leave_behind({Life("D0", 0): False}, 2.5)
    core.handle(PeerDown("D0"), 2.5)
    core.handle(replace(peer_up("D0"), epoch=1), 2.6)
    assert entry.is_suspect(core.options.failures)
    core._try_again(entry, 2.7)
    assert core.isolation.ward == "b"
    assert "b" not in core.dispatch.retries.waiting


def unread(name: str, attempt: int) -> Finished:
    """An end whose target could not read E0."""
    end = told(name, attempt)
    assert end.failure is not None
    return replace(end, failure=replace(end.failure, fields={"cause": "PeerLost", "source": "E0"}))


def test_waiting_for_a_turn_ends_after_as_long_as_the_policy_says() -> None:
    core = with_four(wait_s=5.0)
    back(core)
    core.handle(Abort("d", "cancelled"), 3.0)
    end = end_of(core.handle(Tick(), 6.0))
    assert end.failure is not None
    assert (end.request, end.failure.error, end.failure.fields) == ("c", "Overloaded", {})
    assert "its turn has not come" in end.failure.message


def test_where_nothing_waits_nothing_is_held_back() -> None:
    core = recovering("E0 P0 P1 D0", **NARROW, wait_s=0.0)
    for name in "abcdefgh":
        core.handle(Submit(work(name, 4)), 0.0)
    assert len(brief(core.handle(PeerDown("P0"), 1.0))) == 4 * 2


def test_a_share_of_those_in_the_front_end() -> None:
    policy = FailurePolicy(retry_share=0.1, retry_floor=3)
    assert [policy.most_retries(count) for count in (0, 30, 39, 40, 1000)] == [3, 3, 3, 4, 100]


@pytest.mark.parametrize(
    "wrong",
    [{"retry_share": 0.0}, {"retry_share": 1.1}, {"retry_share": -0.1}, {"retry_floor": 0}, {"retry_floor": 1.5}],
)
def test_a_budget_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FailurePolicy(**wrong)


# ---------------------------------------------------------------- inputs that are prepared again


def asked(out: list[Value]) -> list[str]:
    return [each.life for each in out if isinstance(each, Prepare)]


def test_inputs_are_prepared_again_for_so_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PREPARED_AT_ONCE", 2)
    core = recovering("E0 P0 D0", kept_bytes=0)
    for name in "abcde":
        core.handle(Submit(work(name, "cat", 1), ("pixels",), input_bytes=9), 0.0)
    assert asked(core.handle(PeerDown("E0"), 1.0)) == []
    assert asked(core.handle(replace(peer_up("E0"), epoch=1), 2.0)) == ["a~1.1", "b~2.1"]
    contents = tuple(span.content for span in core.entries["a"].work.media)
    out = core.handle(Prepared("b~2.1", ("new",), contents), 3.0)
    assert brief(out) == ["E0: submit b~2.1", "prepare c~3.1"]
    assert asked(core.handle(Abort("d", "cancelled"), 3.5)) == []
    assert asked(core.handle(Abort("a", "cancelled"), 4.0)) == ["e~5.1"]
    assert not core.handle(Prepared("a~1.1", ("new",), contents), 4.5)
    for life in ("c~3.1", "e~5.1"):
        assert brief(core.handle(Prepared(life, ("new",), contents), 5.0)) == [f"E0: submit {life}"]
    assert not core.inputs.preparations.active


# ---------------------------------------------------------------- in virtual time


POLICY = FailurePolicy(recoveries=20, wait_s=60.0, retry_share=1e-9, retry_floor=1)


def watched(seed: int, limit: int = 1_000_000) -> tuple[int, int]:
    cluster = deadly_cluster(seed, failures=POLICY)
    check = watch_storms(cluster)
    cluster.run(limit)
    check_readers(cluster)
    return check.held, sum(bool(each.end and each.end.former) for each in cluster.outcomes.values())


@pytest.mark.timeout(900)
def test_turns_are_kept_and_every_request_ends() -> None:
    found = [watched(seed) for seed in range(400_000, 400_024)]
    assert sum(held > 0 for held, _ in found) > 1, "in which some waited for their turn"
    assert sum(survived for _, survived in found) > 18


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
def test_turns_are_kept_in_many_more_runs(part: int) -> None:
    for seed in range(500_000 + part * 1000, 501_000 + part * 1000):
        watched(seed)


def test_a_host_with_three_of_five_instances_is_lost_and_two_go_on_at_a_time() -> None:
    settings = make_settings("5PD", {"kv": 400}, kv_block_size=4)
    cluster = VirtualCluster(settings, failures=replace_policy(retry_floor=2))
    check = watch_storms(cluster)
    for number in range(60):
        cluster.submit(work(f"r{number}", 8, max_tokens=40), at=number / 100)
    for name in ("PD0", "PD1", "PD2"):
        cluster.kill(name, at=1.0, back_s=None)
    cluster.run()
    ends = [each.end for each in cluster.outcomes.values() if each.end]
    assert {end.reason for end in ends} == {"length"}
    assert sum(bool(end.former) for end in ends) > 20
    assert check.most == 2


def replace_policy(**named: Any) -> FailurePolicy:
    return FailurePolicy(recoveries=20, wait_s=60.0, retry_share=1e-9, **named)


def test_the_default_holds_nobody_back_in_small_pipelines() -> None:
    cluster = run(3, FailurePolicy())
    assert not cluster.frontend.dispatch.retries.waiting
    quiet(cluster.frontend)


# ---------------------------------------------------------------- a rule not kept is noticed


def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody has a turn at once."""
    monkeypatch.setattr(FailurePolicy, "most_retries", lambda self, requests: 1 if not requests else 99)


def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has had its token, or has ended, keeps its turn."""
    monkeypatch.setattr(Turns, "leave", lambda self, name: None)


def unawakened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told that there is a turn."""
    monkeypatch.setattr(FrontendCore, "_begin_next", lambda self, now: [])


def overtaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks first has the turn that is there."""
    take = Turns.take

    def hasty(self: Turns, name: str, age: int, most: int) -> bool:
        return take(self, name, -1 if len(self.active) < most else age, most)

    monkeypatch.setattr(Turns, "take", hasty)


def youngest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The youngest goes first."""
    take = Turns.take
    monkeypatch.setattr(Turns, "take", lambda self, name, age, most: take(self, name, -age, most))


RULES: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    unbounded: 400_000,
    kept: 400_000,
    unawakened: 400_267,
    overtaking: 400_021,
    youngest: 400_000,
}
"""And the seed at which each was noticed, when this was written."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("broken", thinned(RULES, lambda rule: RULES[rule] < 400_010), ids=lambda each: each.__name__)
def test_a_rule_of_turns_that_is_not_kept_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    seeds = range(400_000, 402_000)
    assert is_noticed(lambda seed: watched(seed, limit=20_000), seeds, RULES[broken]), broken.__doc__
