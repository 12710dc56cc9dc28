"""Runs in virtual time with several front ends, some of which die, beside deaths of instances; and rules they need.

Each is checked after every event: all invariants, and the shadow of every block. ``shared_cluster(seed, POLICY).run()``
repeats a run. The readers of front ends that live have all that they would have without the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from support.core_tables import work
from support.many_front_ends import shared_cluster
from support.other_rules import is_noticed
from support.reader_checks import TYPED
from support.thinned import thinned
from support.virtual.cluster import Durations, RequestRecord, VirtualCluster, make_settings
from support.virtual.conversation import label_reader
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import FrontendCore, frontend_core
from trinity.core.instance import admission, front_ends, instance_core, peers
from trinity.core.instance.lanes import DecodeBatch
from trinity.core.instance.state import State
from trinity.core.messages import FRONTEND, Release, Send, Submit, Value
from trinity.core.migration import target
from trinity.core.values import FrontendUp, LifeNames, name_life

POLICY = FailurePolicy(recoveries=20, wait_s=10.0)
AT_ALL = 30
POOLS = {"image": 16, "kv": 32}
STILL = Durations(lambda *_: 0.01, lambda *_: 1.0, lambda *_: 0.1)
NAMES = (FRONTEND, "frontend:b", "frontend:c")


def run(seed: int, kills: bool = True, limit: int = 1_000_000) -> VirtualCluster:
    cluster = shared_cluster(seed, POLICY, kills)
    try:
        cluster.run(limit)
        check_readers(cluster)
    except BaseException as error:
        error.add_note(f"shared_cluster({seed}, {POLICY}, {kills})")
        raise
    return cluster


def readers_of_survivors(cluster: VirtualCluster) -> list[RequestRecord]:
    lost = {reader for reader in cluster.outcomes if _owner(reader) in cluster.lives.dead}
    return [record for reader, record in cluster.outcomes.items() if reader not in lost]


def _owner(reader: str) -> str:
    return reader.rpartition("/")[0] or FRONTEND


def check_readers(cluster: VirtualCluster) -> None:
    """Each reader of a front end that lives has one end and each token once, in order, or a typed error."""
    for record in readers_of_survivors(cluster):
        assert record.end is not None
        assert record.tokens == list(range(1, len(record.tokens) + 1))
        assert record.end.reason != "length" or len(record.tokens) == record.work.max_tokens
        assert record.end.failure is None or record.end.failure.error in TYPED


def test_front_ends_come_and_die_beside_instances_with_all_invariants() -> None:
    seen: Counter[str] = Counter()
    for seed in range(AT_ALL):
        cluster = run(seed)
        seen["front end died"] += len(cluster.lives.dead & set(cluster.lives.front_ends))
        seen["death"] += cluster.lives.kills
        for record in readers_of_survivors(cluster):
            assert record.end is not None
            seen[record.end.reason] += 1
            seen["survived"] += bool(record.end.former) and record.end.reason in ("length", "stop")
        sent = [each.message for *_, each in cluster.commands if isinstance(each, Send)]
        seen["untaken"] += sum(isinstance(each, Release) and each.outcome == "untaken" for each in sent)
    assert seen["front end died"] > AT_ALL // 2, seen
    assert seen["length"] > 3 * AT_ALL, seen
    assert seen["survived"] > AT_ALL // 3, seen
    assert seen["untaken"], seen


def test_several_that_live_serve_side_by_side() -> None:
    for seed in range(70_000, 70_000 + AT_ALL // 4):
        run(seed, kills=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_many_more_runs_with_several_front_ends(part: int) -> None:
    """10,000 in all."""
    for seed in range(800_000 + part * 1000, 801_000 + part * 1000):
        run(seed)


# ---------------------------------------------------------------- nobody notices the others


def cluster_of(placement: str, names: tuple[str, ...] = NAMES, **fields: Any) -> VirtualCluster:
    settings = make_settings(placement, POOLS, image_block_size=4, kv_block_size=4, **fields)
    return VirtualCluster(settings, durations=STILL, front_ends=names)


@pytest.mark.parametrize("placement", ["E+P+D", "EP+D", "ED+P", "2EPD"])
def test_the_death_of_one_at_any_time_harms_nobody_of_the_others(placement: str) -> None:
    """Requests of three front ends with one id; with no recovery allowed, so that none may even be sent again."""
    for tenth in range(0, 100, 7):
        for victim in NAMES[:2]:
            cluster = cluster_of(placement)
            for name in NAMES:
                cluster.submit(work("r", "cat", 1, max_tokens=6), to=name)
            cluster.kill(victim, at=0.01 + tenth / 10)
            cluster.run()
            for name in set(NAMES) - {victim}:
                record = cluster.outcomes[label_reader(name, "r")]
                assert record.end is not None
                assert (record.end.reason, record.tokens, record.end.former) == ("length", [1, 2, 3, 4, 5, 6], ())


def test_one_that_comes_later_is_served_in_turn() -> None:
    """It counts on from what it hears: its requests are the youngest, not the oldest for ever."""
    cluster = cluster_of("PD", NAMES[:1], report_s=0.1)
    for number in range(6):
        cluster.submit(work(f"r{number}", 2, max_tokens=2), at=number / 10)
    cluster.attach("frontend:b", at=5.0)
    cluster.submit(work("r0", 2, max_tokens=2), at=7.0, to="frontend:b")
    cluster.submit(work("late", 2, max_tokens=2), at=9.0)
    cluster.run()
    numbers = [
        each.message.work.number
        for _, name, each in cluster.commands
        if isinstance(each, Send) and isinstance(each.message, Submit)
    ]
    assert numbers == [1, 2, 3, 4, 5, 6, 7, 8]


# ---------------------------------------------------------------- a rule not kept is noticed


def to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens go to the first front end, whoever owns the request."""
    part = DecodeBatch._part

    def first(self: DecodeBatch, members: list[Any]) -> None:
        part(self, members)
        self.owner, self.owned = FRONTEND, {}

    monkeypatch.setattr(DecodeBatch, "_part", first)


