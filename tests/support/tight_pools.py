"""Requests that come all at once into pools that hold one each, under the virtual clock."""

from __future__ import annotations

from support.core_tables import work
from support.virtual.cluster import VirtualCluster, make_settings
from trinity.core.messages import Work
from trinity.core.scheduler import BatchRules

TIGHT = {"image": 3, "kv": 4}


def same_size(request: str, images: int = 1, text: int = 0) -> Work:
    """Three image blocks and four KV blocks wherever it is: just what the tight pools hold."""
    pieces = ["a*12"] if images == 1 else ["a*4", "b*4", "c*4"]
    named = [f"{request}{piece}" for piece in pieces]
    return work(request, *named, 1, text=text or 100, max_tokens=4)


def flood(placement: str, requests: int = 8, images: int = 1, **settings: object) -> VirtualCluster:
    """All at once into pools that hold one request each."""
    settings.setdefault("rules", BatchRules(token_budget=64, image_budget=64))
    configured = make_settings(placement, TIGHT, image_block_size=4, kv_block_size=4, **settings)
    cluster = VirtualCluster(configured, seed=requests)
    for number in range(requests):
        cluster.submit(same_size(f"r{number}", images, 100 * (number + 1)))
    cluster.run()
    assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"length"}
    assert all(len(outcome.tokens) == 4 for outcome in cluster.outcomes.values())
    return cluster
