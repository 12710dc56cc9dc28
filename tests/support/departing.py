"""Random loads for the virtual cluster whose decoders leave: they switch, or go for good, and their decodes move."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from random import Random

from msgspec.structs import replace as replace_work

from support.deadly import deadly_cluster, largest_pools
from support.moving import POLICY, WIDE, moves_of
from support.reader_checks import check_readers
from support.recovering import change_policy
from support.scenarios import KV_BLOCK, MEDIA_BLOCK, largest_need, pressed_cluster, random_cluster, random_works
from support.virtual.cluster import Durations, Faults, VirtualCluster, make_settings
from support.virtual.lives import Kill
from trinity.core.instance.settings import Settings
from trinity.core.messages import FRONTEND, PeerLeaving
from trinity.core.scheduler import BatchRules
from trinity.stage_kinds import order_letters, roles_of


def departing_cluster(seed: int, deaths: bool = True) -> VirtualCluster:
    """A loaded cluster of several decoders, of which one leaves two to five times, one after another; not run yet.

    Each reports its load. One that leaves comes back as it was or with other roles, or is removed, and another of its
    name may be added later. A few are told to stay after all. Half have ``deaths``. No channel is cut before an end: a
    Release that never came, of a decode that has moved on since, makes its first source offer it a second time.
    """
    draw = Random(seed * 6007 + 5)
    placement, kind = draw.choice(WIDE), draw.random()
    if kind < 0.2 and deaths:
        cluster = deadly_cluster(seed, placement, failures=POLICY)
    else:
        make = pressed_cluster if kind < 0.3 else random_cluster if kind < 0.4 else long_cluster
        cluster = make(seed, placement)
        change_policy(cluster.frontend, POLICY)
    if kind > 0.7 and deaths:
        for _ in range(draw.choice([1, 2])):
            cluster.kill(draw.choice(list(cluster.cores)), draw.uniform(0.5, 4.0), draw.choice([0.1, 1.0]))
    for core in [each for each in cluster.cores.values() if each.settings.report_s == inf]:
        core.settings = core.state.settings = replace(core.settings, report_s=0.1, heartbeat_s=0.5)
        core.state.report_at = core.state.reported_at = 0.0
    cluster.lives._cuts.clear()
    cluster.lives.plan_cuts = cluster.lives.hear_all  # type: ignore[method-assign]
    own = {name: core.settings for name, core in cluster.cores.items()}
    pools = largest_pools(own.values())
    at = draw.uniform(0.3, 1.0)
    for _ in range(draw.choice([2, 3, 5])):
        name = draw.choice([each for each, settings in own.items() if "D" in settings.roles])
        others = {letter for other, settings in own.items() if other != name for letter in settings.roles}
        if "D" not in others:
            break
        drain_s, change_s = draw.choice([0.0, 0.5, 1.0, 2.0]), draw.choice([0.05, 0.5])
        if draw.random() < 0.15:
            _stay(cluster, draw, name, at)
        elif draw.random() < 0.3 and set(own[name].roles) <= others:
            back_s = draw.choice([None, change_s])
            cluster.depart(name, at, drain_s, Kill(back_s, own[name], removed=True))
            own = own if back_s is not None else {each: own[each] for each in own if each != name}
        else:
            own[name] = _other_roles(draw, own[name], others, pools)
            cluster.switch(name, at, own[name], drain_s, change_s)
        at += drain_s + change_s + draw.uniform(0.0, 0.5)
    return cluster


def long_cluster(seed: int, placement: str) -> VirtualCluster:
    """Long answers, in pools that have room for a third of them or for all."""
    draw = Random(seed + 8_000_000_011)
    works = [
        replace_work(each, max_tokens=draw.choice([5, 20, 40, 60]), deadline_s=None, stop_ids=frozenset())
        for each in random_works(draw, draw.choice([6, 10, 16]))
    ]
    share = draw.choice([0.3, 1.0])
    pools = {kind: max(count, int(count * len(works) * share)) for kind, count in largest_need(works).items()}
    settings = make_settings(
        placement,
        pools,
        image_block_size=MEDIA_BLOCK,
        kv_block_size=KV_BLOCK,
        depth=draw.choice([1, 2]),
        reservation=draw.choice(["full", "optimistic"]),
        rules=BatchRules(token_budget=64, image_budget=16),
    )
    pull_s = draw.choice([0.01, 0.1, 1.0])
    durations = Durations(pull=lambda each, *_: each.uniform(0.0, pull_s))
    cluster = VirtualCluster(
        settings, durations=durations, faults=Faults.at_random(0.0, draw.choice([0.0, 0.1])), seed=seed
    )
    for each in works:
        cluster.submit(each, draw.uniform(0.0, 2.0))
    return cluster


def _stay(cluster: VirtualCluster, draw: Random, name: str, at: float) -> None:
    """Have the front end hear that one leaves, and soon that it does not."""
    epoch = cluster.lives.epochs[name]
    cluster.post(at, FRONTEND, PeerLeaving(name, epoch, leaving=True))
    cluster.post(at + draw.uniform(0.0, 1.0), FRONTEND, PeerLeaving(name, epoch, leaving=False))


def _other_roles(draw: Random, settings: Settings, others: set[str], pools: dict[str, int]) -> Settings:
    """Draw roles of its next life, with which no stage is lost."""
    letters = order_letters(others | set(settings.roles))
    roles = "".join(each for each in letters if each not in others or draw.random() < 0.5) or draw.choice(letters)
    kinds = roles_of(roles).kinds
    return replace(settings, roles=roles, pools={kind: pools[kind] for kind in pools if kind in kinds and pools[kind]})


def run(seed: int, deaths: bool = True, limit: int = 1_000_000) -> VirtualCluster:
    """Run it. Every reader gets each token once, in order, and one end: a whole one, or a typed one."""
    cluster = departing_cluster(seed, deaths)
    try:
        cluster.run(limit)
        check_readers(cluster)
        assert (cluster.frontend.inputs.waiting_bytes, cluster.frontend.inputs.kept_bytes) == (0, 0)
    except BaseException as error:
        error.add_note(f"departing_cluster({seed}, {deaths})")
        raise
    return cluster


def count(cluster: VirtualCluster, seen: Counter[str]) -> None:
    """Count how its moves ended, and the lives that ended early."""
    seen.update(moves_of(cluster))
    for outcome in cluster.outcomes.values():
        assert outcome.end is not None
        seen["survived"] += len(outcome.end.former)
        seen["failed"] += outcome.end.failure is not None
