"""Instances in threads with and without the interpreter's lock, beside instances in processes: does it pay?

    python3.14t benchmarks/serving/free_threaded.py --rounds 5

Needs a free-threaded build of Python 3.13 or later that has trinity's packages and its extension; any other build
serves the rows with the lock alone. Prints requests a second and a CPU second of bursts, ways in turns, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.report import Table
from benchmarks.setting import build_cached
from trinity.bench.load import CheckpointRequests, burst_row, make_requests
from trinity.bench.measure import Burst, count_exact, run_burst
from trinity.bench.servers import DTYPES, BenchRequest, EngineSpec, Server

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
PLACEMENTS = ("1E1P1D", "EP+D", "2EPD")
REQUESTS, PROMPT, OUTPUT = 12, 40, 24
EXACT = 2
WAYS = ("threads, lock", "threads, no lock", "processes")


class LockedServer(Server):
    """A server whose interpreter has its lock, or not: ``PYTHON_GIL``, which only a free-threaded build takes."""

    def __init__(self, engine: EngineSpec, checkpoint: Path, locked: bool) -> None:
        super().__init__(engine, checkpoint)
        self._locked = locked

    def _environment(self) -> dict[str, str]:
        lock = {"PYTHON_GIL": "1" if self._locked else "0"} if FREE_THREADED else {}
        return {**super()._environment(), **lock}


def server_of(way: str, placement: str, dtype: str, checkpoint: Path) -> LockedServer:
    """A process has its lock as its Python comes: processes do not share an interpreter."""
    hosting = "process" if way == "processes" else "thread"
    engine = EngineSpec(placement=placement, dtype=dtype, options={"hosting": hosting}, label=f"{placement}, {way}")
    return LockedServer(engine, checkpoint, locked=way != "threads, no lock")


async def measured(
    placement: str, dtype: str, checkpoint: Path, requests: list[BenchRequest], rounds: int
) -> list[list[str]]:
    ways = [way for way in WAYS if FREE_THREADED or way != "threads, no lock"]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server_of(way, placement, dtype, checkpoint)) for way in ways]
        for server in servers:
            await run_burst(server, requests[:2])
        bursts: list[list[Burst]] = [[] for _ in servers]
        for _ in range(rounds):
            for server, found in zip(servers, bursts, strict=True):
                found.append(await run_burst(server, requests))
    return [row(placement, dtype, way, found, bursts[0]) for way, found in zip(ways, bursts, strict=True)]


def row(placement: str, dtype: str, way: str, found: list[Burst], first: list[Burst]) -> list[str]:
    ratios = [one.per_s / base.per_s for one, base in zip(found, first, strict=True)]
    return [
        f"{placement}, {dtype}, {way}",
        f"{median(each.per_s for each in found):.2f}",
        f"{median(each.per_cpu_s for each in found):.2f}",
        f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{median(each.foreign for each in found):.0%}",
    ]


async def everything(checkpoint: Path, rounds: int, placements: Sequence[str] = PLACEMENTS) -> None:
    with await asyncio.to_thread(CheckpointRequests, checkpoint, "threads") as make:
        requests = await make_requests(make, [burst_row(1, PROMPT, OUTPUT)] * REQUESTS)
    exact = await count_exact(
        [EngineSpec(placement="1E1P1D", options={"hosting": "thread"})], checkpoint, requests[:EXACT]
    )
    rows = [
        line
        for dtype in DTYPES
        for placement in placements
        for line in await measured(placement, dtype, checkpoint, requests, rounds)
    ]
    build = " free-threaded" if FREE_THREADED else ""
    title = f"{checkpoint.name}, bursts of {REQUESTS}, Python {sys.version.split()[0]}{build}"
    print(Table(title, ["way", "requests/s", "a CPU second", "of threads with the lock", "others"], rows).text())
    print(f"tokens equal to generate(): {exact}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llava-110m", help="a checkpoint of trinity.testing")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    asyncio.run(everything(build_cached(given.model), given.rounds))


if __name__ == "__main__":
    main()
