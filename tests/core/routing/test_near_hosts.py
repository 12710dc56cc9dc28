"""Requests stay on their host as far as each instance of the next stage gets its equal share."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.core_tables import work
from support.virtual.cluster import VirtualCluster, make_settings
from trinity.core.messages import PeerLoad, PeerSuspect, PeerUp
from trinity.core.routing.router import (
    HostTurns,
    LeastLoaded,
    PrefixHits,
    RandomChoice,
    RoundRobin,
    Router,
    RoutingPolicy,
    weigh_hosts,
)
from trinity.core.routing.stage_peers import Slots, StagePeers

POOLS = {"image": 64, "kv": 4096}


def up(name: str, host: str = "") -> PeerUp:
    return PeerUp(name, name.rstrip("0123456789"), pools=POOLS, kv_block_size=4, host=host)


def make_router(own: str, placed: dict[str, str], policy: RoutingPolicy | None = None) -> Router:
    """The router of one instance among others on these hosts."""
    router = Router(policy or RoundRobin(), own, placed.get(own, ""))
    for name, host in placed.items():
        router.add(up(name, host))
    return router


def ask(router: Router, letter: str, times: int) -> list[str]:
    return [str(router.choose(letter, work("r", 8))) for _ in range(times)]


def test_kv_stays_where_each_host_has_its_own() -> None:
    placed = {"P0": "a", "D0": "a", "P1": "b", "D1": "b", "D2": "b"}
    even = {name: host for name, host in placed.items() if name != "D2"}
    assert set(ask(make_router("P0", even), "D", 10)) == {"D0"}
    assert set(ask(make_router("P1", even), "D", 10)) == {"D1"}
    shared = Counter(ask(make_router("P0", placed), "D", 30))
    assert shared == {"D0": 20, "D1": 5, "D2": 5}, "of three decoders one is here: a third of two halves"
    assert Counter(ask(make_router("P1", placed), "D", 30)) == {"D1": 15, "D2": 15}


def test_nobody_is_left_without_work() -> None:
    """Always to stay would leave D1 and D2 with nothing."""
    placed = {"P0": "a", "D0": "a", "D1": "b", "D2": "c"}
    assert Counter(ask(make_router("P0", placed), "D", 30)) == {"D0": 10, "D1": 10, "D2": 10}


def test_turns_on_a_host_are_its_own() -> None:
    """One count for all hosts would give every second turn, and so the same instance, to each of two."""
    placed = {"P0": "a", "D0": "a", "D1": "a", "D2": "b", "D3": "b"}
    assert Counter(ask(make_router("P0", placed), "D", 40)) == {"D0": 10, "D1": 10, "D2": 10, "D3": 10}


def test_features_stay_too_and_cross_where_they_have_to() -> None:
    placed = {"E0": "a", "E1": "b", "P0": "a", "P1": "b", "D0": "a"}
    assert set(ask(make_router("E0", placed), "P", 6)) == {"P0"}
    apart = {"E0": "a", "P0": "b", "P1": "c"}
    assert Counter(ask(make_router("E0", apart), "P", 6)) == {"P0": 3, "P1": 3}


def test_a_loss_moves_the_share_and_a_return_moves_it_back() -> None:
    router = make_router("P0", {"P0": "a", "P1": "b", "D0": "a", "D1": "b"})
    assert set(ask(router, "D", 5)) == {"D0"}
    router.drop("D0")
    assert set(ask(router, "D", 5)) == {"D1"}
    router.add(up("D0", "a"))
    assert set(ask(router, "D", 5)) == {"D0"}
    router.avoid(PeerSuspect("D0", 0, True))
    assert set(ask(router, "D", 5)) == {"D1"}


@pytest.mark.parametrize("policy", [LeastLoaded, PrefixHits])
def test_of_equally_loaded_ones_the_near_is_chosen(policy: type[RoutingPolicy]) -> None:
    placed = {"P0": "a", "D0": "b", "D1": "a", "D2": "b", "D3": "a"}
    router = make_router("P0", placed, policy())
    assert Counter(ask(router, "D", 4)) == {"D0": 1, "D1": 1, "D2": 1, "D3": 1}, "the near first, and then the free"
    for name in placed:
        router.take(PeerLoad(name, predicted_s={"D": 1.0 if placed[name] == "a" else 0.5}, unit_s={"D": 0.01}))
    assert set(ask(router, "D", 2)) == {"D0", "D2"}, "a load that is less goes before"
    router = make_router("P0", placed, policy())
    assert ask(router, "D", 2)[0] == "D1"


def test_the_front_end_and_other_policies_are_offered_every_host() -> None:
    placed = {"P0": "a", "P1": "b", "D0": "a", "D1": "b"}
    assert Counter(ask(make_router("", placed), "P", 8)) == {"P0": 4, "P1": 4}
    assert set(ask(make_router("P0", placed, RandomChoice()), "D", 40)) == {"D0", "D1"}


NAMES = st.sampled_from(("E", "P", "D", "EP", "PD", "ED", "EPD"))


@given(st.lists(NAMES, min_size=1, max_size=8), st.sampled_from("PD"), st.sampled_from(("", "here")))
def test_where_all_are_on_one_host_nothing_changes(roles: list[str], letter: str, host: str) -> None:
    names = [f"{each}{number}" for number, each in enumerate(roles)]
    plain, placed = make_router(names[0], {}), make_router(names[0], dict.fromkeys(names, host))
    for name in names:
        plain.add(up(name))
    assert ask(placed, letter, 20) == ask(plain, letter, 20)


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1))
def test_every_receiver_has_its_equal_share_and_each_host_keeps_what_it_can(hosts: dict[str, tuple[int, int]]) -> None:
    senders, receivers = (sum(each[side] for each in hosts.values()) for side in (0, 1))
    known = [up(f"{letter}{number}", host) for host, counts in hosts.items()
             for letter, count in zip("PD", counts, strict=True) for number in range(count)]  # fmt: skip
    peers = [each for each in known if each.roles == "D"]
    got = Counter[str]()
    for host, (sending, receiving) in hosts.items():
        weights = weigh_hosts(host, "D", peers, known) if peers else {}
        if not (sending and receivers):
            assert weights == {}
            continue
        total = sum(weights.values())
        for target, weight in weights.items():
            got[target] += Fraction(sending * weight, total)  # type: ignore[assignment]
        kept = min(Fraction(1), Fraction(receiving * senders, sending * receivers))
        assert Fraction(weights.get(host, 0), total) == kept
    if senders and receivers:
        assert dict(got) == {
            host: Fraction(counts[1] * senders, receivers) for host, counts in hosts.items() if counts[1]
        }


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=6), st.integers(1, 40))
def test_turns_are_as_their_weights_at_any_time(hosts: list[str], times: int) -> None:
    """Never more than one turn from what the weights say."""
    known = [up("P0", "a"), up("P1", "b"), *(up(f"D{number}", host) for number, host in enumerate(hosts))]
    slots, turns, seen = Slots(), HostTurns("a"), Counter[str]()
    for each in known:
        slots.add(each.name)
    peers = StagePeers.of(known[2:], slots)
    weights = weigh_hosts("a", "D", peers, known)
    for _ in range(times):
        chosen = turns.choose("D", peers, known)
        assert len({peer.host for peer in chosen}) == 1
        seen[chosen[0].host] += 1
    for host, weight in weights.items():
        assert abs(seen[host] - Fraction(times * weight, sum(weights.values()))) <= 1


def test_requests_of_whole_runs_stay_on_their_hosts() -> None:
    """On the cores, in virtual time: two hosts, each with a P and a D."""
    settings = make_settings("2P2D", POOLS)
    placed = [replace(each, host="a" if each.name.endswith("0") else "b") for each in settings]
    for given_settings, pairs in ((settings, 4), (placed, 2)):
        cluster, moves = VirtualCluster(given_settings), set[tuple[str, str]]()
        for number in range(8):
            cluster.submit(work(f"r{number}", 8, text=100 * number))
        cluster.run()
        for record in cluster.outcomes.values():
            assert record.end is not None
            assert record.end.finished is not None
            moves |= set(pairwise(record.end.finished.route))
        assert len(moves) == pairs, moves
