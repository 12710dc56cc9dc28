"""What is told of the requests of a pipeline while it serves them: running, ended, and refused at the door."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest

from trinity.adapt.live_requests import follow_requests, iter_running
from trinity.core.messages import Work
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.errors import ConfigError, Overloaded
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.traces.survival import RUNNING
from trinity.traces.trace import TraceRow

COST = LinearCost(step_s=2e-3)
MODEL = EmulatedModel(shape=LLAVA_15_7B, cost=COST, scale=4096)
SIZES: dict[str, Any] = {"cache": CacheConfig(pools={"image": 8, "kv": 256})}


def asked(name: str, tokens: int = 200, images: int = 1) -> EmulatedRequest:
    return EmulatedRequest(text_tokens=8, image_tokens=(576,) * images, max_tokens=tokens, request_id=name)


async def test_a_request_is_told_while_it_runs_and_as_it_ends() -> None:
    async with Pipeline(MODEL, "1E1PD", **SIZES) as pipe:
        await pipe.complete(asked("before", 2))
        rows = follow_requests(pipe, every_s=0.02)
        serving = asyncio.create_task(pipe.complete(asked("a")))
        told: list[TraceRow] = []
        while not told or told[-1].finish_reason == RUNNING:
            told.append(await asyncio.wait_for(anext(rows), 120))
        await serving
        await rows.aclose()
    running, (ended,) = told[:-1], told[-1:]
    assert {each.request_id for each in told} == {"a"}
    assert ended.output_length == 200
    assert len(running) >= 3
    assert {(each.input_length, each.text_tokens, each.visual_tokens, each.max_tokens) for each in told} == {
        (ended.input_length, 8, 576, 200)
    }
    lengths = [each.output_length for each in running]
    assert lengths == sorted(lengths)
    assert lengths[-1] < 200
    assert len({each.timestamp for each in told}) == 1
    assert abs(ended.timestamp / 1000 - time.time()) < 600
    stamps = [each.latency_s or 0.0 for each in running]
    assert stamps == sorted(stamps)


async def test_those_refused_at_the_door_are_told_like_others_of_then() -> None:
    async with Pipeline(MODEL, "1E1PD", max_waiting=1, **SIZES) as pipe:
        rows = follow_requests(pipe, every_s=0.02)
        first = asyncio.ensure_future(anext(rows))
        await asyncio.sleep(0)
        serving = asyncio.create_task(pipe.complete(asked("a", 400, images=2)))
        assert (await asyncio.wait_for(first, 120)).request_id == "a"
        refused = 0
        waiting = [asyncio.create_task(pipe.complete(asked(f"{n}"))) for n in range(4)]
        for done in await asyncio.gather(*waiting, return_exceptions=True):
            refused += isinstance(done, Overloaded)
        told: list[TraceRow] = []
        while sum(each.finish_reason == "refused" for each in told) < refused:
            told.append(await asyncio.wait_for(anext(rows), 120))
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await rows.aclose()
    assert refused >= 1
    door = [each for each in told if each.finish_reason == "refused"]
    assert {(each.output_length, each.request_id, each.latency_s) for each in door} == {(0, "", None)}
    assert {len(each.images) for each in door} <= {1, 2}
    assert min(each.visual_tokens for each in door) >= 576


async def test_what_only_encodes_or_is_not_prepared_is_no_demand() -> None:
    async with Pipeline(MODEL, "EPD", **SIZES) as pipe:
        stream = pipe.stream(asked("a"))
        assert list(iter_running([stream], 0.0)) == []  # not prepared
        for encode_only in (False, True):
            work = Work(request="a", prompt=(0,) * 9, media=(), max_tokens=4, encode_only=encode_only)
            prepared = SimpleNamespace(
                request=stream.request, arrived_at=1.0, token_count=2, processed=SimpleNamespace(work=work)
            )
            told = list(iter_running([prepared], 4.0))
            assert [(each.input_length, each.output_length, each.latency_s) for each in told] == (
                [] if encode_only else [(9, 2, 3.0)]
            )
    with pytest.raises(ConfigError, match="positive"):
        await anext(follow_requests(pipe, every_s=0))
