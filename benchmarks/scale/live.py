"""One replay on paced instances, live: what it came to, and the signs by which a saturated CPU is told.

Emulation: threads, cores, messages, block pools, transfers and digests are real; stages wait for the time that a
roofline gives. Times are ``dilation`` times as long as the device's, in costs, bounds and arrivals alike.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from benchmarks.paper_devices import paper_device
from benchmarks.rank.ranking import SETTINGS, slo_of
from benchmarks.setting import ForeignLoad
from trinity import traces
from trinity.bench.live_replay import replay
from trinity.core.scheduler import BatchRules
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import Device, Roofline
from trinity.emulation.content import expected_tokens
from trinity.emulation.model import EmulatedModel, EmulatedRequest, EmulatedShape
from trinity.errors import TrinityWarning
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.metrics import percentile
from trinity.pipeline import Pipeline
from trinity.placement import Placement
from trinity.simulation.simulator import Simulator
from trinity.traces.goodput import SHARE, falls_behind, score_outcomes, steady_state_s
from trinity.traces.trace import COMPLETE, SLO, ServedRequest, Trace

NAME = "llava-1.5-7b"
MODEL = get_model_shape(NAME)
DEVICE = paper_device("H20")  # the paper's
PER_HOST = 8
BUDGETED = 0.9  # of the TBT bound: a step that takes all of it is late by what this host adds
SCALE = 2048.0  # smaller blocks: a word of 8 bytes for a token and layer
UNSCHEDULED = BatchRules(policy="prefill_first", chunked=False, limit_encodes=False)  # no stage-level batching
SOURCE = f"a roofline of {MODEL.name} on an {DEVICE.name} with the shares of its peaks that trinity.Device assumes"
PROBE_S = 0.02
Record = dict[str, Any]

LIMITS = {  # stated before the run; a rate at which one is passed is not judged
    "cpu": 0.70,  # of a core, by the process: its threads share one interpreter lock
    "machine": 0.95,  # of all cores, by everybody
    "client": 0.01,  # of the TTFT bound, the 99th percentile of how late a request was sent
    "steps": 0.02,  # of the time that steps are to take, how much longer they took in all
    "loop": 0.10,  # of the TBT bound, the 99th percentile of how late the event loop woke up
}


class Task(NamedTuple):
    """One replay: ``asked`` requests of a dataset at ``rate`` requests a second of the device's time."""

    dataset: str
    placement: str
    scheduled: bool  # stage-level batching
    asked: int
    rate: float
    dilation: int

    @property
    def slo(self) -> SLO:
        return bounds(self.dataset)


def bounds(dataset: str, budgeted: float = 1.0, dilation: float = 1.0) -> SLO:
    """TriInfer's table 5, in seconds of the device or dilated."""
    found = slo_of(NAME, dataset, SETTINGS[0])
    return SLO(found.ttft * dilation, found.tbt * budgeted * dilation)


def requests(dataset: str, count: int, seed: int = 0) -> Trace:
    return traces.synthesise(dataset, count, visual_tokens=MODEL.visual_tokens, rate=10.0, seed=seed)


def slowed(device: Device, dilation: float) -> Device:
    """The same device whose every second takes ``dilation`` seconds."""
    return msgspec.structs.replace(
        device,
        name=device.name if dilation == 1 else f"{device.name} slowed {dilation:g} times",
        flops=device.flops / dilation,
        bandwidth=device.bandwidth / dilation,
        pass_s=device.pass_s * dilation,
        row_s=device.row_s * dilation,
    )


def paced(dilation: float, scale: float = SCALE) -> EmulatedModel:
    cost = Roofline(model=MODEL, device=slowed(DEVICE, dilation))
    return EmulatedModel(shape=EmulatedShape.of(MODEL), cost=cost, scale=scale)


def simulator(dataset: str, placement: str, scheduled: bool) -> Simulator:
    """The same cores in virtual time, on the devices themselves: undilated, whole blocks over NVLink and InfiniBand."""
    cluster = Cluster.of(DEVICE, Placement.parse(placement).size, per_host=PER_HOST).arrange_for(placement)
    return Simulator(MODEL, bounds(dataset, BUDGETED), cluster=cluster, rules=rules(scheduled))


def rules(scheduled: bool) -> BatchRules:
    return BatchRules() if scheduled else UNSCHEDULED


def pipeline(task: Task) -> Pipeline:
    """As many blocks for each instance as its device has room for, each smaller by the factor that is printed."""
    settings = simulator(*task[:3]).settings(task.placement)
    instances = [
        Instance(each.roles, each.name, pools=each.pools, prefix_cache=False, image_cache=False) for each in settings
    ]
    slo, given = bounds(task.dataset, BUDGETED, task.dilation), rules(task.scheduled)
    return Pipeline(paced(task.dilation), instances, slo=slo, rules=given, verify="always")


# ---------------------------------------------------------------- a replay


def served(task: Task) -> Record:
    """Serve it here, in a process that does nothing else."""
    with warnings.catch_warnings(), uncollected():
        warnings.filterwarnings("ignore", "the client sent", TrinityWarning)  # it is one of the signs
        return asyncio.run(_served(task))


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for cyclic garbage: one would stop all instances at once, as it never does those of many hosts."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


