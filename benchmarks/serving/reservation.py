"""KV blocks at admission or as requests decode, where they ask for 2,048 tokens and use 100; policies and queue orders.

Live on one paced instance (cores, threads, blocks are real; stages wait), and simulated for LLaVA-1.5-7B on H100s. Then
every batching policy and queue order on a recorded trace in the simulator.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from benchmarks.paper_devices import paper_cluster
from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting
from trinity import traces
from trinity.core.instance.settings import RESERVATIONS, Reservation
from trinity.core.scheduler import BatchRules, Order, Policy
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.errors import TraceTooShort
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.simulation.simulator import Simulator
from trinity.tables import percentile
from trinity.traces.goodput import ServeFunction, goodput
from trinity.traces.trace import SLO, SLORule, Trace, TraceImage, TraceRow

ASKED, USED = 2048, 100
COST = LinearCost(step_s=0.008, decode_s=5e-5, prefill_s=1.5e-5, source="made up: steps of a 7B model on a fast device")
BLOCKS = 700  # of 16 tokens: four requests in full, fifteen by what they use
BOUND = SLO(4.0, 0.1)
POLICIES: tuple[Policy, ...] = ("alg1", "time", "prefill_first")
RULES: tuple[SLORule, ...] = ("guard", "p99")
ORDERS: tuple[Order, ...] = ("fcfs", "sjf", "deadline")
PLACEMENTS = ("4EPD", "1EP3D")  # where all stages are batched together, and where decode is alone
STRICT = SLO(1.0, 0.06)
RESERVING = (
    "reservation",
    "most at once",
    "mean at once",
    "requests/s",
    "tokens/s",
    "preempted",
    "TTFT p50",
    "TBT p99",
)


@dataclass
class Run:
    """What one serving of the requests came to; ``rows`` that decoded in each step, with its seconds."""

    rows: list[tuple[float, int]]
    seconds: float
    preemptions: int
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def most(self) -> int:
        return max(rows for _, rows in self.rows)

    @property
    def mean(self) -> float:
        return sum(seconds * rows for seconds, rows in self.rows) / sum(seconds for seconds, _ in self.rows)

    @property
    def rate(self) -> float:
        return len(self.ttfts) / self.seconds

    def figures(self) -> dict[str, float]:
        out = len(self.ttfts) + len(self.gaps)
        return {
            "most": self.most,
            "mean": self.mean,
            "requests_s": self.rate,
            "tokens_s": out / self.seconds,
            "preemptions": self.preemptions,
            "ttft_p50": percentile(sorted(self.ttfts), 50),
            "tbt_p99": percentile(sorted(self.gaps), 99),
        }


# ---------------------------------------------------------------- live


async def live(reservation: Reservation, count: int) -> Run:
    """All at once to one paced instance; every reader leaves after 100 of the 2,048 tokens that it asked for."""
    paced = EmulatedModel(shape=LLAVA_15_7B, cost=COST, scale=2048)
    pools = {"image": 4, "kv": BLOCKS}
    async with Pipeline(
        paced, "EPD", cache=CacheConfig(pools=pools), prefix_cache=False, reservation=reservation
    ) as pipe:
        began = time.monotonic()
        read = await asyncio.gather(*(_read(pipe, number) for number in range(count)))
        seconds = time.monotonic() - began
        steps = [(each.duration_s, int(each.args.get("decodes", 0))) for each in pipe.timeline.slices()]
        preemptions = sum(host.core.state.preemptions for host in pipe.hosts.values())
    run = Run([each for each in steps if each[1]], seconds, preemptions)
    for number, (times, tokens) in enumerate(read):
        run.ttfts.append(times[0] - began)
        run.gaps += [after - before for before, after in pairwise(times)]
        run.tokens[str(number)] = tokens
    return run


async def _read(pipe: Pipeline, number: int) -> tuple[list[float], list[int]]:
    request = EmulatedRequest(text_tokens=600, max_tokens=ASKED, text=f"text{number}")
    times: list[float] = []
    tokens: list[int] = []
    async with pipe.stream(request) as stream:
        async for token in stream:
            times.append(time.monotonic())
            tokens.append(token.id)
            if len(tokens) == USED:
                break
    return times, tokens


# ---------------------------------------------------------------- simulated


def asked(count: int, output: Callable[[random.Random], int]) -> Trace:
    """All within a second: an image of 576 visual tokens and 40 tokens of text each."""
    draw, image = random.Random(0), TraceImage(width=336, height=336, tokens=576)
    rows = [
        TraceRow(timestamp=at, input_length=616, text_length=40, output_length=output(draw), images=[image])
        for at in sorted(draw.uniform(0, 1000) for _ in range(count))
    ]
    return Trace(rows)


def simulated(placement: str, size: int, trace: Trace, **options: Any) -> Run:
    """LLaVA-1.5-7B on H100s by the roofline."""
    simulator = Simulator("llava-1.5-7b", BOUND, cluster=paper_cluster("H100", size), **options)
    found = simulator.replay(trace, placement, record=True)
    rows = [(each.duration_s, int(each.args.get("decodes", 0))) for each in found.timeline if each.lane != "migration"]
    run = Run([each for each in rows if each[1]], found.duration_s, found.preemptions)
    for outcome in found.outcomes:
        assert outcome.ttft_s is not None
        run.ttfts.append(outcome.ttft_s)
        run.gaps += list(outcome.itl_s)
    return run


OUTPUTS: dict[str, Callable[[random.Random], int]] = {
    "100 tokens each": lambda draw: USED,
    "300 tokens in the mean, exponential": lambda draw: min(2000, 1 + int(draw.expovariate(1 / 300))),
}


def reservations(count: int) -> dict[str, Run]:
    """Both reservations, and the full one of a user who knows the length of every output."""
    runs: dict[str, Run] = {}
    for what, output in OUTPUTS.items():
        trace = asked(count, output)
        for placement, size in (("EPD", 1), ("EP+D", 2), ("E+P+D", 3)):
            for reservation in RESERVATIONS:
                name = f"{placement}, {what}: {reservation}"
                runs[name] = simulated(placement, size, trace, reservation=reservation, ask=ASKED)
            runs[f"{placement}, {what}: full, length known"] = simulated(placement, size, trace)
    return runs


# ---------------------------------------------------------------- policies and orders


class Found(NamedTuple):
    """Goodput by 90 % of gaps with the guard, and by 99 %; percentiles in seconds."""

    guard: float
    p99: float
    ttft: float
    tbt: float


def recorded(count: int) -> Trace:
    """As many requests like those of the hour of production image traffic that trinity ships."""
    return traces.resample(traces.read_shipped("servegen-image-1h"), count, seed=0)


def policies(trace: Trace) -> dict[tuple[str, str, str], Found]:
    """The percentiles are at one rate for all: nine tenths of the placement's best goodput."""
    found: dict[tuple[str, str, str], Found] = {}
    for placement in PLACEMENTS:
        served = {(policy, order): _serving(placement, policy, order) for policy in POLICIES for order in ORDERS}
        guard, p99 = ({key: _goodput(each, trace, rule) for key, each in served.items()} for rule in RULES)
        best = max(guard.values())
        offered = trace.scale(rate=0.9 * best) if best else trace  # none: of --quick
        for key, serve in served.items():
            outcomes = serve(offered)
            ttfts = sorted(each.ttft_s for each in outcomes if each.ttft_s is not None)
            gaps = sorted(gap for each in outcomes for gap in each.itl_s)
            found[placement, *key] = Found(guard[key], p99[key], percentile(ttfts, 99), percentile(gaps, 99))
    return found


