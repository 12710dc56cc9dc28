"""Routing: who comes into question for a stage, and in which turn."""

from __future__ import annotations

from collections import Counter

import pytest

from support.core_tables import peer_up, work
from trinity.core.messages import Work
from trinity.core.routing.router import (
    RandomChoice,
    RoundRobin,
    Router,
    RoutingPolicy,
    number_of,
    routing_policy,
)
from trinity.errors import UnknownName


def make_router(peers: str, policy: RoutingPolicy | None = None) -> Router:
    router = Router(policy or RoundRobin())
    for peer in peers.split():
        router.add(peer_up(peer))
    return router


def test_round_robin_takes_turns_stage_by_stage() -> None:
    router = make_router("E0 P0 P1 PD0 D0")
    request = work("r", 1)
    assert [router.choose("P", request) for _ in range(4)] == ["P0", "P1", "PD0", "P0"]
    assert [router.choose("D", request) for _ in range(3)] == ["PD0", "D0", "PD0"]
    assert router.choose("P", request) == "P1"
    assert router.choose("E", request) == "E0"


def test_only_those_with_the_stage_and_the_blocks_are_chosen() -> None:
    router = make_router("P0")
    router.add(peer_up("P1", kv=2))
    assert {router.choose("P", work("r", 8)) for _ in range(4)} == {"P0", "P1"}
    assert {router.choose("P", work("r", 9)) for _ in range(4)} == {"P0"}
    assert router.choose("E", work("r", 1)) is None
    assert router.choose("P", work("r", 1000)) is None


def test_the_policy_is_asked_with_the_stage_and_the_request() -> None:
    asked: list[tuple[str, str, list[str]]] = []

    class Last:
        def choose(self, letter: str, work: Work, peers: list[object]) -> object:
            asked.append((letter, work.request, [peer.name for peer in peers]))  # type: ignore[attr-defined]
            return peers[-1]

    router = make_router("P0 P1", Last())  # type: ignore[arg-type]
    assert router.choose("P", work("r", 1)) == "P1"
    assert asked == [("P", "r", ["P0", "P1"])]


def test_random_choice_follows_its_seed_and_reaches_all() -> None:
    router, again = make_router("P0 P1 P2", RandomChoice(3)), make_router("P0 P1 P2", RandomChoice(3))
    chosen = [router.choose("P", work("r", 1)) for _ in range(60)]
    assert chosen == [again.choose("P", work("r", 1)) for _ in range(60)]
    assert min(Counter(chosen).values()) > 5
    assert len(Counter(chosen)) == 3


@pytest.mark.parametrize(("name", "number"), [("P3", 3), ("EP12", 12), ("mine", 0), ("", 0), ("a" + "9" * 40, 999_999)])
def test_the_number_of_a_name(name: str, number: int) -> None:
    assert number_of(name) == number


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix_hits"])
def test_instances_begin_their_turns_at_numbers_of_their_own(policy: str) -> None:
    """All from the first on, they would send to one peer at a time."""
    firsts = []
    for own in ("E0", "E1", "E2", "E3"):
        router = Router(routing_policy(policy), own)
        for peer in ("P0", "P1", "P2"):
            router.add(peer_up(peer))
        firsts.append(router.choose("P", work("r", 1)))
    assert firsts == ["P0", "P1", "P2", "P0"]


def test_policies_by_name_or_as_they_are() -> None:
    assert isinstance(routing_policy("round_robin"), RoundRobin)
    assert isinstance(routing_policy("random"), RandomChoice)
    own = RoundRobin()
    assert routing_policy(own) is own
    known = "least_loaded, prefix_hits, random, round_robin, two_choices"
    with pytest.raises(UnknownName, match=f"unknown routing policy 'best'; known: {known}"):
        routing_policy("best")


def test_a_router_knows_which_stages_there_are() -> None:
    router = make_router("EP0")
    assert [router.has(letter) for letter in "EPD"] == [True, True, False]


def test_instances_of_a_kind_are_asked_for_the_same_and_each_by_its_own_pools() -> None:
    router, request = Router(RoundRobin()), work("r", 10, max_tokens=1)
    sizes = {"P0": 2, "P1": 99, "PD0": 99, "PD1": 3, "D0": 99, "P2": 3}
    for name, kv in sizes.items():
        router.add(peer_up(name, kv=kv))
    assert [peer.name for peer in router.fitting("P", request)] == ["P1", "PD0", "PD1", "P2"]
    assert [peer.name for peer in router.fitting("D", work("r", 10, max_tokens=9))] == ["PD0", "D0"]