async def _served(task: Task) -> Record:
    trace, slo, dilation = requests(task.dataset, task.asked), task.slo, task.dilation
    offered = trace.scale(rate=task.rate / dilation)
    async with pipeline(task) as pipe:
        watch = Watch()
        with watch:
            rows = await replay(pipe, offered)
        exact = await right_tokens(pipe, task.dataset)
        moved, steps = moves(pipe), [each.args for each in pipe.timeline.slices() if "late us" in each.args]
        paced_s = sum(each.duration_s for each in pipe.timeline.slices() if "late us" in each.args)
    dilated = bounds(task.dataset, dilation=dilation)
    seen = score_outcomes(offered, rows, dilated)
    behind = falls_behind(seen, "guard", SHARE, steady_state_s(offered, dilated))
    signs = watch.signs(rows, [each["late us"] * 1e-6 for each in steps], paced_s, slo, dilation)
    return {
        "task": list(task),
        "attainment": seen.attainment,
        "completed": seen.completed,
        "holds": seen.attainment["guard"] >= SHARE and not behind,
        "late": passed(signs),
        "signs": signs,
        "cpu_s": watch.cpu_s,
        "wall_s": watch.wall_s,
        "latency": latencies(rows, dilation),
        "failed": sum(row.finish_reason not in COMPLETE for row in rows),
        "tokens": sum(row.output_length for row in rows),
        "steps": len(steps),
        "exact": exact,
        **moved,
    }


class Watch:
    """CPU time, time, others' share of the machine, and how late the event loop wakes up, within its block."""

    def __enter__(self) -> Watch:
        self._others = ForeignLoad()
        self._others.__enter__()
        self._started, self._cpu = time.monotonic(), time.process_time()
        self._lags: list[float] = []
        self._task = asyncio.get_running_loop().create_task(self._probe())
        return self

    def __exit__(self, *_: object) -> None:
        self._task.cancel()
        self.cpu_s, self.wall_s = time.process_time() - self._cpu, time.monotonic() - self._started
        self._others.__exit__()

    async def _probe(self) -> None:
        while True:
            due = time.monotonic() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self._lags.append(time.monotonic() - due)

    def signs(
        self, rows: Sequence[ServedRequest], late_s: Sequence[float], paced_s: float, slo: SLO, dilation: float
    ) -> dict[str, float]:
        """By the names of ``LIMITS``."""
        share = self.cpu_s / self.wall_s
        client = sorted(getattr(row, "late_s", None) or 0.0 for row in rows)
        return {
            "cpu": share,
            "machine": min(1.0, self._others.share + share / (os.cpu_count() or 1)),
            "client": percentile(client, 99) / (slo.ttft * dilation),
            "steps": math.fsum(late_s) / paced_s if paced_s else 0.0,
            "loop": percentile(sorted(self._lags), 99) / (slo.tbt * dilation),
        }


def passed(signs: dict[str, float]) -> list[str]:
    """List the signs of a saturated CPU."""
    return [name for name, limit in LIMITS.items() if signs[name] > limit]


def latencies(rows: Sequence[ServedRequest], dilation: float) -> dict[str, float]:
    """Seconds of the device's time."""
    ttft = sorted(row.ttft_s for row in rows if row.ttft_s is not None)
    tpot = sorted(sum(row.itl_s) / len(row.itl_s) for row in rows if row.itl_s)
    return {
        f"{name} p{percent}": percentile(found, percent) / dilation
        for name, found in (("TTFT", ttft), ("TPOT", tpot))
        for percent in (50, 90)
        if found
    }


def moves(pipe: Pipeline) -> dict[str, int]:
    """Pulls, those whose blocks were compared with their digests, blocks and bytes."""
    pulls = [each.args for each in pipe.timeline.slices() if each.lane == "migration"]
    good = [each for each in pulls if each["outcome"] == "pulled"]
    return {
        "pulls": len(pulls),
        "verified": sum("digest_s" in each for each in good),
        "blocks": sum(each["blocks"] for each in good),
        "bytes": sum(each["bytes"] for each in good),
    }


async def right_tokens(pipe: Pipeline, dataset: str, count: int = 4) -> bool:
    """Test whether requests like the dataset's give the tokens that follow from their content without any block."""
    rows = list(requests(dataset, count))
    asked = [EmulatedRequest.of(row, number, "checked/") for number, row in enumerate(rows)]
    outputs = await asyncio.gather(*map(pipe.complete, asked))
    vocabulary = MODEL.vocabulary
    return all(
        output.token_ids == expected_tokens(pipe.processor.process(each).work, 16, vocabulary)
        for output, each in zip(outputs, asked, strict=True)
    )


# ---------------------------------------------------------------- full-size blocks

FULL_POOLS = {"image": 4, "kv": 64}


def full_size(dataset: str, every: int, count: int) -> Record:
    """Each ``every``-th of ``count`` requests once more, one after the other, by blocks of the model's own size."""
    return asyncio.run(_full_size(dataset, every, count))


async def _full_size(dataset: str, every: int, count: int) -> Record:
    rows = list(requests(dataset, count))[::every]
    model_of = paced(1.0, scale=1.0)
    pipe = Pipeline(
        model_of, "1E1P1D", cache=CacheConfig(pools=FULL_POOLS), verify="always", prefix_cache=False, image_cache=False
    )
    async with pipe:
        asked = [EmulatedRequest.of(row, number) for number, row in enumerate(rows)]
        outputs = [await pipe.complete(each) for each in asked]
        right = [
            output.token_ids == expected_tokens(pipe.processor.process(each).work, 16, MODEL.vocabulary)
            for output, each in zip(outputs, asked, strict=True)
        ]
        found = {"requests": len(rows), "right": sum(right), **moves(pipe)}
        seconds = [each.args for each in pipe.timeline.slices() if each.lane == "migration"]
        found["gb_s"] = sum(each["bytes"] for each in seconds) / sum(each["seconds"] for each in seconds) / 1e9
    return found
