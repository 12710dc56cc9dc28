"""``pipe.map``: any iterable, order, bounds, errors, leaving, and resumption, on pipelines whose stages wait."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.emulated_pipelines import LIVENESS_S, MODEL, POOLS, right
from support.map_requests import TOO_LARGE, asked, bad, collect, copy, note_ids
from trinity.emulation.model import EmulatedRequest
from trinity.errors import ClosedError, ConfigError, RequestError, RequestTooLarge
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.request import Output, Request

SMALL = 3  # requests that may wait


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def pipe(runner: asyncio.Runner) -> Iterator[Pipeline]:
    started = Pipeline(MODEL, "1EP1D", cache=CacheConfig(pools=POOLS), max_waiting=SMALL)
    runner.run(started.start())
    yield started
    runner.run(started.aclose())


async def asynchronously(requests: Iterable[Request]) -> AsyncIterator[Request]:
    for each in requests:
        await asyncio.sleep(0)
        yield each


class Counted:
    """Requests, and how many of them have been taken."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests, self.taken = requests, 0

    def __iter__(self) -> Iterator[Request]:
        for each in self.requests:
            self.taken += 1
            yield each


KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "generator": lambda each: iter(each), "async": asynchronously}


# ---------------------------------------------------------------- order, errors, bounds


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 5), max_size=12),
    kind=st.sampled_from(sorted(KINDS)),
    concurrency=st.integers(1, 5),
    ordered=st.booleans(),
    taken=st.one_of(st.none(), st.integers(0, 12)),
)
def test_each_request_has_its_result_once(
    pipe: Pipeline,
    runner: asyncio.Runner,
    sizes: list[int],
    kind: str,
    concurrency: int,
    ordered: bool,
    taken: int | None,
) -> None:
    """A size of 0 is a bad request. After ``taken`` results the reader leaves."""
    good = asked(len(sizes), sizes)
    requests = [each if each.max_tokens else bad(each.request_id) for each in good]
    given = {each.request_id: each for each in requests}

    async def read() -> list[Output | RequestError]:
        found: list[Output | RequestError] = []
        results = pipe.map(KINDS[kind](requests), concurrency=concurrency, ordered=ordered, on_error="return")
        async with asyncio.timeout(LIVENESS_S), aclosing(results):
            async for each in results:
                found.append(each)
                assert len(pipe.streams) <= concurrency
                if len(found) == taken:
                    break
        assert not pipe.streams
        await pipe.wait_idle()
        return found

    found = runner.run(read())
    names = [each.request_id for each in found]
    assert len(set(names)) == len(names) == (len(sizes) if taken in (None, 0) else min(taken or 0, len(sizes)))
    if ordered:
        assert names == list(given)[: len(names)]
    for each in found:
        request = given[each.request_id]
        if isinstance(each, Output):
            assert each.token_ids == right(request)
        else:
            assert isinstance(each, RequestTooLarge)
            assert request.text_tokens == TOO_LARGE


def test_an_endless_iterable_is_read_ahead_within_bounds(pipe: Pipeline, runner: asyncio.Runner) -> None:
    endless = Counted(EmulatedRequest(text_tokens=12, max_tokens=2, request_id=f"e{at}") for at in itertools.count())

    async def read() -> None:
        async with asyncio.timeout(LIVENESS_S), aclosing(pipe.map(endless, concurrency=2)) as results:
            for number in range(20):
                assert (await anext(results)).request_id == f"e{number}"
                assert endless.taken <= number + 1 + 2 * 2 + 1
            await asyncio.sleep(0.1)  # a slow reader stops the taking
            assert endless.taken <= 20 + 2 * 2 + 1

    runner.run(read())
    assert not pipe.streams


def test_it_waits_for_room_where_others_fill_the_pipeline(pipe: Pipeline, runner: asyncio.Runner) -> None:
    async def read() -> list[str]:
        maps = [pipe.map(asked(8), concurrency=64), pipe.map([copy(each, "b") for each in asked(8)], concurrency=64)]
        async with asyncio.timeout(LIVENESS_S):
            found = await asyncio.gather(*(collect(each) for each in maps))
        return [each.request_id for several in found for each in several]

    refused = pipe.metrics.summary()["refused"].get("Overloaded", 0)
    assert runner.run(read()) == [f"r{at}" for at in range(8)] + [f"br{at}" for at in range(8)]
    assert pipe.metrics.summary()["refused"].get("Overloaded", 0) == refused


