"""An emulated model that is quick, requests for it, and the tokens that they must get."""

from __future__ import annotations

import asyncio

from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.content import expected_tokens
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.emulation.processor import EmulatedProcessor
from trinity.pipeline import Pipeline
from trinity.request import Output

QUICK = LinearCost(step_s=0.002, decode_s=1e-5, prefill_s=2e-6, encode_s=0.003, source="made up for tests")
MODEL = EmulatedModel(shape=LLAVA_15_7B, cost=QUICK, scale=2048)
POOLS = {"image": 12, "kv": 400}
LIVENESS_S = 60.0


def asked() -> list[EmulatedRequest]:
    """Text alone, one image, two, an image that somebody else has too, a long prompt."""
    return [
        EmulatedRequest(text_tokens=21, max_tokens=12),
        EmulatedRequest(text_tokens=18, image_tokens=(576,), contents=("cat",), max_tokens=9),
        EmulatedRequest(text_tokens=40, image_tokens=(576, 576), max_tokens=20),
        EmulatedRequest(text_tokens=33, image_tokens=(576,), contents=("cat",), max_tokens=3, text="shared"),
        EmulatedRequest(text_tokens=64, image_tokens=(576,), contents=("cat",), max_tokens=3, text="shared"),
        EmulatedRequest(text_tokens=2500, max_tokens=1),
    ]


def right(request: EmulatedRequest, model: EmulatedModel = MODEL) -> list[int]:
    return expected_tokens(EmulatedProcessor(model).process(request).work, 16, model.shape.vocabulary)


async def serve(pipe: Pipeline, requests: list[EmulatedRequest]) -> list[Output]:
    async with asyncio.timeout(LIVENESS_S):
        return list(await asyncio.gather(*(pipe.complete(request) for request in requests)))


def check(outputs: list[Output], requests: list[EmulatedRequest]) -> None:
    assert [output.token_ids for output in outputs] == [right(request) for request in requests]
    assert all(output.emulated for output in outputs)
