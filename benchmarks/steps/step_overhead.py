"""Cost of a decode step beside the model: CPU time of the core, of the shell around it and of the front end.

A pipeline with one PD instance serves n requests at once. The CPU time of each of its three threads (lane, core, event
loop) is noted once a step; only steps that decode all n requests and prefill nothing count. The core answers on
whichever thread has its events: what the answers take is the core's, the rest of both threads the shell's. The gap is
wall time: from one forward's end to the next one's start, in which the lane computes nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from benchmarks.report import Aim, Result, Table
from benchmarks.setting import ForeignLoad, Setting, calm, disturbed, prompt_of
from benchmarks.steps.launched_steps import launch_aim, launch_table, measure_launches
from trinity.core import InstanceCore
from trinity.core.instance.state import Settings
from trinity.core.messages import KV, Emit, Open, Sampled, Step, Stepped, Submit, Value, Work
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling
from trinity.runtime.host import InstanceHost
from trinity.stages.base import StageSetup

PARTS = ("model", "stage", "lane", "core", "core_thread", "loop")
SHELL = ("lane", "core", "core_thread")  # core and scheduler, and what carries their events and commands
CORE_AIM_US, PER_REQUEST_AIM_US, SHELL_AIM_US, SHARE_AIM = 100.0, 1.0, 150.0, 0.10
MIDSIZE = "llava-110m"
DEPTHS = (1, 2)
PROMPT_TOKENS = 128
SKIPPED = 2  # first steps of a round


class Notes:
    """CPU seconds of each part, one entry per step that decodes all ``running`` requests."""

    def __init__(self, running: int) -> None:
        self.running = running
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.answers: list[tuple[int, float, int]] = []  # of the core: the thread, its seconds, rows

    def add(self, part: str, seconds: float, rows: int) -> None:
        if rows == self.running:
            self.seconds[part].append(seconds)

    def answered(self, thread: int) -> float:
        """Seconds of the core's answers on a thread since this was asked last."""
        mine = [each for each in self.answers if each[0] == thread]
        for each in mine:
            self.answers.remove(each)
            self.add("core", *each[1:])
        return sum(seconds for _, seconds, _ in mine)

    def medians(self, skip: int) -> dict[str, float]:
        """Microseconds by part, the first ``skip`` steps left out."""
        return {part: median(self.seconds[part][skip:]) * 1e6 for part in (*PARTS, "gap")}


class TimedModel:
    """The loaded model, with the CPU time of its last forward."""

    def __init__(self, model: Any) -> None:
        self._model, self.seconds = model, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *arguments: Any) -> Any:
        started = time.thread_time()
        logits = self._model.forward(*arguments)
        self.seconds = time.thread_time() - started
        return logits


class TimedStage:
    """The built-in language stage; "lane" is what its thread spends from one forward's end to the next one's start,
    "core_thread" what the core's spends from one forward's start to the next one's; neither with the core's answers."""

    letters = "PD"

    def __init__(self, setup: StageSetup, notes: Notes) -> None:
        from trinity.stages.language import LanguageStage

        self._model, self._notes = TimedModel(setup.model), notes
        self._stage = LanguageStage(cast(Any, self._model), setup.memory[KV], None, letters=self.letters)
        self._ended = self._left = self._core_thread_s = 0.0

    def open(self, request: Open) -> None:
        self._stage.open(request)

    def close(self, request: str) -> None:
        self._stage.close(request)

    def forward(self, step: Step) -> dict[str, Sampled]:
        began, came, notes = time.thread_time(), time.perf_counter(), self._notes
        rows = 0 if step.prefills else len(step.decodes)
        notes.add("lane", began - self._ended - notes.answered(threading.get_ident()), rows)
        notes.add("gap", came - self._left, rows)
        notes.add("core_thread", self._core_thread(), rows)
        started = time.thread_time()
        sampled = self._stage.forward(step)
        ended = time.thread_time()
        notes.add("model", self._model.seconds, rows)
        notes.add("stage", ended - started - self._model.seconds, rows)
        self._ended, self._left = time.thread_time(), time.perf_counter()
        return sampled

    def _core_thread(self) -> float:
        """CPU time of the core's thread since the last call."""
        core = next(each.ident for each in threading.enumerate() if each.name.endswith("-core"))
        assert core is not None
        now = time.clock_gettime(time.pthread_getcpuclockid(core))
        since, self._core_thread_s = self._core_thread_s, now
        return now - since - self._notes.answered(core)


