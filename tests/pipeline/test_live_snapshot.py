"""Snapshots of a pipeline: true while requests run, one for all who look, and made for nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from support.emulated_pipelines import MODEL, POOLS, asked, check, serve
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import EmulatedModel, EmulatedRequest
from trinity.errors import ConfigError, Overloaded, RequestError, TraceError
from trinity.memory.cache_config import CacheConfig
from trinity.metrics import SPANS
from trinity.pipeline import Pipeline, live_feed
from trinity.pipeline.live_feed import LiveFeed
from trinity.pipeline.live_page import embed_snapshot, live_policy, read_live_page
from trinity.pipeline.live_plan import GUESSED, LivePlanner
from trinity.pipeline.live_snapshot import MOST_SHOWN, LiveSnapshot, name_placement, take_snapshot
from trinity.traces.trace import SLO

LOOSE_S, TIGHT_S = (10.0, 1.0), (1.0, 0.1)
SLOW = LinearCost(step_s=0.02, decode_s=1e-4, prefill_s=1e-4, encode_s=0.1, source="made up for tests")


def emulated(placement: str = "1E2P1D", **named: Any) -> Pipeline:
    return Pipeline(MODEL, placement, cache=CacheConfig(pools=POOLS), slo=SLO(*LOOSE_S), **named)


def read(encoded: bytes) -> LiveSnapshot:
    return msgspec.json.decode(encoded, type=LiveSnapshot)


async def test_an_idle_pipeline_and_a_new_one() -> None:
    pipe = emulated()
    new = take_snapshot(pipe)
    assert (new.state, new.placement, new.slo, new.requests) == ("new", "1E2P1D", (10.0, 1.0), ())
    assert next((each.name, each.state, each.pools) for each in new.instances) == ("E0", "new", {})
    async with pipe:
        idle = take_snapshot(pipe)
        assert [(each.name, each.roles, each.state) for each in idle.instances] == [
            ("E0", "E", "up"), ("P0", "P", "up"), ("P1", "P", "up"), ("D0", "D", "up"),
        ]  # fmt: skip
        assert idle.instances[0].pools["image"] == (12, 12)
        assert idle.instances[3].pools["kv"][1] == 400
    assert {each.state for each in take_snapshot(pipe).instances} == {"closed"}


async def test_counts_of_requests_that_run_and_of_those_that_ended() -> None:
    async with emulated() as pipe:
        requests = asked()
        outputs = await serve(pipe, requests)
        check(outputs, requests)
        with pytest.raises(RequestError):
            await pipe.complete(EmulatedRequest(text_tokens=50_000, max_tokens=5))
        await pipe.features(EmulatedRequest(image_tokens=(576,)))
        found = take_snapshot(pipe)
        assert sum(found.finished.values()) == len(requests) + 2
        assert found.judged == len(requests) + 1, "no SLO is for features, which lowered attainment on the page"
        assert found.finished["length"] == len(requests)
        assert found.output_tokens == sum(each.max_tokens or 0 for each in requests)
        assert found.met is not None
        assert found.met["guard"] == len(requests)
        assert set(found.spans) == set(SPANS)
        assert found.spans["prefill"][1] == len(requests)
        encoded = [each.spans["encode"] for each in outputs if each.spans["encode"]]
        assert found.spans["encode"][0] > sum(encoded)
        assert found.spans["encode"][1] == len(encoded) + 1
        pairs = {(each.kind, each.source, each.target): each for each in found.transfers}
        assert sum(each.count for each in found.transfers if each.kind == "kv") == len(requests) - 1
        assert all(each.scheme == "inproc" for each in found.transfers if each.outcome == "pulled")
        assert {source for kind, source, _ in pairs if kind == "image"} <= {"E0", "P0", "P1", ""}
        totals = {kind: sum(each.bytes for each in found.transfers if each.kind == kind) for kind in ("image", "kv")}
        moved = pipe.metrics.summary()["migrations"]
        assert totals == {kind: moved[kind]["bytes"] for kind in totals}


async def test_requests_are_shown_where_they_are_and_how_they_end() -> None:
    slow = EmulatedModel(shape=MODEL.shape, cost=SLOW, scale=2048)
    async with Pipeline(slow, "1E1P1D", cache=CacheConfig(pools=POOLS)) as pipe:
        seen: list[tuple[str, bool]] = []
        hostile = '<img src=x onerror="document.title=1">'
        request = EmulatedRequest(text_tokens=300, image_tokens=(576,), max_tokens=20, request_id=hostile)
        async with pipe.stream(request) as stream, asyncio.timeout(60):
            while not stream.done:
                (shown,) = take_snapshot(pipe).requests or (None,)
                if shown is not None and (not seen or seen[-1] != (shown.at, shown.tokens > 0)):
                    assert (shown.id, shown.media) == (hostile, 1)
                    seen.append((shown.at, shown.tokens > 0))
                    one = next(each for each in take_snapshot(pipe).instances if each.name == shown.at)
                    assert one.waiting + one.decoding == 1
                await asyncio.sleep(0.002)
        assert next(at for at, _ in seen if at) == "E0"
        assert seen[-1] == ("D0", True)
        assert ("P0", False) in seen
        assert stream.place == ""
        (end,) = take_snapshot(pipe, watched=(stream,)).ended
        assert (end.id, end.reason, end.route) == (hostile, "length", ("E0", "P0", "D0"))
        assert end.bytes == sum(each["bytes"] for each in stream.output.transfers) > 0


async def test_of_many_requests_some_are_listed_and_all_are_counted() -> None:
    count = MOST_SHOWN + 50
    async with emulated("1EP1D") as pipe:
        jobs = [asyncio.create_task(pipe.complete(EmulatedRequest(text_tokens=20, max_tokens=8))) for _ in range(count)]
        async with asyncio.timeout(60):
            while len(pipe.streams) < count:
                await asyncio.sleep(0)
        found = take_snapshot(pipe)
        assert (len(found.requests), found.unlisted) == (MOST_SHOWN, 50)
        assert found.requests[0].id == pipe.streams[0].request.request_id
        nowhere = sum(1 for each in pipe.streams if not each.place)
        assert sum(each.waiting + each.decoding for each in found.instances) == count - nowhere
        assert len(msgspec.json.encode(found)) < 40_000
        await asyncio.gather(*jobs)


async def test_a_kill_and_the_restart_show() -> None:
    async with emulated("1EP2D", hosting="process") as pipe:
        assert {each.state for each in take_snapshot(pipe).instances} == {"up"}
        os.kill(pipe.processes["D1"].process, signal.SIGKILL)
        seen: list[Any] = []
        async with asyncio.timeout(60):
            while not seen or (seen[-1].state, seen[-1].epoch) != ("up", 1):
                seen.append(take_snapshot(pipe).instances[2])
                await asyncio.sleep(0.002)
        assert {"up", "lost"} <= {each.state for each in seen} or {"up", "starting"} <= {each.state for each in seen}
        assert "ended" in seen[-1].why
        assert [each.epoch for each in take_snapshot(pipe).instances] == [0, 0, 1]


async def test_a_change_and_a_recovery_show() -> None:
    slow = EmulatedModel(shape=MODEL.shape, cost=SLOW, scale=2048)
    async with Pipeline(slow, "1EP2D", cache=CacheConfig(pools=POOLS)) as pipe:
        async with pipe.stream(EmulatedRequest(text_tokens=20, max_tokens=40)) as stream, asyncio.timeout(60):
            while not (stream.token_count and stream.place.startswith("D")):
                await asyncio.sleep(0.002)
            switching = asyncio.create_task(pipe.switch(stream.place, "EPD", drain_s=0))
            while not take_snapshot(pipe).change:
                await asyncio.sleep(0.001)
            name = stream.place
            assert take_snapshot(pipe).change == pipe.change == f"instance {name} switches to EPD"
            await switching
            assert len((await stream.collect()).token_ids) == 40
        found = take_snapshot(pipe)
        assert (found.change, found.recoveries) == ("", stream.output.lives - 1)
        assert {each.name: each.roles for each in found.instances}[name] == "EPD"


async def test_a_planned_life_is_told_from_a_loss() -> None:
    async with emulated("1EP2D", hosting="process") as pipe:
        await pipe.switch("D1", "EPD")
        assert [(each.state, each.epoch, each.planned) for each in take_snapshot(pipe).instances] == [
            ("up", 0, False), ("up", 0, False), ("up", 1, True),
        ]  # fmt: skip
        os.kill(pipe.processes["D1"].process, signal.SIGKILL)
        async with asyncio.timeout(60):
            while (found := take_snapshot(pipe).instances[2]).epoch < 2 or found.state != "up":
                await asyncio.sleep(0.01)
        assert not found.planned
        assert "ended" in found.why


# ---------------------------------------------------------------- one feed for all


class Clock:
    """Time that goes on where somebody sleeps, and nowhere else: no viewer is late, however busy the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        due = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, due)


