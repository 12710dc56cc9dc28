"""Against transformers' own continuous batching (``generate_batch``): the same checkpoint, in the same run.

Both serve the same prompts in pairs, A B A B, once with few and once with many output tokens: the difference is decode
steps alone, whatever set-up and prefill cost. CPU time is the whole process's, all threads included.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting, prompt_of
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling

BATCH = 16
AIM = 0.70
BUDGET = 2048  # tokens a step, on both sides
Served = list[list[int]]


@dataclass(frozen=True)
class Load:
    """Requests of both sides: prompts (text and ids), and the two output lengths."""

    texts: list[str]
    ids: list[list[int]]
    few: int
    many: int

    @property
    def steps(self) -> int:
        return self.many - self.few


@dataclass
class Sample:
    """One side, once: CPU and wall seconds of a decode step; CPU seconds until the few tokens are there."""

    step_cpu_s: float
    step_wall_s: float
    start_cpu_s: float
    tokens: Served

    @property
    def tokens_per_s(self) -> float:
        return BATCH / self.step_wall_s


class GenerateBatch:
    """transformers' side. The cache is bounded by hand: left alone it takes nine tenths of the free memory."""

    def __init__(self, directory: Path, longest: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
        self._config = ContinuousBatchingConfig(
            num_blocks=BATCH * (longest // 256 + 2), max_batch_tokens=BUDGET, allow_block_sharing=False
        )

    async def serve(self, load: Load, tokens: int) -> Served:
        return await asyncio.to_thread(self._serve, load.ids, tokens)

    def _serve(self, ids: list[list[int]], tokens: int) -> Served:
        from transformers import GenerationConfig

        never = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        found = self._model.generate_batch(
            ids, generation_config=never, continuous_batching_config=self._config, persistent_manager=True
        )
        return [list(each.generated_tokens) for each in found.values()]

    def close(self) -> None:
        self._model.destroy_cached_continuous_batching_manager()


async def serve(pipe: Pipeline, load: Load, tokens: int) -> Served:
    """trinity's side: text in, text out, through the front end."""
    sampling = Sampling(ignore_eos=True)
    asked = [Request(text, max_tokens=tokens, sampling=sampling) for text in load.texts]
    return [output.token_ids for output in await asyncio.gather(*map(pipe.complete, asked))]


async def sample(side: Callable[[Load, int], Awaitable[Served]], load: Load) -> Sample:
    started = _clocks()
    await side(load, load.few)
    middle = _clocks()
    tokens = await side(load, load.many)
    ended = _clocks()
    few, many = (b - a for a, b in ((started[0], middle[0]), (middle[0], ended[0])))
    few_wall, many_wall = (b - a for a, b in ((started[1], middle[1]), (middle[1], ended[1])))
    return Sample((many - few) / load.steps, (many_wall - few_wall) / load.steps, few, tokens)


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def make_load(tokenizer: Any, context: int, few: int, many: int) -> Load:
    texts = [prompt_of(tokenizer, context, seed) for seed in range(BATCH)]
    return Load(texts, [tokenizer(text)["input_ids"] for text in texts], few, many)


@dataclass
class Pairs:
    """Both sides' samples at one context length."""

    context: int
    theirs: list[Sample]
    ours: list[Sample]

    @property
    def ratios(self) -> list[float]:
        return sorted(own.step_cpu_s / other.step_cpu_s for own, other in zip(self.ours, self.theirs, strict=True))

    @property
    def equal(self) -> int:
        """Requests of the first pair with equal tokens."""
        return sum(own == other for own, other in zip(self.ours[0].tokens, self.theirs[0].tokens, strict=True))


async def measure(setting: Setting, contexts: tuple[int, ...], few: int, many: int, pairs: int) -> list[Pairs]:
    """A pair to warm up with, then ``pairs`` pairs, at each context length."""
    directory, longest = setting.pick("llama-512x8", "llama"), max(contexts) + many
    pools = {"kv": BATCH * (longest // 16 + 2)}
    found = []
    theirs = await asyncio.to_thread(GenerateBatch, directory, longest)
    try:
        async with Pipeline(
            directory, "PD", dtype="float32", cache=CacheConfig(pools=pools), prefix_cache=False
        ) as pipe:
            for context in contexts:
                load = make_load(pipe.processor.tokenizer, context, few, many)
                rounds = []
                for _ in range(pairs + 1):
                    await asyncio.to_thread(setting.settle)
                    one = await sample(theirs.serve, load)
                    rounds.append((one, await sample(lambda *asked: serve(pipe, *asked), load)))
                found.append(Pairs(context, [a for a, _ in rounds[1:]], [b for _, b in rounds[1:]]))
    finally:
        theirs.close()
    return found


def run(setting: Setting) -> Result:
    """CPU time of a decode step at batch 16, and tokens per second, beside ``generate_batch``'s."""
    contexts, few, many, pairs = ((24,), 2, 6, 1) if setting.quick else ((64, 256, 512), 4, 28, 4)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()  # generate_batch collects garbage at its end, and would go through all of torch and transformers
    try:
        found = asyncio.run(measure(setting, contexts, few, many, pairs))
    finally:
        gc.unfreeze()
    return result(found, few, many)


def result(found: list[Pairs], few: int, many: int) -> Result:
    return Result(
        name="versus_generate_batch",
        title="Against transformers' generate_batch",
        method=(
            f"llama-512x8 in float32, {BATCH} requests at once, the same token ids on both sides, {len(found[0].ours)} "
            f"pairs A B A B after one to warm up. A decode step's CPU time: (process CPU time for {many} output tokens "
            f"− for {few}) / {many - few}. trinity's has everything in it: text in, text out, core, threads, streams. "
            "tokens/s: the same difference in wall time. Its prefix cache is off, as is generate_batch's block sharing."
        ),
        tables=[Table("Medians; ratio with min and max of the pairs", HEADER, [row(pairs) for pairs in found])],
        aims=[aim(pairs) for pairs in found],
        values={str(pairs.context): values(pairs) for pairs in found},
    )


HEADER = (
    "context",
    "generate_batch CPU ms a step",
    "trinity CPU ms a step",
    "ratio",
    "generate_batch tokens/s",
    "trinity tokens/s",
    "equal requests",
)


def aim(pairs: Pairs) -> Aim:
    ratio = median(pairs.ratios)
    what = f"CPU time of a decode step at batch {BATCH}, context {pairs.context}, of generate_batch's"
    return Aim(what, f"≤ {AIM:.0%}", f"{ratio:.0%}", ratio <= AIM)


def row(pairs: Pairs) -> list[str]:
    ratios = pairs.ratios
    return [
        str(pairs.context),
        f"{median(each.step_cpu_s for each in pairs.theirs) * 1e3:.1f}",
        f"{median(each.step_cpu_s for each in pairs.ours) * 1e3:.1f}",
        f"{median(ratios):.0%} ({ratios[0]:.0%} to {ratios[-1]:.0%})",
        f"{median(each.tokens_per_s for each in pairs.theirs):.0f}",
        f"{median(each.tokens_per_s for each in pairs.ours):.0f}",
        f"{pairs.equal} of {len(pairs.ours[0].tokens)}",
    ]


def values(pairs: Pairs) -> dict[str, Any]:
    sides = {"generate_batch": pairs.theirs, "trinity": pairs.ours}
    return {
        "ratios": pairs.ratios,
        "equal_requests": pairs.equal,
        "requests": len(pairs.ours[0].tokens),
        **{
            name: {
                "step_cpu_s": [each.step_cpu_s for each in samples],
                "step_wall_s": [each.step_wall_s for each in samples],
                "start_cpu_s": [each.start_cpu_s for each in samples],
            }
            for name, samples in sides.items()
        },
    }
