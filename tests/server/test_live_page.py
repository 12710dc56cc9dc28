"""The live page in Chromium: what it draws is what is served, and no text of a request becomes a part of the page."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.chromium import Page, chromium
from support.emulated_pipelines import MODEL
from support.emulated_server import EmulatedServer, serve_emulated
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import EmulatedModel, EmulatedRequest
from trinity.pipeline.live_snapshot import take_snapshot
from trinity.server import ServerConfig
from trinity.traces.trace import SLO

SLOW = LinearCost(step_s=0.02, decode_s=1e-4, prefill_s=1e-4, encode_s=0.1, source="made up for tests")
HOSTILE = (
    "<img src=x onerror=\"document.title='taken'\">",
    "</td></table><script>document.title='taken'</script>",
    "</script><script>document.title='taken'</script>",
    "javascript:document.title='taken'",
)

TEXT = "document.getElementById('{}').innerText"

pytestmark = pytest.mark.slow  # a browser takes seconds of CPU to start


@asynccontextmanager
async def looked_at(
    folder: Path, config: ServerConfig | None = None, placement: str = "1E2P1D", **named: Any
) -> AsyncIterator[tuple[EmulatedServer, Page]]:
    model = EmulatedModel(shape=MODEL.shape, cost=SLOW, scale=2048)
    async with chromium(folder) as page, serve_emulated(placement, config, model, SLO(2.0, 0.5), **named) as served:
        await page.size(1280, 900)
        await page.open(f"{served.url}/live")
        yield served, page


async def test_requests_instances_and_transfers_are_drawn_and_hostile_names_stay_text(tmp_path: Path) -> None:
    async with looked_at(tmp_path) as (served, page):
        await page.until("document.getElementById('link').textContent === 'live'")
        asked = [EmulatedRequest(image_tokens=(576,), max_tokens=60, request_id=name) for name in HOSTILE]
        running = [asyncio.create_task(served.pipe.complete(each)) for each in asked]
        await page.until("document.querySelectorAll('#board circle').length === 4")
        for name in HOSTILE:
            await page.until(f"document.getElementById('requests').innerText.includes({json.dumps(name)})")
        assert await page.evaluate("document.querySelectorAll('img, body script').length") == 2, "its own two scripts"
        names = await page.evaluate("[...document.querySelectorAll('.instance b')].map(each => each.textContent)")
        assert names == ["arriving", "E0", "P0", "P1", "D0"]
        await asyncio.gather(*running)
        await page.until("document.querySelectorAll('#board circle').length === 0")
        await page.until("document.querySelector('#board .gap + .column + .gap').innerText.includes('image · inproc')")
        lines = await page.evaluate("document.querySelectorAll('#board path').length")
        assert lines == len({(each.kind, each.source, each.target) for each in take_snapshot(served.pipe).transfers})
        for width in (1280, 420):
            await page.size(width, 900)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
        await page.draw(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000
        assert await page.evaluate("document.title") == "trinity live"
        assert page.problems == []
        assert {each.removeprefix(served.url) for each in page.requests} <= {"/live", "/live/events", "data:,"}


async def test_a_key_is_asked_for_and_a_plan_shown(tmp_path: Path) -> None:
    async with looked_at(tmp_path, ServerConfig(api_keys=["right"])) as (_, page):
        await page.until("!document.getElementById('keycard').hidden")
        await page.evaluate(
            "document.getElementById('key').value = 'right'; document.querySelector('#keyform button').click()"
        )
        await page.until("document.getElementById('link').textContent === 'live'")
        assert await page.evaluate("document.getElementById('keycard').hidden")
        await page.evaluate("document.getElementById('ask').click()")
        await page.until("document.getElementById('plan').textContent.includes('nothing was served so far')")
        assert await page.evaluate("[document.getElementById('ttft').value, document.getElementById('tbt').value]") == [
            "2",
            "0.5",
        ]


async def test_a_switch_and_a_recovery_are_told(tmp_path: Path) -> None:
    async with looked_at(tmp_path, placement="1E2P2D", hosting="process") as (served, page):
        pipe = served.pipe
        await page.until("document.getElementById('link').textContent === 'live'")
        asked = [EmulatedRequest(image_tokens=(576,), max_tokens=80, request_id=f"r{number}") for number in range(8)]
        running = [asyncio.create_task(pipe.complete(each)) for each in asked]
        async with asyncio.timeout(60):
            while not any(each.place == "D1" and each.token_count for each in pipe.streams):
                await asyncio.sleep(0.01)
        switching = asyncio.create_task(pipe.switch("P1", "D"))
        await page.until(f"{TEXT.format('about')}.includes('instance P1 switches to D')")
        await switching
        await page.until(f"{TEXT.format('log')}.includes('P1 was prefill and is decode now')")
        assert "was lost" not in await page.evaluate(TEXT.format("log")), "a change that was asked for is no loss"
        columns = "[...document.querySelectorAll('.column')].map(each => each.querySelectorAll('.instance').length)"
        assert await page.evaluate(columns) == [1, 1, 1, 3]
        assert await page.evaluate("document.getElementById('title').textContent") == "emulated on 1E1P3D"

        asked = [EmulatedRequest(text_tokens=30, max_tokens=400, request_id=f"s{number}") for number in range(8)]
        running += [asyncio.create_task(pipe.complete(each)) for each in asked]
        async with asyncio.timeout(60):
            while not any(each.place == "D1" and each.token_count for each in pipe.streams):
                await asyncio.sleep(0.01)
        os.kill(pipe.processes["D1"].process, signal.SIGKILL)
        await page.until(f"{TEXT.format('log')}.includes('D1 was lost')")
        outputs = await asyncio.gather(*running)
        again = sum(each.lives - 1 for each in outputs)
        assert again > 0
        await page.until(f"{TEXT.format('numbers')}.replace(/\\s+/g, ' ').includes('{again} recoveries')")
        await page.until(f"{TEXT.format('log')}.includes('went on at another instance')")
        await page.until(f"{TEXT.format('log')}.includes('D1 is up again, in life 2')")
        await page.draw(tmp_path / "page.png")
        assert page.problems == []
