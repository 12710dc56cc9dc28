"""Generation stalls, live: what chunked prefill and the image budget do to the time between tokens (TriInfer 3.2)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Result, Table
from benchmarks.serving.live import (
    EASY,
    Rounds,
    Way,
    at_rest,
    capacity,
    exact,
    in_turns,
    ms,
    opened,
    placed,
    seen,
    traffic,
    unreached,
)
from benchmarks.setting import MAX_FOREIGN_SHARE, Setting, disturbed
from trinity.core.scheduler import BatchRules
from trinity.costs.budgets import StepBudgets
from trinity.costs.model_config import read_model_shape

PLACEMENTS = ("EPD", "EP+D")
CHUNKS = (None, 512, 128, 32)  # tokens of a step; None: prompts are not cut
IMAGES = (None, 4, 2, 1)  # of a step; None: as many as wait
OUTPUTS, MOST_IMAGES = 24, 2
LOAD = 0.7  # of what the slowest placement does of a burst
ROUNDS = 2
SPENT = 0.7  # of the minutes, for what is measured; the rest goes for starting


def ways(image_tokens: int, chunks: Sequence[int | None], images: Sequence[int | None]) -> list[Way]:
    """Each placement without bounds, then chunks of several sizes, then image budgets beside the middle chunk."""
    middle = [chunk for chunk in chunks if chunk][len(chunks) // 3]
    pairs = [
        (None, None),
        *((chunk, 1) for chunk in chunks if chunk),
        *((middle, each) for each in images if each != 1),
    ]
    found: list[Way] = []
    for placement in PLACEMENTS:
        known = pairs if placement == "EPD" else [(None, None), (middle, 1)]
        found += [way(placement, chunk, most, image_tokens) for chunk, most in known]
    return found


def way(placement: str, chunk: int | None, images: int | None, image_tokens: int) -> Way:
    """Chunks off still take up to the default token budget of several whole prompts in a step."""
    rules = BatchRules(chunked=chunk is not None, limit_encodes=images is not None)
    budgets = StepBudgets(token_budget=chunk or EASY.token_budget, image_budget=(images or 1) * image_tokens)
    name = f"{placement}, {f'chunks of {chunk}' if chunk else 'whole prompts'}, {said(images)}"
    return Way(name, placed(placement), rules, budgets)


def said(images: int | None) -> str:
    if images is None:
        return "any number of images"
    return f"{images} image{'s' if images > 1 else ''}"


async def measure(model: Path, setting: Setting) -> tuple[Rounds, dict[str, Any]]:
    began = time.monotonic()
    image_tokens = read_model_shape(model).image_tokens
    known = ways(image_tokens, (None, 16, 8) if setting.quick else CHUNKS, (None, 1) if setting.quick else IMAGES)
    known = known[:2] + known[-1:] if setting.quick else known
    outputs = 4 if setting.quick else OUTPUTS
    row = next(iter(traffic(1, image_tokens, outputs)))
    facts: dict[str, Any] = {"exact": await exact(model, [known[0], known[-1]], row)}
    async with opened(model, known) as pipes:
        first = next(iter(pipes.values()))
        facts["rest"] = await at_rest(first, row, 1 if setting.quick else 3)
        facts["capacity"] = await capacity(first, traffic(6, image_tokens, outputs, MOST_IMAGES))
        for pipe in pipes.values():
            await capacity(pipe, traffic(2, image_tokens, 4), turns=1)  # code for new shapes is made, pages are touched
        until = began + 60 * setting.minutes
        rate = LOAD * facts["capacity"]
        seconds = SPENT * (until - time.monotonic()) / (ROUNDS * len(known))
        count = 3 if setting.quick else max(6, int(seconds * rate))
        facts["count"], facts["rate"] = count, rate
        trace = traffic(count, image_tokens, outputs, MOST_IMAGES)
        rounds = 1 if setting.quick else ROUNDS
        found, facts["foreign"] = await in_turns(pipes, trace, [rate], rounds, until)
        facts["cells"] = rounds * len(known)
    return found, facts


def run(setting: Setting) -> Result:
    model = setting.pick("llava-110m", "llava")
    found, facts = asyncio.run(measure(model, setting))
    return result(found, facts, model.name)


HEADER = ("way", "TBT p50", "p90", "p99", "longest", "TTFT p50", "p99", "tokens/s", "requests")


def result(found: Rounds, facts: dict[str, Any], name: str) -> Result:
    figures = {way: seen(rounds) for (way, _), rounds in found.items()}
    rest_ttft, rest_gap = facts["rest"]
    return Result(
        name="stalls",
        title="Generation stalls: chunked prefill and the image budget, live",
        method=(
            f"{name} in bfloat16, one thread an instance, each instance a process on a core of its own; requests of 1 "
            f"or {MOST_IMAGES} images (in turn), 40 tokens of text and {OUTPUTS} of output, {facts['count']} of them a "
            f"round, up to {ROUNDS} rounds of all ways in turns, at {facts['rate']:.2f} requests a second: {LOAD:.0%} "
            "of what whole prompts on one instance do of a burst; every tenth arrival that ServeGen recorded. Caches "
            "off. ms, wall time, TTFT from the intended arrival. Alone on EPD a request has its first token after "
            f"{ms(rest_ttft)} ms and one every {rest_gap * 1e3:.1f} ms. {facts['exact']}"
        ),
        tables=[Table("Time between tokens and throughput", HEADER, [row_of(*each) for each in figures.items()])],
        notes=disturbed(["all ways"] if facts["foreign"] > MAX_FOREIGN_SHARE else [])
        + unreached(found, facts["cells"])
        + lessons(figures),
        values={"figures": figures, **facts},
    )


def row_of(way: str, found: dict[str, float]) -> list[str]:
    gaps = [ms(found[f"gap_{each}_s"]) for each in ("p50", "p90", "p99", "max")]
    ttfts = [ms(found[f"ttft_p{each}_s"]) for each in (50, 99)]
    count = f"{found['requests']:.0f}" + (f", {found['failed']:.0f} failed" if found["failed"] else "")
    return [way, *gaps, *ttfts, f"{found['tokens_per_s']:.1f}", count]


def lessons(figures: dict[str, dict[str, float]]) -> list[str]:
    """What bounds did to the 99th percentile on each placement, and at what throughput."""
    told: list[str] = []
    for placement in PLACEMENTS:
        known = {way: each for way, each in figures.items() if way.startswith(f"{placement},")}
        if len(known) > 1:
            (first, before), *rest = known.items()
            best, after = min(rest, key=lambda each: each[1]["gap_p99_s"])
            gap, tokens = (after[key] / before[key] for key in ("gap_p99_s", "tokens_per_s"))
            told.append(
                f"{placement}: the 99th percentile of TBT with {best.partition(', ')[2]} is {gap:.2f} times that "
                f"with {first.partition(', ')[2]}, throughput {tokens:.2f} times."
            )
    return told
