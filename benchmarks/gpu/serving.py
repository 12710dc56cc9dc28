"""Served on a GPU: tokens a second beside generate_batch on the same weights, and one lane beside two."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image

from benchmarks.setting import prompt_of
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling
from trinity.stages.models import load_model, loader

DUAL = ("vision", "language")


@dataclass(frozen=True)
class Load:
    """Requests at once, tokens of a prompt, tokens of an output."""

    requests: int
    prompt: int
    outputs: int

    @property
    def tokens(self) -> int:
        return self.requests * self.outputs


def pools(load: Load, further: int = 0) -> dict[str, int]:
    return {"kv": load.requests * (-(-(load.prompt + further + load.outputs) // 16) + 2), "image": load.requests + 2}


class GenerateBatch:
    """transformers' side: the same weights once more, its own attention, its manager kept from round to round."""

    def __init__(self, model: Path, device: str, dtype: str, load: Load) -> None:
        from transformers import LlamaForCausalLM
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        held = load_model(model, "PD", dtype=dtype, device=device)
        own = loader._load_part(model, "language", held.dtype).to(held.device).eval()
        text = held.adapter.language(own)
        with torch.device("meta"):
            self._model = LlamaForCausalLM(text.config)
        self._model.model, self._model.lm_head = text, own.get_output_embeddings()
        self._model.set_attn_implementation("sdpa")
        blocks = load.requests * ((load.prompt + load.outputs) // 256 + 2)
        self._config = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=4096, allow_block_sharing=False)

    def serve(self, ids: Sequence[list[int]], outputs: int) -> list[list[int]]:
        from transformers import GenerationConfig

        never = GenerationConfig(max_new_tokens=outputs, do_sample=False, eos_token_id=-1, pad_token_id=0)
        made = self._model.generate_batch(
            list(ids), generation_config=never, continuous_batching_config=self._config, persistent_manager=True
        )
        return [list(each.generated_tokens) for each in made.values()]

    def close(self) -> None:
        self._model.destroy_cached_continuous_batching_manager()


async def beside_generate_batch(model: Path, device: str, dtype: str, load: Load, rounds: int) -> dict[str, Any]:
    """Seconds of each round on both sides, A B A B after one round each to warm up, and how many tokens are equal."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    theirs = await asyncio.to_thread(GenerateBatch, model, device, dtype, load)
    found: dict[str, Any] = {"ours_s": [], "theirs_s": []}
    try:
        async with Pipeline(
            model, "EPD", device=device, dtype=dtype, cache=CacheConfig(pools=pools(load)), prefix_cache=False
        ) as pipe:
            tokenizer = pipe.processor.tokenizer
            texts = [prompt_of(tokenizer, load.prompt, seed) for seed in range(load.requests)]
            ids = [tokenizer(text)["input_ids"] for text in texts]
            asked = [Request(text, max_tokens=load.outputs, sampling=Sampling(ignore_eos=True)) for text in texts]
            for _ in range(rounds + 1):
                started = time.perf_counter()
                outputs = await asyncio.gather(*map(pipe.complete, asked))
                middle = time.perf_counter()
                other = await asyncio.to_thread(theirs.serve, ids, load.outputs)
                found["ours_s"].append(middle - started)
                found["theirs_s"].append(time.perf_counter() - middle)
    finally:
        theirs.close()
    both = zip((output.token_ids for output in outputs), other, strict=True)
    pairs = [pair for one, two in both for pair in zip(one, two, strict=True)]
    found["equal_tokens"] = sum(a == b for a, b in pairs) / len(pairs)
    found["tokens_per_s"] = {side: load.tokens / median(found[f"{side}_s"][1:]) for side in ("ours", "theirs")}
    return found


async def serve_texts(model: Path, device: str, dtype: str, load: Load, rounds: int) -> dict[str, Any]:
    """Serve bursts of prompts of text, after one to warm up: seconds of each, tokens of the last, and the prompts."""
    cache = CacheConfig(pools=pools(load))
    seconds: list[float] = []
    async with Pipeline(model, "EPD", device=device, dtype=dtype, cache=cache, prefix_cache=False, depth=2) as pipe:
        tokenizer = pipe.processor.tokenizer
        texts = [prompt_of(tokenizer, load.prompt, seed) for seed in range(load.requests)]
        asked = [Request(text, max_tokens=load.outputs, sampling=Sampling(ignore_eos=True)) for text in texts]
        for _ in range(rounds + 1):
            started = time.perf_counter()
            outputs = await asyncio.gather(*map(pipe.complete, asked))
            seconds.append(time.perf_counter() - started)
        ids = [list(tokenizer(text)["input_ids"]) for text in texts]
    return {"seconds": seconds[1:], "tokens": [each.token_ids for each in outputs], "ids": ids}


def compare(load: Load, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Compare two sides that served the same prompts: tokens a second, and the share of tokens that are equal."""
    both = zip(ours["tokens"], theirs["tokens"], strict=True)
    pairs = [pair for one, two in both for pair in zip(one, two, strict=True)]
    return {
        "tokens_per_s": {
            name: load.tokens / median(side["seconds"]) for name, side in (("ours", ours), ("theirs", theirs))
        },
        "equal_tokens": sum(a == b for a, b in pairs) / len(pairs),
        "version": theirs.get("version", ""),
    }


async def dual_stream(model: Path, device: str, dtype: str, load: Load, rounds: int) -> dict[str, Any]:
    """A burst of requests with an image each through one EPD instance, with one lane and with two, in turns."""
    held = pools(load, further=600)
    ways = {"sequential": ("joint",), "dual": DUAL}
    found: dict[str, Any] = {name: [] for name in ways}
    tokens: dict[str, list[list[int]]] = {}
    for turn in range(rounds + 1):
        for name, lanes in ways.items():
            instance = Instance("EPD", lanes=lanes, pools=held, prefix_cache=False, image_cache=False, device=device)
            async with Pipeline(model, [instance], dtype=dtype, device=device) as pipe:
                for first in (1000, 0):  # the first burst is for what is compiled and recorded on the way
                    started = time.perf_counter()
                    burst = [_with_image(load, first + number) for number in range(load.requests)]
                    outputs = await asyncio.gather(*map(pipe.complete, burst))
                    spent = time.perf_counter() - started
            if turn:
                found[name].append(load.requests / spent)
            tokens[name] = [output.token_ids for output in outputs]
    found["equal_requests"] = sum(a == b for a, b in zip(tokens["sequential"], tokens["dual"], strict=True))
    found["requests"] = load.requests
    return found


def _with_image(load: Load, seed: int) -> Request:
    colour = ((seed * 37) % 256, (seed * 91) % 256, (seed * 53) % 256)
    image = Image.new("RGB", (336, 336), colour)
    text = "USER: <image>\n" + "word " * load.prompt + "ASSISTANT:"
    return Request(text, images=[image], max_tokens=load.outputs, sampling=Sampling(ignore_eos=True))
