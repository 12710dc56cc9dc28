"""A shift of recorded traffic on paced pipelines, live: with and without proposals that apply themselves.

TriInfer 4.4's redeploy. Recorded requests (ServeGen's image hour) whose outputs are a quarter as long until the shift,
and as recorded from then on. Three pipelines of four paced instances serve the same requests at the same time: one
stays the best placement of the traffic before, one starts as that and is watched (``AutoApply``, ``Replanner`` and
``DriftDetector`` at their defaults), one is the best fixed placement of the traffic after. The predicate, stated before
the run: from three minutes after the shift on, the watched one serves at least 0.9 of the requests in time that the
best fixed one does.
"""

from __future__ import annotations

import asyncio
import random
import time
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec

from benchmarks.paper_devices import paper_device
from benchmarks.planning.watch import hour
from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting
from trinity.adapt.auto_apply import AutoApply
from trinity.adapt.drift import DriftDetector
from trinity.adapt.replanner import Replanner
from trinity.bench.live_replay import replay
from trinity.core.scheduler import latency_bound
from trinity.costs.budgets import StepBudgets, predict_budgets
from trinity.costs.cluster import Cluster
from trinity.costs.demand import Demand
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import Roofline
from trinity.emulation.model import EmulatedModel, EmulatedShape
from trinity.errors import TrinityWarning
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.planner import HybridPlanner, SearchConfig
from trinity.traces.trace import SLO, Trace, TraceRow

INSTANCES, RATE = 4, 4.0  # requests/s: 0.4 of what the best placement serves before the shift, 0.7 of it after
BEFORE_S, AFTER_S, WITHIN_S, BIN_S = 210.0, 390.0, 180.0, 30.0
SHORTER = 4  # outputs before the shift
LONGEST_OUTPUT, LONGEST_PROMPT = 512, 3000  # tokens; of longer ones the last would end minutes after the run
SHARE = 0.9
SLOW = 2  # the device's speed is divided by it, and passes take 40 ms: what this host adds is small beside them
BOUND, BUDGETED = SLO(ttft=2.0, tbt=0.15), SLO(ttft=2.0, tbt=0.12)
MODEL = get_model_shape("llava-1.5-7b")
POOLS = {"image": 64, "kv": 2600}  # blocks: what the device's memory holds beside the weights
ROLES = ("E", "P", "D", "EP", "ED", "PD", "EPD")
KINDS = ("stays", "watched", "best fixed")


@cache
def cost() -> Roofline:
    fast = paper_device("A100")
    slow = {"flops": fast.flops / SLOW, "bandwidth": fast.bandwidth / SLOW}
    return Roofline(model=MODEL, device=msgspec.structs.replace(fast, pass_s=0.04, memory=36e9, **slow))


@cache
def planner() -> HybridPlanner:
    budgets: dict[str, StepBudgets] = {}
    for roles in ROLES:  # as a pipeline searches them on its cost, with room for what the host adds
        bound = latency_bound(roles, BUDGETED.ttft, BUDGETED.tbt)
        budgets[roles] = predict_budgets(cost().seconds, roles, bound, MODEL.image_tokens)
    cluster = Cluster.of(cost().device, INSTANCES)
    return HybridPlanner(MODEL, BOUND, cluster=cluster, cost=cost(), budgets=budgets, search=SearchConfig(seeds=0))


def requests(seed: int) -> list[TraceRow]:
    """Recorded requests of four a second, as many as ten minutes have and more; outputs as recorded."""
    noise = random.Random(seed)
    fitting = [row for row in hour() if row.output_length <= LONGEST_OUTPUT and row.input_length <= LONGEST_PROMPT]
    every_s = fitting[-1].timestamp / 1000 / len(fitting)
    return [row for row in fitting if noise.random() < RATE * every_s]


