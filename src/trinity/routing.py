"""Routing: which instance a request goes to next. A request stays where its next stage is (TriInfer 4.3)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from trinity.blocks import blocks_for
from trinity.messages import IMAGE, KV, PeerUp, Work
from trinity.plugins import find


class RoutingPolicy(Protocol):
    """Chooses among instances that have the stage and the room; ``peers`` is never empty."""

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp]) -> PeerUp: ...


class RoundRobin:
    """Each in turn, per stage."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp]) -> PeerUp:
        turn = self._next.get(letter, 0)
        self._next[letter] = turn + 1
        return peers[turn % len(peers)]


class RandomChoice:
    """Any of them, from a seeded generator."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp]) -> PeerUp:
        return self._random.choice(peers)


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {"round_robin": RoundRobin, "random": RandomChoice}


def routing_policy(name: str | RoutingPolicy) -> RoutingPolicy:
    """The policy of this name, or the object itself. Raises ``UnknownName``."""
    if not isinstance(name, str):
        return name
    make = POLICIES.get(name) or find("trinity.routing", "routing policy", name, POLICIES)
    made: RoutingPolicy = make()
    return made


class Router:
    """The instances that one core knows, and its policy."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self.policy = policy
        self.peers: dict[str, PeerUp] = {}
        self.lost: dict[str, PeerUp] = {}

    def add(self, peer: PeerUp) -> None:
        self.peers[peer.name] = peer
        self.lost.pop(peer.name, None)

    def drop(self, name: str) -> PeerUp | None:
        """An instance is gone, and may come back."""
        peer = self.peers.pop(name, None)
        if peer is not None:
            self.lost[name] = peer
        return peer

    def misses(self, letter: str) -> bool:
        """Whether every instance with this stage is gone for now."""
        return not self.has(letter) and any(letter in peer.roles for peer in self.lost.values())

    def choose(self, letter: str, work: Work) -> str | None:
        """Name of the instance for stage ``letter``; None where none has both the stage and the blocks."""
        fitting = [peer for peer in self.peers.values() if letter in peer.roles and fits(peer, letter, work)]
        return self.policy.choose(letter, work, fitting).name if fitting else None

    def has(self, letter: str) -> bool:
        return any(letter in peer.roles for peer in self.peers.values())


def fits(peer: PeerUp, letter: str, work: Work) -> bool:
    """Whether the whole need of a request at this stage could ever be had from an instance's pools."""
    need = needs(letter, work, peer.roles, peer.media_block, peer.kv_block)
    return all(count <= peer.pools.get(kind, 0) for kind, count in need.items())


def needs(letter: str, work: Work, roles: str, media_block: int, kv_block: int) -> dict[str, int]:
    """Blocks by kind that a request holds at stage ``letter`` (and at those that follow on the same instance)."""
    stages = _stages_here(letter, roles)
    need: dict[str, int] = {}
    for span in work.media if stages & {"E", "P"} else ():
        need[IMAGE] = need.get(IMAGE, 0) + blocks_for(span.tokens, media_block)
    if stages & {"P", "D"}:
        need[KV] = blocks_for(kv_tokens(work, decodes="D" in stages), kv_block)
    return need


def _stages_here(letter: str, roles: str) -> set[str]:
    stages = {letter}
    for following in "EPD"["EPD".index(letter) + 1 :]:
        if following not in roles:
            break
        stages.add(following)
    return stages


def kv_tokens(work: Work, decodes: bool) -> int:
    """KV entries to reserve: the prompt, and where decoding happens one for every output but the last."""
    return len(work.prompt) + (work.max_tokens - 1 if decodes else 0)
