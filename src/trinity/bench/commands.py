"""The two commands of ``python -m trinity.bench``."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from trinity import traces
from trinity.bench import outcome
from trinity.bench.load import CheckpointRequests, RequestMaker, burst_row, draw_stretch, make_requests, shrink_trace
from trinity.bench.machine import machine_facts
from trinity.bench.measure import (
    TrialFunction,
    best_setting,
    count_exact,
    make_trial,
    run_rounds,
    run_trial,
    start_servers,
    sweep,
    sweep_settings,
)
from trinity.bench.search import GOODPUT_RULES, Goal, Trial, check_rates, find_goodputs, schedule_trials, to_plain
from trinity.bench.servers import DTYPES, BenchRequest, EngineSpec, find_python
from trinity.traces.cut_short import fill_cut_outputs
from trinity.traces.trace import SLO, Trace

EXACT_REQUESTS = 3  # requests whose tokens are compared
SWEEP_REQUESTS = 12  # of a trial for each setting of a sweep
Content = dict[str, Any]


def make_engines(args: Namespace, placements: Sequence[str], dtype: str, caches: bool) -> list[EngineSpec]:
    """Make specs of trinity's placements, then of the peers. Raises ``ConfigError`` for one that is not installed."""
    for kind in args.peer:
        find_python(kind)
    common = {"dtype": dtype, "threads": args.threads, "caches": caches, "images": max(1, args.images)}
    ours = [EngineSpec(placement=each, **common) for each in placements]
    return [*ours, *(EngineSpec(kind=kind, **common) for kind in args.peer)]


def cache_settings(args: Namespace) -> list[bool]:
    return {"off": [False], "on": [True], "both": [False, True]}[args.caches]


def images_per_request(make: CheckpointRequests, args: Namespace) -> int:
    return int(args.images) if make.takes_images else 0


async def tune_engines(
    engines: Sequence[EngineSpec],
    checkpoint: Path,
    requests: Sequence[BenchRequest],
    tokens: Sequence[int],
    trial: TrialFunction | None = None,
) -> tuple[list[EngineSpec], dict[str, Any]]:
    """Give every engine the best setting of a sweep of the same size; returns the engines and all sweeps."""
    swept = {
        each.name: await sweep(sweep_settings(each, tokens), checkpoint, requests, trial=trial) for each in engines
    }
    if len(tokens) > 1:
        print(outcome.render_text([outcome.sweep_table(dict(swept))]), flush=True)
    found = {
        name: best_setting(each, wall=trial is not None).tokens if each else tokens[0] for name, each in swept.items()
    }
    chosen = [msgspec.structs.replace(each, tokens=found[each.name]) for each in engines]
    return chosen, {name: [msgspec.to_builtins(each) for each in found] for name, found in swept.items()}


async def run_cpu(args: Namespace) -> None:
    """Measure and print requests per CPU second of bursts, engines in turn."""
    content: Content = {"machine": machine_facts(), "runs": {}}
    runs = [
        (f"{dtype}, caches {'on' if caches else 'off'}", make_engines(args, ["EPD"], dtype, caches))
        for dtype in args.dtype or DTYPES
        for caches in cache_settings(args)
    ]
    with await asyncio.to_thread(CheckpointRequests, args.checkpoint, "cpu") as make:
        row = burst_row(images_per_request(make, args), args.prompt, args.output)
        requests = await make_requests(make, [row] * args.requests)
    for name, engines in runs:
        content["runs"][name] = await measure_cpu(engines, args.checkpoint, requests, args)
    if args.json:
        outcome.save_json(args.json, content)