def shorter(row: TraceRow) -> TraceRow:
    return msgspec.structs.replace(row, output_length=max(1, row.output_length // SHORTER))


def shifted(rows: Sequence[TraceRow], before_s: float, after_s: float) -> Trace:
    """The first of them, shorter until the shift."""
    until = [row for row in rows if row.timestamp < 1000 * (before_s + after_s)]
    return Trace(shorter(row) if row.timestamp < 1000 * before_s else row for row in until)


class Served(NamedTuple):
    """What a pipeline served; ``done``: what was applied and when (s since the first request), by the watched one."""

    rows: list[TraceRow]
    done: list[tuple[float, str]]
    placement: str


def pipeline(placement: str) -> Pipeline:
    model = EmulatedModel(shape=EmulatedShape.of(MODEL), cost=cost(), scale=2048)
    given: dict[str, Any] = {"cache": CacheConfig(pools=POOLS), "image_cache": False, "prefix_cache": False}
    return Pipeline(model, placement, slo=BUDGETED, max_waiting=round(2 * RATE * BOUND.ttft), **given)


async def serve(placement: str, trace: Trace, watch: bool) -> Served:
    async with pipeline(placement) as pipe:
        replanner = Replanner(DriftDetector(Demand.for_slo(cost(), BOUND)), placement)
        applies = AutoApply(pipe, replanner, planner().plan)
        watching = asyncio.create_task(applies.run()) if watch else None
        began_s = time.time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrinityWarning)  # how late requests were sent is told by the result
            rows = list(await replay(pipe, trace))
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        done = [(each.at_s - began_s, str(each)) for each in applies.decisions]
        return Served(rows, done, str(pipe.placement))


def in_time(rows: Sequence[TraceRow], begin_s: float, end_s: float) -> float:
    """Requests in time a second, of those that came in these seconds."""
    met = sum(BOUND.is_met(row, "guard") for row in rows if 1000 * begin_s <= row.timestamp < 1000 * end_s)
    return met / (end_s - begin_s)


def best_placement(rows: Sequence[TraceRow]) -> str:
    """The planner's choice for the true traffic, known beforehand."""
    return str(planner().plan(Trace(rows)).placement)


async def serve_all(trace: Trace, before: str, after: str) -> dict[str, Served]:
    asked = zip(KINDS, (before, before, after), strict=True)
    tasks = {kind: asyncio.create_task(serve(placed, trace, kind == "watched")) for kind, placed in asked}
    await asyncio.gather(*tasks.values())
    return {kind: task.result() for kind, task in tasks.items()}


def run(setting: Setting) -> Result:
    """Ten minutes, of three pipelines side by side; a plan each beforehand."""
    before_s, after_s = (2.0, 4.0) if setting.quick else (BEFORE_S, AFTER_S)
    rows = requests(seed=0)
    before, after = (
        ("3EP1D", "4EPD") if setting.quick else (best_placement(list(map(shorter, rows))), best_placement(rows))
    )
    served = asyncio.run(serve_all(shifted(rows, before_s, after_s), before, after))
    return result(served, before_s, after_s, (before, after))


def result(served: dict[str, Served], before_s: float, after_s: float, best: tuple[str, str]) -> Result:
    step = min(BIN_S, after_s / 4)
    edges = [number * step for number in range(round((before_s + after_s) / step))]
    bins = {kind: [in_time(each.rows, at, at + step) for at in edges] for kind, each in served.items()}
    from_s, until_s = before_s + min(WITHIN_S, after_s / 2), before_s + after_s
    late = {kind: in_time(each.rows, from_s, until_s) for kind, each in served.items()}
    share = late["watched"] / late["best fixed"] if late["best fixed"] else 0.0
    table = [[f"{at - before_s:g}", *(f"{bins[kind][n]:.2f}" for kind in KINDS)] for n, at in enumerate(edges)]
    sent_late = max(row.late_s or 0.0 for each in served.values() for row in each.rows)
    decided = [[f"{at - before_s:.0f}", what] for at, what in served["watched"].done]
    return Result(
        name="redeploy",
        title="A shift of traffic, with proposals that apply themselves",
        method=_method(best),
        tables=[
            Table("Requests in time a second, by seconds since the shift", ("from", *KINDS), table),
            Table("What was decided, in seconds since the shift", ("at", "decision"), decided),
        ],
        aims=[
            Aim(
                f"requests in time from {WITHIN_S:.0f} s after the shift on, over those of the best fixed placement",
                f">= {SHARE:g}",
                f"{share:.2f}: {late['watched']:.2f} of {late['best fixed']:.2f} a second, {late['stays']:.2f} without",
                share >= SHARE,
            )
        ],
        notes=[
            f"The watched one ended as {served['watched'].placement}. The latest request was sent "
            f"{sent_late * 1e3:.0f} ms after its time, which counts.",
        ],
        values={"in time": bins, "late": late, "share": share, "decisions": served["watched"].done, "best": list(best)},
    )


def _method(best: tuple[str, str]) -> str:
    return (
        f"Live, {INSTANCES} paced instances each on threads (a roofline of {MODEL.name} on half an "
        f"{cost().device.name} with 40 ms a pass), {RATE:g} requests/s of ServeGen's image hour as recorded, outputs a "
        f"quarter as long before the shift; SLO {BOUND.ttft:g} s and {BOUND.tbt:g} s. The planner's best: {best[0]} "
        f"before, {best[1]} after. {KINDS[0].capitalize()}: {best[0]} throughout; {KINDS[1]}: from {best[0]}, "
        f"AutoApply at its defaults; {KINDS[2]}: {best[1]} throughout."
    )
