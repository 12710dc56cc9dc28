"""Images whose pixels are equal and whose features are not, one after the other: no cache gives one for the other."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from trinity.errors import BadMedia, RequestError
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling
from trinity.testing.oracle import Oracle

PALETTE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8)).quantize(16)
SETTINGS: dict[str, Any] = {"dtype": "float32", "pools": {"image": 16, "kv": 256}}


def png(image: Image.Image, form: str = "PNG", **more: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **more)
    return buffer.getvalue()


LOOKS = {
    "opaque": png(PALETTE),
    "a transparent entry": png(PALETTE, transparency=3),
    "a transparent colour": png(PALETTE.convert("RGB"), transparency=(154, 160, 130)),
    "a transparent grey": png(PALETTE.convert("L"), transparency=128),
    "grey": png(PALETTE.convert("L")),
    "a transparent gif": png(PALETTE, "GIF", transparency=3),
}


def ask(name: str, requests: dict[str, Request]) -> dict[str, list[int]]:
    oracle = Oracle(checkpoint(name))
    return {look: oracle.generate(request) for look, request in requests.items()}


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
async def test_each_has_its_own_tokens_in_any_order(name: str) -> None:
    requests = {
        look: Request("<image>\nWhat?", images=[data], max_tokens=6, sampling=Sampling(ignore_eos=True))
        for look, data in LOOKS.items()
    }
    wanted = await asyncio.to_thread(ask, name, requests)
    assert wanted["opaque"] != wanted["a transparent entry"], "the control: they differ"
    async with Pipeline(checkpoint(name), "EPD", **pipeline_options(SETTINGS)) as pipe:
        for order in (list(requests), list(reversed(requests))):
            for look in order:
                assert (await pipe.complete(requests[look])).token_ids == wanted[look], look


@pytest.mark.parametrize("shape", [(3, 40, 60), (40, 60, 3), (3, 40, 3), (1, 50, 60), (3, 300, 4)])
async def test_arrays_are_read_as_transformers_reads_them(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).integers(0, 255, shape, dtype=np.uint8)
    request = Request("<image>\nWhat?", images=[array], max_tokens=6, sampling=Sampling(ignore_eos=True))
    wanted = (await asyncio.to_thread(ask, "llava", {"": request}))[""]
    async with Pipeline(checkpoint("llava"), "EPD", **pipeline_options(SETTINGS)) as pipe:
        assert (await pipe.complete(request)).token_ids == wanted


async def test_bad_words_are_bounded_in_all() -> None:
    async with Pipeline(checkpoint("llava"), "EPD", **pipeline_options(SETTINGS)) as pipe:
        for many, long in ((4096, 4096), (1, 4096 * 5), (300, 64)):
            words = [[3] * long] * many
            with pytest.raises(RequestError, match=r"token ids in all|items; 4096 are allowed"):
                await pipe.complete(Request("abc", sampling=Sampling(bad_words_ids=words)))  # type: ignore[arg-type]
        for rows in (1, 3, 4):  # transformers' own ways differ on these
            with pytest.raises(BadMedia, match="channels at either end"):
                await pipe.complete(Request("<image>", images=[np.zeros((4, 300, rows), np.uint8)]))
        with pytest.raises(BadMedia):
            await pipe.complete(Request("<image>", images=[np.zeros((5, 5, 5), np.uint8)]))
