"""Random loads for the virtual cluster with several front ends, which come, die, and use the same ids as the others."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from support.deadly import deadly_cluster
from support.recovering import change_policy
from support.virtual.cluster import VirtualCluster
from trinity.core.failure_policy import NO_RECOVERY, FailurePolicy
from trinity.core.frontend import FrontendCore
from trinity.core.messages import FRONTEND

KNOWN_S = 0.7  # after it has begun a front end knows each instance


def give_policy(cluster: VirtualCluster, failures: FailurePolicy) -> None:
    """Have every front end of the cluster, and those that come, survive losses by this policy."""
    made = cluster.make_frontend

    def make(name: str) -> FrontendCore:
        core = made(name)
        change_policy(core, failures)
        return core

    cluster.make_frontend = make
    for core in cluster.frontends.values():
        change_policy(core, failures)


def shared_cluster(seed: int, failures: FailurePolicy = NO_RECOVERY, kills: bool = True) -> VirtualCluster:
    """A loaded cluster with one to three more front ends, some of which die, as instances do; not run yet.

    kills: False for no deaths at all.
    """
    draw = Random(seed + 9_000_000_011)
    cluster = deadly_cluster(seed, failures=failures, kills=kills and draw.random() < 0.7)
    give_policy(cluster, failures)
    first = list(cluster.outcomes.values())
    names = [f"{FRONTEND}:{each}" for each in "bcd"[: draw.choice([1, 1, 2, 3])]]
    since = {FRONTEND: 0.0} | {name: draw.choice([0.0, 0.0, draw.uniform(0.0, 2.0)]) for name in names}
    for name in names:
        begins = since[name]
        cluster.attach(name, begins)
        for number in range(draw.choice([2, 5, 9])):  # the first one's prompts and ids
            work = replace(draw.choice(first).work, request=f"r{number}")
            at = begins + KNOWN_S + draw.uniform(0.0, draw.choice([0.1, 2.0]))
            cluster.submit(work, at, to=name)
            if draw.random() < 0.2:
                cluster.abort(work.request, at + draw.uniform(0.0, 1.0), draw.choice(["cancelled", "stop"]), to=name)
    for name, begins in since.items():
        if kills and draw.random() < 0.35:
            cluster.kill(name, begins + draw.uniform(0.01, 4.0))
    return cluster
