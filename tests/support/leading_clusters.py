"""Random loads of requests with text before their images, in tight pools, with deaths, silences, cancels and faults."""

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
    see_together,
)
from support.virtual.cluster import Faults, VirtualCluster
from trinity.core.failure_policy import FailurePolicy
from trinity.core.instance.settings import Reservation
from trinity.core.messages import MediaSpan, Open, Work
from trinity.core.routing.router import LeastLoaded, PrefixHits, RoundRobin, RoutingPolicy
from trinity.core.transfers import TransferPolicy

PLACEMENTS = ("E+P+D", "2E1P1D", "2E2P2D", "PD+E", "2E2PD", "EP+D", "2EP1D", "EPD", "ED+P", "1E1EPD", "1EP1PD1D")
POLICIES: tuple[Callable[[], RoutingPolicy], ...] = (RoundRobin, LeastLoaded, PrefixHits)


def leading_work(draw: Random, number: int, texts: int) -> Work:
    """Up to 40 tokens that few or no others begin with, one to three images, and text between and behind them."""
    text = draw.randrange(texts)
    prompt: list[int] = [100 + text] * draw.choice([4, 9, 16, 40])
    media: list[MediaSpan] = []
    kind = draw.random()
    for _ in range(draw.choice([1, 1, 2, 3])):
        content = draw.randrange(9)
        tokens = 1 + content % 6
        media.append(MediaSpan("image", tokens, len(prompt), tokens, f"image{content}", kind < 0.2))
        prompt += [9] * tokens + [draw.randint(1, 2)] * draw.choice([0, 1, 7])
    prompt += [draw.randint(1, 2)]
    media = see_together(media, len(prompt)) if kind < 0.1 else media
    deadline = draw.uniform(0.0, 4.0) if draw.random() < 0.1 else None
    outputs = draw.choice([1, 2, 5, 20])
    return Work(request=f"r{number}", prompt=tuple(prompt), media=tuple(media), max_tokens=outputs, deadline_s=deadline)


def leading_cluster(seed: int, failures: FailurePolicy, placement: str | None = None) -> VirtualCluster:
    """A loaded cluster that has not run yet: everything in it follows from the seed."""
    draw = Random(seed + 10_000_000_019)
    placement = placement or draw.choice(PLACEMENTS)
    texts = draw.choice([1, 3, 1000])
    works = [leading_work(draw, number, texts) for number in range(draw.choice([1, 2, 4, 8]))]
    leases = random_patience(draw)
    transfers = TransferPolicy(early=draw.random() < 0.8, kv=draw.choice(["off", "layer", "grouped"]))
    kinds: list[Reservation] = ["full", "full", "optimistic"]
    reservation = draw.choice(kinds)
    depth, layers = draw.choice([1, 1, 2]), draw.choice([1, 3])
    settings = [
        replace(each, transfers=transfers, prefix_cache=True, reservation=reservation, depth=depth, layers=layers)
        for each in random_settings(draw, placement, works, leases)
    ]
    cluster = VirtualCluster(
        settings,
        routing=draw.choice(POLICIES) if leases else RoundRobin,
        durations=random_durations(draw),
        faults=random_faults(draw) if draw.random() < 0.4 else Faults(),
        seed=seed,
        failures=failures,
    )
    hurry, cancels = draw.choice([0.0, 0.5, 3.0]), draw.choice([0.0, 0.0, 0.5])
    for work in works:
        at = draw.uniform(0.0, hurry)
        cluster.submit(work, at)
        if draw.random() < cancels:
            cluster.abort(work.request, at + draw.uniform(0.0, 1.0), draw.choice(["cancelled", "stop"]))
    if leases and draw.random() < 0.5:
        random_silence(draw, cluster)
    return cluster


def is_leading(cluster: VirtualCluster, name: str, opened: Open) -> bool:
    """Whether it was opened for the beginning of its prompt alone."""
    return len(opened.blocks) * cluster.cores[name].settings.kv_block_size < len(opened.work.prompt)
