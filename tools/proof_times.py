"""Times the self-check of a multimodal checkpoint that nobody listed, beside a pipeline's load of it without one.

``python tools/proof_times.py MODEL... [--runs 5]`` opens a pipeline of each in fresh processes: without a verdict, so
that the proof runs, and then with the verdict that it left. The self-check is what the first takes longer; imports
count in both. Seconds of wall time and of the processes' CPUs (which a busy machine leaves as they are), medians over
the runs, and how many loads a self-check takes.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_OPEN = """
import asyncio, sys
from trinity.pipeline import Pipeline
async def main():
    async with Pipeline(sys.argv[1], "EPD", dtype="float32"):
        pass
asyncio.run(main())
"""


class Spent(NamedTuple):
    """Seconds that something took: of wall time, and of all its processes' CPUs."""

    wall: float
    cpu: float


def open_pipeline(model: Path, cache: Path) -> Spent:
    """Open and close a pipeline in a process of its own. Raises ``CalledProcessError``."""
    environment = {**os.environ, "TRINITY_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    begun, cpu = time.monotonic(), _children_cpu()
    subprocess.run([sys.executable, "-c", _OPEN, str(model)], env=environment, check=True, stderr=subprocess.DEVNULL)
    return Spent(time.monotonic() - begun, _children_cpu() - cpu)


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def time_once(model: Path) -> tuple[Spent, Spent]:
    """Time a first load and one with its verdict."""
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch)
        first = open_pipeline(model, cache)
        if not list((cache / "proofs").glob("*.json")):
            raise SystemExit(f"{model} has no self-check: its type is listed")
        return first, open_pipeline(model, cache)


def describe(model: Path, runs: int) -> str:
    """Time a checkpoint and write its row."""
    pairs = [time_once(model) for _ in range(runs)]
    parts = []
    for name in Spent._fields:
        load = statistics.median(getattr(second, name) for _, second in pairs)
        check = statistics.median(getattr(first, name) - getattr(second, name) for first, second in pairs)
        parts.append(f"{name} load {load:.2f} s, self-check {check:.2f} s, {check / load:.2f} loads")
    return f"{model.name}: {'; '.join(parts)} (medians of {runs})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+", type=Path, help="a checkpoint's directory")
    parser.add_argument("--runs", type=int, default=5, help="of each, the default is 5")
    given = parser.parse_args(arguments)
    for model in given.model:
        print(describe(model, given.runs), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
