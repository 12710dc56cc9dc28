"""Ablation as TriInfer's figure 10, live: disaggregation, stage-level batching and searched budgets, one by one."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.paper_devices import paper_device
from benchmarks.report import Result, Table
from benchmarks.serving.live import (
    BOTH,
    EASY,
    POOLS,
    UNCACHED,
    Rounds,
    Way,
    at_rest,
    attained,
    capacity,
    exact,
    goodput,
    in_turns,
    opened,
    placed,
    seen,
    served,
    traffic,
    unreached,
)
from benchmarks.setting import MAX_FOREIGN_SHARE, ForeignLoad, Setting, disturbed
from trinity.core.scheduler import BatchRules, latency_bound
from trinity.costs.budgets import StepBudgets, predict_budgets
from trinity.costs.cluster import Cluster
from trinity.costs.model_config import read_model_shape
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import CostTables, Roofline
from trinity.emulation.model import EmulatedModel, EmulatedShape
from trinity.instance import Instance, name_instances
from trinity.memory.cache_config import CacheConfig
from trinity.placement import Placement
from trinity.planner import HybridPlanner, SearchConfig
from trinity.runtime.loader import ServingConfig, load_instances, make_processor
from trinity.runtime.profiler import profile_tables
from trinity.traces.synthetic import synthesise
from trinity.traces.trace import SLO, Trace, TraceRow

DISAGGREGATED = ("EP+D", "ED+P", "PD+E")  # every method of two instances but two of EPD
EVEN = "E+P+D"
UNBATCHED = BatchRules(policy="prefill_first", chunked=False, limit_encodes=False)
UNBOUNDED = BatchRules(chunked=False, limit_encodes=False)
OPEN = StepBudgets(token_budget=2048, image_budget=1)
OUTPUTS = 24
LADDER = (0.4, 0.6, 0.8, 1.0, 1.2)  # of the simulated goodput
SHORT = (0.4, 0.7, 1.0)  # of what two EPD instances do of a burst: real requests take their time
EASE = (6.0, 4.0)  # times the TTFT and the TBT of a request that is alone
SPENT = 0.85
REAL = 0.6  # of the minutes; the emulated ones run side by side
END_S = 10.0  # of an emulated round, from the last request on
LEAST, FEW = 60, 4  # requests of an emulated round, and of the one before them

NEXT = get_model_shape("llava-next-7b")
# slow passes: what the host adds is small beside them
DEVICE = msgspec.structs.replace(paper_device("A100"), pass_s=0.04)
COST = Roofline(model=NEXT, device=DEVICE)
PACED = EmulatedModel(shape=EmulatedShape.of(NEXT), cost=COST, scale=2048)
PACED_SLO = SLO(ttft=2.0, tbt=0.15)
BUDGETED = SLO(ttft=2.0, tbt=0.12)  # of the budgets: a step as long as the bound is late by what the host adds
INSTANCES = 6
COUNTS: dict[str, Any] = {"contexts": (1, 512), "rows": (1, 4, 16), "tokens": (1, 64, 256, 1024), "images": (1, 2, 4)}
QUICKLY: dict[str, Any] = {"contexts": (1,), "rows": (1, 4), "tokens": (1, 32), "images": (1,), "repeats": 1}
PLANNED = 1200  # requests of the trace that the planner is given


@dataclass
class Seen:
    """The offered load, its SLO, and the result."""

    slo: SLO
    rates: Sequence[float]
    found: Rounds = field(default_factory=dict)
    foreign: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


def variants(name: str, instances: tuple[Instance, ...]) -> list[Way]:
    """Algorithm 1 as it is; without the budgets; without stage-level batching: whole requests, prefill first."""
    return [
        Way(f"{name}, Algorithm 1", instances, budgets=None),
        Way(f"{name}, no budgets", instances, UNBOUNDED, OPEN),
        Way(f"{name}, no stage-level batching", instances, UNBATCHED, OPEN),
    ]


# ---------------------------------------------------------------- a real model on two cores


def measured(model: Path, quick: bool) -> CostTables:
    """Seconds of a step of one instance on one core, from which budgets are searched: once, and not by every way."""
    counts = QUICKLY if quick else COUNTS
    processor = make_processor(model)
    try:
        (loaded,) = load_instances(
            ServingConfig(model, dtype="bfloat16", cache=CacheConfig(pools=POOLS)), name_instances(placed("EPD")), None
        )
        return profile_tables([loaded], processor, **counts)
    finally:
        processor.close()


def budgeted(way: Way, tables: CostTables, slo: SLO, image_tokens: int) -> Way:
    """With each instance's budgets by its roles (Algorithm 1, lines 1 to 6), where the way asks for searched ones."""
    if way.budgets is not None:
        return way

    def rules(roles: str) -> BatchRules:
        limit = latency_bound(roles, slo.ttft, slo.tbt)
        found = predict_budgets(tables.seconds, roles, limit, image_tokens, warn=False)
        return replace(way.rules, token_budget=found.token_budget, image_budget=found.image_budget)

    return replace(way, instances=tuple(replace(each, rules=rules(each.roles)) for each in way.instances))


