"""The less loaded of two drawn: near to even by itself, and more even than the least loaded where many choose."""

from __future__ import annotations

from collections import Counter
from math import log2

import pytest

from support.core_tables import peer_up, work
from trinity.core.messages import PeerLoad
from trinity.core.routing.router import Router, RoutingPolicy, TwoChoices, routing_policy

SIZE, EACH = 256, 20


def make_router(policy: RoutingPolicy, own: str = "", size: int = SIZE) -> Router:
    router = Router(policy, own)
    for number in range(size):
        router.add(peer_up(f"P{number}"))
    return router


def count_choices(router: Router, times: int) -> Counter[str]:
    return Counter(str(router.choose("P", work("r", 4))) for _ in range(times))


def spread_of(name: str) -> float:
    """How many requests more than the mean the most loaded of many has."""
    return max(count_choices(make_router(routing_policy(name)), SIZE * EACH).values()) - EACH


def test_by_itself_nobody_gets_much_more_than_the_mean() -> None:
    """At most log2(log2(n)) and a constant, however many requests (Berenbrink and others); at random it grows."""
    bound = log2(log2(SIZE)) + 2
    assert spread_of("two_choices") <= bound < spread_of("random")
    assert spread_of("least_loaded") == 0


@pytest.mark.parametrize("name", ["two_choices", "least_loaded"])
def test_the_less_loaded_of_two_is_taken(name: str) -> None:
    router = make_router(routing_policy(name), size=2)
    router.take(PeerLoad("P0", predicted_s={"P": 5.0}))
    assert set(count_choices(router, 30)) == {"P1"}
    router.take(PeerLoad("P1", predicted_s={"P": 6.0}))
    assert set(count_choices(router, 30)) == {"P0"}


def test_where_many_choose_by_the_same_reports_they_do_not_all_send_to_one() -> None:
    """Sixteen that send four requests each between two reports: the least loaded would get one of each."""
    most = {}
    for name in ("two_choices", "least_loaded"):
        got = Counter[str]()
        for own in range(16):
            router = make_router(routing_policy(name), f"E{own}", 64)
            for number in range(64):
                load = PeerLoad(f"P{number}", predicted_s={"P": number / 64}, unit_s={"P": 1.0})
                router.take(load)
            got += count_choices(router, 4)
        most[name] = max(got.values())
    assert most["least_loaded"] == 16
    assert most["two_choices"] <= 6


def test_those_with_other_numbers_draw_otherwise_and_the_same_ones_alike() -> None:
    first, again, other = (make_router(TwoChoices(), own, 64) for own in ("E0", "E0", "E1"))
    chosen = [[router.choose("P", work("r", 4)) for _ in range(20)] for router in (first, again, other)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_of_one_it_is_that_one() -> None:
    assert set(count_choices(make_router(TwoChoices(), size=1), 3)) == {"P0"}
