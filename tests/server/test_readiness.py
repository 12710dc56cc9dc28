"""/ready: 503 that names the part which makes no progress, and 200 however long the queues are."""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import threading
import time
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from PIL import Image

from support.emulated_pipelines import LIVENESS_S
from support.http_server import chat_body, serve_model, settled
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.processor import RequestProcessor
from trinity.runtime.host import InstanceHost
from trinity.runtime.lane import Lane
from trinity.server import ServerConfig
from trinity.server.loop_watch import LoopWatch

STALLED_S = 0.5


def with_picture() -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


async def until(served: Any, wanted: str) -> dict[str, Any]:
    """Ask /ready until it names exactly one part, or none for ""; return its last answer."""
    async with asyncio.timeout(LIVENESS_S):
        while True:
            answer = await served.http.get("/ready")
            stalled = list(answer.json()["stalled"])
            assert (answer.status_code == 200) == (not stalled)
            if stalled == ([wanted] if wanted else []):
                return dict(answer.json())
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("placement", "instance"), [("PD", "PD0"), ("P+D", "P0"), ("P+D", "D0")])
async def test_a_lane_that_hangs_is_named_until_it_goes_on(
    placement: str, instance: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 9df71424 /ready said 200 for ever."""
    held, run_step, struck = threading.Event(), Lane._run_step, list[str]()

    def hang(lane: Lane, step: Any) -> Any:
        if lane.instance == instance and not held.is_set():
            struck.append(f"{instance} {lane.name}")
            held.wait()
        return run_step(lane, step)

    monkeypatch.setattr(Lane, "_run_step", hang)
    try:
        async with serve_model(placement=placement, config=ServerConfig(stalled_after_s=STALLED_S)) as served:
            await until(served, "")
            asked = asyncio.create_task(served.http.post("/v1/chat/completions", json=chat_body(max_tokens=4)))
            while not struck:
                await asyncio.sleep(0.01)
            assert (await until(served, struck[0]))["state"] == "running"
            assert f'trinity_part_stalled_seconds{{part="{struck[0]}"}}' in (await served.http.get("/metrics")).text
            held.set()
            await until(served, "")
            assert (await asked).status_code == 200
    finally:
        held.set()


async def test_a_step_that_was_predicted_to_be_long_is_given_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At d3eb033e balancers left an instance whose encode of 40 s went on as predicted."""
    held, run_step, struck = threading.Event(), Lane._run_step, list[str]()

    def hang(lane: Lane, step: Any) -> Any:
        struck.append(f"PD0 {lane.name}")
        held.wait()
        return run_step(lane, step)

    monkeypatch.setattr(Lane, "_run_step", hang)
    monkeypatch.setattr(InstanceHost, "_predict", lambda *_: 0.001 if held.is_set() else 600.0)
    try:
        async with serve_model(placement="PD", config=ServerConfig(stalled_after_s=STALLED_S)) as served:
            asked = asyncio.create_task(served.http.post("/v1/chat/completions", json=chat_body(max_tokens=4)))
            while not struck:
                await asyncio.sleep(0.01)
            began, named = time.monotonic(), set[str]()
            while not asked.done():
                named |= (await served.http.get("/ready")).json()["stalled"].keys()
                await asyncio.sleep(0.01)
                if time.monotonic() - began > 4 * STALLED_S:
                    held.set()
            assert (await asked).status_code == 200
        assert struck[0] not in named
    finally:
        held.set()


async def test_preparing_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    held = asyncio.Event()
    async with serve_model(config=ServerConfig(stalled_after_s=STALLED_S)) as served:
        prepare = served.pipe.processor.aprocess

        async def hang(request: Any) -> Any:
            await held.wait()
            return await prepare(request)

        monkeypatch.setattr(served.pipe.processor, "aprocess", hang)
        asked = asyncio.create_task(served.http.post("/v1/chat/completions", json=chat_body(max_tokens=4)))
        await until(served, "preparing text")
        held.set()
        assert (await asked).status_code == 200
        await until(served, "")


async def test_an_encoder_that_hangs_is_named_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    held, run_step, struck = threading.Event(), Lane._run_step, list[str]()

    def hang(lane: Lane, step: Any) -> Any:
        if lane.instance == "E0" and not held.is_set():
            struck.append(f"E0 {lane.name}")
            held.wait()
        return run_step(lane, step)

    monkeypatch.setattr(Lane, "_run_step", hang)
    try:
        async with serve_model("llava", "E+PD", ServerConfig(stalled_after_s=STALLED_S)) as served:
            asked = asyncio.create_task(served.http.post("/v1/chat/completions", json=with_picture()))
            while not struck:
                await asyncio.sleep(0.01)
            began = time.monotonic()
            assert (await until(served, struck[0]))["stalled"][struck[0]] >= STALLED_S
            assert time.monotonic() - began < 10 * (STALLED_S + 0.1)  # and a report of the instance
            text = await served.http.post("/v1/chat/completions", json=chat_body(max_tokens=1))
            assert text.status_code == 200, "others need no encoder"
            assert list((await served.http.get("/ready")).json()["stalled"]) == struck
            held.set()
            await until(served, "")
            assert (await asked).status_code == 200
    finally:
        held.set()


@pytest.mark.parametrize("lane", ["text", "media"])
async def test_preparing_that_hangs_is_named_though_its_callers_leave(
    lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 4767dc11 each that left was taken for progress, and what hung without a caller was not seen at all."""
    held, parse = threading.Event(), RequestProcessor._parse

    def hang(processor: RequestProcessor, request: Any) -> Any:
        held.wait()
        return parse(processor, request)

    limits = MediaLimits(preprocess_timeout_s=4 * STALLED_S)
    config = ServerConfig(stalled_after_s=STALLED_S)
    body = chat_body(max_tokens=1) if lane == "text" else with_picture()
    monkeypatch.setattr(RequestProcessor, "_parse", hang)
    async with serve_model("llava", "EPD", config, limits=limits) as served:
        try:
            named, began = list[str](), time.monotonic()
            while named != [f"preparing {lane}"]:
                assert time.monotonic() - began < 100 * STALLED_S
                with suppress(httpx2.TimeoutException):
                    await served.http.post("/v1/chat/completions", json=body, timeout=STALLED_S / 4)
                answer = await served.http.get("/ready")
                named = list(answer.json()["stalled"])
            assert answer.status_code == 503
        finally:
            held.set()
        await until(served, "")
        assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_ten_times_the_load_is_no_reason() -> None:
    """Requests wait for twice as long as a part may go without progress, which is long for a step."""
    stalled_s = 4 * STALLED_S
    async with serve_model(config=ServerConfig(stalled_after_s=stalled_s)) as served:
        body = chat_body(max_tokens=1500, ignore_eos=True)
        asked = [asyncio.create_task(served.http.post("/v1/chat/completions", json=body)) for _ in range(150)]
        began, codes = time.monotonic(), []
        while not all(each.done() for each in asked):
            answer = await served.http.get("/ready")
            codes.append((answer.status_code, str(answer.json()["stalled"])))
            await asyncio.sleep(0.1)
            if time.monotonic() - began > 2 * stalled_s:
                break
        assert set(codes) == {(200, "{}")}
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await settled(served.pipe)


async def test_a_loop_that_is_stuck_is_logged_once_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    def hold_the_loop() -> None:
        while not watch.stuck:
            pass

    with caplog.at_level(logging.WARNING):
        async with LoopWatch(0.1) as watch:
            hold_the_loop()
            while watch.stuck:
                await asyncio.sleep(0.01)
    assert watch.stalls
    assert watch.longest_s >= 0.1
    said = [each.getMessage() for each in caplog.records if "the event loop" in each.getMessage()]
    assert any("hold_the_loop" in each for each in said)
    assert len(said) == 2 * watch.stalls, "each once, and once its end"
    assert "runs again" in said[-1]
