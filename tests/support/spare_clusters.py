"""Random loads of which one instance of a stage gets most, while its siblings take what waits there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from support.reader_checks import check_readers
from support.scenarios import (
    random_durations,
    random_faults,
    random_patience,
    random_settings,
    random_silence,
    random_transfers,
    random_works,
    small_targets,
)
from support.spread_clusters import strike, suspect_some
from support.virtual.cluster import Faults, VirtualCluster
from trinity.core.failure_policy import FailurePolicy
from trinity.core.messages import FRONTEND, PeerUp, Work
from trinity.core.routing.router import LeastLoaded, PrefixHits, RoundRobin, RoutingPolicy

FOR_OFFERS = ("1P2D", "2P3D", "1E1P2D", "2E2P2D", "1E2P1D", "2E3P2D", "1EP3D", "2ED2P", "1P1PD2D", "1E1EP2P3D")
POLICY = FailurePolicy(recoveries=20, wait_s=10.0)
OTHER = f"{FRONTEND}:b"
PLACEMENTS = ("2EPD", "3EPD", "2E2P2D", "3P1D", "3E1PD", "1EP1EPD1D", "2EP2D", "2ED1P", "1E1EP1P2D", "1EPD1E1P1D")


class FirstOfAll:
    """The first instance that has the stage and the room: all others are idle."""

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp]) -> PeerUp:
        return peers[0]


POLICIES: tuple[Callable[[], RoutingPolicy], ...] = (FirstOfAll, FirstOfAll, RoundRobin, LeastLoaded, PrefixHits)


def spare_cluster(
    seed: int,
    failures: FailurePolicy,
    placement: str | None = None,
    front_ends: Sequence[str] = (FRONTEND,),
    offers: bool = False,
) -> VirtualCluster:
    """A loaded cluster that has not run yet: everything in it follows from the seed.

    ``offers``: what waits is mostly offered decodes and features, as where they go holds one request or two.
    """
    draw = Random(seed + 8_500_000_003)
    placement = placement or draw.choice(FOR_OFFERS if offers else PLACEMENTS)
    works = random_works(draw, draw.choice([2, 4, 8, 12]))
    leases = random_patience(draw)
    transfers = replace(random_transfers(draw), hand_over=True)
    caches: dict[str, Any] = {}
    if draw.random() > 0.3:  # what is cached where it waits stays there
        caches = {"prefix_cache": False, "image_cache": draw.random() < 0.3}
    settings = [
        replace(each, transfers=transfers, depth=draw.choice([1, 2]), **caches)
        for each in random_settings(draw, placement, works, leases)
    ]
    if offers:
        settings = small_targets(settings, works, draw.choice([1.0, 1.0, 1.5, 2.5]))
    policy = draw.choice(POLICIES)
    cluster = VirtualCluster(
        settings,
        routing=policy if leases or policy in (FirstOfAll, RoundRobin) else FirstOfAll,
        durations=random_durations(draw),
        faults=random_faults(draw) if draw.random() < 0.5 else Faults(),
        seed=seed,
        failures=failures,
        spread=draw.choice([1, 1, 2]),
        front_ends=front_ends,
    )
    hurry, cancels = draw.choice([0.0, 0.1, 0.5]), draw.choice([0.0, 0.0, 0.5])
    for number, work in enumerate(works):
        at, owner = draw.uniform(0.0, hurry), front_ends[number % len(front_ends)]
        cluster.submit(work, at, to=owner)
        if draw.random() < cancels:
            cluster.abort(work.request, at + draw.uniform(0.0, 1.0), draw.choice(["cancelled", "stop"]), to=owner)
    if leases and draw.random() < 0.5:
        random_silence(draw, cluster)
    suspect_some(draw, cluster)
    return cluster


def run_spare(seed: int, deaths: bool = True, limit: int = 1_000_000, offers: bool = False) -> VirtualCluster:
    """Run the cluster of this seed, struck by deaths or not, to its end. Two front ends have a third of them."""
    cluster = spare_cluster(seed, POLICY, front_ends=(FRONTEND,) if seed % 3 else (FRONTEND, OTHER), offers=offers)
    if seed % 3 == 0 and seed % 2:
        cluster.kill(OTHER, 0.3)
    try:
        (strike(cluster, seed) if deaths else cluster).run(limit)
        if seed % 3:
            check_readers(cluster)
    except BaseException as error:
        error.add_note(f"run_spare({seed}, {deaths=}, {offers=})")
        raise
    return cluster
