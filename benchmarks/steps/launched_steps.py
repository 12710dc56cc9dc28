"""CPU time of the host for a decode step on a GPU: stage, core and shell, from one launch to the next.

A host serves requests as on a GPU, two steps in flight; its core and its lane are called by turns on one thread, in the
order in which they wait for each other. What a device does is left out: logits lie there already, and a recorded step
is not replayed. So are CUDA's own calls: all tensors are on the CPU. What of sampling is not recorded runs there, on
logits so few that they cost little; texts of 512 tokens, which a penalty looks at, do cost.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch import Tensor

from benchmarks.report import Aim, Table
from benchmarks.setting import Setting
from trinity.core.instance.state import Settings
from trinity.core.messages import KV, Close, Open, ResolvedSampling, Sampled, Step, Submit, Value, Work
from trinity.core.routing.router import RoundRobin
from trinity.instance import Instance
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.runtime.host import InstanceHost, LoadedInstance
from trinity.stages.async_steps import FinishedStep, HostCopies, HostCopy
from trinity.stages.base import PendingStep
from trinity.stages.gpu.decode_graphs import DecodeGraphs
from trinity.stages.language import LanguageStage
from trinity.stages.models import load_model
from trinity.stages.sampler import Drawn
from trinity.timeline import Timeline

COUNTS = (1, 32, 128)
TEXT, VOCABULARY, DEPTH = 512, 64, 2
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 1},
    "penalty, logprobs": {"repetition_penalty": 1.1, "logprobs": 2},
}
PARTS = ("launch", "read", "core", "shell")
AIM_US = 100.0
Parts = dict[str, float]


class RecordedSteps:
    """In place of CUDA graphs: a recorded call has its results already."""

    def __init__(self) -> None:
        self._logits = torch.randn((256, VOCABULARY), generator=torch.Generator().manual_seed(0))
        self._made = dict[Any, Sequence[Tensor]]()

    def has(self, key: tuple[Any, ...]) -> bool:
        return True

    def call(self, key: tuple[Any, ...], *recording: object) -> Sequence[Tensor]:
        if key not in self._made:
            size, most = key[1], key[2].logprobs if key[0] == "sample" else 0
            logits = self._logits[:size]
            drawn = Drawn.of(logits.argmax(-1), torch.zeros((size, 1 + 2 * most)).double() if most else None)
            told = () if drawn.logprobs is None else (drawn.logprobs,)
            self._made[key] = (drawn.flat, drawn.tokens, *told) if key[0] == "sample" else (logits, drawn.tokens)
        return self._made[key]


class BusyDevice(HostCopies):
    """Copies to the host that have not ended until they are waited for."""

    def start(self, numbers: Tensor) -> HostCopy:
        copy = super().start(numbers)
        cast(Any, copy).ready = lambda: False
        return copy


class LaunchingStage:
    """The built-in stage as on a GPU, and what it spends; prompts are there at once."""

    letters = "PD"

    def __init__(self, stage: LanguageStage, spent: Parts) -> None:
        self._stage, self._spent = stage, spent

    def open(self, request: Open) -> None:
        self._stage.open(request)

    def close(self, request: str) -> None:
        self._stage.close(request)

    def forward(self, step: Step) -> dict[str, Sampled]:
        raise AssertionError("every step is launched")

    def launch(self, step: Step) -> PendingStep:
        rows = [self._stage._requests.find(each.request) for each in step.prefills if each.last]
        if rows:
            self._stage._requests.commit(rows, [Sampled(7)] * len(rows))
        filled = {row.request: Sampled(7) for row in rows}
        if not step.decodes:
            return FinishedStep(filled, lambda: None)
        began = time.thread_time()
        pending = self._stage.launch_on_device(replace(step, prefills=()) if step.prefills else step)
        self._spent["launch"] += time.thread_time() - began
        return TimedStep(pending, filled, self._spent)


class TimedStep:
    """A launched step, and what reading it takes; ``filled``: first tokens of prompts."""

    def __init__(self, pending: PendingStep, filled: dict[str, Sampled], spent: Parts) -> None:
        self.ready, self.drop, self._pending = pending.ready, pending.drop, pending
        self._filled, self._spent = filled, spent

    def wait(self) -> dict[str, Sampled]:
        began = time.thread_time()
        found = self._pending.wait()
        self._spent["read"] += time.thread_time() - began
        return found | self._filled if self._filled else found


def make_host(model: Path, requests: int, steps: int, spent: Parts, loop: asyncio.AbstractEventLoop) -> InstanceHost:
    """A host whose cache of one narrow layer has the blocks of all ``requests``, and which nothing writes."""
    spec = Instance("PD", "PD0", depth=DEPTH)
    memory = BlockMemory(
        BlockShape(KV, (1, 2, 1, 16, 8), torch.float32), requests * -(-(TEXT + steps + requests + 2) // 16)
    )
    loaded = load_model(model, "PD", dtype="float32")
    stage = LanguageStage(loaded, memory, None, "PD")
    stage._graphs = DecodeGraphs(loaded, memory.tensor, stage._backend, cast(Any, RecordedSteps()), stage._tokens)
    stage._copies = BusyDevice()
    instance = LoadedInstance(spec, loaded, {KV: memory}, [cast(Any, LaunchingStage(stage, spent))])
    instance.settings = Settings("PD0", "PD", {KV: memory.blocks}, depth=DEPTH)
    connector = SimpleNamespace(verified=())
    network = SimpleNamespace(loop=loop, connector=connector, send_to_frontend=lambda messages: None)
    host = InstanceHost(instance, cast(Any, network), Timeline(), RoundRobin())
    host._mail.open(loop)
    return host


def measure_way(model: Path, requests: int, sampling: Mapping[str, Any], steps: int) -> Parts:
    """Median microseconds of thread time by part, of a step of so many requests."""
    spent: Parts = defaultdict(float)
    with closing(asyncio.new_event_loop()) as loop:
        host = make_host(model, requests, steps, spent, loop)
        try:
            return drive(host, requests, sampling, steps, spent)
        finally:
            host._mail.close()


def drive(host: InstanceHost, requests: int, sampling: Mapping[str, Any], steps: int, spent: Parts) -> Parts:
    handle: Callable[[Value, float], list[Value]] = host.core.handle

    def timed(event: Value, now: float) -> list[Value]:
        began = time.thread_time()
        commands = handle(event, now)
        spent["core"] += time.thread_time() - began
        return commands

    host.core.handle = timed  # type: ignore[method-assign]
    lane, taken = host._lanes["joint"], list[Parts]()
    lane._post = host._thread.decide  # there is no other thread
    for number in range(requests):
        work = Work(
            request=f"request {number}",
            prompt=tuple(range(number, number + TEXT)),
            max_tokens=steps + requests + 2,
            sampling=ResolvedSampling(**sampling),
        )
        host._thread.decide(Submit(work))
    while len(taken) < steps:
        spent.clear()
        began = time.thread_time()
        command = lane._next()
        if isinstance(command, Step):
            assert lane._launch(command)
            whole = time.thread_time() - began
            if len(command.decodes) == requests and not command.prefills:
                taken.append({**spent, "shell": whole - sum(spent.values())})
        else:
            assert not isinstance(command, Close)
            lane._apply(cast(Value, command))
        host._mail._items.clear()
    return {part: median(each.get(part, 0.0) for each in taken[steps // 8 :]) * 1e6 for part in PARTS}


def measure_launches(setting: Setting) -> dict[str, dict[int, Parts]]:
    """By way of sampling and number of requests; ways take turns, and the median round counts."""
    counts, steps, rounds = ((1, 4), 8, 1) if setting.quick else (COUNTS, 200, 3)
    model = setting.checkpoint("llama")
    turns = [
        {way: {count: measure_way(model, count, asked, steps) for count in counts} for way, asked in WAYS.items()}
        for _ in range(rounds)
    ]
    return {
        way: {count: {part: median(turn[way][count][part] for turn in turns) for part in PARTS} for count in counts}
        for way in WAYS
    }


def launch_table(found: dict[str, dict[int, Parts]]) -> Table:
    """Rows: ways to sample; columns: requests."""
    counts = list(next(iter(found.values())))
    rows = [
        [
            way,
            *(
                f"{' + '.join(f'{parts[part]:.0f}' for part in PARTS)} = {sum(parts.values()):.0f}"
                for parts in by_count.values()
            ),
        ]
        for way, by_count in found.items()
    ]
    return Table(
        "Host's CPU time of a decode step on a GPU, CUDA's calls left out: launch + read + core + shell, µs",
        ("sampling", *(f"{count} requests" for count in counts)),
        rows,
    )


def launch_aim(found: dict[str, dict[int, Parts]]) -> Aim:
    """The whole host is to stay below ``AIM_US`` at every number of requests, sampled as well as greedy."""
    sums = {(way, count): sum(parts.values()) for way, by_count in found.items() for count, parts in by_count.items()}
    way, count = max(sums, key=sums.__getitem__)
    worst = sums[way, count]
    return Aim(
        "host of a decode step on a GPU, CUDA's calls left out, at most",
        f"≤ {AIM_US:.0f} µs",
        f"{worst:.0f} µs ({way}, {count} requests)",
        worst <= AIM_US,
    )