def _serving(placement: str, policy: Policy, order: Order) -> ServeFunction:
    rules = BatchRules(policy=policy, order=order)
    return Simulator("llava-1.5-7b", STRICT, cluster=paper_cluster("H100", 4), rules=rules).serve(placement)


def _goodput(serve: ServeFunction, trace: Trace, rule: SLORule) -> float:
    try:
        return goodput(serve, trace, STRICT, rule=rule).rate
    except TraceTooShort:
        return 0.0  # of --quick


# ---------------------------------------------------------------- what is told


def run(setting: Setting) -> Result:
    result = Result(
        "reservation",
        "Reservation of KV blocks, batching policies and queue orders",
        f"Requests ask for {ASKED:,} tokens and use fewer. Live: one paced instance (emulation: stages wait, all "
        f"else is real), {BLOCKS} KV blocks, 600 tokens of prompt, readers leave after {USED} tokens, full and "
        "optimistic in turns. Simulated: LLaVA-1.5-7B on H100s by the roofline, all requests within a second.",
    )
    repeats, count = (1, 6) if setting.quick else (2, 24)
    setting.settle()
    runs = [(each, asyncio.run(live(each, count))) for _ in range(repeats) for each in RESERVATIONS]
    _live(result, runs)
    _simulated(result, reservations(40 if setting.quick else 400))
    _policies(result, policies(recorded(60 if setting.quick else 1500)))
    return result