def real_ways() -> list[Way]:
    """All of two instances under Algorithm 1; E, P and D on what cores there are; the ablations of two of them."""
    chosen = [variants(each, placed(each)) for each in ("2EPD", *DISAGGREGATED)]
    even = Way(f"{EVEN}, Algorithm 1", placed(EVEN), budgets=None)
    return [*(each[0] for each in chosen), even, *chosen[0][1:], *chosen[1][2:]]


async def real(model: Path, setting: Setting) -> Seen:
    until = time.monotonic() + 60 * setting.minutes
    image_tokens, outputs = read_model_shape(model).image_tokens, 4 if setting.quick else OUTPUTS
    ways = real_ways()[:1] + real_ways()[-1:] if setting.quick else real_ways()
    row = next(iter(traffic(1, image_tokens, outputs)))
    tables = await asyncio.to_thread(measured, model, setting.quick)
    told = await exact(model, [Way(each.name, each.instances, each.rules, EASY) for each in ways[:2]], row)
    async with opened(model, [Way("alone", placed("EPD"), budgets=EASY)]) as pipes:
        ttft, gap = await at_rest(pipes["alone"], row, 1 if setting.quick else 3)
    slo = SLO(ttft=math.ceil(10 * EASE[0] * ttft) / 10, tbt=math.ceil(200 * EASE[1] * gap) / 200)
    ways = [budgeted(way, tables, slo, image_tokens) for way in ways]
    async with opened(model, ways) as pipes:
        burst = await capacity(pipes[ways[0].name], traffic(6, image_tokens, outputs))
        for pipe in pipes.values():
            await capacity(pipe, traffic(2, image_tokens, 4), turns=1)  # code for new shapes is made, pages are touched
        rates = [share * burst for share in (SHORT[:1] if setting.quick else SHORT)]
        seconds = SPENT * (until - time.monotonic()) / (len(ways) * sum(1 / rate for rate in rates))
        count = 3 if setting.quick else max(8, int(seconds))
        found, foreign = await in_turns(pipes, traffic(count, image_tokens, outputs), rates, 1, until)
    facts = {"exact": told, "burst": burst, "count": count, "cells": len(ways) * len(rates)}
    budgets = {f"{way.name}, {each.name or each.roles}": each.rules for way in ways for each in way.instances}
    facts["budgets"] = {
        name: [rules.token_budget, rules.image_budget] for name, rules in budgets.items() if rules is not None
    }
    return Seen(slo, rates, found, foreign, facts)


# ---------------------------------------------------------------- paced: six instances of LLaVA-NeXT-7B


def paced_ways(chosen: str) -> list[Way]:
    def instances(placement: str) -> tuple[Instance, ...]:
        return tuple(Instance(roles, **UNCACHED) for _, roles in Placement.parse(placement).instances())

    each = INSTANCES // 3
    even = f"{each}E{each}P{each}D"
    return [*variants(chosen, instances(chosen)), *variants(even, instances(even))[::2]]


