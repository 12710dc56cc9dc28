"""Images that an encoder of transformers cannot take end as BadMedia, next to others, which are served as ever."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any, Literal

import numpy as np
import openai
import pytest
from PIL import Image

from support.checkpoint_files import checkpoint
from support.http_server import serve_model
from support.pipeline_options import pipeline_options
from trinity.errors import BadMedia
from trinity.pipeline import Pipeline
from trinity.request import Output, Request, Sampling
from trinity.testing.oracle import Oracle

pytestmark = [
    pytest.mark.xdist_group("media-lfm2_vl"),
    # transformers' own, of arrays that it makes of tensors: numpy 2 asks for another signature
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
MODEL = "any-lfm2_vl"
THIN = [(3, 9000), (9000, 3), (2, 9000)]  # height, width: more patches than LFM2-VL keeps, so that its encoder fails
SETTINGS: dict[str, Any] = {"dtype": "float32", "pools": {"image": 96, "kv": 512}, "image_budget": 4}
LIVENESS_S = 300.0


def ask(number: int, size: tuple[int, int]) -> Request:
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    ends = Sampling(ignore_eos=True)
    return Request(
        "<image> What?", images=[Image.fromarray(pixels)], max_tokens=4, sampling=ends, request_id=f"r{number}"
    )


REQUESTS = [ask(number, (64 + 8 * (number % 4), 96) if number % 2 else THIN[number // 2 % 3]) for number in range(12)]


def expected() -> dict[str, list[int]]:
    oracle = Oracle(checkpoint(MODEL))
    return {request.request_id: oracle.generate(request) for request in REQUESTS[1::2]}


@pytest.mark.parametrize(
    ("placement", "hosting"),
    [("EPD", "thread"), ("2E1PD", "thread"), pytest.param("2E1PD", "process", marks=pytest.mark.slow)],
)
async def test_many_of_them_harm_no_other_request(placement: str, hosting: Literal["thread", "process"]) -> None:
    wanted = await asyncio.to_thread(expected)
    async with Pipeline(checkpoint(MODEL), placement, hosting=hosting, **pipeline_options(SETTINGS)) as pipe:
        before = {name: each.epoch for name, each in pipe.health.items()}
        asked = (pipe.complete(request) for request in REQUESTS)
        async with asyncio.timeout(LIVENESS_S):
            found = await asyncio.gather(*asked, return_exceptions=True)
        for request, answer in zip(REQUESTS, found, strict=True):
            if request.request_id in wanted:
                assert isinstance(answer, Output), answer
                assert answer.token_ids == wanted[request.request_id]
            else:
                assert type(answer) is BadMedia, answer
                assert "the model's encoder cannot take the image of" in str(answer)
                assert len(str(answer)) < 400
        assert {name: each.epoch for name, each in pipe.health.items()} == before, "none was restarted"
        assert (await pipe.complete(REQUESTS[1])).token_ids == wanted["r1"]


async def test_over_http_it_is_a_fault_of_the_request() -> None:
    """Clients send what ended with 500 again by themselves."""
    file = io.BytesIO()
    Image.new("RGB", (9000, 3)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    async with serve_model(MODEL, "2EPD", pools={"image": 512, "kv": 2048}) as served:
        with pytest.raises(
            openai.BadRequestError, match="the model's encoder cannot take the image of 9000 x 3"
        ) as caught:
            await served.client.chat.completions.create(
                model="any-lfm2_vl",
                messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
                max_tokens=2,
            )
        assert caught.value.code == "invalid_media"
