"""Overlap of transfers with computation: KV by layers and groups, features ahead of prefill."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.report import Aim, Result, Table
from benchmarks.setting import MAX_FOREIGN_SHARE, ForeignLoad, Setting, disturbed, prompt_of
from trinity.core.transfers import KvMode, TransferPolicy
from trinity.costs.budgets import StepBudgets
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest, EmulatedShape
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.supervision.process_config import kept_launcher
from trinity.request import Output, Request, Sampling

MODES: tuple[KvMode, ...] = ("off", "layer", "grouped")
LENGTHS = (1024, 2048)
OVERLAP = 0.98  # the aim, with paced compute
IMAGE_ROWS = (100, 400, 529, 1196, 2691, 16206)  # the six resolutions of EPD-Serve table 3, 280 x 280 to 4096 x 3112
COMBINATIONS = (
    ("neither", TransferPolicy(prefetch=False, kv="off")),
    ("feature prefetch", TransferPolicy(kv="off")),
    ("grouped KV", TransferPolicy(prefetch=False, kv="grouped")),
    ("both", TransferPolicy(kv="grouped")),
)
COST = LinearCost(step_s=0.01, decode_s=0.001, prefill_s=4e-4, encode_s=0.02, media_s=1e-4, source="given by hand")
SCALE = 8.0  # of the emulation's KV blocks
FEATURES = EmulatedShape(
    name="features", layers=2, kv_heads=1, head_dim=64, image_width=3584, image_tokens=20_000, context=32_768
)
TURN_S = 1e-3  # a request that waited longer for its turn did not wait for its features
INTERVAL_S = 0.35


@dataclass
class Served:
    """Requests of one kind that were served one way, and the share of the machine that others took meanwhile."""

    outputs: list[Output] = field(default_factory=list)
    foreign: float = 0.0

    def moved(self, kind: str) -> list[dict[str, Any]]:
        return [each for output in self.outputs for each in output.transfers if each["kind"] == kind and each["bytes"]]

    def kv(self, name: str) -> float:
        return median(each[name] for each in self.moved("kv"))

    def span(self, name: str) -> float:
        return median(output.spans.get(name, 0.0) for output in self.outputs)

    @property
    def ttft_s(self) -> float:
        return median(output.ttft_s for output in self.outputs if output.ttft_s is not None)

    @property
    def second_s(self) -> float:
        """Seconds to the second token, the first that the decode instance makes."""
        return median(output.ttft_s + output.itl_s[0] for output in self.outputs if output.ttft_s is not None)

    @property
    def tpot_s(self) -> float:
        return median(sum(output.itl_s) / len(output.itl_s) for output in self.outputs)


async def in_turn(pipe: Pipeline, warm: Sequence[Request], asked: Sequence[Request]) -> Served:
    """One request after another."""
    for request in warm:
        await pipe.complete(request)
    with ForeignLoad() as load:
        outputs = [await pipe.complete(request) for request in asked]
    return Served(outputs, load.share)


async def at_rate(pipe: Pipeline, warm: Sequence[Request], asked: Sequence[Request], interval_s: float) -> Served:
    """One request every ``interval_s``, whatever became of those before; ``warm`` at once, to touch the pools."""

    async def one(number: int, request: Request) -> Output:
        await asyncio.sleep(number * interval_s)
        return await pipe.complete(request)

    await asyncio.gather(*(pipe.complete(request) for request in warm))
    with ForeignLoad() as load:
        outputs = await asyncio.gather(*(one(*each) for each in enumerate(asked)))
    return Served(list(outputs), load.share)


# ---------------------------------------------------------------- KV while prefill runs


async def real_kv(setting: Setting, mode: KvMode, tokens: int, rounds: int) -> Served:
    """Prefill that computes, in a process; its KV to another process over shm."""
    model = setting.pick("llava-110m", "llava")
    pools = {"image": 2, "kv": 3 * tokens // 16 + 8}
    options: dict[str, Any] = {
        "hosting": "process",
        "connector": "shm",
        "dtype": "float32",
        "cache": CacheConfig(pools=pools),
    }
    async with Pipeline(model, "EP+D", transfers=TransferPolicy(kv=mode), prefix_cache=False, **options) as pipe:
        tokenizer = pipe.processor.tokenizer
        asked = [text_request(prompt_of(tokenizer, tokens, seed)) for seed in range(rounds + 2)]
        await asyncio.to_thread(setting.settle)
        return await in_turn(pipe, asked[:2], asked[2:])


def text_request(prompt: str) -> Request:
    return Request(prompt, max_tokens=3, sampling=Sampling(ignore_eos=True))


async def paced_kv(mode: KvMode, tokens: int, rounds: int) -> Served:
    """Emulation: prefill waits, blocks of LLaVA-1.5-7B's shape and an eighth of its bytes move over shm."""
    model = EmulatedModel(shape=LLAVA_15_7B, cost=COST, scale=SCALE)
    options: dict[str, Any] = {
        "hosting": "process",
        "cache": CacheConfig(pools={"image": 2, "kv": 3 * tokens // 16 + 8}),
    }
    async with Pipeline(model, "EP+D", transfers=TransferPolicy(kv=mode), prefix_cache=False, **options) as pipe:
        asked = [EmulatedRequest(text_tokens=tokens, max_tokens=3) for _ in range(rounds + 2)]
        return await in_turn(pipe, asked[:2], asked[2:])


KV_HEADER = (
    "prefill",
    "tokens",
    "KV",
    "pulls",
    "layers",
    "transfer ms",
    "exposed ms",
    "overlap",
    "prefill ms",
    "TTFT ms",
    "2nd token ms",
)


def kv_row(compute: str, tokens: int, mode: str, served: Served) -> list[str]:
    counts = [f"{served.kv(name):.0f}" for name in ("pulls", "group")]
    times = [ms(served.kv("busy_s")), ms(served.kv("exposed_s"))]
    ends = [ms(each) for each in (served.span("prefill"), served.ttft_s, served.second_s)]
    return [compute, str(tokens), mode, *counts, *times, f"{served.kv('overlap'):.1%}", *ends]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


# ---------------------------------------------------------------- features ahead of prefill (emulation)


async def paced_features(chosen: TransferPolicy, rows: int, requests: int) -> Served:
    """Requests of one image each that come at once: features of the next may move while one is prefilled.

    A step holds one prompt: with several that came together in one step, the median TTFT would be that of the last.
    """
    model = EmulatedModel(shape=FEATURES, cost=COST)
    budgets = StepBudgets(token_budget=rows + 40, image_budget=rows)
    pools = {"image": (requests + 1) * (rows // 576 + 1), "kv": (requests + 1) * (rows // 16 + 4)}
    options: dict[str, Any] = {
        "hosting": "process",
        "cache": CacheConfig(pools=pools),
        "image_cache": False,
        "prefix_cache": False,
    }
    async with Pipeline(model, "E+P+D", transfers=chosen, budgets=budgets, **options) as pipe:
        asked = [EmulatedRequest(text_tokens=40, image_tokens=(rows,), max_tokens=1) for _ in range(requests + 1)]
        return await at_rate(pipe, asked[:1], asked[1:], 0.0)


def exposed_s(output: Output) -> float:
    """Seconds for which prefill had nothing to wait for but these features: none where it waited for its turn."""
    read = sum(each["seconds"] for each in output.transfers if each["kind"] == "image")
    waited = output.spans.get("prefill_queue", 0.0) > TURN_S
    return 0.0 if waited else min(read, output.spans.get("ep_migration", 0.0))


FEATURE_HEADER = ("rows", "MB", "read ms", "TTFT ms without", "with prefetch", "hidden without", "with prefetch")


def feature_row(rows: int, without: Served, ahead: Served) -> list[str]:
    reads = [each["seconds"] for each in ahead.moved("image")]
    size = median(each["bytes"] for each in ahead.moved("image")) / 1e6
    hidden = [f"{hidden_share(served):.0%}" for served in (without, ahead)]
    return [str(rows), f"{size:.1f}", ms(median(reads)), ms(without.ttft_s), ms(ahead.ttft_s), *hidden]


def hidden_share(served: Served) -> float:
    reads = sum(each["seconds"] for each in served.moved("image"))
    return 1 - sum(exposed_s(output) for output in served.outputs) / reads


# ---------------------------------------------------------------- both (emulation)


async def combined(chosen: TransferPolicy, requests: int) -> Served:
    """An image of 576 visual tokens and a question, at a fixed rate, prefill busy for three quarters of the time."""
    model = EmulatedModel(shape=LLAVA_15_7B, cost=COST, scale=SCALE / 2)
    options: dict[str, Any] = {"hosting": "process", "cache": CacheConfig(pools={"image": 8, "kv": 160})}
    async with Pipeline(model, "E+P+D", transfers=chosen, image_cache=False, prefix_cache=False, **options) as pipe:
        asked = [EmulatedRequest(text_tokens=40, image_tokens=(576,), max_tokens=17) for _ in range(requests + 4)]
        return await at_rate(pipe, asked[:4], asked[4:], INTERVAL_S)


COMBINED_HEADER = ("moves", "TTFT ms", "to the neither", "2nd token ms", "to the neither", "TPOT ms", "KV overlap")


def combined_rows(found: dict[str, Served]) -> list[list[str]]:
    base = found["neither"]
    return [
        [
            name,
            ms(served.ttft_s),
            f"{served.ttft_s / base.ttft_s - 1:+.1%}",
            ms(served.second_s),
            f"{served.second_s / base.second_s - 1:+.1%}",
            ms(served.tpot_s),
            f"{served.kv('overlap'):.1%}",
        ]
        for name, served in found.items()
    ]


# ---------------------------------------------------------------- all of it


@dataclass
class Found:
    """Results by compute, tokens and mode; by rows and prefetch; by combination."""

    kv: dict[tuple[str, int, KvMode], Served] = field(default_factory=dict)
    features: dict[tuple[int, bool], Served] = field(default_factory=dict)
    combinations: dict[str, Served] = field(default_factory=dict)


async def measure(setting: Setting) -> Found:
    lengths, rounds = ((48,), 2) if setting.quick else (LENGTHS, 6)
    sizes, requests = (IMAGE_ROWS[:1], 2) if setting.quick else (IMAGE_ROWS, 4)
    found = Found()
    async with kept_launcher():
        for tokens in lengths:
            for mode in MODES:
                found.kv["real", tokens, mode] = await real_kv(setting, mode, tokens, rounds)
                found.kv["emulated", tokens, mode] = await paced_kv(mode, tokens, rounds)
        for rows in sizes:
            for prefetch in (False, True):
                chosen = TransferPolicy(prefetch=prefetch, kv="off")
                found.features[rows, prefetch] = await paced_features(chosen, rows, requests)
        for name, chosen in COMBINATIONS:
            found.combinations[name] = await combined(chosen, 3 if setting.quick else 16)
    return found


def run(setting: Setting) -> Result:
    """KV in three modes at two lengths, features at six sizes, four combinations."""
    return result(asyncio.run(measure(setting)))


METHOD = (
    "Processes on one machine, shm, caches off, medians. Real: prefill of llava-110m in float32 on one thread, prompts "
    f"of text. Emulated: stages that wait for a time given by hand ({COST}), while cores, sockets and blocks are real; "
    "KV has LLaVA-1.5-7B's shape and an eighth of its bytes (a quarter in the last table), features are 3,584 values "
    "of two bytes. A transfer counts from its first pull to its last, less pauses; what of it comes after prefill's "
    "end is exposed; overlap is 1 - exposed / transfer (EPD-Serve tables 2 to 4). TTFT ends with the prefill "
    "instance's token, the second token is the first of the decode instance. Features are hidden where prefill did "
    "not wait for them."
)


def result(found: Found) -> Result:
    kv = [kv_row(compute, tokens, mode, served) for (compute, tokens, mode), served in found.kv.items()]
    sizes = sorted({rows for rows, _ in found.features})
    features = [feature_row(rows, found.features[rows, False], found.features[rows, True]) for rows in sizes]
    everything = {str(name): served for name, served in found.kv.items()}
    everything |= {str(name): served for name, served in found.features.items()} | found.combinations
    return Result(
        name="overlap",
        title="Transfers that overlap with computing",
        method=METHOD,
        tables=[
            Table("KV while prefill runs", KV_HEADER, sorted(kv)),
            Table("Feature prefetch (emulated)", FEATURE_HEADER, features),
            Table("Prefetch and grouped KV (emulated)", COMBINED_HEADER, combined_rows(found.combinations)),
        ],
        aims=aims(found),
        notes=disturbed([name for name, served in everything.items() if served.foreign > MAX_FOREIGN_SHARE]),
        values={name: values(served) for name, served in everything.items()},
    )


def aims(found: Found) -> list[Aim]:
    """The aim is for emulated compute; the real figure stands beside it."""
    made = []
    for compute in ("emulated", "real"):
        for tokens in sorted({tokens for _, tokens, _ in found.kv}):
            ratio = found.kv[compute, tokens, "grouped"].kv("overlap")
            met = ratio >= OVERLAP if compute == "emulated" else None
            what = f"overlap of grouped KV at {tokens} tokens, {compute} compute"
            made.append(Aim(what, f">= {OVERLAP:.0%}" if met is not None else "beside it", f"{ratio:.2%}", met))
    return made


def values(served: Served) -> dict[str, Any]:
    return {
        "ttft_s": [output.ttft_s for output in served.outputs],
        "itl_s": [output.itl_s for output in served.outputs],
        "spans_s": [output.spans for output in served.outputs],
        "transfers": [list(output.transfers) for output in served.outputs],
        "foreign_load": served.foreign,
    }
