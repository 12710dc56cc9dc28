"""VirtualCluster: what a driver may rely on."""

from __future__ import annotations

from typing import Any

import pytest

from support.core_tables import work
from support.virtual.cluster import Durations, Faults, VirtualCluster, make_settings
from trinity.core.messages import (
    Step,
    Value,
)
from trinity.core.routing.router import RandomChoice
from trinity.core.scheduler import BatchRules

POOLS = {"image": 16, "kv": 32}
STILL = Durations(lambda *_: 0.0, lambda *_: 1.0, lambda *_: 0.0)


def cluster_of(placement: str, **fields: Any) -> VirtualCluster:
    return VirtualCluster(make_settings(placement, POOLS, image_block_size=4, kv_block_size=4), **fields)


def test_settings_follow_from_a_placement() -> None:
    rules = BatchRules(token_budget=7)
    found = make_settings("1E1EP2PD", POOLS, rules=rules, lanes=("vision", "language"))
    assert [(each.name, each.roles, each.pools) for each in found] == [
        ("E0", "E", {"image": 16}),
        ("EP0", "EP", {"image": 16, "kv": 32}),
        ("PD0", "PD", {"image": 16, "kv": 32}),
        ("PD1", "PD", {"image": 16, "kv": 32}),
    ]
    assert [each.lanes for each in found] == [("joint",), ("vision", "language"), ("joint",), ("joint",)]
    assert {each.rules for each in found} == {rules}
    assert make_settings("P+D", POOLS)[1].pools == {"kv": 32}
    assert make_settings("EPD", {"kv": 3})[0].pools == {"kv": 3}, "a text-only model"


def test_tokens_times_and_ends_are_recorded() -> None:
    cluster = cluster_of("EPD", durations=STILL, sample=lambda work, index: 10 * index)
    cluster.submit(work("r", "cat", 1, max_tokens=3), at=2.0)
    cluster.run()
    outcome = cluster.outcomes["r"]
    assert (outcome.submitted, outcome.tokens, outcome.times) == (2.0, [0, 10, 20], [4.0, 5.0, 6.0])
    assert outcome.end is not None
    assert (outcome.end.reason, outcome.ended) == ("length", 6.0)
    steps = [(time, name) for time, name, command in cluster.commands if isinstance(command, Step)]
    assert steps == [(2.0, "EPD0"), (3.0, "EPD0"), (4.0, "EPD0"), (5.0, "EPD0")]


def test_aborts_and_deadlines_take_place_at_their_time() -> None:
    cluster = cluster_of("PD", durations=STILL)
    cluster.submit(work("a", 1, max_tokens=99))
    cluster.submit(work("b", 1, max_tokens=99, deadline_s=4.5))
    cluster.submit(work("c", 1, max_tokens=99, deadline_s=60.0))
    cluster.abort("a", at=3.25)
    cluster.abort("c", at=8.0, reason="stop")
    cluster.run()
    ends = {name: (outcome.end.reason, outcome.ended) for name, outcome in cluster.outcomes.items() if outcome.end}
    assert ends == {"a": ("cancelled", 3.25), "b": ("deadline", 4.5), "c": ("stop", 9.0)}


def test_messages_of_a_pair_keep_their_order_whatever_each_takes() -> None:
    cluster = cluster_of("E+P+D", durations=Durations(message=lambda draw, *_: draw.uniform(0, 9)), seed=5)
    for number in range(6):
        cluster.submit(work(f"r{number}", "cat", 1))
    cluster.run()
    assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"length"}


def test_the_seed_decides() -> None:
    def commands(seed: int) -> list[Any]:
        cluster = cluster_of("2EP2D", seed=seed, routing=lambda: RandomChoice(1))
        for number in range(4):
            cluster.submit(work(f"r{number}", "cat", number))
        cluster.run()
        return cluster.commands

    assert commands(1) == commands(1)
    assert commands(1) != commands(2)


def test_faults_hit_the_rows_and_pulls_they_name() -> None:
    only_b = Faults(row=lambda draw, name, step, request: request == "b")
    cluster = cluster_of("PD", faults=only_b)
    for name in "abc":
        cluster.submit(work(name, 1))
    cluster.run()
    assert [outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end] == ["length", "error", "length"]
    no_kv = Faults(pull=lambda draw, pull: pull.kind == "kv")
    cluster = cluster_of("E+P+D", faults=no_kv)
    cluster.submit(work("r", "cat", 1))
    cluster.run()
    end = cluster.outcomes["r"].end
    assert end is not None
    assert end.failure is not None
    assert (end.failure.error, end.failure.message) == ("MigrationError", "a pull of r failed")


def test_a_livelock_is_an_error_after_a_limit_of_events() -> None:
    cluster = cluster_of("PD")
    cluster.submit(work("r", 1, max_tokens=50))
    with pytest.raises(AssertionError, match="no end after 20 events"):
        cluster.run(20)
    cluster.run()


def test_a_failed_check_comes_with_the_last_events() -> None:
    class Strict:
        def event(self, name: str, event: Value) -> None: ...

        def command(self, name: str, command: Value) -> None:
            assert not isinstance(command, Step) or not command.decodes, "no decodes, please"

        def after_event(self, name: str) -> None: ...

        def at_end(self) -> None: ...

        def lost(self, name: str) -> None: ...

    cluster = cluster_of("PD", observers=[Strict()])
    cluster.submit(work("r", 1))
    with pytest.raises(AssertionError, match="no decodes, please") as error:
        cluster.run()
    notes = error.value.__notes__
    assert len(notes) == 3
    assert notes[0].startswith("0.0000 frontend <- Submit(")
    assert "PD0 <- Stepped(id=1" in notes[2]


def test_a_request_is_submitted_once() -> None:
    cluster = cluster_of("PD")
    cluster.submit(work("r", 1))
    with pytest.raises(AssertionError, match="r was submitted before"):
        cluster.submit(work("r", 1))


def test_overload_is_an_end() -> None:
    cluster = cluster_of("PD", max_waiting=1)
    cluster.submit(work("a", 1))
    cluster.submit(work("b", 1))
    cluster.run()
    end = cluster.outcomes["b"].end
    assert end is not None
    assert end.failure is not None
    assert end.failure.error == "Overloaded"