def textcaps(count: int, seed: int) -> Trace:
    return synthesise("TextCaps", count, visual_tokens=NEXT.visual_tokens, rate=1.0, seed=seed)


def at_rate(way: Way, rate: float, count: int) -> list[TraceRow]:
    """One way at one rate, in a process that does nothing else."""

    async def once() -> Trace:
        async with opened(PACED, [way], BUDGETED) as pipes:
            return await served(pipes[way.name], textcaps(count, seed=2), rate)

    return list(asyncio.run(once()))


def side_by_side(ways: Sequence[Way], rates: Sequence[float], count: int, until: float) -> tuple[Rounds, float]:
    """All ways at the same time, rate after rate; none begins after ``until``. Also others' largest share.

    A first round of a few requests is left out: processes start in it.
    """
    found: Rounds = {}
    foreign = 0.0
    with ProcessPoolExecutor(len(ways), mp_context=multiprocessing.get_context("spawn")) as pool:
        if time.monotonic() < until:
            list(pool.map(at_rate, ways, repeat(rates[0]), repeat(FEW)))
        for rate in rates:
            if time.monotonic() < until:
                with ForeignLoad() as load:
                    made = list(pool.map(at_rate, ways, repeat(rate), repeat(count)))
                foreign = max(foreign, load.share)
                found |= {(way.name, rate): [Trace(rows)] for way, rows in zip(ways, made, strict=True)}
    return found, foreign


def fitting(seconds: float, rates: Sequence[float]) -> int:
    """How many requests at each rate take so many seconds, the ends of the last ones and a first round included."""
    return max(LEAST, int((seconds - END_S * (1 + len(rates))) / sum(1 / rate for rate in rates)))


def paced(setting: Setting) -> Seen:
    """What the planner chooses on other requests, against as many E, P and D (TriInfer 5.3)."""
    until = time.monotonic() + 60 * setting.minutes
    planner = HybridPlanner(
        NEXT,
        PACED_SLO,
        cluster=Cluster(devices=(DEVICE,) * INSTANCES),
        rule="p90",
        search=SearchConfig(least_requests=PLANNED),
    )
    plan = planner.plan(textcaps(PLANNED, seed=1))
    ways = paced_ways(plan.placement)
    ways = [ways[0], ways[-1]] if setting.quick else ways
    rates = [share * plan.best.goodput["p90"] for share in (LADDER[:1] if setting.quick else LADDER)]
    count = 6 if setting.quick else fitting(SPENT * (until - time.monotonic()), rates)
    found, foreign = side_by_side(ways, rates, count, until)
    told = {"plan": plan.placement, "simulated": plan.best.goodput["p90"], "count": count}
    told["cells"] = len(ways) * len(rates)
    return Seen(PACED_SLO, rates, found, foreign, told)


# ---------------------------------------------------------------- both


def run(setting: Setting) -> Result:
    model = setting.pick("llava-110m", "llava")
    first, second = (replace(setting, minutes=share * setting.minutes) for share in (REAL, 1 - REAL))
    return result({model.name: asyncio.run(real(model, first)), "emulated": paced(second)}, model.name)


