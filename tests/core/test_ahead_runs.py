"""Depth 2 in random runs: they reach what only it brings about, and every token is that of depth 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from support.core_tables import work
from support.scenarios import PLACEMENTS, random_cluster
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core.messages import Step, Stepped, Value, Work


class Seen:
    """Counts what only depth 2 brings about."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster, self.counts = cluster, Counter[str]()

    def event(self, name: str, event: Value) -> None:
        if isinstance(event, Stepped):
            requests = self.cluster.cores[name].state.requests
            for request in [*event.sampled, *event.failed]:
                ending = requests[request].ending
                self.counts[f"row after {ending.reason}" if ending else "row"] += 1

    def command(self, name: str, command: Value) -> None:
        if isinstance(command, Step):
            flight = self.cluster.cores[name].state.lanes[command.lane]
            before = flight[0].step if flight[0].step.id != command.id else None
            if before is not None:
                self.counts["two in flight"] += 1
                chunks = {row.request for row in before.prefills}
                self.counts["chunk behind chunk"] += any(row.request in chunks for row in command.prefills)
                self.counts["decode behind chunk"] += bool(chunks & set(command.decodes))

    def after_event(self, name: str) -> None:
        """Nothing."""

    def lost(self, name: str) -> None:
        """Nobody dies here."""

    def at_end(self) -> None:
        """Nothing."""


def counted(seeds: Sequence[int], depth: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        cluster = random_cluster(seed, depth=depth)
        seen = Seen(cluster)
        cluster.observers = [*cluster.observers, seen]
        cluster.run()
        total += seen.counts
    return total


@pytest.mark.slow
def test_the_interleavings_have_what_only_depth_2_brings_about() -> None:
    found = counted(range(60), 2)
    wanted = {"two in flight", "chunk behind chunk", "decode behind chunk", "row after stop", "row after error"}
    assert not {each for each in wanted if not found[each]}, found
    assert not set(counted(range(40), 1)) & {"two in flight", "row after stop"}


def tokens_of(depth: int, placement: str, works: Sequence[Work]) -> dict[str, list[int]]:
    cluster = VirtualCluster(
        make_settings(placement, {"image": 12, "kv": 16}, image_block_size=4, kv_block_size=4, depth=depth),
        durations=Durations(step=lambda draw, name, step: 0.1 + draw.random()),
        sample=lambda work, index: (hash_of(work.request) + index) % 7,
    )
    for at, each in enumerate(works):
        cluster.submit(each, at=0.3 * at)
    cluster.run()
    return {request: outcome.tokens for request, outcome in cluster.outcomes.items()}


def hash_of(request: str) -> int:
    return sum(map(ord, request))


@pytest.mark.parametrize("placement", PLACEMENTS[:8])
def test_tokens_are_those_of_depth_1(placement: str) -> None:
    works = [
        work(f"r{number}", *(["cat*6"] if number % 2 else []), 3, max_tokens=9, stop_ids=frozenset({number}))
        for number in range(7)
    ]
    found = tokens_of(2, placement, works)
    assert found == tokens_of(1, placement, works)
    assert any(len(tokens) < 9 for tokens in found.values())
