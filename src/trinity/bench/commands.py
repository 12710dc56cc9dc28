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
from trinity.bench.load import Make, Maker, burst, drawn, fitted, made
from trinity.bench.machine import facts
from trinity.bench.measure import Tried, attaining, best, exactness, rounds, settings, started, sweep, trial_of
from trinity.bench.search import RULES, Goal, Trial, checked_rates, goodputs, plain, turns
from trinity.bench.servers import DTYPES, Asked, Engine, python_of
from trinity.traces.trace import SLO, Trace

EXACT = 3  # requests whose tokens are compared
SWEEP_REQUESTS = 12  # of a trial for each setting of a sweep
Content = dict[str, Any]


def engines_of(asked: Namespace, placements: Sequence[str], dtype: str, caches: bool) -> list[Engine]:
    """Trinity under every placement, then the peers. Raises ``ConfigError`` for one that is not installed."""
    for kind in asked.peer:
        python_of(kind)
    common = {"dtype": dtype, "threads": asked.threads, "caches": caches, "images": max(1, asked.images)}
    ours = [Engine(placement=each, **common) for each in placements]
    return [*ours, *(Engine(kind=kind, **common) for kind in asked.peer)]


def cached(asked: Namespace) -> list[bool]:
    return {"off": [False], "on": [True], "both": [False, True]}[asked.caches]


def images_of(make: Maker, asked: Namespace) -> int:
    return int(asked.images) if make.sees else 0


async def tuned(
    engines: Sequence[Engine],
    checkpoint: Path,
    requests: Sequence[Asked],
    tokens: Sequence[int],
    tried: Tried | None = None,
) -> tuple[list[Engine], dict[str, Any]]:
    """Every engine with the best setting of a sweep of the same size, and all the sweeps."""
    swept = {each.name: await sweep(settings(each, tokens), checkpoint, requests, tried=tried) for each in engines}
    if len(tokens) > 1:
        print(outcome.text([outcome.sweep_table(dict(swept))]), flush=True)
    found = {name: best(each, wall=tried is not None).tokens if each else tokens[0] for name, each in swept.items()}
    chosen = [msgspec.structs.replace(each, tokens=found[each.name]) for each in engines]
    return chosen, {name: [msgspec.to_builtins(each) for each in found] for name, found in swept.items()}


async def cpu(asked: Namespace) -> None:
    """Requests per CPU second of one burst, engines in turn."""
    content: Content = {"machine": facts(), "runs": {}}
    runs = [
        (f"{dtype}, caches {'on' if caches else 'off'}", engines_of(asked, ["EPD"], dtype, caches))
        for dtype in asked.dtype or DTYPES
        for caches in cached(asked)
    ]
    with await asyncio.to_thread(Maker, asked.checkpoint, "cpu") as make:
        row = burst(images_of(make, asked), asked.prompt, asked.output)
        requests = await made(make, [row] * asked.requests)
    for name, engines in runs:
        content["runs"][name] = await cpu_run(engines, asked.checkpoint, requests, asked)
    if asked.json:
        outcome.save(asked.json, content)


async def cpu_run(engines: Sequence[Engine], checkpoint: Path, requests: Sequence[Asked], asked: Namespace) -> Content:
    chosen, swept = await tuned(engines, checkpoint, requests, asked.sweep)
    exact = await exactness(chosen, checkpoint, requests[:EXACT])
    async with started(chosen, checkpoint) as servers:
        about = {name: server.about for name, server in servers.items()}
        found = await rounds(servers, requests, asked.rounds)
    count = min(EXACT, len(requests))
    title = f"{chosen[0].dtype}: {len(requests)} requests of {len(requests[0].ids)} + {requests[0].tokens} tokens"
    print(outcome.text([outcome.cpu_table(found, chosen[0].name, exact, count)], [title]), flush=True)
    return {
        "engines": [msgspec.to_builtins(each) for each in chosen],
        "about": about,
        "sweep": swept,
        "exact": {name: [equal, count] for name, equal in exact.items()},
        "bursts": {name: [msgspec.to_builtins(each) for each in bursts] for name, bursts in found.items()},
    }


def loaded(name: str) -> Trace:
    """A shipped trace by its name, or a file. Raises ``TraceError``."""
    return traces.read_shipped(name) if name in traces.SHIPPED_TRACES else traces.read_trace(name)


def goals_of(slos: Sequence[SLO]) -> list[Goal]:
    return [Goal(slo, rule) for slo in slos for rule in RULES]


async def serve(asked: Namespace) -> None:
    """Goodput of every engine for every SLO under both rules."""
    rates, goals = checked_rates(asked.rates), goals_of(asked.slo)
    trace = await asyncio.to_thread(loaded, asked.trace)
    placements = asked.placement or ["EPD"]
    engines = [each for on in cached(asked) for each in engines_of(asked, placements, asked.dtype, on)]
    with await asyncio.to_thread(Maker, asked.checkpoint, "serve") as make:
        served = fitted(trace, text=asked.prompt, output=asked.output, images=images_of(make, asked))
        some = await made(make, drawn(served, max(4, EXACT), 0))
        tried = attaining(served, make, goals, rates[(len(rates) - 1) // 2], SWEEP_REQUESTS)
        chosen, swept = await tuned(engines, asked.checkpoint, some, asked.sweep, tried)
        exact = await exactness(chosen, asked.checkpoint, some[:EXACT])
        trials, about = await _trials(chosen, asked, served, make, goals, rates)
    names = [each.name for each in chosen]
    found = goodputs(trials, names, goals, rates, range(asked.seeds))
    tables = [outcome.trials_table(trials), outcome.goodput_table(found, goals, names, names[0])]
    notes = [f"Tokens of generate() in float32: {', '.join(f'{name} {n} of {EXACT}' for name, n in exact.items())}."]
    print(outcome.text(tables, notes), flush=True)
    if asked.plot and trials:
        outcome.picture(trials, goals, asked.plot)
    if asked.json:
        content: Content = {"machine": facts(), "trace": asked.trace, "seeds": asked.seeds, "rates": rates}
        content |= {"engines": [msgspec.to_builtins(each) for each in chosen], "about": about, "sweep": swept}
        content |= {"exact": {name: [n, EXACT] for name, n in exact.items()}, "trials": plain(trials)}
        outcome.save(asked.json, {**content, "goodput": [msgspec.to_builtins(each) for each in found]})


async def _trials(
    chosen: Sequence[Engine], asked: Namespace, trace: Trace, make: Make, goals: Sequence[Goal], rates: Sequence[float]
) -> tuple[list[Trial], Content]:
    trials: list[Trial] = []
    until = time.monotonic() + 60 * asked.minutes
    names = [each.name for each in chosen]
    async with started(chosen, asked.checkpoint) as servers:
        for engine, rate, seed in turns(trials, names, goals, rates, range(asked.seeds)):
            if time.monotonic() > until:
                break
            trials.append(await trial_of(servers[engine], trace, make, goals, rate, seed, asked.requests))
        return trials, {name: server.about for name, server in servers.items()}
