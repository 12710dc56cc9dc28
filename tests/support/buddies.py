"""Front ends with buddies in virtual time: random loads, deaths of front ends and instances, and what is right."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from support.many_front_ends import give_policy
from support.scenarios import random_durations, random_settings, random_works
from support.virtual.adoption import BuddyCluster
from support.virtual.cluster import Faults
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import Deliver
from trinity.core.messages import FRONTEND, Work

POLICY = FailurePolicy(recoveries=30, wait_s=30.0)
NAMES = (FRONTEND, "frontend:b", "frontend:c")
PLACED = ("EPD", "2EPD", "EP+D", "ED+P", "E+P+D", "2E2P2D", "1EP2D", "1ED2P", "EPD+E+P+D")


def sample(work: Work, index: int) -> int:
    """A token that another request, or another place in it, does not have; one of a stop now and then."""
    return 3 if work.stop_ids and index == len(work.prompt) % 7 + 2 else 100 + index + 1000 * len(work.prompt)


class StruckCluster(BuddyCluster):
    """Front ends die once their readers have so many tokens (``tokens_left``), besides all else."""

    tokens_left: dict[str, int]

    def deliver(self, name: str, command: Deliver) -> None:
        super().deliver(name, command)
        self.tokens_left[name] = self.tokens_left.get(name, 0) - 1
        if self.tokens_left[name] == 0:
            self.kill(name, self.now)


def buddy_cluster(seed: int, kills: bool = True) -> BuddyCluster:
    """A loaded cluster of two or three front ends in a ring of buddies, of which some die at any time; not run yet."""
    draw = Random(seed + 11_000_000_029)
    names = NAMES[: draw.choice([2, 2, 3])]
    works = [replace(each, max_tokens=draw.choice([5, 12, 40])) for each in random_works(draw, draw.choice([2, 4, 8]))]
    cluster = StruckCluster(
        random_settings(draw, draw.choice(PLACED), works, {}),
        buddies=dict(zip(names, (*names[1:], names[0]), strict=True)),
        durations=random_durations(draw),
        faults=Faults.at_random(draw.choice([0.0, 0.0, 0.02]), draw.choice([0.0, 0.0, 0.1])),
        sample=sample,
        seed=seed,
        front_ends=names,
    )
    cluster.tokens_left = {}
    give_policy(cluster, POLICY)
    for name in names:
        for work in works[: draw.choice([1, 2, 8])]:
            at = draw.uniform(0.0, draw.choice([0.1, 2.0]))
            cluster.submit(work, at, to=name)
            if draw.random() < 0.1:
                cluster.abort(work.request, at + draw.uniform(0.0, 1.0), draw.choice(["cancelled", "stop"]), to=name)
    if kills:
        strike(cluster, draw, names)
    return cluster


def strike(cluster: StruckCluster, draw: Random, names: tuple[str, ...]) -> None:
    """Kill one front end, or all but one, and perhaps instances, which come back."""
    for name in draw.sample(names, draw.randint(1, len(names) - 1)):
        if draw.random() < 0.6:
            cluster.tokens_left[name] = draw.choice([1, 2, 5, 20, 60])
        else:
            cluster.kill(name, draw.uniform(0.0, draw.choice([0.3, 1.0, 4.0])))
    for _ in range(draw.choice([0, 0, 1, 3])):
        back = draw.choice([0.05, 0.5, 2.0])
        cluster.kill(draw.choice(list(cluster.cores)), draw.uniform(0.0, 3.0), back)


def check_adopted(cluster: BuddyCluster) -> list[tuple[int, int]]:
    """Check what readers of lost front ends find with the buddy. Returns of each how many it had, and was known.

    Whoever had a token goes on behind it: the same tokens, no other and none missing, and one end. Those of which the
    buddy died as well are its own buddy's, if that lives.
    """
    followed, seen = {(each.owner, each.key): each for each in cluster.adoptions}, []
    known = {each.label: each.known for each in cluster.adoptions}  # ahead of which the buddy has given none
    for owner in set(cluster.buddies) & cluster.lives.dead:
        buddy = cluster.buddies[owner]
        for reader, had in cluster.outcomes.items():
            if whose(reader) != owner or had.end is not None or buddy in cluster.lives.dead:
                continue
            found = followed.get((owner, key_of(reader)))
            if found is None:
                none = len(had.tokens) == known.get(reader, 0) or given_up(cluster, reader)
                assert none, f"{reader} had {had.tokens}, and {buddy} knows nothing"
                continue
            there = cluster.outcomes[found.label]
            assert there.end is not None, f"{found} has no end"
            right = [sample(there.work, index) for index in range(len(there.tokens))]
            assert there.tokens == right, f"{found} got {there.tokens}, not {right}"
            if there.end.failure is None and there.end.reason != "cancelled":
                assert there.tokens[: len(had.tokens)] == had.tokens, f"{found} has lost some of {had.tokens}"
                whole = len(there.tokens) == there.work.max_tokens or there.tokens[-1] in there.work.stop_ids
                assert whole, f"{found} ended with {there.end} after {there.tokens}"
            seen.append((len(had.tokens), len(there.tokens)))
    return seen


def given_up(cluster: BuddyCluster, reader: str) -> bool:
    return any(each.opening.key == key_of(reader) for each in cluster.given_up)


def whose(reader: str) -> str:
    """Front end of a reader."""
    return reader.partition("/")[0] if reader.startswith(f"{FRONTEND}:") else FRONTEND


def key_of(reader: str) -> str:
    return reader.removeprefix(f"{whose(reader)}/")
