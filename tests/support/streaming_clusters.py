"""Random loads whose KV streams in layers while it is prefilled in small chunks, and whose prefill instances die."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from msgspec.structs import replace as replace_work

from support.leading_clusters import leading_work
from support.scenarios import random_durations, random_patience, random_settings, random_silence
from support.virtual.cluster import Faults, VirtualCluster
from trinity.core.failure_policy import FailurePolicy
from trinity.core.messages import Fetch, Fetched, Ready, Send, Value, Work
from trinity.core.routing.router import LeastLoaded, PrefixHits, RoundRobin, RoutingPolicy
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy

PLACEMENTS = ("1P1PD", "2P1D", "3P2D", "2P1PD1D", "1E2P1D", "1E3P2D", "1E1P1EPD", "2EP1D", "3EP2D")
POLICIES: tuple[Callable[[], RoutingPolicy], ...] = (RoundRobin, LeastLoaded, PrefixHits)


def streaming_cluster(seed: int, failures: FailurePolicy) -> VirtualCluster:
    """A loaded cluster that has not run yet: everything in it follows from the seed."""
    draw = Random(seed + 11_000_000_003)
    placement = draw.choice(PLACEMENTS)
    texts = draw.choice([2, 1000, 1000])
    works = [_make_work(draw, number, texts, "E" in placement) for number in range(draw.choice([1, 1, 2, 4, 8]))]
    leases = random_patience(draw)
    rules = BatchRules(token_budget=draw.choice([8, 12, 16]), image_budget=8, leading_text=draw.random() < 0.5)
    transfers = TransferPolicy(early=draw.random() < 0.8, kv=draw.choice(["layer", "grouped"]))
    told: dict[str, Any] = {"transfers": transfers, "prefix_cache": True, "rules": rules}
    told["layers"] = draw.choice([1, 2, 3])
    settings = [
        replace(each, **told, depth=draw.choice([1, 1, 2])) for each in random_settings(draw, placement, works, leases)
    ]
    cluster = VirtualCluster(
        settings,
        routing=draw.choice(POLICIES) if leases else RoundRobin,
        durations=random_durations(draw),
        faults=Faults.at_random(draw.choice([0.0, 0.0, 0.05]), draw.choice([0.0, 0.05, 0.3])),
        seed=seed,
        failures=failures,
    )
    hurry, cancels = draw.choice([0.0, 0.5, 3.0]), draw.choice([0.0, 0.0, 0.3])
    for work in works:
        at = draw.uniform(0.0, hurry)
        cluster.submit(work, at)
        if draw.random() < cancels:
            cluster.abort(work.request, at + draw.uniform(0.0, 1.0), draw.choice(["cancelled", "stop"]))
    if leases and draw.random() < 0.3:
        random_silence(draw, cluster)
    return cluster


def _make_work(draw: Random, number: int, texts: int, media: bool) -> Work:
    work = leading_work(draw, number, texts)
    if media and draw.random() < 0.7:
        return work
    prompt = (100 + draw.randrange(texts), *range(7, 7 + draw.choice([15, 50, 80])))
    return replace_work(work, prompt=prompt, media=())


class Striker:
    """Kills instances as they say that a piece of a prompt is ready, or lease a text: those or their targets."""

    def __init__(self, cluster: VirtualCluster, seed: int) -> None:
        self.cluster, self.draw = cluster, Random(seed + 12_000_000_017)
        self.strikes, self.share = self.draw.choice([1, 2, 4]), self.draw.choice([0.1, 0.3, 0.6])

    def event(self, name: str, event: Value) -> None:
        """Nothing."""

    def command(self, name: str, command: Value) -> None:
        if not isinstance(command, Send) or not self.strikes or self.draw.random() > self.share:
            return
        if isinstance(command.message, (Ready, Fetch, Fetched)):
            victim = self.draw.choice([name, name, name, command.to])
            if victim in self.cluster.cores and victim not in self.cluster.lives.dead:
                self.strikes -= 1
                at = self.cluster.now + self.draw.choice([0.0, 0.01, 0.1])
                self.cluster.kill(victim, at, self.draw.choice([0.05, 0.5, 2.0, 2.0, None]))

    def after_event(self, name: str) -> None:
        """Nothing."""

    def lost(self, name: str) -> None:
        """Nothing."""

    def at_end(self) -> None:
        """Nothing."""


def strike_streams(cluster: VirtualCluster, seed: int) -> VirtualCluster:
    """Have instances die amid what they stream or fetch."""
    cluster.observers = [*cluster.observers, Striker(cluster, seed)]
    return cluster
