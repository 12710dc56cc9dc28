"""CPU time of the host for a decode step on a GPU: what the lane's thread does to launch it, and to read its tokens.

The stage and its sampler are the built-in ones, two steps in flight. The model is left out: its logits lie there
already, and a decode batch is packed as for a CUDA graph that is not replayed. So are CUDA's calls: all tensors are on
the CPU, and the logits so few that computing with them costs little. Texts of 512 tokens, which a penalty looks at, do
cost: there the figures hold work that a GPU would do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.report import Aim, Table
from benchmarks.setting import Setting
from trinity.core.messages import KV, Open, ResolvedSampling, Step, Work
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.stages.base import PendingStep
from trinity.stages.decode_graphs import DecodeGraphs
from trinity.stages.language import LanguageStage
from trinity.stages.models import load_model

COUNTS = (1, 32, 128)
TEXT, VOCABULARY, DEPTH = 512, 64, 2
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 1},
    "penalty, logprobs": {"repetition_penalty": 1.1, "logprobs": 2},
}
AIM_US = 100.0
Parts = dict[str, float]


class ReadyLogits:
    """In place of CUDA graphs: takes a batch's inputs, and has its logits."""

    def __init__(self) -> None:
        self._logits = torch.randn((256, VOCABULARY), generator=torch.Generator().manual_seed(0))

    def call(
        self, key: tuple[str, int], run: object, inputs: Sequence[Tensor], kind: str | None = None
    ) -> Sequence[Tensor]:
        return [self._logits[: key[1]]]


def make_stage(model: Path, requests: int, steps: int) -> tuple[LanguageStage, int]:
    """A stage with a cache of one narrow layer, which nothing writes, and the blocks of each of ``requests``."""
    blocks = -(-(TEXT + steps + 2) // 16)
    memory = BlockMemory(BlockShape(KV, (1, 2, 1, 16, 8), torch.float32), requests * blocks)
    loaded = load_model(model, "PD", dtype="float32")
    stage = LanguageStage(loaded, memory, None, "PD")
    stage._graphs = DecodeGraphs(loaded, memory.tensor, stage._backend, cast(Any, ReadyLogits()), stage._tokens)
    return stage, blocks


def measure_way(model: Path, requests: int, sampling: dict[str, Any], steps: int) -> Parts:
    """Median microseconds of thread time to launch a step of so many requests, and to read it."""
    stage, blocks = make_stage(model, requests, steps)
    names = tuple(f"request {number}" for number in range(requests))
    for number, name in enumerate(names):
        work = Work(
            request=name,
            prompt=tuple(range(TEXT)),
            max_tokens=steps + 2,
            sampling=ResolvedSampling(**sampling),
        )
        first = number * blocks
        stage.open(Open(work=work, blocks=tuple(range(first, first + blocks)), tokens=(7,)))
    flight, spent = deque[PendingStep](), {"launch": list[float](), "read": list[float]()}
    for number in range(steps):
        step, began = Step(number, "joint", decodes=tuple(names)), time.thread_time()
        flight.append(stage.launch_on_device(step))
        spent["launch"].append(time.thread_time() - began)
        if len(flight) == DEPTH:
            began = time.thread_time()
            flight.popleft().wait()
            spent["read"].append(time.thread_time() - began)
    return {part: median(seconds[2:]) * 1e6 for part, seconds in spent.items()}


def measure_launches(setting: Setting) -> dict[str, dict[int, Parts]]:
    """By way of sampling and number of requests; ways take turns, and the median round counts."""
    counts, steps, rounds = ((1, 4), 8, 1) if setting.quick else (COUNTS, 200, 3)
    model = setting.checkpoint("llama")
    turns = [
        {way: {count: measure_way(model, count, asked, steps) for count in counts} for way, asked in WAYS.items()}
        for _ in range(rounds)
    ]
    return {
        way: {
            count: {part: median(turn[way][count][part] for turn in turns) for part in ("launch", "read")}
            for count in counts
        }
        for way in WAYS
    }


def launch_table(found: dict[str, dict[int, Parts]]) -> Table:
    """Rows: ways to sample; columns: requests."""
    counts = list(next(iter(found.values())))
    rows = [
        [way, *(f"{parts['launch']:.0f} + {parts['read']:.0f}" for parts in by_count.values())]
        for way, by_count in found.items()
    ]
    return Table(
        "Host's CPU time of a decode step on a GPU, CUDA's calls and the model left out: launch + read, µs",
        ("sampling", *(f"{count} requests" for count in counts)),
        rows,
    )


def launch_aim(found: dict[str, dict[int, Parts]]) -> Aim:
    """The whole host, with the core and the shell, is to stay below ``AIM_US``; these are apart in the other tables."""
    most = max(found["greedy"])
    spent = sum(found["greedy"][most].values())
    return Aim(
        f"launch and read of a greedy step of {most} requests, CUDA's calls left out",
        f"≤ {AIM_US:.0f} µs",
        f"{spent:.0f} µs",
        spent <= AIM_US,
    )
