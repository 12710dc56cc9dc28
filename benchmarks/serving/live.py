"""Ways to place and batch one model on the cores of this machine: live, in turns, over the same requests."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.setting import ForeignLoad
from trinity import traces
from trinity.bench.live_replay import replay
from trinity.bench.lookalike import Lookalikes
from trinity.core.scheduler import BatchRules
from trinity.costs.budgets import StepBudgets
from trinity.emulation.model import EmulatedModel
from trinity.errors import TrinityWarning
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.metrics import percentile
from trinity.pipeline import Pipeline
from trinity.placement import Placement
from trinity.remote.supervision.process_config import kept_launcher
from trinity.request import Output
from trinity.traces.trace import COMPLETE, SLO, SLORule, Trace, TraceImage, TraceRow

POOLS = {"image": 24, "kv": 800}
PACED_POOLS = {"image": 64, "kv": 4096}
UNCACHED: dict[str, Any] = {"image_cache": False, "prefix_cache": False}
BOTH: tuple[SLORule, ...] = ("p90", "p99")
HOLDS = 0.9  # of the requests in time: a rate that counts for goodput
BURST = 6
THINNED = 10  # of ServeGen's arrivals one in so many: ten a second, often several at once, are more than fits here
EASY = StepBudgets(token_budget=512, image_budget=576)


@dataclass(frozen=True)
class Way:
    """``budgets`` None: searched under the SLO when it starts, as a pipeline does."""

    name: str
    instances: tuple[Instance, ...]
    rules: BatchRules = field(default_factory=BatchRules)
    budgets: StepBudgets | None = EASY


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def placed(placement: str, **options: Any) -> tuple[Instance, ...]:
    """Each instance on a core of its own as far as there are cores, with caches off."""
    known = cores()
    parsed = enumerate(Placement.parse(placement).instances())
    return tuple(Instance(roles, cores=(known[at % len(known)],), **UNCACHED, **options) for at, (_, roles) in parsed)


def traffic(count: int, image_tokens: int, outputs: int, images: int = 1, text: int = 40) -> Trace:
    """Requests of up to ``images`` images, some text, ``outputs`` tokens; every tenth arrival that ServeGen recorded.

    No two have an image in common: what is compared is work, not caches.
    """
    arrivals = [row.timestamp for row in traces.read_shipped("servegen-image-1h")][::THINNED][:count]
    rows = []
    for number, at in enumerate(arrivals):
        media = [TraceImage(width=336, height=336, tokens=image_tokens)] * (1 + number % images)
        length = text + image_tokens * len(media)
        row = TraceRow(timestamp=at, input_length=length, text_length=text, output_length=outputs, images=media)
        rows.append(row)
    return Trace(rows)


@asynccontextmanager
async def opened(
    model: Path | EmulatedModel, ways: Sequence[Way], slo: SLO | None = None, dtype: str = "bfloat16"
) -> AsyncIterator[dict[str, Pipeline]]:
    """A pipeline for each way, all at once: those that do not serve take no CPU. Paced ones run on threads here."""
    paced = isinstance(model, EmulatedModel)
    where: dict[str, Any] = (
        {"cache": CacheConfig(pools=PACED_POOLS)}
        if paced
        else {"cache": CacheConfig(pools=POOLS), "hosting": "process", "dtype": dtype}
    )
    async with AsyncExitStack() as stack:
        if not paced:
            await stack.enter_async_context(kept_launcher())
        made: dict[str, Pipeline] = {}
        for way in ways:
            pipe = Pipeline(model, list(way.instances), rules=way.rules, budgets=way.budgets, slo=slo, **where)
            made[way.name] = await stack.enter_async_context(pipe)
        yield made


async def exact(model: Path, ways: Sequence[Way], row: TraceRow) -> str:
    """Of each way in float32, whether it gives the tokens of the model's own generate(); in words."""
    from trinity.testing.oracle import Oracle

    oracle = await asyncio.to_thread(Oracle, model)
    wrong: list[str] = []
    async with opened(model, ways, dtype="float32") as pipes:
        for name, pipe in pipes.items():
            request = await asyncio.to_thread(Lookalikes(pipe.processor, "exact/"), row, 0)
            wanted = await asyncio.to_thread(oracle.generate, request)
            if (await pipe.complete(request)).token_ids != wanted:
                wrong.append(name)
    told = f"not of {', '.join(wrong)}" if wrong else "of every way"
    return f"In float32 the tokens {told} are those of generate(), for a request of {row.output_length} tokens."


