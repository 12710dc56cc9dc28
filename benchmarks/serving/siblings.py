"""What instances take from their siblings (``TransferPolicy(hand_over=True)``): what it gives and costs.

The cores in virtual time, Qwen2-VL 7B on H100 by roofline. Sizes have a heavy tail (Pareto), so that queues of equal
length hold unequal work and routing in turn is often wrong. At low load hardly anything waits; at the highest rates all
queues are full and nobody is idle. With long outputs it is decodes that wait, for KV blocks: instances have a quarter
of each device's memory, most of which are weights. A hand-over takes the cluster's time of a message; pixels that
travel are not counted. Quantiles are of the requests of all draws: of 120 the 99th percentile is nearly the last one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import quantiles
from typing import Literal, NamedTuple

from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import FrontendOptions
from trinity.core.routing.router import ROUTING_POLICIES
from trinity.core.transfers import TransferPolicy
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import get_model_shape
from trinity.placement import Placement
from trinity.simulation.cluster_model import SimulatedCluster
from trinity.simulation.simulator import Simulator
from trinity.simulation.workload import Job
from trinity.traces.trace import SLO

SHAPE = get_model_shape("qwen2-vl-7b")
BOUND = SLO(2.0, 0.05)
OUTPUTS, TAIL, IMAGE_TOKENS, MOST_IMAGES = 60, 64, (300, 1000, 4000), 8
TEXT, MOST_TEXT = 60, 16_000  # tokens of the shortest and the longest prompt without images
LONG_TEXT, LONG_OUTPUTS, MOST_OUTPUTS, MEMORY_SHARE = 1000, 200, 2000, 0.24
Sort = Literal["images", "text", "long outputs"]
LOADS: Mapping[tuple[str, Sort], tuple[float, ...]] = {  # requests/s by placement and what is asked
    ("4E2P2D", "images"): (2.0, 8.0, 16.0, 24.0),
    ("6EPD", "images"): (2.0, 8.0, 16.0),
    ("4P4D", "text"): (120.0, 480.0),
    ("2P4D", "long outputs"): (4.0, 8.0, 12.0),
}
ROUTINGS = ("round_robin", "least_loaded")


class Served(NamedTuple):
    """TTFT (s) in the median and at p99, longest gap (s) at p99, share within the SLO, and events simulated."""

    median: float
    late: float
    gap: float
    goodput: float
    events: int


class Replayed(NamedTuple):
    """First token and longest gap (s) of each request, and events that the simulation took."""

    first: list[float]
    gaps: list[float]
    events: int


class Pair(NamedTuple):
    """Served without and with hand-overs."""

    without: Served
    with_: Served


def jobs(rate: float, count: int, sort: Sort, seed: int) -> list[Job]:
    """Requests at random times: of text, with long outputs as well, or of one to eight images."""
    draw, at, found = random.Random(seed), 0.0, list[Job]()
    for number in range(count):
        at += draw.expovariate(rate)
        if sort == "images":
            sizes = [draw.choice(IMAGE_TOKENS) for _ in range(min(MOST_IMAGES, int(draw.paretovariate(1.2))))]
            media = tuple((tokens, f"{number}.{item}") for item, tokens in enumerate(sizes))
            found.append(Job(at, sum(sizes) + TAIL, media, OUTPUTS))
        elif sort == "long outputs":
            text = min(MOST_TEXT, int(LONG_TEXT * draw.paretovariate(1.1)))
            found.append(Job(at, text, (), min(MOST_OUTPUTS, int(LONG_OUTPUTS * draw.paretovariate(1.1)))))
        else:
            found.append(Job(at, min(MOST_TEXT, int(TEXT * draw.paretovariate(1.1))), (), OUTPUTS))
    return found


def replay(placement: str, asked: Sequence[Job], routing: str, hand_over: bool, memory_share: float = 0.9) -> Replayed:
    cluster, transfers = Cluster.of("H100", Placement.parse(placement).size), TransferPolicy(hand_over=hand_over)
    simulator = Simulator(
        SHAPE, BOUND, cluster=cluster, transfers=transfers, routing=routing, memory_share=memory_share
    )
    settings = simulator.settings(placement, shared=True)
    run = SimulatedCluster(
        settings,
        asked,
        cluster=simulator.cluster,
        costs=[simulator.cost_of(place) for place in range(len(settings))],
        model=SHAPE,
        routing=ROUTING_POLICIES[routing],
        frontend=FrontendOptions(max_waiting=4096, failures=NO_RECOVERY),
        interference=1.0,
        shared=True,
        record=False,
    )
    run.run()
    first = [times[0] - job.at for job, times in zip(asked, run.times.values(), strict=True)]
    gaps = [max((after - before for before, after in pairwise(times)), default=0.0) for times in run.times.values()]
    return Replayed(first, gaps, run.events)


def serve(placement: str, draws: Sequence[Sequence[Job]], routing: str, hand_over: bool, memory_share: float) -> Served:
    """Serve all draws of the traffic, one after the other."""
    runs = [replay(placement, asked, routing, hand_over, memory_share) for asked in draws]
    first = [each for run in runs for each in run.first]
    gaps = [each for run in runs for each in run.gaps]
    good = sum(ttft <= BOUND.ttft and gap <= BOUND.tbt for ttft, gap in zip(first, gaps, strict=True))
    cuts = quantiles(first, n=100)
    return Served(cuts[49], cuts[98], quantiles(gaps, n=100)[98], good / len(first), sum(run.events for run in runs))


def pair(placement: str, sort: Sort, rate: float, routing: str, count: int, seeds: int) -> Pair:
    draws = [jobs(rate, count, sort, seed) for seed in range(1, seeds + 1)]
    share = MEMORY_SHARE if sort == "long outputs" else 0.9
    return Pair(*(serve(placement, draws, routing, hand_over, share) for hand_over in (False, True)))


Loads = Mapping[tuple[str, Sort, str, float], Pair]


def run(setting: Setting) -> Result:
    count, seeds = (40, 1) if setting.quick else (240, 3)
    return result(
        {
            (placement, sort, routing, rate): pair(placement, sort, rate, routing, count, seeds)
            for (placement, sort), rates in LOADS.items()
            for routing in ROUTINGS
            for rate in (rates[-1:] if setting.quick else rates)
        },
        count,
        seeds,
    )


def result(loads: Loads, count: int, seeds: int) -> Result:
    return Result(
        name="siblings",
        title="Work that an idle instance takes from a sibling",
        method=(
            f"The cores in virtual time, {SHAPE.name} on H100 by roofline, requests whose sizes have a heavy tail: of "
            f"one to {MOST_IMAGES} images, or of {TEXT} to {MOST_TEXT:,} tokens of text; {OUTPUTS} tokens of output. "
            f"With long outputs: {LONG_TEXT:,} to {MOST_TEXT:,} tokens of text, {LONG_OUTPUTS} to {MOST_OUTPUTS:,} of "
            f"output, on {MEMORY_SHARE:.0%} of each device's memory. {seeds} draws of {count} requests, quantiles of "
            f"all of them; goodput is the share within {BOUND.ttft:g} s and {BOUND.tbt:g} s."
        ),
        tables=[Table("Without and with `hand_over`", COLUMNS, list(rows(loads)))],
        aims=list(aims(loads)),
        values={" ".join(map(str, load)): [list(each) for each in found] for load, found in loads.items()},
    )


COLUMNS = (
    *("placement", "of", "routing", "requests/s", "TTFT p50 s, without", "with", "p99 s, without", "with"),
    *("longest gap p99 s, without", "with", "goodput, without", "with"),
)


def rows(loads: Loads) -> Iterator[list[str]]:
    for (placement, sort, routing, rate), (without, with_) in loads.items():
        figures = [
            f"{each:.3f}" for name in ("median", "late", "gap", "goodput") for each in _both(without, with_, name)
        ]
        yield [placement, sort, routing, f"{rate:g}", *figures]


def _both(without: Served, with_: Served, name: str) -> tuple[float, float]:
    return getattr(without, name), getattr(with_, name)


def aims(loads: Loads) -> Iterator[Aim]:
    """What the default would need: nobody is served worse. Where one is missed, it stays off."""
    worst = max(found.with_.late / found.without.late for found in loads.values())
    best = min(found.with_.late / found.without.late for found in loads.values())
    said = f"{1 - best:.0%} sooner at best, {worst - 1:+.1%} at worst"
    yield Aim("first token at p99 under each load", "at most 1 % later", said, worst <= 1.01)
    lost = max(found.without.goodput - found.with_.goodput for found in loads.values())
    yield Aim("goodput under each load", "none lost", f"{lost:+.3f} of all requests at most", lost <= 0.0)
    waits = [found for found in loads.values() if found.without.gap > BOUND.tbt and found.with_.goodput > 0.9]
    longest = max((found.with_.gap for found in waits), default=0.0)
    before = max((found.without.gap for found in waits), default=0.0)
    said = f"{longest:.3f} s at most, without it {before:.3f} s"
    yield Aim(
        "longest gap at p99 where it was beyond the bound and 90 % are served", "within it", said, longest <= BOUND.tbt
    )
