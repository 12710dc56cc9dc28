"""Requests of a trace at their times: live on a paced emulation, whose stages sleep, and in the simulator."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import NamedTuple

from trinity.core.scheduler import BatchRules
from trinity.costs.budgets import StepBudgets
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import ModelShape
from trinity.emulation.model import EmulatedModel, EmulatedRequest, EmulatedShape
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.placement import Placement
from trinity.request import Output
from trinity.simulation.simulator import Simulator
from trinity.traces.trace import SLO, Trace, TraceRow

VLLM = BatchRules(policy="prefill_first", chunked=False)  # version 0.6.1
CACHE = CacheConfig(pools={"image": 1024, "kv": 8192})


class Served(NamedTuple):
    """A request as an SLO sees it; seconds."""

    ttft_s: float | None
    itl_s: Sequence[float]
    finish_reason: str


class System(NamedTuple):
    """A placement of a paper's system, what its steps cost, and its settings."""

    placement: str
    cost: LinearCost
    spread: int = 1
    rules: BatchRules | None = None


def poisson(rate: float, count: int, row: Callable[[float], TraceRow], seed: int) -> Trace:
    """Requests at random times, ``rate`` a second; ``row`` makes one of its arrival in ms."""
    draw, at, rows = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        rows.append(row(1000 * at))
    return Trace(rows)


def by_roles(media: int, prompt: int) -> dict[str, StepBudgets]:
    """Budgets in which every stage works on one request at a time (EPDServe E.1): its media, its prompt, its decode."""
    both = StepBudgets(token_budget=prompt, image_budget=media)
    return {
        "E": StepBudgets(image_budget=media),
        "P": StepBudgets(token_budget=prompt),
        "EP": both,
        "EPD": both,
        "D": StepBudgets(token_budget=1),
    }


def simulate(shape: ModelShape, system: System, trace: Trace, budgets: Mapping[str, StepBudgets]) -> list[Served]:
    """Replay a trace on the cores in virtual time, or compiled where that is the same."""
    devices = sum(map(int, filter(str.isdigit, system.placement)))
    simulator = Simulator(
        shape,
        SLO(60.0, 10.0),
        cluster=Cluster.of("A100", devices),
        cost=system.cost,
        budgets=budgets,
        rules=system.rules,
        spread=system.spread,
    )
    return [
        Served(each.ttft_s, each.itl_s, each.finish_reason)
        for each in simulator.replay(trace, system.placement).outcomes
    ]


async def serve(
    shape: ModelShape, system: System, trace: Trace, budgets: Mapping[str, StepBudgets], scale: float
) -> list[Served]:
    """Serve a trace on live instances whose steps, and the times between requests, take ``scale`` times as long."""
    cost, slow = system.cost, scale
    steps = LinearCost(
        step_s=cost.step_s * slow,
        decode_s=cost.decode_s * slow,
        prefill_s=cost.prefill_s * slow,
        encode_s=cost.encode_s * slow,
        media_s=cost.media_s * slow,
    )
    model = EmulatedModel(shape=EmulatedShape.of(shape), cost=steps, scale=2048)
    instances = [
        Instance(roles, name, rules=limit_rules(system.rules or BatchRules(), budgets[roles]))
        for name, roles in Placement.parse(system.placement).instances()
    ]
    async with Pipeline(model, instances, spread=system.spread, cache=CACHE) as pipe:
        loop = asyncio.get_running_loop()
        began = loop.time() + 0.2

        async def ask(number: int, row: TraceRow) -> Served:
            await asyncio.sleep(began + row.timestamp / 1000 * scale - loop.time())
            try:
                output: Output = await pipe.complete(EmulatedRequest.of(row, number))
            except Exception as error:
                return Served(None, (), type(error).__name__)
            first = None if output.ttft_s is None else output.ttft_s / scale
            return Served(first, [gap / scale for gap in output.itl_s], output.finish_reason)

        return list(await asyncio.gather(*(ask(*each) for each in enumerate(trace))))


def limit_rules(rules: BatchRules, budgets: StepBudgets) -> BatchRules:
    """Rules of a live instance with these budgets."""
    return replace(rules, token_budget=budgets.token_budget, image_budget=budgets.image_budget)


def mean_ttft(served: Sequence[Served]) -> float:
    """Mean seconds to the first token, of those that have one."""
    return mean(each.ttft_s for each in served if each.ttft_s is not None)


def attainment(served: Sequence[Served], slo: SLO) -> float:
    """Share of requests with TTFT and mean gap within the bounds."""
    return sum(slo.is_met(each, "tpot") for each in served) / len(served)


def lost(served: Sequence[Served]) -> int:
    """Count the requests that did not end with all their tokens."""
    return sum(each.finish_reason != "length" for each in served)