async def at_rest(pipe: Pipeline, row: TraceRow, turns: int = 3) -> tuple[float, float]:
    """Seconds to the first token and between tokens of a request that is alone: the least of a few, after a first."""
    outputs: list[Output] = []
    for number in range(turns + 1):
        outputs.append(await pipe.complete(await asyncio.to_thread(Lookalikes(pipe.processor, "rest/"), row, number)))
    gaps = [sum(each.itl_s) / max(1, len(each.itl_s)) for each in outputs[1:]]
    return min(each.ttft_s or 0.0 for each in outputs[1:]), min(gaps)


async def capacity(pipe: Pipeline, trace: Trace, turns: int = 2) -> float:
    """Requests a second of a burst that comes at once, the last one of ``turns``: the first makes code for shapes."""
    rows = [row.request_at(0.0) for row in list(trace)[:BURST]]
    seconds = 0.0
    for _ in range(turns):
        began = time.monotonic()
        await served(pipe, Trace(rows))
        seconds = time.monotonic() - began
    return len(rows) / seconds


async def served(pipe: Pipeline, trace: Trace, rate: float | None = None) -> Trace:
    """As ``replay``; a late client shows in the rows (``late_s``), and is reported with the figures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrinityWarning)
        return await replay(pipe, trace, rate=rate)


Cell = tuple[str, float]  # a way's name, a rate
Rounds = dict[Cell, list[Trace]]


async def in_turns(
    pipes: Mapping[str, Pipeline], trace: Trace, rates: Iterable[float], rounds: int, until: float
) -> tuple[Rounds, float]:
    """Every way at every rate, ``rounds`` times in turns (A B A B); no cell begins after ``until``.

    Also the largest share of the machine that others took meanwhile.
    """
    found: Rounds = {}
    foreign = 0.0
    known = list(rates)
    for _ in range(rounds):
        for rate in known:
            for name, pipe in pipes.items():
                if time.monotonic() < until:
                    with ForeignLoad() as load:
                        rows = await served(pipe, trace, rate)
                    foreign = max(foreign, load.share)
                    found.setdefault((name, rate), []).append(rows)
    return found, foreign


def unreached(found: Rounds, cells: int) -> list[str]:
    """A note on what the minutes were too few for."""
    left = cells - sum(map(len, found.values()))
    return [f"{left} of {cells} rounds were not reached in the minutes given: give --minutes more."] if left else []


def seen(rounds: Sequence[Trace], slo: SLO | None = None) -> dict[str, float]:
    """Figures of all rounds of one cell together: seconds, tokens a second, shares."""
    rows = [row for trace in rounds for row in trace]
    done = [row for row in rows if row.finish_reason in COMPLETE]
    gaps = sorted(gap for row in done for gap in row.itl_s)
    ttfts = sorted(row.ttft_s for row in done if row.ttft_s is not None)
    spans = [span(trace) for trace in rounds]
    tokens = sum(row.output_length for row in done)
    figures = {"requests": len(rows), "failed": len(rows) - len(done), "late_s": max((r.late_s or 0.0) for r in rows)}
    figures |= {"tokens_per_s": tokens / sum(spans), "requests_per_s": len(done) / sum(spans)}
    for percent in (50, 90, 99):
        figures[f"ttft_p{percent}_s"] = percentile(ttfts, percent) if ttfts else float("nan")
        figures[f"gap_p{percent}_s"] = percentile(gaps, percent) if gaps else float("nan")
    figures["gap_max_s"] = gaps[-1] if gaps else float("nan")
    if slo is not None:
        figures |= {f"attained_{rule}": sum(slo.is_met(row, rule) for row in rows) / len(rows) for rule in BOTH}
    return figures


def span(trace: Trace) -> float:
    """Seconds from the first arrival to the last token."""
    rows = list(trace)
    first = min(row.timestamp for row in rows) / 1000
    return max(row.timestamp / 1000 + (row.latency_s or 0.0) for row in rows) - first


def attained(rounds: Sequence[Trace], slo: SLO, rule: SLORule) -> float:
    rows = [row for trace in rounds for row in trace]
    return sum(slo.is_met(row, rule) for row in rows) / len(rows)


def goodput(found: Rounds, name: str, slo: SLO, rule: SLORule) -> tuple[float, bool]:
    """The rate at which nine tenths of the requests are in time, and whether it was seen to end there.

    On the line between the last rate of the ladder that holds and the first that does not; 0 where the lowest does not.
    """
    held, share = 0.0, 1.0
    for rate in sorted(rate for way, rate in found if way == name):
        now = attained(found[name, rate], slo, rule)
        if now < HOLDS:
            return (held + (rate - held) * (share - HOLDS) / (share - now) if held else 0.0), True
        held, share = rate, now
    return held, False


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"
