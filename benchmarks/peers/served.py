"""Served goodput on two cores: recorded arrivals, three SLOs, both rules; every method at N = 2 against all else.

Against (a) the co-located trinity on two threads, (b) two EPD instances, (c) other engines on two threads. SLOs are
4, 8 and 16 times what (a) takes for a request alone. Every engine has that of its settings, three of each, which keeps
most requests in time. Trials are kept, so that the next run goes on from there. The whole takes hours on two cores:
with fewer minutes than WHOLE_MINUTES it is one seed, and one setting for every engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from benchmarks.peers.cpu_second import table
from benchmarks.report import Aim, Result
from benchmarks.setting import ROOT, Setting
from trinity import traces
from trinity.bench import measure, outcome
from trinity.bench.client import replay_to_server
from trinity.bench.commands import make_goals
from trinity.bench.load import CheckpointRequests, draw_stretch, make_requests, shrink_trace
from trinity.bench.machine import read_cpu_field
from trinity.bench.search import EngineGoodput, Goal, Trial, find_goodputs, goodput_ratio, schedule_trials
from trinity.bench.servers import PEERS, BenchRequest, EngineSpec, Server
from trinity.traces.trace import SLO, Trace

TRACE = "servegen-image-1h"
METHODS = ("E+PD", "EP+D", "ED+P")
TIMES = (4, 8, 16)  # of the latencies of a request alone
MINUTES = 12.0
SHARES = (0.4, 0.53, 0.7, 0.88, 1.1, 1.38, 1.72, 2.2)  # of what (a) does with a burst; slow trials take longest
TOLERANCE = 0.33  # no rate between two of these
SWEEP_SHARE, SWEEP_BURST = 0.8, 4
LEAST_TBT_S = 1e-3
Record = dict[str, Any]


class Sizes(NamedTuple):
    """Sizes of a run."""

    dtype: str = "bfloat16"
    threads: int = 2
    requests: int = 24
    seeds: int = 3
    text: int = 28
    output: int = 32
    sweep: tuple[int, ...] = (128, 512, 2048)
    swept: int = 20
    exact: int = 2
    shares: tuple[float, ...] = SHARES
    methods: tuple[str, ...] = METHODS
    peers: tuple[str, ...] = PEERS


WHOLE_MINUTES = 90.0
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}  # without these, peers take 5 to 9 times as long as in float32
SHORT = Sizes(seeds=1, sweep=(512,))
QUICK = Sizes("float32", 1, 8, 1, 8, 3, (64,), 4, 2, (0.5,), ("E+PD",), ())


def engines_of(sizes: Sizes, peers: Sequence[str]) -> list[EngineSpec]:
    """(a), (b), every method, the peers: each has two cores."""
    both: Record = {"dtype": sizes.dtype, "threads": sizes.threads}
    ours = [EngineSpec(placement=each, dtype=sizes.dtype) for each in ("2EPD", *sizes.methods)]
    return [EngineSpec(**both), *ours, *(EngineSpec(kind=kind, **both) for kind in peers)]


def settings_of(engine: EngineSpec, tokens: Sequence[int], slo: SLO) -> list[EngineSpec]:
    """What a sweep tries: tokens a step; of trinity also what a user would try besides, for as many settings in all.

    Where a step may encode or decode beside a prefill: budgets under the middle SLO, for steps of a predicted length.
    Of two instances: a second thread for the one that prefills, which takes what the other leaves of its core. Prompts
    need not be cut where nobody decodes beside them.
    """
    plain = measure.sweep_settings(engine, tokens)
    if engine.kind != "trinity" or len(plain) != 3:
        return plain
    few, some, whole = plain
    searched = msgspec.structs.replace(engine, options={"slo": [slo.ttft, slo.tbt], "policy": "time"})
    return {
        "2EPD": [few, some, _wider(few, "EPD")],
        "E+PD": [few, searched, _wider(few, "PD")],
        "EP+D": [some, whole, _wider(whole, "EP")],
        "ED+P": [some, whole, _wider(whole, "P")],
    }.get(engine.placement, [few, some, searched])


def _wider(engine: EngineSpec, roles: str) -> EngineSpec:
    return msgspec.structs.replace(engine, options={"threads_of": {roles: 2}})


class Kept:
    """Results measured before by the same sources and sizes, a JSON object a line. None: kept nowhere."""

    def __init__(self, path: Path | None, sizes: Sizes) -> None:
        self.path, self.key = path, f"{sources()} {json.dumps(sizes)}"
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self.records = [each for each in map(json.loads, lines) if each["key"] == self.key]

    def of(self, kind: str) -> list[Record]:
        return [each["record"] for each in self.records if each["kind"] == kind]

    def add(self, kind: str, record: Record) -> Record:
        line = {"key": self.key, "kind": kind, "record": record}
        self.records.append(line)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return record


def sources(root: Path = ROOT) -> str:
    """A digest of the code that a figure hangs on."""
    digest = hashlib.sha256(os.environ.get("TRINITY_PEERS", "").encode())
    for pattern in ("src/trinity/**/*.py", "csrc/**/*.?pp"):
        for path in sorted(root.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Ready(msgspec.Struct, kw_only=True):
    """What is known before the first trial: engines with their settings, SLOs, rates; how exact each engine is."""

    engines: list[EngineSpec]
    slos: list[SLO]
    rates: list[float]
    exact: dict[str, int]
    swept: dict[str, list[measure.SweepPoint]]


async def alone(server: Server, requests: Sequence[BenchRequest], apart: Trace) -> tuple[float, float]:
    """Median seconds to the first token and between tokens, of requests one after another."""
    served: list[Any] = []
    for row, request in zip(apart, requests, strict=True):
        served += await replay_to_server(server, Trace([row]), [request])
    gaps = [gap for row in served for gap in row.itl_s]
    return median(row.ttft_s or 0.0 for row in served), max(LEAST_TBT_S, median(gaps))


async def tuned(
    settings: Sequence[Sequence[EngineSpec]],
    checkpoint: Path,
    requests: Sequence[BenchRequest],
    trial: measure.TrialFunction,
) -> tuple[list[EngineSpec], dict[str, list[measure.SweepPoint]]]:
    """Each engine with the best of its settings. One of which no setting runs is left out."""
    swept = {each[0].name: await measure.sweep(each, checkpoint, requests, trial=trial) for each in settings}
    chosen = []
    for each in settings:
        found = swept[each[0].name]
        if not found:
            chosen.append(each[0])
        elif not all(one.problem for one in found):
            chosen.append(each[found.index(measure.best_setting(found, wall=True))])
    return chosen, swept


async def prepare(setting: Setting, sizes: Sizes, checkpoint: Path, trace: Trace, make: CheckpointRequests) -> Ready:
    """SLOs at light load, the grid of rates, sweeps, exactness: all before the first trial."""
    rows = draw_stretch(trace, 8, 0)
    some = await make_requests(make, rows)
    engines = engines_of(sizes, measure.split_installed(sizes.peers)[0])
    await asyncio.to_thread(setting.settle)
    async with Server(engines[0], checkpoint) as server:
        await measure.run_burst(server, some)
        rate = (await measure.run_burst(server, some)).per_s
        ttft, tbt = await alone(server, some, rows)
    slos = [SLO(round(times * ttft, 3), round(times * tbt, 4)) for times in TIMES]
    rates = [round(share * rate, 3) for share in sizes.shares]
    tried = measure.make_trial(trace, make, make_goals(slos), round(SWEEP_SHARE * rate, 3), sizes.swept)
    settings = [settings_of(each, sizes.sweep, slos[len(slos) // 2]) for each in engines]
    chosen, swept = await tuned(settings, checkpoint, some[:SWEEP_BURST], tried)
    exact = await measure.count_exact(chosen, checkpoint, some[: sizes.exact])
    return Ready(engines=chosen, slos=slos, rates=rates, exact=exact, swept=swept)


async def everything(setting: Setting, sizes: Sizes) -> Result:
    until = time.monotonic() + 60 * max(MINUTES, setting.minutes)
    kept = Kept(setting.kept and setting.kept / "served-trials.jsonl", sizes)
    checkpoint = await asyncio.to_thread(setting.pick, "llava-110m", "llava")
    with await asyncio.to_thread(CheckpointRequests, checkpoint, "served") as make:
        shipped = await asyncio.to_thread(traces.read_shipped, TRACE)
        trace = await asyncio.to_thread(shrink_trace, shipped, text=sizes.text, output=sizes.output, images=1)
        known = kept.of("ready") or [
            kept.add("ready", msgspec.to_builtins(await prepare(setting, sizes, checkpoint, trace, make)))
        ]
        ready = msgspec.convert(known[-1], Ready)
        goals = make_goals(ready.slos)
        trials = [msgspec.convert(each, Trial) for each in kept.of("trial")]
        names = [each.name for each in ready.engines]
        async with measure.start_servers(ready.engines, checkpoint) as servers:
            for server in servers.values():
                await measure.run_burst(server, await make_requests(make, draw_stretch(trace, 4, 1)))
            for name, rate, seed in schedule_trials(trials, names, goals, ready.rates, range(sizes.seeds), TOLERANCE):
                if time.monotonic() > until:
                    break
                seen = await measure.run_trial(servers[name], trace, make, goals, rate, seed, sizes.requests)
                kept.add("trial", msgspec.to_builtins(seen))
                trials.append(seen)
    return result(ready, trials, goals, sizes)


def run(setting: Setting) -> Result:
    os.environ.setdefault("TRINITY_PEERS", str(ROOT / ".peers"))
    return asyncio.run(everything(setting, choose_sizes(setting)))


def choose_sizes(setting: Setting) -> Sizes:
    """Take what fits into the minutes, in bfloat16 where the processor multiplies it, else float32, as users do."""
    if setting.quick:
        return QUICK
    sizes = Sizes() if setting.minutes >= WHOLE_MINUTES else SHORT
    return sizes._replace(dtype="bfloat16" if BFLOAT16_FLAGS & set(read_cpu_field("flags").split()) else "float32")


# ---------------------------------------------------------------- what it came to


def result(ready: Ready, trials: Sequence[Trial], goals: Sequence[Goal], sizes: Sizes) -> Result:
    names = [each.name for each in ready.engines]
    found = find_goodputs(trials, names, goals, ready.rates, range(sizes.seeds), TOLERANCE)
    missing = [each for each in sizes.peers if not any(one.kind == each for one in ready.engines)]
    goodput = outcome.goodput_table(found, goals, names, names[0])
    methods = [each.name for each in ready.engines if each.placement in sizes.methods]
    slos = ", ".join(f"{slo.ttft:g} s / {slo.tbt * 1e3:g} ms" for slo in ready.slos)
    settings = "; ".join(f"{each.name}: {outcome.describe_setting(each)}" for each in ready.engines)
    exact = ", ".join(f"{name} {count} of {sizes.exact}" for name, count in ready.exact.items())
    return Result(
        name="served",
        title="Served goodput on two cores",
        method=(
            f"llava-110m in {sizes.dtype}, {sizes.requests} requests a trial from the shipped {TRACE}, a stretch of "
            f"it for each of {sizes.seeds} seeds, rows scaled to a median of {sizes.text} tokens of text and "
            f"{sizes.output} of output, at most one image (336 x 336), its time stamps scaled to the rate. Open loop, "
            "on an absolute schedule, from a process of its own, TTFT from the intended arrival, the first tenth not "
            "judged, drained to the end, failures count as missed, prefix and image caches off. Engines in turn. "
            f"SLOs are {', '.join(map(str, TIMES))} times the medians of requests alone on trinity EPD with two "
            f"threads, before the first trial (TTFT / TBT): {slos}. Goodput: bisection of "
            f"{', '.join(f'{rate:.2f}' for rate in ready.rates)} requests/s; median of the seeds (lowest to highest). "
            f"Every engine has that of {len(sizes.sweep)} settings which kept most of {sizes.swept} requests in time "
            f"(mean of all SLOs and rules) at {SWEEP_SHARE:.0%} of what trinity EPD does with a burst, tokens a step: "
            f"{settings}. {sizes.requests} requests are few: a goodput from a long trace is lower. Tokens equal to "
            f"generate() in float32: {exact}."
        ),
        tables=[
            table("Goodput", goodput, missing),
            table("Sweeps", outcome.sweep_table(dict(ready.swept))),
            table("Trials", outcome.trials_table(trials)),
        ],
        aims=aims(found, goals, names, methods),
        notes=plainly(found, goals, names, methods),
        values={"ready": msgspec.to_builtins(ready), "trials": [msgspec.to_builtins(each) for each in trials]},
    )


def best_of(found: Sequence[EngineGoodput], goal: Goal, names: Sequence[str]) -> tuple[str, float] | None:
    """The engine with the highest median goodput, and that; None where none has run."""
    seen = [(each.engine, each.median) for each in found if each.goal == goal.key and each.engine in names]
    ran = [(name, rate) for name, rate in seen if rate is not None]
    return max(ran, key=lambda each: each[1], default=None)


def plainly(
    found: Sequence[EngineGoodput], goals: Sequence[Goal], names: Sequence[str], methods: Sequence[str]
) -> list[str]:
    """A sentence for each SLO and rule: where disaggregation wins, and where it loses."""
    said = []
    for goal in goals:
        split = best_of(found, goal, methods)
        whole = best_of(found, goal, [each for each in names if each not in methods])
        if split is None or whole is None:
            continue
        rough = any(each.disturbed for each in found if each.goal == goal.key)
        verb = "loses" if split[1] < whole[1] else "wins" if split[1] > whole[1] else "ties"
        said.append(
            f"TTFT {goal.slo.ttft:g} s, TBT {goal.slo.tbt * 1e3:g} ms, {goal.rule}: disaggregation {verb}: "
            f"{split[0]} {split[1]:.2f} requests/s, the best without it {whole[0]} {whole[1]:.2f}."
            + (" Others disturbed some of it: no verdict." if rough else "")
        )
    return said


def aims(
    found: Sequence[EngineGoodput], goals: Sequence[Goal], names: Sequence[str], methods: Sequence[str]
) -> list[Aim]:
    """Trinity's best placement over the best of every other engine, by goal."""
    made = []
    ours = [each for each in names if each.startswith("trinity")]
    for goal in goals:
        own, other = best_of(found, goal, ours), best_of(found, goal, [each for each in names if each not in ours])
        if own is None or other is None:
            continue
        over = goodput_ratio(found, goal.key, own[0], other[0])
        told = f"{own[0]} {own[1]:.2f}, {other[0]} {other[1]:.2f}" + (f", ratio {over[0]:.2f}" if over else "")
        what = f"Goodput at TTFT {goal.slo.ttft:g} s, TBT {goal.slo.tbt * 1e3:g} ms, {goal.rule}, requests/s"
        made.append(Aim(what, "ahead of every peer", told, own[1] > other[1]))
    return made
