"""Thousands of interleavings in which instances die and come back, each checked after every event.

Each channel of a dying instance is cut at a place of its own. A failure names its seed: ``deadly_cluster(seed).run()``
in ``tests/support/deadly.py`` repeats it, on any machine.
"""

from __future__ import annotations

from collections import Counter

import pytest

from support.core_tables import work
from support.deadly import deadly_cluster
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core.instance import instance_core
from trinity.core.instance.state import State
from trinity.core.messages import Gone, Moved, PeerDown, PeerUp, Send, Step, Value

AT_ALL = 50
POOLS = {"image": 16, "kv": 32}
STILL = Durations(lambda *_: 0.01, lambda *_: 1.0, lambda *_: 0.1)


def run(seed: int) -> VirtualCluster:
    cluster = deadly_cluster(seed)
    try:
        cluster.run()
    except BaseException as error:
        error.add_note(f"deadly_cluster({seed})")
        raise
    check_readers(cluster)
    return cluster


def check_readers(cluster: VirtualCluster) -> None:
    """Every reader has an end, a typed one where it is an error, and each token once, in order."""
    for outcome in cluster.outcomes.values():
        assert outcome.end is not None
        assert outcome.tokens == list(range(1, len(outcome.tokens) + 1))
        assert (outcome.end.reason == "error") <= (outcome.end.failure is not None)


def test_every_interleaving_with_deaths_keeps_the_invariants() -> None:
    """The cuts, the ends and the words that these deaths are for all come about."""
    seen: Counter[str] = Counter()
    for seed in range(AT_ALL):
        cluster = run(seed)
        seen["death"] += cluster.lives.kills
        seen["cut"] += cluster.lives.lost_messages
        for outcome in cluster.outcomes.values():
            assert outcome.end is not None
            seen[outcome.end.failure.error if outcome.end.failure else outcome.end.reason] += 1
        seen.update(type(each.message).__name__ for *_, each in cluster.commands if isinstance(each, Send))
    wanted = {"length", "stop", "cancelled", "DeadlineExceeded", "StageError", "MigrationError", "Overloaded"}
    assert not {each for each in wanted | {"death", "cut", "Gone", "Moved"} if seen[each] < 5}, seen
    assert seen["length"] > AT_ALL, "most requests are not met by a death"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_many_more_interleavings_with_deaths(part: int) -> None:
    """10,000 in all."""
    for seed in range(100_000 + part * 1000, 101_000 + part * 1000):
        run(seed)


def cluster_of(placement: str) -> VirtualCluster:
    return VirtualCluster(make_settings(placement, POOLS, image_block_size=4, kv_block_size=4), durations=STILL)


def test_a_death_ends_what_is_there_and_the_next_life_serves() -> None:
    cluster = cluster_of("E+P+D")
    cluster.submit(work("r", "cat", 1, max_tokens=9))
    cluster.submit(work("s", "cat", 1, max_tokens=2), at=9.0)
    cluster.kill("D0", at=4.0, back_s=1.0)
    cluster.run()
    ends = [outcome.end for outcome in cluster.outcomes.values() if outcome.end]
    assert [end.failure.error if end.failure else end.reason for end in ends] == ["StageError", "length"]
    assert cluster.cores["D0"].settings.epoch == 1
    heard = [event for _, name, event in cluster.recent if name == "frontend" and isinstance(event, PeerDown | PeerUp)]
    assert [type(event) for event in heard] in ([], [PeerDown, PeerUp])


def test_an_instance_that_stays_away_is_missed_and_nothing_waits_for_it() -> None:
    cluster = cluster_of("EP+D")
    cluster.kill("D0", at=0.5, back_s=None)
    cluster.submit(work("r", "cat", 1))
    cluster.submit(work("s", "cat", 1), at=5.0)
    cluster.run()
    errors = [each.end.failure.error for each in cluster.outcomes.values() if each.end and each.end.failure]
    assert errors in (["StageError", "Overloaded"], ["MigrationError", "Overloaded"])


def test_what_a_dead_instance_had_in_flight_never_ends() -> None:
    cluster = cluster_of("PD")
    cluster.submit(work("r", 1, max_tokens=9))
    cluster.kill("PD0", at=0.5, back_s=0.1)
    cluster.run()
    steps = [time for time, name, command in cluster.commands if isinstance(command, Step)]
    assert len(steps) == 1, "a prefill that nobody heard the end of"


def test_the_seed_decides_the_deaths_too() -> None:
    first, second = run(3), run(3)
    assert first.commands == second.commands
    assert first.lives.lost_messages == second.lives.lost_messages


# ---------------------------------------------------------------- a rule not kept is noticed


def unsaid(kind: type[Value], monkeypatch: pytest.MonkeyPatch) -> None:
    said = State.send
    monkeypatch.setattr(State, "send", lambda s, to, each: None if isinstance(each, kind) else said(s, to, each))


def is_noticed() -> bool:
    for seed in range(400):
        try:
            run(seed)
        except (AssertionError, KeyError):
            return True
    return False


@pytest.mark.parametrize("kind", [Gone, pytest.param(Moved, marks=pytest.mark.slow)])
def test_a_word_that_is_not_said_is_noticed(kind: type[Value], monkeypatch: pytest.MonkeyPatch) -> None:
    unsaid(kind, monkeypatch)
    assert is_noticed()


def test_a_death_that_a_core_is_not_told_of_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(s: State, event: PeerDown, now: float) -> None:
        s.router.drop(event.name)

    monkeypatch.setitem(vars(instance_core)["_HANDLERS"], PeerDown, deaf)
    assert is_noticed()