def watch_core(host: InstanceHost, notes: Notes) -> None:
    """Note the CPU time of every answer of the core."""
    handle: Callable[[Value, float], list[Value]] = host.core.handle

    def timed(event: Value, now: float) -> list[Value]:
        started = time.thread_time()
        commands = handle(event, now)
        spent = time.thread_time() - started
        notes.answers.append((threading.get_ident(), spent, len(event.sampled) if isinstance(event, Stepped) else 0))
        return commands

    host.core.handle = timed  # type: ignore[method-assign]


def watch_loop(pipe: Pipeline, notes: Notes) -> None:
    """Note the CPU time of the event loop's thread from the tokens of one step to those of the next."""
    post: Callable[[Value], None] = pipe._frontend.post
    last = 0.0

    def timed(event: Value) -> None:
        nonlocal last
        if isinstance(event, Emit):
            now = time.thread_time()
            notes.add("loop", now - last, len(event.sampled))
            last = now
        post(event)

    pipe._frontend.post = timed  # type: ignore[method-assign]


def warm_core(running: int, steps: int, waiting: int = 0) -> float:
    """Microseconds of a core's answer to a decode step when it does nothing else: its caches stay warm.

    ``waiting``: so many more requests wait, for whom there are no blocks.
    """
    length = steps + running  # more than enough: the first decode while the last are prefilled
    blocks = running * (-(-(PROMPT_TOKENS + length + 1) // 16))
    core = InstanceCore(Settings("PD0", "PD", {KV: blocks}))
    out: list[Value] = []
    for number in range(running):
        prompt = tuple(range(number, number + PROMPT_TOKENS))
        out += core.handle(Submit(Work(request=str(number), prompt=prompt, max_tokens=length + 2)), 0.0)
    spent: list[float] = []
    while len(spent) < steps:
        step = next(each for each in out if isinstance(each, Step))
        rows = [row.request for row in step.prefills if row.last] + list(step.decodes)
        answer = Stepped(step.id, step.lane, {request: Sampled(1) for request in rows})
        started = time.thread_time()
        out = core.handle(answer, 0.0)
        if len(step.decodes) == running:
            spent.append(time.thread_time() - started)
            for number in range(waiting):
                work = Work(request=f"late {number}", prompt=(number,) * PROMPT_TOKENS, max_tokens=length + 2)
                core.handle(Submit(work), 0.0)
            waiting = 0
    return median(spent) * 1e6


async def serve(model: Path, notes: Notes, steps: int, prompt_tokens: int, spec: Instance) -> None:
    """``notes.running`` requests at once, each long enough for ``steps`` steps that decode them all."""
    running = notes.running
    waves = -(-running * prompt_tokens // 2048)  # prefill takes this many steps, in which the first already decode
    length = steps + waves + 4
    blocks = running * (-(-(prompt_tokens + length) // 16) + 1)
    spec = replace(spec, pools={"kv": blocks, "image": 1}, stages=[lambda setup: TimedStage(setup, notes)])
    async with Pipeline(model, [spec], dtype="float32") as pipe:
        watch_core(next(iter(pipe.hosts.values())), notes)
        watch_loop(pipe, notes)
        tokenizer, sampling = pipe.processor.tokenizer, Sampling(ignore_eos=True)
        prompts = [prompt_of(tokenizer, prompt_tokens, seed) for seed in range(running)]
        await asyncio.gather(*(pipe.complete(Request(p, max_tokens=length, sampling=sampling)) for p in prompts))


def run(setting: Setting) -> Result:
    """CPU time per decode step by part, at 1, 8, 32 and 64 running requests; both depths; a model of 110 M."""
    counts, steps, rounds = ((1, 4), 8, 1) if setting.quick else ((1, 8, 32, 64), 60, 3)
    model, noisy = setting.pick("llama-512x8", "llama"), list[int]()
    found: dict[int, dict[int, Parts]] = {depth: {} for depth in DEPTHS}
    for running in counts:
        turns = [
            {depth: one_round(setting, model, running, steps, Instance("PD", depth=depth)) for depth in DEPTHS}
            for _ in range(rounds)
        ]
        for depth in DEPTHS:  # A B A B
            kept, quiet = calm([turn[depth] for turn in turns])
            found[depth][running] = {part: median(each[part] for each in kept) for part in (*PARTS, "gap")}
            noisy += [] if quiet else [running]
        found[1][running]["core_warm"] = warm_core(running, steps)
    midsize = setting.pick(MIDSIZE, "llava")
    larger = {
        count: one_round(setting, midsize, count, steps // 2, Instance("EPD"))[1] for count in counts if count <= 32
    }
    waiting = {count: warm_core(max(counts), steps, count) for count in (10, 100 if setting.quick else 10_000)}
    return result(Found(found, larger, waiting, measure_launches(setting)), steps, rounds, sorted(set(noisy)))


Parts = dict[str, float]


@dataclass(frozen=True)
class Found:
    """Microseconds by part: ``depths`` by depth and running requests, ``larger`` of the model of 110 M by running
    requests; ``waiting`` of a warm core at the most running requests, by how many wait; ``launched`` for a GPU."""

    depths: dict[int, dict[int, Parts]]
    larger: dict[int, Parts]
    waiting: dict[int, float]
    launched: dict[str, dict[int, Parts]] = field(default_factory=dict)


def one_round(setting: Setting, model: Path, running: int, steps: int, spec: Instance) -> tuple[float, Parts]:
    """The foreign share of the machine's time, and microseconds by part."""
    prompt_tokens = 16 if setting.quick else PROMPT_TOKENS
    while True:
        notes = Notes(running)
        setting.settle()
        with ForeignLoad() as load:
            asyncio.run(serve(model, notes, steps, prompt_tokens, spec))
        if all(len(notes.seconds[part]) > SKIPPED for part in (*PARTS, "gap")):
            return load.share, notes.medians(SKIPPED)
        steps *= 2  # on a busy machine the first had ended before the last had come


def shell(parts: Parts) -> float:
    return sum(parts[part] for part in SHELL)


def share(parts: Parts) -> float:
    """Of a step's CPU time, all that is not the model's."""
    beside = sum(parts[part] for part in PARTS if part != "model")
    return beside / (beside + parts["model"])


def aims(found: Found) -> list[Aim]:
    plain = found.depths[1]
    most, least = max(plain), min(plain)
    core, whole = plain[most]["core"], shell(plain[most])
    growth = (core - plain[least]["core"]) / (most - least)
    worst = max(found.larger, key=lambda running: share(found.larger[running]))
    few, many = min(found.waiting), max(found.waiting)
    slower = found.waiting[many] / found.waiting[few]
    at = f"a step at {most} running requests"
    return [
        Aim(f"core and scheduler, {at}", f"≤ {CORE_AIM_US:.0f} µs", f"{core:.0f} µs", core <= CORE_AIM_US),
        Aim(
            "core and scheduler, each further request",
            f"≤ {PER_REQUEST_AIM_US:.0f} µs",
            f"{growth:.2f} µs",
            growth <= PER_REQUEST_AIM_US,
        ),
        Aim(f"core, scheduler and shell, {at}", f"≤ {SHELL_AIM_US:.0f} µs", f"{whole:.0f} µs", whole <= SHELL_AIM_US),
        Aim(
            f"Python's share of a decode step of {MIDSIZE}, at most",
            f"≤ {SHARE_AIM:.0%}",
            f"{share(found.larger[worst]):.1%} (at {worst})",
            share(found.larger[worst]) <= SHARE_AIM,
        ),
        Aim(f"{at} with {many:,} waiting, of one with {few}", "≤ 120%", f"{slower:.0%}", slower <= 1.2),
    ]


def result(found: Found, steps: int, rounds: int, noisy: Sequence[int] = ()) -> Result:
    """Tables and aims; ``noisy`` had no undisturbed round."""
    plain, ahead = found.depths[1], found.depths[2]
    return Result(
        name="step_overhead",
        title="Python beside the model, per decode step",
        method=(
            f"One PD instance, llama-512x8 in float32, prompts of about {PROMPT_TOKENS} tokens; thread CPU time, the "
            f"median of {steps} steps, the median of {rounds} rounds. core: `InstanceCore.handle` with the scheduler, "
            "between two forwards, which leave nothing of it in the caches; core warm: the same decisions in a row. "
            "stage: building the batch and sampling, the argmax over 8,192 logits a row included. lane: the rest of "
            "its thread between two forwards: queue, timeline and, where the core answers there, what that sends. core "
            "thread: the rest of its thread. The shell is both. loop: front end, text, streams and the readers, which "
            "are the user's side. gap: wall time between two forwards of the "
            f"lane. Depths take turns. {MIDSIZE} serves text alone, over {steps // 2} steps, once."
        ),
        tables=[
            Table("CPU time of a step", HEADER, [row(running, parts) for running, parts in plain.items()]),
            Table(
                "Steps in flight on a lane: 1 | 2",
                ("running", "gap µs", "lane µs", "core µs", "core thread µs", "core and shell µs", "gap of the step"),
                [compared(running, plain[running], ahead[running]) for running in plain],
            ),
            Table(
                f"CPU time of a step of {MIDSIZE}", HEADER[:-1], [row(n, parts) for n, parts in found.larger.items()]
            ),
            Table(
                f"A warm core's answer at {max(plain)} running requests",
                ("waiting", "µs"),
                [[f"{count:,}", f"{spent:.0f}"] for count, spent in found.waiting.items()],
            ),
            *([launch_table(found.launched)] if found.launched else ()),
        ],
        aims=[*aims(found), *([launch_aim(found.launched)] if found.launched else ())],
        notes=disturbed(noisy),
        values={
            "microseconds": {str(running): parts for running, parts in plain.items()},
            "ahead": {str(running): parts for running, parts in ahead.items()},
            "midsize": {str(running): parts for running, parts in found.larger.items()},
            "waiting": {str(count): spent for count, spent in found.waiting.items()},
            "launched": {way: {str(n): parts for n, parts in each.items()} for way, each in found.launched.items()},
        },
    )


HEADER = (
    "running",
    "model ms",
    "stage µs",
    "lane µs",
    "core µs",
    "core thread µs",
    "loop µs",
    "all beside the model",
    "core warm µs",
)


def row(running: int, parts: Parts) -> list[str]:
    beside = sum(parts[part] for part in PARTS if part != "model")
    shown = [f"{parts[part]:.0f}" for part in PARTS if part != "model"]
    warm = [f"{parts['core_warm']:.0f}"] if "core_warm" in parts else []
    return [str(running), f"{parts['model'] / 1e3:.2f}", *shown, f"{beside:.0f} µs ({share(parts):.1%} of all)", *warm]


def compared(running: int, one: Parts, two: Parts) -> list[str]:
    parts = [f"{one[part]:.0f} | {two[part]:.0f}" for part in ("gap", "lane", "core", "core_thread")]
    gaps = [each["gap"] / (each["gap"] + each["model"] + each["stage"]) for each in (one, two)]
    return [str(running), *parts, f"{shell(one):.0f} | {shell(two):.0f}", " | ".join(f"{gap:.2%}" for gap in gaps)]