def _live(result: Result, runs: Sequence[tuple[Reservation, Run]]) -> None:
    by = {name: [each for kind, each in runs if kind == name] for name in RESERVATIONS}
    result.values["live"] = {name: [each.figures() for each in found] for name, found in by.items()}
    rows = [_row(name, {key: median(each.figures()[key] for each in found) for key in found[0].figures()})
            for name, found in by.items()]  # fmt: skip
    result.tables.append(Table(f"Live, emulated, {len(runs[0][1].ttfts)} requests at once", RESERVING, rows))
    equal = len({str(each.tokens) for _, each in runs}) == 1
    result.aims.append(Aim("the tokens of every request are those of the other reservation", "all", str(equal), equal))
    ratio = median(b.rate / a.rate for a, b in zip(by["full"], by["optimistic"], strict=True))
    result.values["live_ratio"] = ratio
    result.notes.append(f"Live: optimistic serves {ratio:.2f} times the requests/s of full (median of the pairs).")


def _simulated(result: Result, runs: dict[str, Run]) -> None:
    figures = {name: each.figures() for name, each in runs.items()}
    result.values["simulated"] = figures
    rows = [_row(name, each) for name, each in figures.items()]
    result.tables.append(Table(f"Simulated, {len(next(iter(runs.values())).ttfts)} requests", RESERVING, rows))
    for name in figures:
        place, found, _ = name.partition(": optimistic")
        if found:
            full, known = figures[f"{place}: full"], figures[f"{place}: full, length known"]
            more = figures[name]["mean"] / full["mean"]
            share = figures[name]["requests_s"] / known["requests_s"]
            said = f"{more:.1f} times the requests at once of full, {share:.0%} of the requests/s of one who knows"
            result.notes.append(f"{place}: {said}.")


def _policies(result: Result, found: dict[tuple[str, str, str], Found]) -> None:
    result.values["policies"] = {" ".join(key): each for key, each in found.items()}
    header = ("placement, policy, order", "goodput, 90 % + guard", "goodput, 99 %", "TTFT p99", "TBT p99")
    rows = [
        [
            ", ".join(key),
            f"{each.guard:.2f}",
            f"{each.p99:.2f}",
            f"{1e3 * each.ttft:.0f} ms",
            f"{1e3 * each.tbt:.1f} ms",
        ]
        for key, each in found.items()
    ]
    what = f"Policies and orders, simulated, recorded image traffic, SLO {STRICT.ttft:g} s and {STRICT.tbt:g} s"
    result.tables.append(Table(f"{what}, requests/s; percentiles at 0.9 of the placement's best", header, rows))
    result.notes.append("The trace has no deadlines, so that the order by deadline is that of arrival.")
    for placement in PLACEMENTS:
        for rule in RULES:
            rates = {key: getattr(each, rule) for key, each in found.items() if key[0] == placement}
            best = max(rates, key=lambda key: rates[key])
            share = rates[placement, "alg1", "fcfs"] / rates[best] if rates[best] else 1.0
            said = f"best is {best[1]} with {best[2]}, of which Algorithm 1, first come, has {share:.0%}"
            result.notes.append(f"{placement}, {rule}: {said}.")


def _row(name: str, figures: dict[str, float]) -> list[str]:
    return [
        name,
        f"{figures['most']:.0f}",
        f"{figures['mean']:.1f}",
        f"{figures['requests_s']:.2f}",
        f"{figures['tokens_s']:.0f}",
        f"{figures['preemptions']:.0f}",
        f"{figures['ttft_p50']:.2f} s",
        f"{1e3 * figures['tbt_p99']:.1f} ms",
    ]
