"""Random loads for the virtual cluster with deaths: the same clusters, whose instances die and come back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random

from support.recovering import change_policy
from support.scenarios import pressed_cluster, random_cluster
from support.virtual.cluster import VirtualCluster
from trinity.core.failure_policy import NO_RECOVERY, FailurePolicy
from trinity.core.instance.settings import Settings
from trinity.stage_kinds import order_letters, roles_of


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
    change_policy(cluster.frontend, failures)
    names = list(cluster.cores)
    for _ in range(draw.choice([1, 1, 1, 2, 3, 6]) if kills else 0):
        back = draw.choice([0.05, 0.5, 2.0, None])
        cluster.kill(draw.choice(names), draw.uniform(0.0, draw.choice([0.5, 3.0])), back)
    return cluster


def switching_cluster(seed: int, failures: FailurePolicy = NO_RECOVERY, deaths: bool = True) -> VirtualCluster:
    """A loaded cluster whose instances switch roles one to four times in all, mostly beside deaths; not run yet.

    Each stage that the cluster has is had by some instance whenever all are up; a switch may leave it without one for
    its time.
    """
    draw = Random(seed + 5_000_000_011)
    cluster = deadly_cluster(seed, failures=failures) if deaths and draw.random() < 0.7 else random_cluster(seed)
    change_policy(cluster.frontend, failures)
    own = {name: core.settings for name, core in cluster.cores.items()}
    letters = order_letters(letter for settings in own.values() for letter in settings.roles)
    pools = largest_pools(own.values())
    at = 0.0
    for _ in range(draw.choice([1, 1, 2, 4])):
        name = draw.choice(list(own))
        own[name] = change_roles(draw, name, own, letters, pools)
        at += draw.uniform(0.0, 1.5)
        cluster.switch(name, at, own[name], drain_s=draw.choice([0.0, 0.3, 2.0]), change_s=draw.choice([0.05, 0.5]))
    return cluster


def change_roles(
    draw: Random, name: str, own: Mapping[str, Settings], letters: Sequence[str], pools: Mapping[str, int]
) -> Settings:
    """Draw other roles for an instance, such that each of the stages ``letters`` is left to one of these instances.

    pools: blocks by kind that an instance gets of each kind that its roles use.
    """
    others = {letter for other, settings in own.items() if other != name for letter in settings.roles}
    needed = [letter for letter in letters if letter not in others]
    more = [letter for letter in letters if letter in needed or draw.random() < 0.5] or [draw.choice(letters)]
    roles = "".join(more)
    kinds = roles_of(roles).kinds
    return replace(own[name], roles=roles, pools={kind: pools[kind] for kind in pools if kind in kinds})


def largest_pools(settings: Iterable[Settings]) -> dict[str, int]:
    """Find the most blocks of each kind that any of these instances has."""
    found: dict[str, int] = {}
    for each in settings:
        found |= {kind: max(count, found.get(kind, 0)) for kind, count in each.pools.items()}
    return dict(sorted(found.items()))