def named_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two front ends give their requests one name."""
    monkeypatch.setattr(frontend_core, "name_life", lambda *named: name_life(*named[:3]))
    first = LifeNames.name_first

    def plain(self: LifeNames, request: str, number: int) -> str:
        self.owner = FRONTEND
        return first(self, request, number)

    monkeypatch.setattr(LifeNames, "name_first", plain)


def unended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lost front end owned goes on."""
    monkeypatch.setattr(peers, "lose_frontend", lambda s, name, now: s.frontends.remove(name))


def all_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of one ends the requests of all."""
    lose = front_ends.lose_frontend

    def lose_all(s: State, name: str, now: float) -> None:
        others = [each for each in s.frontends if each != name]
        for each in [name, *others]:
            lose(s, each, now)
        s.frontends = others

    monkeypatch.setattr(peers, "lose_frontend", lose_all)


def welcoming(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance takes in what a front end owns that it is not in touch with."""
    monkeypatch.setattr(target, "refuse_offer", lambda s, offer: False)
    monkeypatch.setattr(admission, "refuse_submit", lambda s, sent: False)


def unreleased(monkeypatch: pytest.MonkeyPatch) -> None:
    """An offer of a stranger is dropped without a word."""
    monkeypatch.setattr(target, "refuse_offer", lambda s, offer: offer.work.owner not in s.frontends)


def unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of an offer that was refused does not tell its owner."""
    monkeypatch.setattr(peers, "_report_untaken", lambda s, lease, state, now: None)


def unforgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance remembers for ever what a lost front end will not have it forget."""
    lose = front_ends.lose_frontend

    def keep(s: State, name: str, now: float) -> None:
        stones = dict(s.tombstones)
        lose(s, name, now)
        s.tombstones.update(stones)

    monkeypatch.setattr(peers, "lose_frontend", keep)


def unannounced(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that has begun anew is not told who its front ends are."""
    handlers: dict[Any, Any] = instance_core._HANDLERS
    monkeypatch.setitem(handlers, FrontendUp, lambda s, event, now: None)


def misowned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request does not say whose it is."""
    submit = FrontendCore._submit

    def plain(self: FrontendCore, *given: Any) -> list[Value]:
        own, self.name = self.name, FRONTEND
        out = submit(self, *given)
        self.name = own
        return out

    monkeypatch.setattr(FrontendCore, "_submit", plain)


RULES: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    to_the_first: 0,
    named_alike: 0,
    unended: 3,
    welcoming: 5,
    unreleased: 5,
    unreported: 43,
    unforgetting: 3,
    unannounced: 0,
    misowned: 0,
}
"""And the seed at which each was noticed, when this was written."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("broken", thinned(RULES, lambda rule: RULES[rule] < 10), ids=lambda each: each.__name__)
def test_a_rule_that_is_not_kept_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert is_noticed(lambda seed: run(seed, limit=20_000), range(1000), RULES[broken]), broken.__doc__


def test_ends_of_all_by_the_death_of_one_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    all_ended(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_death_of_one_at_any_time_harms_nobody_of_the_others("EP+D")


def test_a_count_of_its_own_makes_a_new_front_end_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test of turns: without the numbers of others the new one begins at one."""
    monkeypatch.setattr(FrontendCore, "_loaded", lambda self, event, now: self.router.take(event) or [])
    with pytest.raises(AssertionError):
        test_one_that_comes_later_is_served_in_turn()
