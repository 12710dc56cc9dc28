"""A real model on two processes, each on a core of its own, beside the simulator with tables measured first.

``python benchmarks/fidelity_real.py DIRECTORY ROLES CORE OUT COUNTS`` measures such an instance's tables by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fidelity_seen import Load, Seen, seen
from benchmarks.setting import ROOT, ForeignLoad, Setting
from trinity import model_config
from trinity.budget import Budgets
from trinity.cluster import Cluster
from trinity.cost import Device, Link, Tables
from trinity.goodput import goodput
from trinity.hosting import Deployment, make_processor, profiled
from trinity.instance import Instance, named
from trinity.model_shapes import Model
from trinity.pipeline import Pipeline
from trinity.replay import replay
from trinity.simulator import Simulator
from trinity.trace import SLO, Trace, TraceImage, TraceRow

PLACEMENT = "1EP1D"
SHARES = (0.6, 0.75, 0.9)
REPEATS = 3
BUDGETS = Budgets(tokens=1024, media=576)
POOLS = {"image": 24, "kv": 1200}
OPTIONS: dict[str, Any] = {"dtype": "float32", "pools": POOLS, "image_cache": False, "prefix_cache": False}
Counts = dict[str, dict[str, Any]]  # of Tables.taken, by roles
PREFILLS = {"tokens": (1, 16, 32, 64, 256, 640), "images": (1, 2), "repeats": 3}
DECODES = {"rows": (1, 2, 4, 8), "repeats": 40}  # about as long as the other takes
TABLES: Counts = {"EP": {"contexts": (1, 384), **PREFILLS}, "D": {"contexts": (32, 128, 640), **DECODES}}
QUICKLY: dict[str, Any] = {"contexts": (1, 64), "rows": (1, 4), "tokens": (1, 32), "images": (1,), "repeats": 1}
SIZE = (448, 336)
MEMORY = 8e9
MESSAGE_S = 2e-4  # as the benchmark "control" has it


@dataclass(frozen=True)
class Costs:
    """Measured beforehand, and not touched afterwards: steps by roles, and a pull; a message is far below both."""

    tables: dict[str, Tables]
    message_s: float
    link: Link


@dataclass
class Real:
    """What was seen of the real model."""

    name: str
    costs: Costs
    slo: SLO
    goodput: float = 0.0
    loads: list[Load] = field(default_factory=list)

    def method(self) -> str:
        return (
            f"Real: {self.name} in float32, {PLACEMENT}, a process on a core each, tables of costs measured before it "
            f"started, both at once as they serve; every third request has an image; SLO {self.slo.ttft:.2f} s and "
            f"{self.slo.tbt:.3f} s, simulated goodput {self.goodput:.2f} requests/s; {len(self.loads[0].live)} live "
            "repeats of each load."
        )

    def values(self) -> dict[str, Any]:
        costs = {"message_s": self.costs.message_s, "pull_s": self.costs.link.fixed_s}
        return {"goodput": self.goodput, **costs, "loads": [load.values() for load in self.loads]}


def trace(count: int, image_tokens: int, rate: float = 1.0, seed: int = 5) -> Trace:
    """Poisson arrivals; every third request has an image, so that short prefills wait for long ones."""
    draw, at, rows = random.Random(seed), 0.0, []
    for number in range(count):
        at += draw.expovariate(rate) * 1000
        text = draw.randint(24, 64)
        images = [TraceImage(width=SIZE[0], height=SIZE[1], tokens=image_tokens)] if number % 3 == 0 else []
        length = text + image_tokens * len(images)
        output = draw.randint(6, 20)
        row = TraceRow(timestamp=at, input_length=length, text_length=text, output_length=output, images=images)
        rows.append(row)
    return Trace(rows)


async def measured(directory: Path, counts: Counts, calm: Trace) -> Costs:
    """Tables of both instances, measured at once as they will serve at once; then a pull, of a pipeline at rest."""
    with tempfile.TemporaryDirectory() as folder:
        outs = {roles: Path(folder) / f"{roles}.json" for roles in counts}
        jobs = [(roles, core, outs[roles], counts[roles]) for core, roles in enumerate(counts)]
        await asyncio.gather(*(_apart(directory, *job) for job in jobs))
        tables = {roles: Tables.load(out) for roles, out in outs.items()}
    async with serving(directory) as pipe:
        await replay(pipe, calm, late_s=1e9)
    pulls = [seconds for lane, _, _, seconds, _ in pipe.timeline.rows() if lane == "migration"]  # there at the end
    return Costs(tables, MESSAGE_S, Link(name="this host", bandwidth=1e15, fixed_s=median(pulls)))


async def _apart(directory: Path, roles: str, core: int, out: Path, counts: dict[str, Any]) -> None:
    """Measure an instance of these roles in a process of its own, on a core of its own."""
    command = (sys.executable, str(Path(__file__)), str(directory), roles, str(core), str(out), json.dumps(counts))
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    if await process.wait():
        raise RuntimeError(f"the tables of {roles} could not be measured: see what it said above")


def profile_alone(directory: Path, roles: str, out: Path, counts: dict[str, Any]) -> None:
    """What such a process does."""
    processor = make_processor(directory)
    try:
        profiled(Deployment(directory, "float32", pools=POOLS), named([Instance(roles)]), processor, {}, out, **counts)
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


def simulator(shape: Model, slo: SLO, costs: Costs) -> Simulator:
    devices = tuple(Device(name=roles, flops=1e11, bandwidth=1e10, memory=MEMORY) for roles in costs.tables)
    cluster = Cluster(devices=devices, link=costs.link, message_s=costs.message_s)
    return Simulator(shape, slo, cluster=cluster, cost=costs.tables, budgets=BUDGETS)


async def repeated(pipe: Pipeline, offered: Trace, slo: SLO, repeats: int) -> tuple[Trace, list[Seen], float]:
    """The rows as they were served once, and what each repeat saw."""
    found: list[Seen] = []
    with ForeignLoad() as load:
        for _ in range(repeats):
            served = await replay(pipe, offered)
            found.append(seen(served, slo))
    return served, found, load.share


async def compare(directory: Path, counts: Counts, count: int, shares: Sequence[float], repeats: int) -> Real:
    shape = model_config.read(directory)
    asked = trace(count, shape.image_tokens)
    costs = await measured(directory, counts, trace(4, shape.image_tokens, rate=0.5, seed=1))
    slo = bounds(costs, shape)
    real, simulated = Real(directory.name, costs, slo), simulator(shape, slo, costs)
    found = await asyncio.to_thread(goodput, simulated.serve(PLACEMENT), asked, slo, least_requests=4, least_ttfts=1.0)
    real.goodput = found.rate
    async with serving(directory) as pipe:
        pin(pipe)
        await replay(pipe, asked, rate=found.rate, late_s=1e9)  # code for new shapes is made, pages are touched
        for share in shares:
            offered = asked.scaled(rate=share * found.rate)
            served, live, foreign = await repeated(pipe, offered, slo, repeats)
            expected = await asyncio.to_thread(simulated.replay, served, PLACEMENT)
            real.loads.append(Load(share, count, seen(expected.outcomes, slo), live, foreign))
    return real


def bounds(costs: Costs, shape: Model) -> SLO:
    """An SLO that this machine can keep: three image requests' worth of steps, and twice a step of four decodes."""
    first, second = costs.tables.values()
    image = first.seconds(0, 0, shape.image_tokens) + first.seconds(0, shape.image_tokens + 44, 0)
    return SLO(ttft=3 * image, tbt=2 * second.seconds(4, 0, 0))


def run(setting: Setting) -> Real:
    directory = setting.pick("llava-110m", "llava")
    if setting.quick:
        return asyncio.run(compare(directory, {"EP": QUICKLY, "D": QUICKLY}, 6, SHARES[2:], 2))
    return asyncio.run(compare(directory, TABLES, 24, SHARES, REPEATS))


if __name__ == "__main__":
    given = sys.argv[1:]
    os.sched_setaffinity(0, {cores()[int(given[2]) % len(cores())]})
    profile_alone(Path(given[0]), given[1], Path(given[3]), json.loads(given[4]))
