"""Random loads of many images on several encoders that help each other, with deaths, silences, cancels and faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from support.scenarios import (
    random_durations,
    random_faults,
    random_patience,
    random_settings,
    random_silence,
    random_transfers,
)
from support.virtual.cluster import Faults, VirtualCluster
from trinity.core.failure_policy import FailurePolicy
from trinity.core.messages import MediaSpan, PeerSuspect, Work
from trinity.core.routing.router import LeastLoaded, PrefixHits, RoundRobin, RoutingPolicy

PLACEMENTS = ("1E1PD", "2E1PD", "3E1PD", "4E1PD", "2E1P1D", "3E2P1D", "4E1P2D", "2E1EP1D", "3E1EPD", "2E2P2D")
POLICIES: tuple[Callable[[], RoutingPolicy], ...] = (RoundRobin, LeastLoaded, PrefixHits)


def picture_work(draw: Random, number: int, contents: int) -> Work:
    """A request of one to eight images, of which some may be equal, and those of other requests too."""
    prompt: list[int] = [7] * draw.choice([0, 1, 5])
    media: list[MediaSpan] = []
    for _ in range(draw.randint(1, 8)):
        content = draw.randrange(contents)
        tokens = 1 + content % 6
        media.append(MediaSpan("image", tokens, len(prompt), tokens, f"image{content}"))
        prompt += [9] * tokens + [draw.randint(1, 2)] * draw.choice([0, 1])
    deadline = draw.uniform(0.0, 4.0) if draw.random() < 0.1 else None
    prompt += [draw.randint(1, 2)]
    return Work(
        request=f"r{number}",
        prompt=tuple(prompt),
        media=tuple(media),
        max_tokens=draw.choice([1, 2, 5]),
        deadline_s=deadline,
    )


def spread_cluster(seed: int, failures: FailurePolicy, placement: str | None = None) -> VirtualCluster:
    """A loaded cluster that has not run yet, of one to four encoders: everything in it follows from the seed."""
    draw = Random(seed + 8_000_000_009)
    placement = placement or draw.choice(PLACEMENTS)
    contents = draw.choice([3, 12, 1000])
    works = [picture_work(draw, number, contents) for number in range(draw.choice([1, 2, 4, 8]))]
    leases = random_patience(draw)
    transfers = random_transfers(draw)
    settings = [
        replace(each, transfers=transfers, image_cache=draw.random() < 0.9)
        for each in random_settings(draw, placement, works, leases)
    ]
    cluster = VirtualCluster(
        settings,
        routing=draw.choice(POLICIES) if leases else RoundRobin,
        durations=random_durations(draw),
        faults=random_faults(draw) if draw.random() < 0.5 else Faults(),
        seed=seed,
        failures=failures,
        spread=draw.choice([2, 3, 4]),
    )
    hurry, cancels = draw.choice([0.0, 0.5, 3.0]), draw.choice([0.0, 0.0, 0.5])
    for work in works:
        at = draw.uniform(0.0, hurry)
        cluster.submit(work, at)
        if draw.random() < cancels:
            cluster.abort(work.request, at + draw.uniform(0.0, 1.0), draw.choice(["cancelled", "stop"]))
    if leases and draw.random() < 0.5:
        random_silence(draw, cluster)
    suspect_some(draw, cluster)
    return cluster


def strike(cluster: VirtualCluster, seed: int) -> VirtualCluster:
    """Have its instances die one to four times."""
    draw = Random(seed + 9_000_000_011)
    names = list(cluster.cores)
    for _ in range(draw.choice([1, 1, 2, 4])):
        back = draw.choice([0.05, 0.5, 2.0, None])
        cluster.kill(draw.choice(names), draw.uniform(0.0, draw.choice([0.5, 2.0])), back)
    return cluster


def suspect_some(draw: Random, cluster: VirtualCluster) -> None:
    """Have an instance count as silent for a while, at some of the others."""
    for name in draw.sample(list(cluster.cores), draw.choice([0, 0, 1])):
        at, seconds = draw.uniform(0.0, 1.0), draw.uniform(0.0, 1.0)
        for other in cluster.cores:
            if other != name and draw.random() < 0.7:
                cluster.post(at, other, PeerSuspect(name, 0, suspected=True))
                cluster.post(at + seconds, other, PeerSuspect(name, 0, suspected=False))