async def test_viewers_share_snapshots_and_nobody_else_has_them_made(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in ("time", "asyncio"):
        monkeypatch.setattr(live_feed, module, clock)
    async with emulated() as pipe:
        feed = LiveFeed(pipe, every_s=0.02)
        await asyncio.sleep(0.1)
        assert (feed.made, feed.viewers) == (0, 0)
        seen: list[list[bytes]] = [[] for _ in range(20)]

        async def view(kept: list[bytes]) -> None:
            async with aclosing(feed.follow()) as snapshots:
                async for each in snapshots:
                    kept.append(each)
                    if len(kept) == 5:
                        return

        await asyncio.gather(*map(view, seen))
        assert feed.made == 5
        assert all(kept == seen[0] for kept in seen), "all saw the same five"
        assert [read(each).number for each in seen[0]] == [1, 2, 3, 4, 5]
        await asyncio.sleep(0.1)
        assert (feed.made, feed.viewers) == (5, 0)


async def test_a_slow_viewer_gets_the_newest_and_a_late_one_no_old_one() -> None:
    async with emulated() as pipe:
        feed = LiveFeed(pipe, every_s=0.02)
        async with aclosing(feed.follow()) as slow, aclosing(feed.follow()) as quick:
            first = read(await anext(slow))
            for _ in range(6):
                await anext(quick)
            assert read(await anext(slow)).number >= 6 > first.number, "those between were never held"
        await asyncio.sleep(0.1)
        before = feed.made
        async with aclosing(feed.follow()) as late:
            assert read(await anext(late)).number == before + 1


async def test_what_ended_between_two_snapshots_is_told_once_and_not_kept() -> None:
    async with emulated() as pipe:
        feed = LiveFeed(pipe, every_s=0.01)
        async with aclosing(feed.follow()) as snapshots:
            async with pipe.stream(EmulatedRequest(text_tokens=20, max_tokens=30)) as stream:
                assert read(await anext(snapshots)).requests[0].id == stream.request.request_id
                await stream.collect()
            found = [read(await anext(snapshots)) for _ in range(3)]
            assert [each.id for snapshot in found for each in snapshot.ended] == [stream.request.request_id]
        async with pipe.stream(EmulatedRequest(text_tokens=20, max_tokens=300)), aclosing(feed.follow()) as snapshots:
            await anext(snapshots)  # it may be the last one of before
            await anext(snapshots)
            assert feed._watched == pipe.streams
        assert feed._watched == (), "an output is kept for nobody"


async def test_a_feed_ends_with_its_pipeline() -> None:
    pipe = emulated()
    async with pipe:
        snapshots = LiveFeed(pipe, every_s=0.01).follow()
        await anext(snapshots)
    async with asyncio.timeout(120):
        left = [read(each).state async for each in snapshots]
    assert left[-1] == "closed"


# ---------------------------------------------------------------- what the planner would do


async def test_a_plan_of_what_was_served_is_made_while_it_serves_and_never_twice_at_once() -> None:
    async with emulated("2EPD") as pipe:
        with pytest.raises(TraceError, match="nothing was served so far"):
            await LivePlanner(pipe).plan(*LOOSE_S)
    async with emulated("2EPD") as pipe:
        requests = [EmulatedRequest(text_tokens=16, image_tokens=(576,), max_tokens=2 + i % 3) for i in range(120)]
        await serve(pipe, list(requests))
        pipe.cost = SLOW  # as if measured: few requests a second, so that a short trace tells a rate
        planner = LivePlanner(pipe)
        first = asyncio.create_task(planner.plan(*TIGHT_S))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="another plan"):
            await planner.plan(*TIGHT_S)
        during = await pipe.complete(EmulatedRequest(text_tokens=16, max_tokens=3))
        assert len(during.token_ids) == 3
        found = await first
        assert (found.now, found.note) == ("2EPD", "")
        assert found.text.startswith(f"Run {found.placement}")
        hurried = LivePlanner(pipe, seconds=1e-9)
        with pytest.raises(Overloaded, match="no plan was found in 1e-09 s"):
            await hurried.plan(*TIGHT_S)


