"""Every built-in routing policy keeps the contract; a broken one is caught by it, and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trinity.core.messages import PeerUp, Work
from trinity.core.routing.router import ROUTING_POLICIES, RoutingPolicy
from trinity.testing.routing_contract import check_routing


@pytest.mark.parametrize("name", ROUTING_POLICIES)
def test_built_in_policies_keep_the_contract(name: str) -> None:
    check_routing(ROUTING_POLICIES[name])


class MostFree:
    """The policy of CONTRIBUTING.md."""

    informed, straight = True, False

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp], router: Any) -> PeerUp:
        free = {name: load.free.get("kv", 0) for name, load in router.loads.items()}
        return max(peers, key=lambda peer: free.get(peer.name, 0))


def test_so_does_that_of_the_guide() -> None:
    check_routing(MostFree)


class Broken:
    informed, straight = True, False

    def choose(self, letter: str, work: Work, peers: Any, router: Any) -> Any:
        return peers[0]


class ByName(Broken):
    def choose(self, letter: str, work: Work, peers: Any, router: Any) -> Any:
        return peers[0].name


class Remembering(Broken):
    """Goes on sending to the first instance that it saw."""

    def __init__(self) -> None:
        self.first: dict[str, PeerUp] = {}

    def choose(self, letter: str, work: Work, peers: Any, router: Any) -> Any:
        return self.first.setdefault(letter, peers[0])


class Trusting(Broken):
    """Takes every instance to have reported."""

    def choose(self, letter: str, work: Work, peers: Any, router: Any) -> Any:
        return max(peers, key=lambda peer: router.loads[peer.name].free["kv"])


class Sorting(Broken):
    def choose(self, letter: str, work: Work, peers: Any, router: Any) -> Any:
        peers.sort(key=lambda peer: peer.name, reverse=True)
        return peers[0]


class Another(Broken):
    """Makes up an instance that looks like one of those."""

    def choose(self, letter: str, work: Work, peers: Any, router: Any) -> Any:
        return PeerUp(f"{letter}7", "EPD")


class NeedsTwo(Broken):
    def choose(self, letter: str, work: Work, peers: Any, router: Any) -> Any:
        return peers[1]


ONE: RoutingPolicy = MostFree()
BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "a name": (ByName, "which is none of"),
    "remembers": (Remembering, "it_chooses_among_the_peers: choose"),
    "trusts": (Trusting, "the policy raised KeyError"),
    "sorts": (Sorting, "the policy raised AttributeError"),
    "makes one up": (Another, "which is none of"),
    "needs two": (NeedsTwo, "one_peer_is_enough: the policy raised IndexError"),
    "one for all": (lambda: ONE, "make a new object each time"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_policy_is_caught(broken: str) -> None:
    make, said = BROKEN[broken]
    with pytest.raises(AssertionError, match=said):
        check_routing(make)
