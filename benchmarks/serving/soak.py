"""A soak: four instances in processes, random requests, random cancels, no kills; is memory flat at the end?

    python benchmarks/serving/soak.py --minutes 30

Prints a table by process: resident memory and descriptors, a line fitted to their last two thirds, PASS or FAIL.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.report import Table
from benchmarks.setting import PHOTOS, WORDS, build_cached
from trinity.errors import TrinityError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling

PLACEMENT = "1E1P2D"
POOLS = {"image": 32, "kv": 512}
CLIENTS, CANCELLED = 6, 0.3  # at once; share of the requests whose reader leaves
MOST_GROWTH = 16 << 20  # bytes, by the fitted line, over what it is fitted to
SAMPLES = 200


@dataclass
class Series:
    """One process over time: seconds, resident bytes, descriptors."""

    seconds: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)

    def take(self, process: int, now: float) -> None:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        self.seconds.append(now)
        self.resident.append(float(pages * os.sysconf("SC_PAGE_SIZE")))
        self.descriptors.append(float(len(os.listdir(f"/proc/{process}/fd"))))

    def growth(self, values: list[float]) -> float:
        """Rise of the fitted line over the last two thirds."""
        first = len(values) // 3
        return slope(self.seconds[first:], values[first:]) * (self.seconds[-1] - self.seconds[first])


def slope(x: list[float], y: list[float]) -> float:
    """Of the line of least squares."""
    middle, height = sum(x) / len(x), sum(y) / len(y)
    spread = sum((each - middle) ** 2 for each in x)
    return sum((a - middle) * (b - height) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


def drawn(draw: random.Random, photos: list[Path]) -> Request:
    """Text or up to three photographs, short or long, greedy or sampled."""
    images = draw.sample(photos, draw.choice((0, 1, 1, 2, 3)))
    text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 60)))
    sampling = Sampling(ignore_eos=True, temperature=draw.choice((0.0, 0.8)), seed=draw.randint(0, 1 << 30))
    return Request("<image>" * len(images) + text, images=images, max_tokens=draw.randint(1, 48), sampling=sampling)


async def client(pipe: Pipeline, draw: random.Random, until: float, ends: Counter[str]) -> None:
    """One request after another; some are left in their middle."""
    photos = sorted(PHOTOS.glob("*.jpg"))
    while time.monotonic() < until:
        left_at = draw.randint(0, 12) if draw.random() < CANCELLED else None
        try:
            async with pipe.stream(drawn(draw, photos)) as tokens:
                async for token in tokens:
                    if token.index == left_at:
                        break
            ends["left" if left_at is not None else "served"] += 1
        except TrinityError as error:
            ends[type(error).__name__] += 1


async def watch(pipe: Pipeline, seconds: float, series: dict[str, Series]) -> None:
    processes = {"front end": os.getpid(), **{name: each.process for name, each in pipe.processes.items()}}
    started = time.monotonic()
    while (now := time.monotonic() - started) < seconds:
        for name, process in processes.items():
            series.setdefault(name, Series()).take(process, now)
        await asyncio.sleep(seconds / SAMPLES)


async def soak(model: Path, seconds: float, connector: str, seed: int = 0) -> tuple[dict[str, Series], Counter[str]]:
    """The series by process, and how the requests ended."""
    series: dict[str, Series] = {}
    ends: Counter[str] = Counter()
    settings: dict[str, Any] = {
        "dtype": "float32",
        "hosting": "process",
        "connector": connector,
        "cache": CacheConfig(pools=POOLS),
    }
    async with Pipeline(model, PLACEMENT, **settings) as pipe:
        until = time.monotonic() + seconds
        clients = [client(pipe, random.Random(seed + each), until, ends) for each in range(CLIENTS)]
        await asyncio.gather(watch(pipe, seconds, series), *clients)
        await pipe.wait_idle()
    return series, ends


def verdict(series: dict[str, Series], ends: Counter[str]) -> tuple[Table, bool]:
    rows, flat = [], True
    for name, each in series.items():
        memory, opened = each.growth(each.resident), each.growth(each.descriptors)
        good = memory <= MOST_GROWTH and opened < 1.0
        flat = flat and good
        first = len(each.resident) // 3
        sizes = [f"{value / 2**20:.1f}" for value in (each.resident[first], each.resident[-1], memory)]
        files = [f"{each.descriptors[first]:.0f}", f"{each.descriptors[-1]:.0f}", f"{opened:+.2f}"]
        rows.append([name, *sizes, *files, "flat" if good else "GROWS"])
    header = ("process", "MiB at 1/3", "MiB at end", "fitted", "files at 1/3", "files at end", "fitted", "")
    return Table(f"Resident memory and descriptors; requests {dict(ends)}", header, rows), flat and not failures(ends)


def failures(ends: Counter[str]) -> dict[str, int]:
    """Errors, of which there should be none: nobody was killed."""
    return {name: count for name, count in ends.items() if name not in ("served", "left")}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--connector", default="shm")
    parser.add_argument("--model", type=Path, help="a checkpoint directory; a tiny LLaVA without it")
    asked = parser.parse_args(arguments)
    model = asked.model or build_cached("llava")
    table, good = verdict(*asyncio.run(soak(model, asked.minutes * 60, asked.connector)))
    print(table.text(), "PASS" if good else "FAIL", sep="\n\n")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