async def test_a_plan_without_measured_costs_says_so_and_one_of_an_unknown_shape_is_refused() -> None:
    strange = EmulatedModel(shape=msgspec.structs.replace(MODEL.shape, name="mine"), cost=MODEL.cost, scale=2048)
    async with Pipeline(strange, "2EPD", cache=CacheConfig(pools=POOLS)) as pipe:
        await pipe.complete(EmulatedRequest(text_tokens=16, max_tokens=3))
        with pytest.raises(ConfigError, match="needs a known model shape"):
            await LivePlanner(pipe).plan(*LOOSE_S)
    async with emulated("2EPD") as pipe:
        await serve(pipe, [EmulatedRequest(text_tokens=16, max_tokens=2 + i % 3) for i in range(120)])
        pipe.cost = None
        assert (await LivePlanner(pipe).plan(2.0, 0.5)).note == GUESSED


# ---------------------------------------------------------------- the page


def test_the_page_is_one_file_that_names_nothing_else() -> None:
    page = read_live_page()
    for outside in ("http:", "https:", "//cdn", "@import", "url(", "innerHTML", "outerHTML", "document.write", "eval("):
        assert outside not in page.replace("http://www.w3.org/2000/svg", ""), outside
    assert page.count("<script>") == page.count("<style>") == 1
    assert " style=" not in page, "its policy lets neither run"
    assert "default-src 'none'" in live_policy()
    assert "unsafe" not in live_policy()


async def test_a_snapshot_in_the_page_cannot_leave_its_element() -> None:
    async with emulated("1EP1D") as pipe, pipe.stream(
        EmulatedRequest(text_tokens=9, max_tokens=9, request_id="</script><script>alert(1)</script>")
    ):  # fmt: skip
        encoded = msgspec.json.encode(take_snapshot(pipe))
        page = embed_snapshot(encoded)
    assert "</script><script>alert" not in page
    inside = page.split('id="snapshot">')[1].split("</script>")[0]
    assert read(inside.encode()) == read(encoded)
    assert name_placement(pipe) == "1EP1D"
    assert "Content-Security-Policy" in page
