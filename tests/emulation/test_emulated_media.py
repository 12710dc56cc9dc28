"""Videos and audio in an emulated pipeline: items of several kinds, served with the tokens that their content gives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.emulated_pipelines import LIVENESS_S, QUICK
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.emulation.content import expected_tokens
from trinity.emulation.model import EmulatedModel, EmulatedRequest, EmulatedShape
from trinity.emulation.processor import EmulatedProcessor
from trinity.errors import BadMedia, RequestError, RequestTooLarge
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.simulation.workload import jobs_of, work_of
from trinity.traces.media import MOST_FRAMES
from trinity.traces.trace import Trace, TraceAudio, TraceRow, TraceVideo

OMNI = get_model_shape("qwen2.5-omni-7b")
MODEL = EmulatedModel(shape=EmulatedShape.of(OMNI), cost=QUICK, scale=2048)
VOICE = EmulatedModel(shape=EmulatedShape.of(get_model_shape("ultravox-v0.3")), cost=QUICK, scale=2048)
VIDEO = TraceVideo(frames=6, width=280, height=280, content="v")
ROW = TraceRow(
    timestamp=0.0, input_length=0, text_length=9, output_length=3, videos=[VIDEO], audio=[TraceAudio(seconds=2.0)]
)
POOLS = CacheConfig(pools={"image": 24, "kv": 400})


def asked() -> list[EmulatedRequest]:
    return [
        EmulatedRequest(text_tokens=21, clips=(VIDEO,), max_tokens=5),
        EmulatedRequest(text_tokens=9, image_tokens=(80,), clips=(VIDEO, TraceAudio(seconds=3.0)), max_tokens=4),
        EmulatedRequest(text_tokens=9, leading_tokens=4, clips=(TraceAudio(seconds=3.0, content="a"),), max_tokens=4),
        EmulatedRequest(text_tokens=30, max_tokens=3),
    ]


@pytest.mark.parametrize(("placement", "spread"), [("EPD", 1), ("2E1P1D", 2)])
async def test_all_kinds_are_served_with_the_tokens_of_their_content(placement: str, spread: int) -> None:
    requests = asked()
    async with Pipeline(MODEL, placement, cache=POOLS, spread=spread) as pipe, asyncio.timeout(LIVENESS_S):
        outputs = await asyncio.gather(*map(pipe.complete, requests))
        works = [EmulatedProcessor(MODEL).process(each).work for each in requests]
        await pipe.wait_idle()
        rows = {each.request_id: each for each in pipe.trace}
    assert [each.token_ids for each in outputs] == [expected_tokens(each, 16, MODEL.vocabulary) for each in works]
    recorded = rows[requests[1].request_id]
    assert [(each.items, each.tokens, each.content) for each in recorded.videos] == [(3, 300, "v#0:100")]
    assert [each.tokens for each in recorded.audio] == [75]
    assert recorded.text_tokens == 9


async def test_another_video_has_another_output() -> None:
    other = TraceVideo(frames=6, width=280, height=280, content="w")
    requests = [EmulatedRequest(text_tokens=9, text="same", clips=(each,), max_tokens=8) for each in (VIDEO, other)]
    async with Pipeline(MODEL, "EPD", cache=POOLS) as pipe, asyncio.timeout(LIVENESS_S):
        one, two = [await pipe.complete(each) for each in requests]
    assert one.token_ids != two.token_ids


async def test_a_recorded_row_is_replayed_with_the_same_items() -> None:
    (job,) = jobs_of(Trace([ROW]), OMNI)
    simulated = work_of(job, 0, shared=False).media
    emulated = EmulatedProcessor(MODEL).process(EmulatedRequest.of(ROW)).work.media
    assert [(each.kind, each.tokens, each.offset) for each in emulated] == [
        (each.kind, each.tokens, each.offset) for each in simulated
    ]


async def test_a_step_of_audio_takes_what_its_tokens_are_worth() -> None:
    """A clip of 0.47 of an image's cost a token: two seconds of encoding where an image of as many would take four."""
    cost = LinearCost(media_s=0.01)
    model = EmulatedModel(shape=EmulatedShape.of(OMNI), cost=cost, scale=2048)
    requests = [
        EmulatedRequest(text_tokens=2, image_tokens=(100,), max_tokens=1),
        EmulatedRequest(text_tokens=2, clips=(TraceAudio(tokens=100),), max_tokens=1),
    ]
    async with Pipeline(model, "EPD", cache=POOLS) as pipe, asyncio.timeout(LIVENESS_S):
        image, audio = [(await pipe.complete(each)).ttft_s or 0.0 for each in requests]
    assert image >= 1.0  # it slept at least so long
    assert 0.46 <= audio < image


@pytest.mark.parametrize(
    ("model", "fields", "said"),
    [
        (VOICE, {"clips": (VIDEO,)}, "takes no videos"),
        (VOICE, {"image_tokens": (9,)}, "takes audio and text"),
        (MODEL, {"clips": ("clip.mp4",)}, "TraceVideo"),
        (MODEL, {"clips": (TraceVideo(frames=2, width=9000, height=9),)}, "narrow"),
    ],
)
def test_odd_clips_are_refused(model: EmulatedModel, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadMedia, match=said):
        EmulatedProcessor(model).process(EmulatedRequest(text_tokens=2, **fields))


def test_a_video_beyond_the_context_is_refused_before_it_has_items() -> None:
    with pytest.raises(RequestTooLarge):
        EmulatedProcessor(MODEL).process(EmulatedRequest(text_tokens=2, clips=(TraceVideo(frames=MOST_FRAMES),)))


def test_a_request_of_text_needs_text() -> None:
    with pytest.raises(RequestError):
        EmulatedProcessor(VOICE).process(EmulatedRequest(text_tokens=0, clips=(TraceAudio(seconds=1.0),)))
