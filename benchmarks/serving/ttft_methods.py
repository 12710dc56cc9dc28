"""TTFT, ITL and migrations under every disaggregation method, with real photographs, on the cores of this machine.

Open loop: request k is due k intervals after the start, whatever became of those before it; TTFT counts from then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Result, Table
from benchmarks.setting import MAX_FOREIGN_SHARE, ForeignLoad, Setting, calm, disturbed
from trinity.memory.cache_config import CacheConfig
from trinity.metrics import percentile
from trinity.pipeline import Pipeline
from trinity.request import Output, Request, Sampling

METHODS = ("EPD", "EP+D", "ED+P", "PD+E", "E+P+D")
QUESTION = "<image>\nWhat is in this photo?"


@dataclass
class Served:
    """One method's requests of all rounds: seconds from when each was due to its first token, outputs, lateness."""

    ttft_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    @property
    def itl_s(self) -> list[float]:
        return [gap for output in self.outputs for gap in output.itl_s]

    def pulls(self, kind: str) -> list[dict[str, Any]]:
        records = [record for output in self.outputs for record in output.transfers]
        return [record for record in records if record["kind"] == kind and record.get("bytes")]

    def span(self, name: str) -> list[float]:
        return [output.spans[name] for output in self.outputs if output.spans.get(name)]

    def extend(self, other: Served) -> None:
        for name in ("ttft_s", "late_s", "wall_s", "cpu_s", "foreign", "outputs"):
            getattr(self, name).extend(getattr(other, name))


@dataclass(frozen=True)
class Schedule:
    """``count`` requests, one every ``interval_s``, of ``tokens`` output tokens each."""

    count: int
    interval_s: float
    tokens: int

    def request(self, photos: Sequence[Path], number: int) -> Request:
        photo = photos[number % len(photos)]
        return Request(QUESTION, images=[photo], max_tokens=self.tokens, sampling=Sampling(ignore_eos=True))


async def serve(pipe: Pipeline, schedule: Schedule, photos: Sequence[Path]) -> Served:
    """One round. A request that fails raises: a benchmark of failures would mean nothing."""
    served = Served()
    start = time.monotonic()

    async def one(number: int) -> None:
        due = start + number * schedule.interval_s
        await asyncio.sleep(due - time.monotonic())
        late = time.monotonic() - due
        output = await pipe.complete(schedule.request(photos, number))
        assert output.ttft_s is not None
        served.late_s.append(late)
        served.ttft_s.append(late + output.ttft_s)
        served.outputs.append(output)

    cpu = time.process_time()
    with ForeignLoad() as load:
        await asyncio.gather(*(one(number) for number in range(schedule.count)))
    served.wall_s.append(time.monotonic() - start)
    served.cpu_s.append(time.process_time() - cpu)
    served.foreign.append(load.share)
    return served


async def measure(model: Path, method: str, schedule: Schedule, setting: Setting, rounds: int) -> Served:
    """``rounds`` undisturbed rounds after one request to warm up; twice as many are tried.

    Caches are off: photographs come back, features must not.
    """
    served: list[Served] = []
    pools = {"image": 4 * schedule.count, "kv": 64 * schedule.count}
    options: dict[str, Any] = {
        "dtype": "float32",
        "cache": CacheConfig(pools=pools),
        "prefix_cache": False,
        "image_cache": False,
    }
    async with Pipeline(model, method, **options) as pipe:
        await pipe.complete(schedule.request(setting.photos, 0))
        while len(served) < 2 * rounds and sum(each.foreign[0] <= MAX_FOREIGN_SHARE for each in served) < rounds:
            await asyncio.to_thread(setting.settle)
            served.append(await serve(pipe, schedule, setting.photos))
    kept, _ = calm([(each.foreign[0], each) for each in served])
    for each in kept[1:]:
        kept[0].extend(each)
    return kept[0]


def run(setting: Setting) -> Result:
    """One pipeline per method, all under the same schedule."""
    model = setting.pick("llava-110m", "llava")
    schedule, rounds = (Schedule(2, 0.01, 4), 1) if setting.quick else (Schedule(12, 1.0, 32), 2)
    methods = ("EPD", "E+P+D") if setting.quick else METHODS
    found = {method: asyncio.run(measure(model, method, schedule, setting, rounds)) for method in methods}
    return result(found, schedule, rounds)


def result(found: dict[str, Served], schedule: Schedule, rounds: int) -> Result:
    noisy = [method for method, served in found.items() if max(served.foreign) > MAX_FOREIGN_SHARE]
    return Result(
        name="ttft_methods",
        title="TTFT, ITL and migration by disaggregation method",
        method=(
            f"llava-110m in float32, {schedule.count} requests of one photograph (576 visual tokens) and "
            f"{schedule.tokens} output tokens, one every {schedule.interval_s:g} s, {rounds} rounds; every instance "
            "has one intra-op thread, and all share the machine's cores, the client too. Wall time in ms, from when a "
            f"request was due. Rounds in which others took more than {MAX_FOREIGN_SHARE:.0%} of the machine are left "
            "out. A read is the copy of the blocks; a migration counts from the offer to the blocks' arrival."
        ),
        tables=[
            Table("Latencies, ms", LATENCIES, [latency_row(*each) for each in found.items()]),
            Table("Migrations, ms", MIGRATIONS, [row for each in found.items() for row in migration_rows(*each)]),
        ],
        notes=disturbed(noisy),
        values={method: values(served) for method, served in found.items()},
    )


LATENCIES = ("method", "TTFT p50", "p95", "ITL p50", "p95", "late p95", "CPU s a request")
MIGRATIONS = ("method", "kind", "reads", "KiB", "read p50", "p95", "migration p50", "p95")
SPANS = {"image": "ep_migration", "kv": "pd_migration"}


def at(values: Sequence[float], percent: float) -> float:
    return percentile(sorted(values), percent)


def ms(values: Sequence[float], percent: float) -> str:
    return f"{at(values, percent) * 1e3:.1f}" if values else "-"


def latency_row(method: str, served: Served) -> list[str]:
    cpu = sum(served.cpu_s) / len(served.outputs)
    shown = [ms(values, percent) for values in (served.ttft_s, served.itl_s) for percent in (50, 95)]
    return [method, *shown, ms(served.late_s, 95), f"{cpu:.2f}"]


def migration_rows(method: str, served: Served) -> list[list[str]]:
    rows = []
    for kind, span in SPANS.items():
        pulls = served.pulls(kind)
        if pulls:
            seconds, spans = [each["seconds"] for each in pulls], served.span(span)
            size = sum(each["bytes"] for each in pulls) / len(pulls) / 1024
            shown = [ms(values, percent) for values in (seconds, spans) for percent in (50, 95)]
            rows.append([method, kind, str(len(pulls)), f"{size:.0f}", *shown])
    return rows


def values(served: Served) -> dict[str, Any]:
    return {
        "ttft_s": distribution(served.ttft_s),
        "itl_s": distribution(served.itl_s),
        "late_s": distribution(served.late_s),
        "spans_s": {name: distribution(served.span(name)) for name in served.outputs[0].spans},
        "reads": {
            kind: {"seconds": distribution([each["seconds"] for each in pulls]), "bytes": [p["bytes"] for p in pulls]}
            for kind in SPANS
            if (pulls := served.pulls(kind))
        },
        "cpu_s": served.cpu_s,
        "wall_s": served.wall_s,
        "foreign_load": served.foreign,
        "requests": len(served.outputs),
    }


def distribution(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": at(values, percent) for percent in (50, 90, 95, 99)} if values else {}