def result(kinds: dict[str, Seen], name: str) -> Result:
    own, emulated = kinds[name], kinds["emulated"]
    noisy = [kind for kind, each in kinds.items() if each.foreign > MAX_FOREIGN_SHARE]
    return Result(
        name="ablation",
        title="Ablation, live (TriInfer figure 10)",
        method=(
            f"Real: {name} in bfloat16, each instance a process with one thread, on a core of its own as far as two go "
            f"({EVEN} has three); requests of one image, 40 tokens of text and {OUTPUTS} of output, "
            f"{own.facts['count']} at each rate, every tenth arrival that ServeGen recorded. SLO {words(own.slo)}: "
            f"{EASE[0]:g} and {EASE[1]:g} times what a request alone takes. {own.facts['exact']} "
            f"Emulated: {NEXT.name}, {PACED}; {INSTANCES} instances, requests like TextCaps' at random times, "
            f"{emulated.facts['count']} at each rate, SLO {words(emulated.slo)}; the planner chose "
            f"{emulated.facts['plan']} on other requests (simulated goodput {emulated.facts['simulated']:.2f}); all "
            "ways are served at the same time, each in a process of its own, which takes a fifth of a core. "
            "Algorithm 1 has budgets searched under the SLO on costs measured before; no budgets: decodes first, whole "
            "prompts, any number of images; no stage-level batching: besides, decodes wait while there is anything to "
            "prefill or encode. Goodput in requests a second, between two rates on the line; wall time, caches off, "
            "real ways in turns."
        ),
        tables=[table for kind, each in kinds.items() for table in (goodputs(kind, each), attainments(kind, each))],
        notes=[
            *disturbed(noisy),
            *(f"{kind}: {note}" for kind, each in kinds.items() for note in unreached(each.found, each.facts["cells"])),
            *(note for kind, each in kinds.items() for note in compared(kind, each)),
        ],
        values={kind: values(each) for kind, each in kinds.items()},
    )


def words(slo: SLO) -> str:
    return f"{slo.ttft:g} s and {slo.tbt * 1e3:g} ms"


def names(each: Seen) -> list[str]:
    return list(dict.fromkeys(way for way, _ in each.found))


def shown(each: Seen, way: str, rule: Any) -> str:
    rate, ended = goodput(each.found, way, each.slo, rule)
    return f"{rate:.2f}" if ended else f">= {rate:.2f}"


def goodputs(kind: str, each: Seen) -> Table:
    rows = []
    for way in names(each):
        top = max(rate for known, rate in each.found if known == way)
        last = seen(each.found[way, top])
        figures = [f"{last['ttft_p50_s']:.2f}", f"{last['gap_p50_s'] * 1e3:.0f}", f"{last['gap_p99_s'] * 1e3:.0f}"]
        rows.append([way, *(shown(each, way, rule) for rule in BOTH), *figures])
    header = ("way", "goodput, 90 % rule", "99 % rule", "TTFT p50 at the top, s", "TBT p50, ms", "p99, ms")
    return Table(f"Goodput, {kind}", header, rows)


def attainments(kind: str, each: Seen) -> Table:
    rows = []
    for way in names(each):
        cells = []
        for rate in each.rates:
            rounds = each.found.get((way, rate))
            cells.append(
                "-" if rounds is None else " / ".join(f"{attained(rounds, each.slo, rule):.0%}" for rule in BOTH)
            )
        rows.append([way, *cells])
    header = ("way", *(f"{rate:.2f}/s" for rate in each.rates))
    return Table(f"Requests in time by the 90 % and the 99 % rule, {kind}", header, rows)


def compared(kind: str, each: Seen) -> list[str]:
    """The best way against what lacks one thing of it, by the 99 % rule."""
    rates = {way: goodput(each.found, way, each.slo, "p99")[0] for way in names(each)}
    best = max(rates, key=lambda way: rates[way])
    placement = best.partition(", ")[0]
    told = []
    for way, rate in rates.items():
        same, _, kept = way.partition(", ")
        if way != best and (same == placement or kept == "Algorithm 1"):
            lost = f"{best} has {rates[best] / rate:.2f} times the goodput of {way}" if rate else f"{way} has none"
            told.append(f"{kind}, 99 % rule: {lost}.")
    return told


def values(each: Seen) -> dict[str, Any]:
    return {
        "slo": [each.slo.ttft, each.slo.tbt],
        "rates": list(each.rates),
        "goodput": {way: {rule: goodput(each.found, way, each.slo, rule) for rule in BOTH} for way in names(each)},
        "figures": {f"{way} at {rate:.3f}": seen(rounds, each.slo) for (way, rate), rounds in each.found.items()},
        "foreign_load": each.foreign,
        **each.facts,
    }
