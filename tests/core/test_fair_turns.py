"""The order of clients' jobs: what any interleaving of arrivals, ends and departures keeps to."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.core import fair_turns
from trinity.core.fair_turns import FairJob, FairTurns

KINDS = ["join", "join", "drop", "take", "take", "leave", "pause", "go on", "start"]
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from("abcd"), st.integers(0, 12)), max_size=120)


def started(turns: FairTurns) -> list[str]:
    found = []
    while (job := turns.take()) is not None:
        found.append(job.client)
    return found


@given(EVENTS, st.integers(1, 4))
@settings(max_examples=300)
def test_any_interleaving(events: list[tuple[str, str, int]], places: int) -> None:
    turns = FairTurns(places)
    waiting: list[FairJob] = []
    running: list[FairJob] = []
    paused: list[FairJob] = []
    started_at_once = set[FairJob]()
    for kind, client, number in events:
        if kind == "join":
            waiting.append(turns.join(client, 1 + number % places))
        elif kind == "start":
            running.append(turns.start(client, 1 + number))
            started_at_once.add(running[-1])
        elif kind == "drop" and waiting + paused:
            job = (waiting + paused)[number % len(waiting + paused)]
            (waiting if job in waiting else paused).remove(job)
            assert turns.drop(job)
            assert not turns.drop(job)
        elif kind == "leave" and running:
            turns.leave(running.pop(number % len(running)), float(number))
        elif kind == "pause" and running:
            paused.append(running.pop(number % len(running)))
            turns.pause(paused[-1])
            started_at_once.discard(paused[-1])
        elif kind == "go on" and paused:
            waiting.insert(0, paused.pop(number % len(paused)))
            turns.go_on(waiting[0])
        elif kind == "take":
            have = Counter[str]()
            for each in running:
                have[each.client] += each.size
            begun = have + Counter(each.client for each in paused)
            first = {
                each: next(job for job in waiting if job.client == each) for each in {one.client for one in waiting}
            }
            held = sum(each.size for each in running if each in started_at_once)
            may = {each for each, job in first.items() if begun[each] < places and held + job.size <= places}
            free = places - have.total()
            taken = turns.take()
            if taken is None:
                least = [first[each] for each in may if have[each] == min(have[one] for one in may)]
                assert free <= 0 or not may or any(job.size > free for job in least), "no place is left free in vain"
            else:
                assert taken is first[taken.client], "jobs of one client stay in order"
                assert taken.size <= free
                assert all(have[taken.client] <= have[each] for each in may), "the fewest running first"
                waiting.remove(taken)
                running.append(taken)
        assert (turns.waiting, turns.running) == (len(waiting), sum(each.size for each in running))
        assert turns.held == sum(each.size for each in running if each in started_at_once)
    for job in waiting + paused:
        assert turns.drop(job)
    for job in running:
        turns.leave(job, 1.0)
    assert (turns.waiting, turns.running, turns._clients) == (0, 0, {})


def test_one_that_held_places_leave_no_room_for_keeps_no_other_from_its_turn() -> None:
    """At 44286955 a client that held one byte and another one that asked for all of them kept all others waiting."""
    turns = FairTurns(100)
    first = turns.start("holds", 1)
    large = turns.join("wants all", 100)
    for each in range(200):
        turns.join(f"client {each % 3}", 30)
    for _ in range(50):
        running = [turns.take() for _ in range(3)]
        assert turns.take() is None
        for job in running:
            assert job is not None
            turns.leave(job, 1.0)
    turns.leave(first, 0.0)
    assert turns.take() is large, "it fits now"


def test_one_that_waits_for_those_that_run_is_not_passed() -> None:
    turns = FairTurns(100)
    turns.join("runs", 40)
    running = turns.take()
    assert running is not None
    large, small = turns.join("large", 80), turns.join("runs", 1)
    assert turns.take() is None
    turns.leave(running, 1.0)
    assert turns.take() is large
    assert turns.take() is small


@given(st.lists(st.integers(1, 30), min_size=2, max_size=8), st.integers(1, 3), st.integers(0, 100))
@settings(max_examples=100)
def test_whatever_the_others_send_a_newcomer_waits_for_a_free_place_only(
    costs: list[int], places: int, rounds: int
) -> None:
    """Each of the others comes again and again, the one with many jobs, the next with one at a time."""
    turns, running, served = FairTurns(places), list[FairJob](), set[str]()
    jobs = {f"attacker {number}": float(cost) for number, cost in enumerate(costs)}
    for number, name in enumerate(jobs):
        for _ in range(1 + number % 3):
            turns.join(name)
    for _ in range(rounds + 1):
        while (job := turns.take()) is not None:
            running.append(job)
            served.add(job.client)
        ended = running.pop(0)
        turns.leave(ended, jobs[ended.client])
        turns.join(ended.client)
    while (job := turns.take()) is not None:
        running.append(job)
        served.add(job.client)
    turns.join("new")
    first = running.pop(0)
    turns.leave(first, jobs[first.client])
    taken = turns.take()
    assert taken is not None
    assert taken.client == "new" or taken.client not in served, "only others that were never served go before it"


def test_one_client_has_all_places_by_itself_and_its_share_while_others_wait() -> None:
    turns = FairTurns(4)
    own = [turns.join("a") for _ in range(9)]
    assert started(turns) == ["a"] * 4
    for name in "bc":
        for _ in range(9):
            turns.join(name)
    for job in own[:4]:
        turns.leave(job, 1.0)
    assert sorted(started(turns)) == ["a", "b", "b", "c"]


def test_a_client_gets_no_more_bytes_than_others_while_they_wait() -> None:
    turns = FairTurns(100)
    own = [turns.join("a", 20) for _ in range(9)]
    assert started(turns) == ["a"] * 5
    large = turns.join("b", 50)
    for job in own[:2]:
        turns.leave(job, 20.0)
        assert started(turns) == [], "smaller jobs of others do not pass a large one"
    turns.leave(own[2], 20.0)
    assert started(turns) == ["b"]
    turns.leave(large, 50.0)
    assert started(turns) == ["a", "a", "a"]


def test_a_paused_job_gives_its_places_to_other_clients_only() -> None:
    turns = FairTurns(1)
    first, _, other = turns.join("a"), turns.join("a"), turns.join("b")
    assert turns.take() is first
    turns.pause(first)
    assert turns.take() is other
    turns.leave(other, 1.0)
    assert turns.take() is None
    turns.go_on(first)
    assert turns.take() is first


def test_jobs_of_equal_clients_take_turns() -> None:
    turns = FairTurns(1)
    for name in "aaabbbcc":
        turns.join(name)
    order = []
    while (job := turns.take()) is not None:
        order.append(job.client)
        turns.leave(job, 1.0)
    assert "".join(order) == "abcabcab"


def test_cheap_jobs_go_more_often() -> None:
    turns, costs, served = FairTurns(1), {"cheap": 1.0, "dear": 10.0}, Counter[str]()
    for name in costs:
        for _ in range(200):
            turns.join(name)
    for _ in range(110):
        job = turns.take()
        assert job is not None
        turns.leave(job, costs[job.client])
        served[job.client] += 1
    assert served == {"cheap": 100, "dear": 10}, "each has had the same cost"


@pytest.mark.parametrize("held", [True, False])
def test_a_job_that_runs_may_take_more_places_or_fewer(held: bool) -> None:
    turns = FairTurns(10)
    turns.join("a", 4)
    job = turns.start("a", 4) if held else turns.take()
    if held:
        turns.join("b", 1)
        assert started(turns) == ["b", "a"], "the job of the client that has nothing goes first"
    assert job is not None
    own, others = turns.count("a"), turns.count("b")
    for size in (9, 3, 12):
        turns.resize(job, size)
        assert (turns.count("a"), turns.count("b")) == (own - 4 + size, others)
        assert turns.running == turns.count("a") + others
        assert turns.held == (size if held else 0)
    turns.leave(job, 0.0)
    assert (turns.count("a"), turns.held, turns.running) == (own - 4, 0, own - 4 + others)
    assert turns.count("unknown") == 0


def test_what_a_paused_job_has_cost_is_paid_though_it_is_dropped() -> None:
    """Costs of a: 0.5, 2, and 1 of each further job; of b: 1 of each. Whose jobs have cost less goes first."""
    turns, order = FairTurns(1), ""
    for name in "ab" + "a" * 3 + "b" * 3:
        turns.join(name)
    for number in range(8):
        job = turns.take()
        assert job is not None
        order += job.client
        if number == 0:
            turns.pause(job, 0.5)
            assert turns.drop(job)
        elif number == 2:
            turns.pause(job, 2.0)
            assert turns.drop(job)
        else:
            turns.leave(job, 1.0)
    assert order == "ababbaba"
    assert turns.take() is None


@pytest.mark.parametrize("place", ["waiting", "former"])
def test_what_is_remembered_is_bounded(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_turns, "MOST_FORMER", 8)
    turns = FairTurns(1)
    for number in range(100):
        job = turns.join(f"client {number}")
        if place == "waiting":
            assert turns.drop(job)
        else:
            assert turns.take() is job
            turns.leave(job, 5.0)
    assert not turns._clients
    assert list(turns._former) == [f"client {number}" for number in range(92, 100)], "the last that left"
