"""The live page over HTTP: the page, its stream of snapshots, plans on demand, keys, viewers that are slow or leave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest

from support.emulated_pipelines import serve
from support.emulated_server import EmulatedServer, serve_emulated
from trinity.emulation.model import EmulatedRequest
from trinity.pipeline.live_feed import LiveFeed
from trinity.pipeline.live_snapshot import LiveSnapshot
from trinity.server import ServerConfig
from trinity.server.command import _make_parser, make_server_config
from trinity.server.live_routes import MOST_VIEWERS

JSON = {"content-type": "application/json"}


async def snapshots(http: httpx2.AsyncClient, **named: Any) -> AsyncIterator[LiveSnapshot]:
    async with http.stream("GET", "/live/events", **named) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                yield msgspec.json.decode(line.removeprefix("data: "), type=LiveSnapshot)


def feed_of(served: EmulatedServer) -> LiveFeed:
    """Feed of a server's route."""
    app = served.uvicorn.config.app
    (route,) = [each for each in app.routes if each.path == "/live/events"]  # type: ignore[union-attr]
    found: LiveFeed = route.app._handle.__self__.feed
    return found


async def test_the_page_may_run_its_own_script_and_nothing_else() -> None:
    async with serve_emulated() as served:
        answer = await served.http.get("/live")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = dict(each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
        assert policy["script-src"].startswith("'sha256-")
        assert policy["connect-src"] == "'self'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "<title>trinity live</title>" in answer.text


async def test_snapshots_come_while_someone_looks_and_stop_when_all_have_gone() -> None:
    async with serve_emulated("1E2P1D") as served:
        feed = feed_of(served)
        seen: list[LiveSnapshot] = []
        async with asyncio.timeout(120):
            async for each in snapshots(served.http):
                seen.append(each)
                if len(seen) == 2:
                    asked = asyncio.create_task(served.pipe.complete(EmulatedRequest(text_tokens=20, max_tokens=4)))
                if each.finished:
                    break
            while feed.viewers:
                await asyncio.sleep(0.01)
        left = feed.made  # by a server that was late to see that they have gone, one more
        assert len((await asked).token_ids) == 4
        assert [each.number for each in seen] == list(range(1, len(seen) + 1))
        assert seen[-1].output_tokens == 4
        await asyncio.sleep(0.7)
        assert feed.made == left, "snapshots were made for nobody"


async def test_a_viewer_that_reads_nothing_costs_one_snapshot_and_no_other_viewer_anything() -> None:
    async with serve_emulated() as served:
        feed, (host, port) = feed_of(served), served.url.removeprefix("http://").split(":")
        feed._every_s = 0.002
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        stuck.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stuck, (host, int(port)))
        await loop.sock_sendall(stuck, b"GET /live/events HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(120):
            while feed.viewers < 1 or feed.made < 400:  # until its socket is full nobody else asks
                made = feed.made
                await asyncio.sleep(0.3)
                if feed.viewers and feed.made == made:
                    break
            async for each in snapshots(served.http):
                if each.number >= made + 50:
                    break
        assert feed.viewers >= 1, "the stuck one is still there"
        stuck.close()
        async with asyncio.timeout(120):
            while feed.viewers:
                await asyncio.sleep(0.01)


async def test_too_many_viewers_are_refused_and_others_served() -> None:
    async with serve_emulated() as served:
        feed = feed_of(served)
        feed.viewers = MOST_VIEWERS
        refused = await served.http.get("/live/events")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_viewers")
        assert refused.headers["retry-after"]
        feed.viewers = 0


async def test_with_keys_the_page_is_empty_and_its_data_need_one() -> None:
    async with serve_emulated(config=ServerConfig(api_keys=["right"])) as served:
        assert (await served.http.get("/live")).status_code == 200
        for method, path in (("GET", "/live/events"), ("POST", "/live/plan")):
            assert (await served.http.request(method, path, headers=JSON, content="{}")).status_code == 401
        async for each in snapshots(served.http, headers={"authorization": "Bearer right"}):
            assert each.state == "running"
            break


async def test_switched_off_there_is_nothing() -> None:
    async with serve_emulated(config=ServerConfig(live=False)) as served:
        for path in ("/live", "/live/events", "/live/plan"):
            assert (await served.http.get(path)).status_code == 404
    off = make_server_config(_make_parser().parse_args(["x", "--no-live"]))
    assert (off.live, make_server_config(_make_parser().parse_args(["x"])).live) == (False, True)


async def test_a_plan_is_made_on_demand_and_bad_questions_are_refused() -> None:
    async with serve_emulated("2EPD") as served:
        ask = {"ttft": 1.0, "tbt": 0.1}
        early = await served.http.post("/live/plan", json=ask)
        assert (early.status_code, early.json()["error"]["code"]) == (400, "no_plan")
        assert "nothing was served so far" in early.json()["error"]["message"]
        for bad in (
            {},
            {"ttft": "soon", "tbt": 1},
            {"ttft": 0, "tbt": 1},
            {"ttft": 1e9, "tbt": 1},
            {"ttft": 1, "tbt": 11},
        ):
            assert (await served.http.post("/live/plan", json=bad)).status_code == 400
        from_elsewhere = await served.http.post(
            "/live/plan", content=json.dumps(ask), headers={"content-type": "text/plain"}
        )
        assert from_elsewhere.status_code == 415, "what a page of another site can send unasked"
        assert (await served.http.get("/live/plan")).status_code == 405
        await serve(served.pipe, [EmulatedRequest(text_tokens=16, max_tokens=2 + i % 3) for i in range(120)])
        served.pipe.cost = None
        first, second = await asyncio.gather(*(served.http.post("/live/plan", json=ask) for _ in range(2)))
        assert sorted((first.status_code, second.status_code)) == [200, 429]
        done = first if first.status_code == 200 else second
        assert set(done.json()) == {"placement", "now", "met", "text", "note"}


async def test_a_drain_ends_the_streams_of_viewers() -> None:
    async with serve_emulated() as served:
        seen = 0
        async with asyncio.timeout(120):
            async for _ in snapshots(served.http):
                seen += 1
                if seen == 1:
                    served.uvicorn.begin_drain()
        assert seen >= 1


async def test_a_closed_pipeline_ends_the_streams_and_says_so() -> None:
    async with serve_emulated() as served:
        states: list[str] = []
        async with asyncio.timeout(120):
            async for each in snapshots(served.http):
                states.append(each.state)
                if len(states) == 1:
                    await served.pipe.aclose()
        assert (states[0], states[-1]) == ("running", "closed")


@pytest.mark.parametrize("count", [30])
async def test_many_viewers_share_one_snapshot(count: int) -> None:
    async with serve_emulated() as served:
        feed = feed_of(served)

        async def view() -> list[int]:
            seen: list[int] = []
            async for each in snapshots(served.http):
                seen.append(each.number)
                if len(seen) == 3:
                    break
            return seen

        seen = await asyncio.gather(*(view() for _ in range(count)))
        assert feed.made <= count, "one for all, and those for who came later; each its own were thrice that"
        assert all(each == sorted(set(each)) for each in seen)
