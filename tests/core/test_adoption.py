"""Runs in virtual time with front ends that are buddies: whoever had a token goes on behind it, whenever one dies.

Each is checked after every event: all invariants, and the shadow of every block. ``buddy_cluster(seed).run()`` repeats
a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from support.buddies import NAMES, POLICY, buddy_cluster, check_adopted, sample
from support.core_tables import work
from support.many_front_ends import give_policy
from support.virtual.adoption import BuddyCluster
from support.virtual.cluster import Durations, make_settings
from support.virtual.conversation import label_reader
from trinity.core.frontend import frontend_core, frontend_request, journal
from trinity.core.frontend.journal import JournalKeeper, JournalWriter, Kept
from trinity.core.messages import FRONTEND

OF_ALL = 16
POOLS = {"image": 16, "kv": 64}
STILL = Durations(lambda *_: 0.01, lambda *_: 1.0, lambda *_: 0.1)
A, B = NAMES[1], FRONTEND


def run(seed: int, kills: bool = True, limit: int = 200_000) -> tuple[BuddyCluster, list[tuple[int, int]]]:
    cluster = buddy_cluster(seed, kills)
    try:
        cluster.run(limit)
        return cluster, check_adopted(cluster)
    except BaseException as error:
        error.add_note(f"buddy_cluster({seed}, {kills})")
        raise


def test_readers_of_lost_front_ends_go_on_with_their_buddies() -> None:
    seen: Counter[str] = Counter()
    for seed in range(OF_ALL):
        cluster, followed = run(seed)
        seen["adopted"] += len(cluster.adoptions)
        seen["had some"] += sum(had > 0 for had, _ in followed)
        ends = [cluster.outcomes[each.label].end for each in cluster.adoptions]
        seen.update(end.reason for end in ends if end is not None)
    assert seen["adopted"] > OF_ALL // 2, seen
    assert seen["had some"] > OF_ALL // 4, seen
    assert seen["length"] > OF_ALL // 4, seen


def test_buddies_of_front_ends_that_live_adopt_nothing() -> None:
    for seed in range(90_000, 90_003):
        cluster, _ = run(seed, kills=False)
        assert not cluster.adoptions


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
def test_many_more_runs_with_buddies(part: int) -> None:
    """2,000 in all."""
    for seed in range(300 + 500 * part, 800 + 500 * part):
        run(seed)


# ---------------------------------------------------------------- a death at every event


def small(placement: str, kill_at: float | None = None) -> BuddyCluster:
    """Two requests of a front end that may die, and one, of the same name, of its buddy."""
    settings = make_settings(placement, POOLS, image_block_size=4, kv_block_size=4)
    cluster = BuddyCluster(settings, buddies={A: B}, durations=STILL, sample=sample, front_ends=(B, A))
    give_policy(cluster, POLICY)
    cluster.submit(work("r", "cat", 1, max_tokens=6), to=A)
    cluster.submit(work("s", 5, max_tokens=4), at=1.3, to=A)
    cluster.submit(work("r", 3, "cat", 1, max_tokens=5), at=0.5, to=B)
    if kill_at is not None:
        cluster.kill(A, kill_at)
    return cluster


def times_of(cluster: BuddyCluster) -> list[float]:
    """Clock times of all events of a run."""
    times: list[float] = []
    handle = cluster.handle

    def note(name: str, event: Any) -> None:
        times.append(cluster.now)
        handle(name, event)

    cluster.handle = note  # type: ignore[method-assign]
    cluster.run()
    return sorted(set(times))


@pytest.mark.parametrize("placement", ["EP+D", pytest.param("E+P+D", marks=pytest.mark.slow), "2EPD"])
def test_a_death_at_every_event_loses_nothing_of_anybody(placement: str) -> None:
    ways: Counter[bool] = Counter()
    for at in times_of(small(placement)):
        cluster = small(placement, at + 1e-6)
        cluster.run()
        for had, known in check_adopted(cluster):
            ways[had > 0] += 1
            assert known >= had
        own = cluster.outcomes["r"]
        assert own.end is not None
        assert (own.end.reason, own.end.former) == ("length", ()), "the buddy's own reader notices"
        unknown = [label_reader(A, each) for each in "rs"]
        lost = [cluster.outcomes[each] for each in unknown if not cluster.outcomes[each].end]
        assert all(not each.tokens for each in lost[len(cluster.adoptions) :])
    assert min(ways[True], ways[False]) > 5, ways


def test_of_two_that_die_in_turn_the_third_goes_on_and_a_fourth_would_not() -> None:
    settings = make_settings("2EPD", POOLS, image_block_size=4, kv_block_size=4)
    names = (FRONTEND, "frontend:b", "frontend:c", "frontend:d")
    buddies = dict(zip(names[1:], (*names[2:], FRONTEND), strict=True))
    cluster = BuddyCluster(settings, buddies=buddies, durations=STILL, sample=sample, front_ends=names)
    give_policy(cluster, POLICY)
    cluster.submit(work("r", 3, max_tokens=30), to="frontend:b")
    for number, name in enumerate(names[1:]):
        cluster.kill(name, 4.0 + 6.0 * number)
    cluster.run()
    assert [(each.owner, each.known > 0) for each in cluster.adoptions] == [("frontend:b", True), ("frontend:c", True)]
    assert [kept.opening.reader for kept in cluster.given_up] == ["r"], "it may be what they die of"


# ---------------------------------------------------------------- a rule not kept is noticed


def unawaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request begins before its buddy knows of it."""
    note = BuddyCluster._note

    def hasty(self: BuddyCluster, name: str, opening: Any, given: Any, behind: Any) -> None:
        self.post(self.now, name, behind) if opening.adoptions else None
        note(self, name, opening, given, behind)

    def later(self: BuddyCluster, name: str, taken: Any) -> None:
        self.frontends[name].handle(taken, self.now)

    monkeypatch.setattr(BuddyCluster, "_note", hasty)
    monkeypatch.setattr(BuddyCluster, "_begin_request", later)


def tokenless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request goes on without the tokens that its reader has."""
    make = Kept.make_adoption
    monkeypatch.setattr(Kept, "make_adoption", lambda self, name, now: replace(make(self, name, now), tokens=()))


def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front end gives tokens again that were known to be out."""
    make = frontend_request.make_adopted

    def forgetful(*given: Any) -> Any:
        entry = make(*given)
        entry.delivered = 0
        return entry

    monkeypatch.setattr(frontend_core, "make_adopted", forgetful)


def repeating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each journal tells all tokens again."""
    write = journal._write_pages

    def again(told: Any) -> Any:
        told.sent = 0
        return write(told)

    monkeypatch.setattr(journal, "_write_pages", again)


def unending(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buddy is not told of ends."""
    monkeypatch.setattr(JournalWriter, "end", lambda self, closing: None)


def one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adopted request keeps the name of a life that it had."""
    monkeypatch.setattr(frontend_request, "name_life", lambda key, number, attempt, owner: key.partition("@")[0])


def unforgiving(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lost front end had is not gone on with."""
    monkeypatch.setattr(JournalKeeper, "lose", lambda self, life, now: [])


@pytest.mark.parametrize("broken", [unawaited, tokenless, uncounted, repeating, unending, one_name, unforgiving])
def test_a_rule_that_is_not_kept_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    for seed in range(200):
        try:
            run(seed, limit=5_000)
        except (AssertionError, KeyError, ValueError):
            return
    pytest.fail(f"200 runs did not notice: {broken.__doc__}")
