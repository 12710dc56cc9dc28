"""Clients that send expensive pictures without end: texts and pictures of another one are served, then and later."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.http_server import ServedModel, chat_body, serve_model, settled
from trinity.preprocess.media_limits import MediaLimits
from trinity.server import ServerConfig

CHAT = "/v1/chat/completions"
LIVENESS_S = 400.0
KEYS = ["of the victim", "of the first", "of the second"]


def expensive(seed: int) -> str:
    """A picture that every bound lets through, and that takes a good part of a second to read."""
    noise = np.random.default_rng(seed).integers(0, 255, (60, 60, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((3600, 3600)).save(file, "JPEG", progressive=True, quality=80)
    return base64.b64encode(file.getvalue()).decode()


def asking(picture: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture}"}}
    content = [{"type": "text", "text": "What?"}, part]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


@asynccontextmanager
async def attacked(served: ServedModel, answered: list[int]) -> AsyncIterator[None]:
    async def attack(number: int) -> None:
        body, own = asking(expensive(number)), {"authorization": f"Bearer {KEYS[number]}"}
        while True:
            answered.append((await served.http.post(CHAT, json=body, headers=own, timeout=LIVENESS_S)).status_code)

    attackers = [asyncio.create_task(attack(1 + number % 2)) for number in range(6)]
    try:
        yield
    finally:
        for task in attackers:
            task.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)


@pytest.mark.parametrize("processes", [0, 1])
async def test_texts_and_pictures_of_others_are_served(forked_workers: None, processes: int) -> None:
    config = ServerConfig(api_keys=KEYS)
    limits = MediaLimits(processes=processes, allow_paths=False)
    own = {"authorization": f"Bearer {KEYS[0]}"}
    small = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(small, "JPEG")
    picture = asking(base64.b64encode(small.getvalue()).decode())
    answered: list[int] = []
    async with serve_model("llava", "EPD", config, limits=limits) as served, asyncio.timeout(LIVENESS_S):
        processor = served.pipe.processor
        async with attacked(served, answered):
            while len(answered) < 2:
                found = await served.http.post(CHAT, json=chat_body(max_tokens=1), headers=own, timeout=LIVENESS_S)
                assert found.status_code == 200, found.text
            while not processor._media_lane.waiting:  # else the test shows nothing
                await asyncio.sleep(0)
            before = len(answered)
            found = await served.http.post(CHAT, json=picture, headers=own, timeout=LIVENESS_S)
            assert found.status_code == 200, found.text
            assert len(answered) - before <= 4, "its picture has the next turn"
            names = {each.request.client for each in served.pipe.streams}
            assert 1 <= len(names) <= 2
            assert not any(key.split()[-1] in name for key in KEYS for name in names)
        while served.server.active:
            await asyncio.sleep(0.01)
        assert processor._media_lane.waiting == 0, "nobody waits for what clients have asked that left"
        await settled(served.pipe)
        for body in (picture, chat_body(max_tokens=1)):
            assert (await served.http.post(CHAT, json=body, headers=own, timeout=LIVENESS_S)).status_code == 200
        await settled(served.pipe)
        assert (processor.room.taken, served.pipe._frontend.core.inputs.waiting_bytes) == (0, 0)
        assert not any("of the" in str(row) for row in served.pipe.trace)
    assert set(answered) == {200}
