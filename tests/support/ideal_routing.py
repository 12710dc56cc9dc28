"""Routing as the screening engine has it, for the Python engine: loads are known the moment that they change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from trinity.core.instance.loads import queued
from trinity.core.messages import FRONTEND, IMAGE, Offer, PeerUp, Submit, Value, Work
from trinity.core.routing.router import RoundRobin, RoutingPolicy
from trinity.core.scheduler import StepRates
from trinity.simulation.cluster_model import SimulatedCluster


class Loads:
    """What every instance of a run has to do, with what is on its way there. ``policy()`` routes by it or, unless
    ``least_loaded``, in turn."""

    def __init__(self, least_loaded: bool = True) -> None:
        self.least_loaded = least_loaded
        self.sent: dict[str, Counter[str]] = {}
        self.run: SimulatedCluster | None = None
        self._rates: dict[str, StepRates] = {}

    def policy(self) -> RoutingPolicy:
        return Ideal(self) if self.least_loaded else RoundRobin()

    def watch(self, run: SimulatedCluster) -> None:
        """Of these cores. Without a cost in its rules an instance's steps are predicted by what they take."""
        self.run = run
        for name, core in run.cores.items():
            own = core.settings
            rules = own.rules if own.rules.cost else replace(own.rules, cost=run.workers[name].cost)
            self._rates[name] = StepRates(rules, own.roles)
            self.sent[name] = Counter()

    def arrive(self, name: str, event: Value) -> None:
        """An instance is told of an event: a request that it brings is on its way no more."""
        if name == FRONTEND:
            return
        if isinstance(event, Submit):
            letter = "E" if event.work.media else "P"
        elif isinstance(event, Offer):
            letter = "P" if event.kind == IMAGE else "D"
        else:
            return
        self.sent[name][letter] -= units(letter, event.work)

    def seconds(self, name: str, letter: str) -> float:
        assert self.run is not None
        waiting = queued(self.run.cores[name].state)
        return self._rates[name].seconds(letter, waiting[letter] + self.sent[name][letter])


class Ideal:
    """To the one that is through with its work first, of equal ones in turn."""

    def __init__(self, loads: Loads) -> None:
        self._loads, self._turns = loads, RoundRobin()
        self.begin = self._turns.begin

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp]) -> PeerUp:
        seconds = [self._loads.seconds(peer.name, letter) for peer in peers]
        least = min(seconds)
        equal = [peer for peer, each in zip(peers, seconds, strict=True) if each == least]
        chosen = self._turns.choose(letter, work, equal)
        self._loads.sent[chosen.name][letter] += units(letter, work)
        return chosen


def units(letter: str, work: Work) -> int:
    """What a request adds to a stage: visual tokens, prompt positions, a row."""
    if letter == "E":
        return sum(span.tokens for span in work.media)
    return len(work.prompt) if letter == "P" else 1
