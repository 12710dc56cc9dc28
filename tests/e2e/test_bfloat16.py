"""A pipeline in bfloat16 on a CPU: every stage runs in it, and its logits are those of float32 but for rounding."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from support.checkpoint_files import checkpoint
from support.exact_pipelines import requests
from support.pipeline_options import pipeline_options
from trinity import Instance, Pipeline
from trinity.stages.attention.backends import pick_backend
from trinity.stages.attention.choice import CacheKind

KIND = CacheKind((1, 2, 1, 16, 8), torch.bfloat16, torch.device("cpu"))
BACKENDS = sorted({"torch", pick_backend("auto", KIND)})
Seen = dict[tuple[int, int], tuple[torch.Tensor, tuple[int, ...]]]  # (request, index): logits, tokens before


async def serve(dtype: str, attention: str) -> Seen:
    logits: dict[tuple[str, int], torch.Tensor] = {}

    def observe(request: str, index: int, scores: torch.Tensor) -> None:
        logits[request, index] = scores.float()

    placed = [Instance(roles, attention=attention) for roles in "EPD"]
    settings: dict[str, Any] = {"dtype": dtype, "pools": {"image": 16, "kv": 256}}
    asked = requests()
    async with Pipeline(checkpoint("llava"), placed, observe=observe, **pipeline_options(settings)) as pipe:
        held = {memory.tensor.dtype for host in pipe.hosts.values() for memory in host.loaded.memory.values()}
        outputs = await asyncio.gather(*(pipe.complete(request) for request in asked))
    assert held == {getattr(torch, dtype)}, "image and KV blocks"
    found: Seen = {}
    for number, output in enumerate(outputs):
        assert len(output.token_ids) == asked[number].max_tokens
        for index in range(len(output.token_ids)):
            found[number, index] = (logits[output.request_id, index], tuple(output.token_ids[:index]))
    return found


@pytest.mark.parametrize("attention", BACKENDS)
async def test_logits_are_those_of_float32_but_for_rounding(attention: str) -> None:
    exact, rounded = await serve("float32", attention), await serve("bfloat16", attention)
    alike = [place for place in exact if exact[place][1] == rounded[place][1]]
    assert {place for place in exact if place[1] == 0} <= set(alike), "prefill, of text and of images"
    assert len([place for place in alike if place[1] > 0]) >= 3, "decode steps after the same tokens"
    for place in alike:
        wanted, found = exact[place][0], rounded[place][0]
        assert (found - wanted).abs().max() < 0.15 * wanted.abs().max()