# ---------------------------------------------------------------- errors


def test_an_error_ends_the_others_and_is_raised_at_its_place(pipe: Pipeline, runner: asyncio.Runner) -> None:
    async def read() -> list[str]:
        found: list[str] = []
        requests = [*asked(2), bad("no"), *[copy(each, "x") for each in asked(9)]]
        with pytest.raises(RequestTooLarge):
            await note_ids(pipe.map(requests, concurrency=2), found)
        assert not pipe.streams
        return found

    assert runner.run(read()) == ["r0", "r1"]


@pytest.mark.parametrize("ordered", [True, False])
def test_an_error_of_the_iterable_comes_after_what_it_gave(
    ordered: bool, pipe: Pipeline, runner: asyncio.Runner
) -> None:
    def broken() -> Iterator[Request]:
        yield from asked(3)
        raise OSError("the disk is gone")

    async def read() -> set[str]:
        found: list[str] = []
        with pytest.raises(OSError, match="the disk is gone"):
            await note_ids(pipe.map(broken(), concurrency=1, ordered=ordered), found)
        return set(found)

    assert runner.run(read()) == {"r0", "r1", "r2"}


def test_what_is_no_request_is_an_error_of_its_own(pipe: Pipeline, runner: asyncio.Runner) -> None:
    strange: Any = [asked(1)[0], "text", 7]
    found = runner.run(collect(pipe.map(strange, on_error="return")))
    assert [type(each).__name__ for each in found] == ["Output", "RequestError", "RequestError"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"requests": "text"}, "requests must be an iterable"),
        ({"requests": 5}, "requests must be an iterable"),
        ({"concurrency": 0}, "concurrency"),
        ({"on_error": "ignore"}, "on_error"),
        ({"progress": "yes"}, "progress is True, False, None or a function"),
        ({"resume": 3}, "resume"),
    ],
)
def test_wrong_arguments_are_refused_at_once(changes: dict[str, Any], said: str, pipe: Pipeline) -> None:
    arguments: dict[str, Any] = {"requests": [], **changes}
    with pytest.raises(ConfigError, match=said):
        pipe.map(**arguments)


async def test_a_pipeline_that_closes_ends_it() -> None:
    pipe = Pipeline(MODEL, "EPD", cache=CacheConfig(pools=POOLS))
    await pipe.start()
    endless = (EmulatedRequest(max_tokens=50) for _ in itertools.count())
    found: list[str] = []
    reading = asyncio.ensure_future(note_ids(pipe.map(endless, on_error="return"), found))
    while not found:
        await asyncio.sleep(0.001)
    async with asyncio.timeout(LIVENESS_S):
        await pipe.aclose()
        with pytest.raises(ClosedError):
            await reading


# ---------------------------------------------------------------- leaving


def test_leaving_the_loop_ends_what_is_in_flight(pipe: Pipeline, runner: asyncio.Runner) -> None:
    async def read() -> None:
        async for _ in pipe.map(asked(30, itertools.repeat(60)), concurrency=4):
            break
        async with asyncio.timeout(LIVENESS_S):
            while pipe.streams:  # the loop closes what was left
                await asyncio.sleep(0.001)
            await pipe.wait_idle()

    runner.run(read())


def test_a_reader_that_is_cancelled_ends_it(pipe: Pipeline, runner: asyncio.Runner) -> None:
    async def read() -> None:
        reading = asyncio.ensure_future(collect(pipe.map(asked(30, itertools.repeat(60)), concurrency=3)))
        while len(pipe.streams) < 3:
            await asyncio.sleep(0.001)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not pipe.streams
        await pipe.wait_idle()

    runner.run(read())


# ---------------------------------------------------------------- progress


def test_progress_is_told_of_each_result(pipe: Pipeline, runner: asyncio.Runner) -> None:
    seen: list[tuple[int, int | None]] = []
    runner.run(collect(pipe.map(asked(3), progress=lambda done, total: seen.append((done, total)))))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    seen.clear()
    runner.run(collect(pipe.map(iter(asked(2)), progress=lambda done, total: seen.append((done, total)))))
    assert seen == [(1, None), (2, None)]


def test_a_bar_is_shown_where_it_is_asked_for(
    pipe: Pipeline, runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.run(collect(pipe.map(asked(3), progress=True)))
    assert "3/3" in capsys.readouterr().err
    runner.run(collect(pipe.map(asked(3))))
    assert capsys.readouterr().err == "", "standard error is no terminal here"
