"""A real model on two processes, each on a core of its own, beside the simulator with tables measured first.

``python benchmarks/fidelity/real_model.py DIRECTORY ROLES CORE OUT COUNTS`` measures such an instance's tables alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.fidelity.comparison import Load, Seen, seen
from benchmarks.fidelity.host import Host, calibrated, slower
from benchmarks.setting import ROOT, ForeignLoad, Setting
from trinity.bench.live_replay import replay
from trinity.bench.lookalike import Lookalikes
from trinity.costs import model_config
from trinity.costs.budgets import StepBudgets
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import ModelShape
from trinity.costs.step_cost import CostTables, Device
from trinity.instance import Instance, name_instances
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.runtime.loader import ServingConfig, make_processor, profile_copies
from trinity.simulation.simulator import Simulator
from trinity.traces.goodput import GoodputOptions, goodput
from trinity.traces.trace import SLO, ServedRequest, Trace, TraceImage, TraceRow

PLACEMENT = "1EP1D"
SHARES = (0.6, 0.75, 0.9)
REPEATS = 3
BUDGETS = StepBudgets(token_budget=1024, image_budget=576)
POOLS = {"image": 24, "kv": 1200}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "cache": CacheConfig(pools=POOLS),
    "image_cache": False,
    "prefix_cache": False,
}
Counts = dict[str, dict[str, Any]]  # of CostTables.profile, by roles
PREFILLS = {"tokens": (1, 16, 32, 64, 256, 640), "images": (1, 2), "repeats": 3}
DECODES = {"rows": (1, 2, 4, 8), "repeats": 7}
TABLES: Counts = {"EP": {"contexts": (1, 384), **PREFILLS}, "D": {"contexts": (32, 128, 640), **DECODES}}
QUICKLY: dict[str, Any] = {"contexts": (1, 64), "rows": (1, 4), "tokens": (1, 32), "images": (1,), "repeats": 1}
SIZE = (448, 336)
MEMORY = 8e9


@dataclass(frozen=True)
class Costs:
    """Measured beforehand, and not touched afterwards: steps by roles, and what the host adds to them."""

    tables: dict[str, CostTables]
    host: Host


@dataclass
class Real:
    """Measurements of the real model."""

    name: str
    costs: Costs
    slo: SLO
    goodput: float = 0.0
    loads: list[Load] = field(default_factory=list)

    def method(self) -> str:
        return (
            f"Real: {self.name} in float32, {PLACEMENT}, a process on a core each, tables of costs measured before it "
            f"started, each instance alone; a message takes {self.costs.host.message_s * 1e6:.0f} us, a pull "
            f"{self.costs.host.pull_s * 1e3:.2f} ms, a step {self.costs.host.step_s * 1e3:.2f} ms more than in the "
            f"tables; every fourth request has an image; SLO {self.slo.ttft:.2f} s and {self.slo.tbt:.3f} s, simulated "
            f"goodput {self.goodput:.2f} requests/s; {len(self.loads[0].live)} live repeats of each load."
        )

    def values(self) -> dict[str, Any]:
        loads = [load.values() for load in self.loads]
        return {"goodput": self.goodput, "host": asdict(self.costs.host), "loads": loads}


def trace(count: int, image_tokens: int, rate: float = 1.0, seed: int = 5) -> Trace:
    """Poisson arrivals; every fourth request has an image, so that short prefills wait for long ones."""
    draw, at, rows = random.Random(seed), 0.0, []
    for number in range(count):
        at += draw.expovariate(rate) * 1000
        text = draw.randint(24, 64)
        images = [TraceImage(width=SIZE[0], height=SIZE[1], tokens=image_tokens)] if number % 4 == 0 else []
        length = text + image_tokens * len(images)
        output = draw.randint(6, 20)
        row = TraceRow(timestamp=at, input_length=length, text_length=text, output_length=output, images=images)
        rows.append(row)
    return Trace(rows)


async def measured(directory: Path, counts: Counts) -> dict[str, CostTables]:
    """Tables of both instances, by roles: one after the other, for each is idle most of the time when they serve."""
    tables: dict[str, CostTables] = {}
    with tempfile.TemporaryDirectory() as folder:
        for core, (roles, wanted) in enumerate(counts.items()):
            out = Path(folder) / f"{roles}.json"
            await _apart(directory, roles, core, out, wanted)
            tables[roles] = CostTables.load(out)
    return tables


async def _apart(directory: Path, roles: str, core: int, out: Path, counts: dict[str, Any]) -> None:
    """Measure an instance of these roles in a process of its own, on a core of its own."""
    command = (sys.executable, str(Path(__file__)), str(directory), roles, str(core), str(out), json.dumps(counts))
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    if await process.wait():
        raise RuntimeError(f"the tables of {roles} could not be measured: see what it said above")


def profile_alone(directory: Path, roles: str, out: Path, counts: dict[str, Any]) -> None:
    """Run in such a process."""
    processor = make_processor(directory)
    try:
        profile_copies(
            ServingConfig(directory, dtype="float32", cache=CacheConfig(pools=POOLS)),
            name_instances([Instance(roles)]),
            processor,
            {},
            out,
            **counts,
        )
    finally:
        processor.close()


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def serving(directory: Path) -> Pipeline:
    return Pipeline(directory, PLACEMENT, hosting="process", budgets=BUDGETS, **OPTIONS)


def pin(pipe: Pipeline) -> None:
    """Every thread of each instance's process onto a core of its own, as far as there are cores."""
    for number, member in enumerate(pipe.processes.values()):
        core = {cores()[number % len(cores())]}
        for thread in Path(f"/proc/{member.process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), core)


def simulator(shape: ModelShape, slo: SLO, costs: Costs) -> Simulator:
    devices = tuple(Device(name=roles, flops=1e11, bandwidth=1e10, memory=MEMORY) for roles in costs.tables)
    cluster = Cluster(devices=devices, link=costs.host.link, message_s=costs.host.message_s)
    tables = {roles: slower(each, costs.host.step_s) for roles, each in costs.tables.items()}
    return Simulator(shape, slo, cluster=cluster, cost=tables, budgets=BUDGETS)


async def at_rest(pipe: Pipeline, shape: ModelShape, tables: dict[str, CostTables], requests: int) -> Host:
    def simulate(host: Host, alone: Trace) -> Sequence[ServedRequest]:
        return simulator(shape, SLO(1.0, 1.0), Costs(tables, host)).replay(alone, PLACEMENT).outcomes

    return await calibrated(pipe, Lookalikes(pipe.processor, "alone/"), trace(requests, shape.image_tokens), simulate)


async def repeated(pipe: Pipeline, offered: Trace, slo: SLO, repeats: int) -> tuple[Trace, list[Seen], float]:
    """The rows as they were served once, and what each repeat saw."""
    found: list[Seen] = []
    with ForeignLoad() as load:
        for _ in range(repeats):
            served = await replay(pipe, offered)
            found.append(seen(served, slo))
    return served, found, load.share


async def compare(directory: Path, counts: Counts, count: int, shares: Sequence[float], repeats: int) -> Real:
    """Tables first; then one pipeline, what its host adds, and every load ``repeats`` times."""
    shape = model_config.read_model_shape(directory)
    asked = trace(count, shape.image_tokens)
    tables = await measured(directory, counts)
    async with serving(directory) as pipe:
        pin(pipe)
        costs = Costs(tables, await at_rest(pipe, shape, tables, min(count, 8)))
        slo = bounds(costs, shape)
        real, simulated = Real(directory.name, costs, slo), simulator(shape, slo, costs)
        options: GoodputOptions = {"least_requests": 4, "least_ttfts": 0.1}
        found = await asyncio.to_thread(goodput, simulated.serve(PLACEMENT), asked, slo, **options)
        real.goodput = found.rate
        await replay(pipe, asked, rate=found.rate, late_s=1e9)  # code for new shapes is made, pages are touched
        for share in shares:
            offered = asked.scale(rate=share * found.rate)
            served, live, foreign = await repeated(pipe, offered, slo, repeats)
            expected = await asyncio.to_thread(simulated.replay, served, PLACEMENT)
            real.loads.append(Load(share, count, seen(expected.outcomes, slo), live, foreign))
    return real


def bounds(costs: Costs, shape: ModelShape) -> SLO:
    """An SLO that this machine can keep: 1.5 times the steps of an image request, and twice a step of four decodes.

    A request with an image that finds another one before it is late, so that the limit comes far below what the
    machine can do: near that, a TTFT is a queue, which multiplies every difference.
    """
    first, second = (slower(each, costs.host.step_s) for each in costs.tables.values())
    image = first.seconds(0, 0, shape.image_tokens) + first.seconds(0, shape.image_tokens + 44, 0)
    return SLO(ttft=1.5 * (image + 2 * costs.host.message_s), tbt=2 * second.seconds(4, 0, 0))


def run(setting: Setting) -> Real:
    directory = setting.pick("llava-110m", "llava")
    if setting.quick:
        return asyncio.run(compare(directory, {"EP": QUICKLY, "D": QUICKLY}, 6, SHARES[2:], 2))
    return asyncio.run(compare(directory, TABLES, 20, SHARES, REPEATS))


if __name__ == "__main__":
    given = sys.argv[1:]
    os.sched_setaffinity(0, {cores()[int(given[2]) % len(cores())]})
    profile_alone(Path(given[0]), given[1], Path(given[3]), json.loads(given[4]))
