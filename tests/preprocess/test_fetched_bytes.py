"""Bytes that were fetched are counted as they come, in shares of their clients, and keep no request from its end."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from support.checkpoint_files import checkpoint
from trinity.errors import BadMedia, ClosedError, Overloaded, RequestTooLarge
from trinity.preprocess import preparation_lanes
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.preparation_lanes import SharedRoom
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.worker_processes import KillableProcessor
from trinity.request import Media, Request

LIVENESS_S = 120.0
MI = 1 << 20


def picture(side: int = 256, whole: int = 300) -> bytes:
    """A file of 3 bytes for each pixel of a side; the whole takes 12 for each as it is prepared."""
    file, pixels = io.BytesIO(), np.zeros((whole, whole, 3), np.uint8)
    pixels[:side, :side] = np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class Pages:
    """Serves one picture under every path; from ``stops_at`` bytes on only once ``go_on`` is set."""

    def __init__(self, data: bytes) -> None:
        self.data, self.stops_at, self.go_on, self.asked = data, len(data), asyncio.Event(), 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(self.data) + self.data[: self.stops_at])
        if self.stops_at < len(self.data):
            await self.go_on.wait()
            writer.write(self.data[self.stops_at :])
        writer.close()


@asynccontextmanager
async def serving(kind: type[RequestProcessor] = RequestProcessor, **limits: Any) -> AsyncIterator[Any]:
    """A processor, its pages, and a function that makes a request of some of these."""
    pages = Pages(picture())
    server = await asyncio.start_server(pages.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    hosts: dict[str, Any] = {"allowed_hosts": ("127.0.0.1:*",), "allowed_networks": ("127.0.0.0/8",)}
    made = await asyncio.to_thread(kind, checkpoint("llava"), limits=MediaLimits(**limits, **hosts))

    def ask(client: str, urls: int = 1, name: str = "") -> asyncio.Task[Any]:
        media = [Media("image", f"http://127.0.0.1:{port}/{at}.png") for at in range(urls)]
        request = Request("<image>" * urls, media=media, untrusted=True, client=client, request_id=name or client)
        return asyncio.create_task(made.aprocess(request))

    try:
        async with asyncio.timeout(LIVENESS_S):
            yield made, pages, ask
    finally:
        server.close()
        await made.aclose()


async def until(reached: Any) -> None:
    while not reached():
        await asyncio.sleep(0.01)


async def fill(made: Any, ask: Any) -> tuple[list[asyncio.Task[Any]], Any]:
    """Have 12 requests of one client fetched while others have the lane; returns them, and what gives that free."""
    made.room.most = 64 * MI
    places = [await made._media_lane.queue.take("slow") for _ in range(2)]
    asked = [ask("a", 8, f"a{at}") for at in range(12)]
    await until(lambda: made._media_lane.waiting >= 4)
    await asyncio.sleep(0.2)

    def free() -> None:
        for each in places:
            made._media_lane.queue.leave(each, 0.0)
        made._media_lane.queue.start_next()

    return asked, free


async def test_what_one_client_fetches_is_bounded_and_all_of_it_is_served() -> None:
    """At 82dc40f9 ten requests of eight URLs had 1.4 GiB while the room had nothing."""
    async with serving() as (made, pages, ask):
        asked, free = await fill(made, ask)
        most, waiting = made.room.taken, made._media_lane.waiting
        assert 8 * len(pages.data) * waiting <= most <= 16 * MI
        assert waiting < 12
        free()
        while not all(each.done() for each in asked):
            most = max(most, made.room._fetched.turns.running)
            await asyncio.sleep(0.01)
        assert all(len(each.result().work.media) == 8 for each in asked)
        assert most <= 16 * MI
        assert made.room.taken == 0


async def test_a_newcomer_fetches_whatever_another_client_has_fetched() -> None:
    async with serving() as (made, pages, ask):
        asked, free = await fill(made, ask)
        before, newcomer = pages.asked, ask("b")
        await until(lambda: pages.asked > before)
        free()
        assert (await newcomer).work.media
        assert sum(each.done() for each in asked) <= 4, "nor does it come behind them on the lane"
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: not made.room.taken)


async def test_requests_that_have_fetched_do_not_wait_for_each_others_bytes(forked_workers: None) -> None:
    """The price of each takes nearly all of the room, and others have fetched theirs: one after the other goes on."""
    async with serving(KillableProcessor, processes=2, preprocess_timeout_s=300.0) as (made, pages, ask):
        pages.data = picture(120, 1000)
        share, prices = made.room.share, list[int]()

        def note(size: int, *given: Any) -> Any:
            prices.append(size)
            return share(size, *given)

        made.room.share = note
        alone = await ask("a", 4)
        made.room.most = prices[0] + 100_000
        found = await asyncio.gather(*(ask(client, 4, f"{client}{at}") for client in "abc" for at in range(4)))
        assert [len(each.work.media) for each in found] == [len(alone.work.media)] * 12
        assert min(prices) > made.room.most // 2
        assert made.room.taken == 0


@pytest.mark.parametrize("end", ["left", "failed", "closed"])
async def test_bytes_are_given_back_however_a_fetch_ends(end: str) -> None:
    async with serving() as (made, pages, ask):
        pages.stops_at = len(pages.data) // 2
        if end == "failed":
            pages.data = b"no picture" * 20_000
        asked = ask("a", 2)
        await until(lambda: pages.asked == 2)
        await asyncio.sleep(0.05)
        assert made.room.taken > 0
        if end == "left":
            asked.cancel()
        elif end == "closed":
            closing = asyncio.create_task(made.aclose())
            await asyncio.sleep(0.05)
        pages.go_on.set()
        error = (await asyncio.gather(asked, return_exceptions=True))[0]
        assert isinstance(error, {"left": asyncio.CancelledError, "failed": BadMedia, "closed": ClosedError}[end])
        assert made.room.taken == 0
        if end == "closed":
            await closing


async def test_more_than_a_clients_part_is_refused_as_it_comes() -> None:
    async with serving() as (made, pages, ask):
        made.room.most = 16 * MI
        with pytest.raises(RequestTooLarge, match=r"URLs lead to more than \d+ bytes, a quarter of max_waiting_bytes"):
            await ask("a", 4 * MI // len(pages.data) + 1)
        assert (await ask("a")).work.media
        assert made.room.taken == 0


async def test_growth_is_shared_and_beginnings_are_waited_for() -> None:
    room = SharedRoom(80, 0.05)  # half of them for what is fetched; once 10 are taken others wait
    async with room.fetching(1, "a1", "a") as first, room.fetching(1, "a2", "a") as second:
        first.add(12)
        second.add(8)
        with pytest.raises(Overloaded, match=r"took all of max_waiting_bytes \(80\)"):
            async with room.fetching(1, "a3", "a"):
                pass
        async with room.fetching(1, "b", "b") as other:
            other.add(10)
            with pytest.raises(Overloaded, match="took this client's part"):
                other.add(1)  # 10 of the 20 that a has left
        with pytest.raises(Overloaded, match="took this client's part"):
            second.add(1)  # 20 of 40 are its part
        assert room.taken == 13, "what is refused gives way to the others at once"
        first.add(7)
        waits = asyncio.create_task(room.fetching(1, "a4", "a").__aenter__())
        await asyncio.sleep(0.01)
        assert not waits.done()
        room.most = 800
        await waits
    room.close()
    with pytest.raises(ClosedError):
        async with room.fetching(1, "a", "a"):
            pass


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(1, 30), max_size=4)), max_size=20))
@settings(max_examples=60)
def test_no_mix_of_fetches_takes_more_than_half_nor_stays(asked: list[tuple[str, list[int]]]) -> None:
    room, most = SharedRoom(80, LIVENESS_S), 0

    async def fetch(client: str, sizes: list[int]) -> None:
        nonlocal most
        async with room.fetching(len(sizes), "x", client) as fetched:
            for size in sizes:
                fetched.add(size)
                most = max(most, room.taken)
                await asyncio.sleep(0)
            fetched.end()
            await asyncio.sleep(0)

    async def fetch_all() -> None:
        async with asyncio.timeout(LIVENESS_S):
            found = await asyncio.gather(*(fetch(*each) for each in asked), return_exceptions=True)
        assert all(each is None or isinstance(each, (Overloaded, RequestTooLarge)) for each in found)

    asyncio.run(fetch_all())
    assert most <= 40
    assert room.taken == 0
    assert not room._fetched._waiters
    assert not room._fetched.turns._clients


def test_a_fetch_begins_with_a_part_of_what_may_be_begun() -> None:
    assert SharedRoom(1 << 30, 1.0)._fetched.turns.places // 4 >= preparation_lanes.FETCHED_AT_FIRST
