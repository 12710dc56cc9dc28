"""Dual stream against sequential, live on this machine's cores: TriInfer 4.2 and figure 12, on a CPU."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from benchmarks.live import (
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
from benchmarks.report import Aim, Result, Table
from benchmarks.setting import FOREIGN, Setting, disturbed
from trinity.instance import Instance
from trinity.model_config import read

DUAL = ("vision", "language")
OUTPUTS, SHARES, ROUNDS = 24, (0.5, 0.8), 2  # shares of what the sequential instance does of a burst
SPENT = 0.75


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


async def measure(model: Path, setting: Setting) -> tuple[Rounds, dict[str, Any]]:
    until = time.monotonic() + 60 * setting.minutes
    image_tokens, outputs = read(model).image_tokens, 4 if setting.quick else OUTPUTS
    known = ways()[:2] if setting.quick else ways()
    row = next(iter(traffic(1, image_tokens, outputs)))
    facts: dict[str, Any] = {"exact": await exact(model, known, row)}
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
        title="Dual stream against sequential (TriInfer, figure 12), on two cores",
        method=(
            f"{name} in bfloat16, one instance in a process on two cores: sequential with two intra-op threads, or "
            "encode on a lane of its own beside prefill and decode, each lane on a core with one thread. With EP+D, D "
            f"has one thread on the language lane's core. Requests of one image, 40 tokens of text, {OUTPUTS} of "
            f"output, {facts['count']} a round, up to {ROUNDS} rounds of all ways in turns, at "
            f"{' and '.join(f'{share:.0%}' for share in SHARES)} of what sequential EPD does of a burst; every tenth "
            "arrival that ServeGen recorded. Caches off. ms, wall time, TTFT from the intended arrival. "
            f"{facts['exact']}"
        ),
        tables=[
            Table("At rest, and a burst of requests", ("way", "burst, requests/s", "TTFT alone", "TBT alone"), alone),
            Table("Under load", HEADER, [row_of(way, rate, seen(rounds)) for (way, rate), rounds in found.items()]),
        ],
        aims=[
            aim(placement, facts["burst"])
            for placement in ("EPD", "EP+D")
            if f"{placement}, dual stream" in facts["burst"]
        ],
        notes=disturbed(["all ways"] if facts["foreign"] > FOREIGN else [])
        + unreached(found, facts["cells"])
        + compared(found),
        values={"figures": figures, **facts},
    )


def aim(placement: str, burst: dict[str, float]) -> Aim:
    """TriInfer's figure 12 has more throughput of both models at every batch where their kernels run side by side."""
    ratio = burst[f"{placement}, dual stream"] / burst[f"{placement}, sequential"]
    what = f"{placement}: requests of a burst a second, dual stream against sequential"
    return Aim(what, "> 1.00 times", f"{ratio:.2f} times", ratio > 1)


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
