"""Dual stream against sequential, live on this machine's cores: TriInfer 4.2 and figure 12, on a CPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Result, Table
from benchmarks.serving.live import (
    EASY,
    UNCACHED,
    Rounds,
    Way,
    at_rest,
    capacity,
    cores,
    exact,
    in_turns,
    ms,
    opened,
    seen,
    traffic,
    unreached,
)
from benchmarks.setting import MAX_FOREIGN_SHARE, Setting, disturbed
from trinity.costs.model_config import read_model_shape
from trinity.instance import Instance, name_instances
from trinity.memory.cache_config import CacheConfig
from trinity.runtime.loader import ServingConfig, load_instances, make_processor
from trinity.runtime.profiler import Probe
from trinity.runtime.profiler_lanes import StepTimer, keep_busy

DUAL = ("vision", "language")
OUTPUTS, SHARES, ROUNDS = 24, (0.5, 0.8), 2  # shares of what the sequential instance does of a burst
SPENT = 0.75
BATCHES, CONTEXT, REPEATS = (1, 8, 32), 1024, 7


def ways() -> list[Way]:
    """One instance on both cores: each operator on two threads, or a lane on each; then with D apart (EP+D).

    D shares the core of the language lane, or that of both, for it is idle while this machine prefills.
    """
    both = tuple(cores()[:2])
    last = both[-1:]

    def one(roles: str, dual: bool) -> Instance:
        if dual:
            return Instance(roles, lanes=DUAL, cores=both, **UNCACHED)
        return Instance(roles, cores=both, threads=len(both), **UNCACHED)

    decode = Instance("D", cores=last, **UNCACHED)
    return [
        Way("EPD, sequential", (one("EPD", False),), budgets=EASY),
        Way("EPD, dual stream", (one("EPD", True),), budgets=EASY),
        Way("EP+D, sequential", (one("EP", False), decode), budgets=EASY),
        Way("EP+D, dual stream", (one("EP", True), decode), budgets=EASY),
    ]


Rates = dict[int, dict[str, tuple[float, float]]]  # by decode rows and way: images and tokens a second


def side_by_side(model: Path, batches: Sequence[int], context: int, repeats: int) -> Rates:
    """Encode and decode of one instance at full load, sequential or parallel (TriInfer figure 12).

    Sequential: steps take turns on both cores, each stage with half of the time. Parallel: each lane on its core.
    """
    sequential, dual = (way.instances[0] for way in ways()[:2])
    processor = make_processor(model)
    pools = {"image": 2, "kv": max(batches) * (context // 16 + 2)}
    found: Rates = {}
    try:
        with ExitStack() as stack:
            probes = []
            for loaded in load_instances(
                ServingConfig(model, dtype="bfloat16", cache=CacheConfig(pools=pools)),
                name_instances([sequential, dual]),
                None,
            ):
                probes.append(stack.enter_context(closing(Probe(loaded, processor))))
            for rows in batches:
                turns, lanes = probes
                encode, decode = partial(turns.encode, 1), partial(turns.decode, rows, context)
                halves = [timed(each, None, repeats) for each in (encode, decode)]
                encode, decode = partial(lanes.encode, 1), partial(lanes.decode, rows, context)
                whole = [timed(encode, decode, repeats), timed(decode, encode, repeats)]
                found[rows] = {
                    "sequential": (0.5 / halves[0], 0.5 * rows / halves[1]),
                    "parallel": (1 / whole[0], rows / whole[1]),
                }
    finally:
        processor.close()
    return found


def timed(step: StepTimer, beside: StepTimer | None, repeats: int) -> float:
    """Median seconds of a step after one that is left out, alone or while the other lane is busy."""
    step()
    with keep_busy(beside) if beside is not None else nullcontext():
        return median(step() for _ in range(repeats))


async def measure(model: Path, setting: Setting) -> tuple[Rounds, dict[str, Any]]:
    until = time.monotonic() + 60 * setting.minutes
    image_tokens, outputs = read_model_shape(model).image_tokens, 4 if setting.quick else OUTPUTS
    known = ways()[:2] if setting.quick else ways()
    row = next(iter(traffic(1, image_tokens, outputs)))
    batches, context, repeats = ((1,), 32, 1) if setting.quick else (BATCHES, CONTEXT, REPEATS)
    facts: dict[str, Any] = {"rates": await asyncio.to_thread(side_by_side, model, batches, context, repeats)}
    facts["exact"] = await exact(model, [each for each in known if "dual" in each.name], row)
    async with opened(model, known) as pipes:
        burst = traffic(2 if setting.quick else 6, image_tokens, outputs)
        facts["rest"] = {name: await at_rest(pipe, row, 1 if setting.quick else 3) for name, pipe in pipes.items()}
        facts["burst"] = {name: await capacity(pipe, burst) for name, pipe in pipes.items()}
        rates = [share * facts["burst"][known[0].name] for share in SHARES]
        rounds = 1 if setting.quick else ROUNDS
        seconds = SPENT * (until - time.monotonic()) / (rounds * len(known) * len(rates))
        facts["count"] = 3 if setting.quick else max(6, int(seconds * min(rates)))
        trace = traffic(facts["count"], image_tokens, outputs)
        facts["cells"] = rounds * len(known) * len(rates)
        found, facts["foreign"] = await in_turns(pipes, trace, rates, rounds, until)
    return found, facts


def run(setting: Setting) -> Result:
    if len(cores()) < 2:
        raise RuntimeError("two lanes need two cores: give this process another one")
    model = setting.pick("llava-110m", "llava")
    found, facts = asyncio.run(measure(model, setting))
    return result(found, facts, model.name)


HEADER = ("way", "requests/s", "TTFT p50", "p90", "TBT p50", "p90", "p99", "longest", "tokens/s")


def result(found: Rounds, facts: dict[str, Any], name: str) -> Result:
    figures = {f"{way} at {rate:.2f}": seen(rounds) for (way, rate), rounds in found.items()}
    alone = [
        [way, f"{facts['burst'][way]:.2f}", ms(ttft), f"{gap * 1e3:.1f}"] for way, (ttft, gap) in facts["rest"].items()
    ]
    return Result(
        name="dual_stream",
        title="Dual stream against sequential (TriInfer figure 12), on two cores",
        method=(
            f"{name} in bfloat16. First the stages themselves, {CONTEXT} tokens of KV a decode row, one image in "
            "a step: sequential is half of the time for each stage on both cores, parallel a core for each. Then "
            "served: one instance in a process on two cores: sequential with two intra-op threads, or "
            "encode on a lane of its own beside prefill and decode, each lane on a core with one thread. With EP+D, D "
            f"has one thread on the language lane's core. Requests of one image, 40 tokens of text, {OUTPUTS} of "
            f"output, {facts['count']} a round, up to {ROUNDS} rounds of all ways in turns, at "
            f"{' and '.join(f'{share:.0%}' for share in SHARES)} of what sequential EPD does of a burst; every tenth "
            "arrival that ServeGen recorded. Caches off. ms, wall time, TTFT from the intended arrival. "
            f"{facts['exact']}"
        ),
        tables=[
            Table("Encode and decode at full load, a second (TriInfer figure 12)", RATES, rate_rows(facts["rates"])),
            Table("At rest, and a burst of requests", ("way", "burst, requests/s", "TTFT alone", "TBT alone"), alone),
            Table("Under load", HEADER, [row_of(way, rate, seen(rounds)) for (way, rate), rounds in found.items()]),
        ],
        notes=disturbed(["all ways"] if facts["foreign"] > MAX_FOREIGN_SHARE else [])
        + unreached(found, facts["cells"])
        + bursts(facts["burst"])
        + compared(found),
        values={"figures": figures, **facts},
    )


RATES = ("decode rows", "images, sequential", "parallel", "ratio", "tokens, sequential", "parallel", "ratio")


def rate_rows(rates: Rates) -> list[list[str]]:
    rows = []
    for count, each in rates.items():
        cells = [str(count)]
        for before, after in zip(each["sequential"], each["parallel"], strict=True):
            cells += [f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}"]
        rows.append(cells)
    return rows


def bursts(burst: dict[str, float]) -> list[str]:
    """Throughput of a burst with a lane on each core, as a ratio to both cores for every operator."""
    told = []
    for way, rate in burst.items():
        placement, _, kind = way.partition(", ")
        if kind == "dual stream":
            ratio = rate / burst[f"{placement}, sequential"]
            told.append(
                f"{placement}: dual stream does {ratio:.2f} times the requests a second of sequential in a burst."
            )
    return told


def row_of(way: str, rate: float, found: dict[str, float]) -> list[str]:
    keys = ("ttft_p50_s", "ttft_p90_s", "gap_p50_s", "gap_p90_s", "gap_p99_s", "gap_max_s")
    failed = f" ({found['failed']:.0f} failed)" if found["failed"] else ""
    return [way, f"{rate:.2f}", *(ms(found[key]) for key in keys), f"{found['tokens_per_s']:.1f}{failed}"]


def compared(found: Rounds) -> list[str]:
    """Dual stream as a ratio to sequential, at each rate where both ran."""
    told: list[str] = []
    for way, rate in found:
        placement, _, kind = way.partition(", ")
        other = (f"{placement}, sequential", rate)
        if kind == "dual stream" and other in found:
            ours, theirs = seen(found[way, rate]), seen(found[other])
            ratios = {key: ours[key] / theirs[key] for key in ("ttft_p50_s", "gap_p50_s", "gap_p99_s", "tokens_per_s")}
            first, middle, worst, tokens = (f"{each:.2f}" for each in ratios.values())
            told.append(
                f"{placement} at {rate:.2f} requests a second, dual stream to sequential: median TTFT {first} times, "
                f"median TBT {middle}, its 99th percentile {worst}, tokens a second {tokens}."
            )
    return told
