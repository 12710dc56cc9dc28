"""Every text type that serves gives, through whole pipelines, the tokens that ``generate()`` gives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.any_model.text_checkpoint import build_any_text
from support.served_types import SERVED_TYPES
from trinity.core.scheduler import BatchRules
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling

OUTPUTS = 10
PROMPTS = (
    "A dog.",
    "Numbers such as 0, 1, 2, 3, 17, 42, 256 and 1024 are split into digits.",
    "Compare the first picture with the second one, then answer in one short sentence. " * 3,
)
SOON = {"deepseek_v3": ("1P1D",), "mimo_v2_flash": ("PD",), "bert": ("1P1D",)}  # latent rows, two widths, another head


def wanted_tokens(directory: Path) -> list[list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    return [_generate(model, tokenizer(prompt, return_tensors="pt").input_ids) for prompt in PROMPTS]


def _generate(model: Any, ids: torch.Tensor) -> list[int]:
    model.generation_config.eos_token_id = None
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUTS, do_sample=False)
    tokens: list[int] = found[0, ids.shape[1] :].tolist()
    return tokens


async def serve(directory: Path, placement: str) -> Sequence[list[int]]:
    cache = CacheConfig(pools={"kv": 96})
    rules = BatchRules(token_budget=23)
    async with Pipeline(directory, placement, dtype="float32", cache=cache, rules=rules) as pipe:
        asked = [Request(text, max_tokens=OUTPUTS, sampling=Sampling(ignore_eos=True)) for text in PROMPTS]
        found = await asyncio.gather(*(pipe.complete(each) for each in asked))
    return [list(each.token_ids) for each in found]


CASES = [
    pytest.param(
        *(name, placement),
        marks=() if placement in SOON.get(name, ()) else pytest.mark.slow,
        id=f"{name}-{placement}",
    )
    for name in SERVED_TYPES
    for placement in ("PD", "1P1D")
]


@pytest.mark.parametrize(("model_type", "placement"), CASES)
def test_the_tokens_of_generate(model_type: str, placement: str, tmp_path: Path) -> None:
    directory = build_any_text(model_type, tmp_path)
    wanted = wanted_tokens(directory)
    assert asyncio.run(serve(directory, placement)) == wanted
