"""Encoders that help are killed: the request goes on in its one life, whatever they were doing for it."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from support.emulated_pipelines import LIVENESS_S, right
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.request import Output

SLOW = EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(step_s=0.002, media_s=0.3 / 576), scale=2048)
IMAGES = (576,) * 5  # two rounds of three encoders, 0.3 s each
OPTIONS: dict[str, Any] = {"hosting": "process", "spread": 3, "cache": CacheConfig(pools={"image": 12, "kv": 400})}


async def serve(pipe: Pipeline, victims: tuple[str, ...], after_s: float) -> tuple[EmulatedRequest, Output]:
    """Serve one request, and kill these encoders so long after it was sent."""
    request = EmulatedRequest(text_tokens=18, image_tokens=IMAGES, max_tokens=5)
    async with asyncio.timeout(LIVENESS_S), pipe.stream(request) as tokens:
        await asyncio.sleep(after_s)  # no state is waited for: any moment must do
        for name in victims:
            os.kill(pipe.processes[name].process, signal.SIGKILL)
        return request, await tokens.collect()


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.35, 0.55])
@pytest.mark.parametrize("victims", [("E1",), ("E1", "E2")], ids=" ".join)
async def test_a_killed_helper_costs_no_recovery(victims: tuple[str, ...], after_s: float) -> None:
    async with Pipeline(SLOW, "3E1P1D", **OPTIONS) as pipe:
        request, output = await serve(pipe, victims, after_s)
        await asyncio.wait_for(pipe.wait_idle(), LIVENESS_S)
    assert output.token_ids == right(request, SLOW)
    assert (output.lives, output.route[0]) == (1, "E0")


async def test_a_killed_asker_is_recovered_from_as_ever() -> None:
    """What its helpers have made is in their caches for the next life."""
    async with Pipeline(SLOW, "3E1P1D", **OPTIONS) as pipe:
        request, output = await serve(pipe, ("E0",), 0.4)
        await asyncio.wait_for(pipe.wait_idle(), LIVENESS_S)
    assert output.token_ids == right(request, SLOW)
    assert output.lives == 2


async def test_without_a_kill_each_encoder_has_its_share() -> None:
    async with Pipeline(SLOW, "3E1P1D", **OPTIONS) as pipe:
        request, output = await serve(pipe, (), 0.0)
    assert output.token_ids == right(request, SLOW)
    assert {record["source"] for record in output.transfers if record["kind"] == "image"} == {"E0", "E1", "E2"}
