"""Pipelines of multimodal types that nobody listed, after their proof: tokens and logits of their own generate()."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from trinity.core.scheduler import BatchRules
from trinity.pipeline import Pipeline
from trinity.preprocess.checkpoint.verdicts import MEDIA, find_verdict
from trinity.request import Request, Sampling
from trinity.stages.proof import prove
from trinity.testing.oracle import Oracle

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # PaliGemma's processor, NumPy 2

OUTPUTS = 6
SIZES = ((90, 70), (64, 120), (150, 66))
# three rotary axes; sizes of images beside pixels; features and positions that only the model's own forward tells; a
# prompt that sees itself whole; images that do in some layers, two head widths, shared keys and values
QUICK = ("qwen3_vl_moe", "mistral3", "hunyuan_vl", "llama4", "paligemma", "gemma4")
UNCUT = ("paligemma",)  # no prefix of their prompts may be used again
SETTINGS: dict[str, Any] = {"dtype": "float32", "pools": {"image": 16, "kv": 256}, "rules": BatchRules(token_budget=23)}


def proven(name: str) -> Path:
    directory = checkpoint(f"any-{name}")
    if find_verdict(directory) is None:
        assert prove(directory).failed is None
    return directory


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size)


def ask(images: int, seed: int = 0) -> Request:
    """A chat of so many images over two turns."""
    parts: list[dict[str, Any]] = []
    for number in range(images):
        parts += [{"type": "image"}, {"type": "text", "text": f"picture {number}"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Two boats."}]}
    again = {"role": "user", "content": [{"type": "text", "text": "Which is red?"}]}
    return Request(
        messages=[{"role": "user", "content": parts}, answer, again],
        images=[picture(seed + number, SIZES[number]) for number in range(images)],
        max_tokens=OUTPUTS,
        sampling=Sampling(ignore_eos=True),
    )


async def serve(directory: Path, placement: str, requests: list[Request]) -> dict[str, tuple[list[int], torch.Tensor]]:
    """Serve the requests at once, and one again: tokens and logits [outputs, vocabulary] by request."""
    seen: dict[Any, torch.Tensor] = {}

    def observe(request: str, index: int, logits: torch.Tensor) -> None:
        seen[request, index] = logits.float().clone()

    async with Pipeline(directory, placement, observe=observe, **pipeline_options(SETTINGS)) as pipe:
        outputs = await asyncio.gather(*(pipe.complete(request) for request in requests))
        again = await pipe.complete(msgspec.structs.replace(requests[0], request_id="again"))
    assert again.token_ids == outputs[0].token_ids
    assert (again.cached_tokens > 0) is not any(name in str(directory) for name in UNCUT), (
        "the second time by the caches"
    )
    logits = {each.request_id: torch.stack([seen[each.request_id, at] for at in range(OUTPUTS)]) for each in outputs}
    return {each.request_id: (list(each.token_ids), logits[each.request_id]) for each in outputs}


def check(name: str, placement: str) -> None:
    directory = proven(name)
    requests = [ask(1), ask(3, 40), ask(1, 90)]
    requests = [msgspec.structs.replace(each, request_id=str(at)) for at, each in enumerate(requests)]
    found, oracle = asyncio.run(serve(directory, placement, requests)), Oracle(directory)
    wanted = [oracle.answer(request) for request in requests]
    for request, own in zip(requests, wanted, strict=True):
        tokens, logits = found[request.request_id]
        assert tokens == own.token_ids, request.request_id
        assert (logits - own.logits).abs().max() < 1e-4 * own.logits.abs().max()
    assert wanted[0].token_ids != wanted[2].token_ids, "another image gives other tokens"


@pytest.mark.parametrize("name", QUICK)
def test_a_type_that_nobody_listed_is_served_exactly(name: str) -> None:
    check(name, "1E1P1D")


@pytest.mark.parametrize("placement", ["EPD", "1E1P1D"])
def test_an_image_of_one_token_is_served_beside_another(placement: str) -> None:
    """Mistral 3's code takes the axis of rows from a feature that is alone: encodes of single images failed."""
    directory = proven("mistral3")
    request = msgspec.structs.replace(ask(2), images=[picture(1, (28, 28)), picture(2, SIZES[0])], request_id="r")

    async def served() -> Any:
        async with Pipeline(directory, placement, **pipeline_options(SETTINGS)) as pipe:
            return await pipe.complete(request)

    found = asyncio.run(served())
    assert found.token_ids == Oracle(directory).answer(request).token_ids


@pytest.mark.parametrize("placement", ["EPD", "1E1P1D"])
def test_a_token_with_a_type_that_the_model_writes_is_text(placement: str) -> None:
    """ERNIE's generate() gives no types as it decodes: by its id the token went to the experts of images."""
    directory = proven("ernie4_5_vl_moe")
    verdict = find_verdict(directory)
    assert verdict is not None
    kinds = next(iter(verdict.facts.token_types.values()))
    vocabulary = Oracle(directory).answer(ask(0)).logits.shape[-1]
    mark = next(number for number in kinds if number not in (MEDIA, verdict.facts.image_token_id))
    others = tuple(number for number in range(vocabulary) if number != mark)
    request = msgspec.structs.replace(ask(1), sampling=Sampling(ignore_eos=True, suppress_tokens=others))
    requests = [msgspec.structs.replace(request, request_id="0")]
    (found,), own = asyncio.run(serve(directory, placement, requests)).values(), Oracle(directory).answer(requests[0])
    assert found[0] == own.token_ids == [mark] * OUTPUTS
    assert (found[1] - own.logits).abs().max() < 1e-4 * own.logits.abs().max()


def test_a_token_with_a_type_in_a_users_text_keeps_it() -> None:
    """No prompt of the proof has marks of videos: beside an image ERNIE's processor types them, and text was typed."""
    directory = proven("ernie4_5_vl_moe")
    given = ask(1)
    parts = [{"type": "image"}, {"type": "text", "text": "see <video_end><video_start> here, <image_end> there"}]
    asked = [
        msgspec.structs.replace(given, messages=[{"role": "user", "content": each}], request_id=str(at))
        for at, each in enumerate((parts, [parts[0], {"type": "text", "text": "see here"}]))
    ]
    found, oracle = asyncio.run(serve(directory, "1E1P1D", asked)), Oracle(directory)
    for request in asked:
        tokens, logits = found[request.request_id]
        own = oracle.answer(request)
        assert tokens == own.token_ids
        assert (logits - own.logits).abs().max() < 1e-4 * own.logits.abs().max()
