"""Random loads for the virtual cluster with deaths: the same clusters, whose instances die and come back."""

from __future__ import annotations

from random import Random

from support.scenarios import pressed_cluster, random_cluster
from trinity.core.failure_policy import NO_RECOVERY, FailurePolicy
from trinity.testing.virtual import VirtualCluster


def deadly_cluster(
    seed: int,
    placement: str | None = None,
    encode_only: float = 0.0,
    failures: FailurePolicy = NO_RECOVERY,
    kills: bool = True,
) -> VirtualCluster:
    """A loaded cluster whose instances die one to six times in all, and mostly come back; not run yet.

    Every fourth is one with optimistic reservation and tight pools. Cancels, deadlines, faults, leases that run out and
    instances that stand still come as in the others. encode_only: as ``random_cluster`` has it; then none is pressed.
    failures: the front end's policy. kills: False for none of these deaths.
    """
    draw = Random(seed + 4_000_000_007)
    pressed = draw.random() < 0.25 and not encode_only
    cluster = pressed_cluster(seed, placement) if pressed else random_cluster(seed, placement, encode_only=encode_only)
    cluster.frontend.failures = failures
    names = list(cluster.cores)
    for _ in range(draw.choice([1, 1, 1, 2, 3, 6]) if kills else 0):
        back = draw.choice([0.05, 0.5, 2.0, None])
        cluster.kill(draw.choice(names), draw.uniform(0.0, draw.choice([0.5, 3.0])), back)
    return cluster