async def measure_cpu(
    engines: Sequence[EngineSpec], checkpoint: Path, requests: Sequence[BenchRequest], args: Namespace
) -> Content:
    chosen, swept = await tune_engines(engines, checkpoint, requests, args.sweep)
    exact = await count_exact(chosen, checkpoint, requests[:EXACT_REQUESTS])
    async with start_servers(chosen, checkpoint) as servers:
        about = {name: server.about for name, server in servers.items()}
        found = await run_rounds(servers, requests, args.rounds)
    count = min(EXACT_REQUESTS, len(requests))
    title = f"{chosen[0].dtype}: {len(requests)} requests of {len(requests[0].ids)} + {requests[0].tokens} tokens"
    print(outcome.render_text([outcome.cpu_table(found, chosen[0].name, exact, count)], [title]), flush=True)
    return {
        "engines": [msgspec.to_builtins(each) for each in chosen],
        "about": about,
        "sweep": swept,
        "exact": {name: [equal, count] for name, equal in exact.items()},
        "bursts": {name: [msgspec.to_builtins(each) for each in bursts] for name, bursts in found.items()},
    }


def load_trace(name: str) -> Trace:
    """Read a shipped trace by its name, or a file, with whole outputs. Raises ``TraceError``."""
    return fill_cut_outputs(traces.read_shipped(name) if name in traces.SHIPPED_TRACES else traces.read_trace(name))


def make_goals(slos: Sequence[SLO]) -> list[Goal]:
    return [Goal(slo, rule) for slo in slos for rule in GOODPUT_RULES]


async def run_serve(args: Namespace) -> None:
    """Measure and print the goodput of every engine for every SLO under both rules."""
    rates, goals = check_rates(args.rates), make_goals(args.slo)
    trace = await asyncio.to_thread(load_trace, args.trace)
    placements = args.placement or ["EPD"]
    engines = [each for on in cache_settings(args) for each in make_engines(args, placements, args.dtype, on)]
    with await asyncio.to_thread(CheckpointRequests, args.checkpoint, "serve") as make:
        sizes = {"text": args.prompt, "output": args.output, "images": images_per_request(make, args)}
        served = await asyncio.to_thread(shrink_trace, trace, **sizes)
        some = await make_requests(make, draw_stretch(served, max(4, EXACT_REQUESTS), 0))
        trial = make_trial(served, make, goals, rates[(len(rates) - 1) // 2], SWEEP_REQUESTS)
        chosen, swept = await tune_engines(engines, args.checkpoint, some, args.sweep, trial)
        exact = await count_exact(chosen, args.checkpoint, some[:EXACT_REQUESTS])
        trials, about = await _run_trials(chosen, args, served, make, goals, rates)
    names = [each.name for each in chosen]
    found = find_goodputs(trials, names, goals, rates, range(args.seeds))
    tables = [outcome.trials_table(trials), outcome.goodput_table(found, goals, names, names[0])]
    notes = [
        f"Tokens of generate() in float32: {', '.join(f'{name} {n} of {EXACT_REQUESTS}' for name, n in exact.items())}."
    ]
    print(outcome.render_text(tables, notes), flush=True)
    if args.plot and trials:
        outcome.plot_trials(trials, goals, args.plot)
    if args.json:
        content: Content = {"machine": machine_facts(), "trace": args.trace, "seeds": args.seeds, "rates": rates}
        content |= {"engines": [msgspec.to_builtins(each) for each in chosen], "about": about, "sweep": swept}
        content |= {"exact": {name: [n, EXACT_REQUESTS] for name, n in exact.items()}, "trials": to_plain(trials)}
        outcome.save_json(args.json, {**content, "goodput": [msgspec.to_builtins(each) for each in found]})


async def _run_trials(
    chosen: Sequence[EngineSpec],
    args: Namespace,
    trace: Trace,
    make: RequestMaker,
    goals: Sequence[Goal],
    rates: Sequence[float],
) -> tuple[list[Trial], Content]:
    trials: list[Trial] = []
    until = time.monotonic() + 60 * args.minutes
    names = [each.name for each in chosen]
    async with start_servers(chosen, args.checkpoint) as servers:
        for engine, rate, seed in schedule_trials(trials, names, goals, rates, range(args.seeds)):
            if time.monotonic() > until:
                break
            trials.append(await run_trial(servers[engine], trace, make, goals, rate, seed, args.requests))
        return trials, {name: server.about for name, server in servers.items()}
