"""The multimodal store of a whole pipeline: what came from it is in the request's record."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.emulated_pipelines import MODEL, POOLS
from trinity.core.messages import IMAGE
from trinity.emulation.model import EmulatedRequest
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.request import Output


def image_record(output: Output) -> dict[str, Any]:
    """Records are in the order in which pulls ended and commits came."""
    return next(record for record in output.transfers if record["kind"] == "image")


@pytest.mark.parametrize("settings", [{}, {"hosting": "process"}, {"hosting": "process", "verify": "always"}])
async def test_a_pipeline_shows_what_came_from_the_store(settings: dict[str, Any]) -> None:
    """Each encoder takes its turns: of the two requests at the second one, one is where the first one's image was."""

    def asked(text: str, image: str = "cat") -> EmulatedRequest:
        return EmulatedRequest(text_tokens=18, image_tokens=(576,), contents=(image,), max_tokens=4, text=text)

    async with Pipeline(MODEL, "2E2P1D", cache=CacheConfig(pools=POOLS), prefix_cache=False, **settings) as pipe:
        first = await pipe.complete(asked("one"))
        here = first.route[1]
        async with asyncio.timeout(120):
            while not all(name in pipe.loads and pipe.loads[name].cached[IMAGE] for name in ("E0", here)):
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)  # E1 hears of it as the front end does
        second = await pipe.complete(asked("two"))
        await pipe.complete(asked("three", "dog"))
        fourth = await pipe.complete(asked("four"))
    assert first.route == ["E0", here, "D0"]
    assert [record["outcome"] for record in first.transfers] == ["pulled", "pulled"]
    assert second.route[::2] == fourth.route[::2] == ["E1", "D0"]
    by_target = {output.route[1]: image_record(output) for output in (second, fourth)}
    assert by_target.keys() == {"P0", "P1"}
    found, (moved,) = by_target.pop(here), by_target.values()  # which comes first hangs on who was up first
    assert (moved["outcome"], moved["source"]) == ("store", here)
    assert moved["bytes"] > 0
    assert ("digest_s" in moved) == (settings.get("verify") == "always")
    assert (found["outcome"], found["bytes"]) == ("store", 0), "it is where it was"
    assert found["source"] in (("P0", "P1") if found is image_record(fourth) else (here,)), "both have it by then"
