"""Requests per CPU second of 8 requests of 605 + 32 tokens (an image of 576 visual tokens each), beside other engines.

The same checkpoint, prompts, images and output lengths; engines in processes of their own, in turn (A B A B). CPU
seconds are those of all of an engine's processes. Each has the best of a sweep of tokens a step.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Aim, Result, Table
from benchmarks.setting import ROOT, Setting
from trinity.bench import measure, outcome
from trinity.bench.load import CheckpointRequests, burst_row, make_requests
from trinity.bench.servers import DTYPES, PEERS, BenchRequest, EngineSpec
from trinity.tables import Table as Cells

REQUESTS, PROMPT, OUTPUT = 8, 28, 32  # the prompt: a first token, 576 of the image, a line break and these
SWEEP = (512, 2048)
ROUNDS = 4
EXACT = 3
AIM = 1.3
AHEAD = 1.0


class Found(msgspec.Struct, kw_only=True):
    """Of one precision: sweeps and bursts by engine."""

    dtype: str
    swept: dict[str, list[measure.SweepPoint]]
    bursts: dict[str, list[measure.Burst]]


async def measured(
    setting: Setting, checkpoint: Path, requests: Sequence[BenchRequest], kinds: Sequence[str], dtype: str
) -> Found:
    engines = [EngineSpec(dtype=dtype), *(EngineSpec(kind=kind, dtype=dtype) for kind in kinds)]
    sweep, count = ((64, 128), 1) if setting.quick else (SWEEP, ROUNDS)
    swept = {
        each.name: await measure.sweep(measure.sweep_settings(each, sweep), checkpoint, requests) for each in engines
    }
    ran = [each for each in engines if not all(one.problem for one in swept[each.name])]
    chosen = [msgspec.structs.replace(each, tokens=measure.best_setting(swept[each.name]).tokens) for each in ran]
    await asyncio.to_thread(setting.settle)
    async with measure.start_servers(chosen, checkpoint) as servers:
        return Found(dtype=dtype, swept=swept, bursts=await measure.run_rounds(servers, requests, count))


async def everything(setting: Setting) -> Result:
    checkpoint = await asyncio.to_thread(setting.pick, "llava-110m", "llava")
    there, missing = measure.split_installed(PEERS)
    output = 3 if setting.quick else OUTPUT
    with await asyncio.to_thread(CheckpointRequests, checkpoint, "cpu") as make:
        requests = await make_requests(make, [burst_row(1, PROMPT, output)] * REQUESTS)
    engines = [EngineSpec(), *(EngineSpec(kind=kind) for kind in there)]
    exact = await measure.count_exact(engines, checkpoint, requests[:EXACT])
    found = [await measured(setting, checkpoint, requests, there, dtype) for dtype in DTYPES]
    return result(found, exact, missing, f"{len(requests[0].ids)} + {requests[0].tokens}")


def run(setting: Setting) -> Result:
    os.environ.setdefault("TRINITY_PEERS", str(ROOT / ".peers"))
    return asyncio.run(everything(setting))


# ---------------------------------------------------------------- what it came to


def table(title: str, cells: Cells, missing: Sequence[str] = (), idle: Sequence[str] = ()) -> Table:
    """With a row for every engine that is not installed, and for every one of which no setting ran."""
    blank = [""] * (len(cells.header) - 2)
    absent = [[name, "not installed: make bench-peers", *blank] for name in missing]
    absent += [[name, "no setting ran: see below", *blank] for name in idle]
    return Table(title, cells.header, [*map(list, cells.rows), *absent])


def result(found: Sequence[Found], exact: dict[str, int], missing: Sequence[str], size: str) -> Result:
    ours = "trinity EPD"
    tables = []
    for each in found:
        cells = outcome.cpu_table(each.bursts, ours, exact, EXACT)
        tables += [table(f"{each.dtype}, one thread: median (lowest to highest)", cells, missing, idle(each))]
    tables += [table(f"Sweeps, {each.dtype}", outcome.sweep_table(dict(each.swept))) for each in found]
    return Result(
        name="cpu_second",
        title="Requests per CPU second",
        method=(
            f"llava-110m, {REQUESTS} requests of {size} tokens asked for at once (one image of 576 visual tokens each, "
            f"336 x 336), {len(found[0].bursts[ours])} bursts of each engine in turn after one to warm up, the best "
            "setting of each engine's sweep, prefix and image caches off. CPU seconds of all of an engine's processes. "
            f"Tokens: of {EXACT} requests in float32 those equal to generate(). generate_batch takes text alone: "
            "features of its images, made one by one, stand behind token ids of their own. OpenVINO in bfloat16 takes "
            "both CPUs: with one thread 2026.4.1 dies (SIGFPE) on CPUs with AMX."
        ),
        tables=tables,
        aims=aims(found, ours),
        notes=problems(found),
        values={"exact": exact, "missing": list(missing), "found": [msgspec.to_builtins(each) for each in found]},
    )


def idle(found: Found) -> list[str]:
    return [name for name in found.swept if name not in found.bursts]


def problems(found: Sequence[Found]) -> list[str]:
    """Settings that did not run, and why."""
    return [
        f"{name} in {each.dtype} with {one.tokens} tokens a step: {one.problem}"
        for each in found
        for name, settings in each.swept.items()
        for one in settings
        if one.problem
    ]


def aims(found: Sequence[Found], ours: str) -> list[Aim]:
    made: list[Aim] = []
    for each in found:
        rows: dict[str, Any] = {name: measure.select_undisturbed(bursts)[0] for name, bursts in each.bursts.items()}
        seen = {name: sorted(one.per_cpu_s for one in bursts)[len(bursts) // 2] for name, bursts in rows.items()}
        own = seen.pop(ours)
        made.append(Aim(f"Requests per CPU second, {each.dtype}", f"≥ {AIM}", f"{own:.2f}", own >= AIM))
        for name, rate in seen.items():
            over = measure.compare_rounds(each.bursts[ours], each.bursts[name])[0]
            said = f"{over:.2f} ({own:.2f} against {rate:.2f})"
            made.append(Aim(f"the same, over {name}'s", f"> {AHEAD}", said, over > AHEAD))
    return made
