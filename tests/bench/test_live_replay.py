"""Replay: requests at their times whatever becomes of them, one row for each, and what is measured so."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

import trinity.bench.live_replay
from support.pipeline_options import pipeline_options
from trinity.bench.live_replay import live_goodput, replay
from trinity.core.scheduler import BatchRules
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import EmulatedModel, EmulatedRequest, EmulatedShape
from trinity.errors import ClosedError, TraceError, TrinityWarning
from trinity.pipeline import Pipeline
from trinity.request import Request
from trinity.traces.trace import SLO, SLO_RULES, Trace, TraceImage, TraceRow

SHAPE = EmulatedShape(name="small", layers=2, kv_heads=1, head_dim=16, image_width=64, image_tokens=32)
QUICK = EmulatedModel(shape=SHAPE, cost=LinearCost(step_s=1e-3, encode_s=1e-3, source="made up for tests"))
POOLS = {"image": 64, "kv": 600}
BEFORE = 1e9  # nothing is late


def pipeline(placement: str = "1E1P1D", model: EmulatedModel = QUICK, **options: Any) -> Pipeline:
    return Pipeline(model, placement, **pipeline_options({"pools": POOLS, "image_block_size": 32, **options}))


def rows(count: int = 6, gap_ms: float = 10.0, **fields: Any) -> Trace:
    image = [TraceImage(width=40, height=30, tokens=32)]
    base: dict[str, Any] = {"input_length": 50, "text_length": 18, "output_length": 4, "images": image, **fields}
    return Trace(TraceRow(timestamp=1e12 + n * gap_ms, session=f"s{n % 2}", **base) for n in range(count))


@pytest.fixture(autouse=True)
def never_late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A busy machine must not fail a test by a warning; tests of lateness say so themselves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the client sent", TrinityWarning)
        yield


async def test_every_row_is_served_as_it_asks_and_comes_back_in_its_place() -> None:
    asked = rows(6)
    shuffled = Trace([asked[at] for at in (3, 0, 5, 1, 4, 2)])
    async with pipeline() as pipe:
        served = await replay(pipe, shuffled)
        assert len(pipe.trace) == 6
    assert [row.timestamp for row in served] == [row.timestamp for row in shuffled]
    for row, wanted in zip(served, shuffled, strict=True):
        assert (row.input_length, row.text_length, row.output_length) == (50, 18, 4)
        assert (row.finish_reason, row.session, row.max_tokens) == ("length", wanted.session, 4)
        assert [image.tokens for image in row.images] == [32]
        assert row.emulated
        assert row.late_s is not None
        assert row.ttft_s is not None
        assert row.ttft_s > row.late_s >= 0
        assert len(row.itl_s) == 3
        assert row.latency_s is not None
        assert row.latency_s >= row.ttft_s + sum(row.itl_s) - 1e-9
    assert served.attainment(SLO(ttft=60.0, tbt=60.0)) == 1.0


async def test_a_rate_scales_the_schedule_and_not_the_requests() -> None:
    async with pipeline() as pipe:
        served = await replay(pipe, rows(5, gap_ms=1000.0), rate=100.0)
    times = [row.timestamp for row in served]
    assert times[-1] - times[0] == pytest.approx(40.0)
    assert {row.input_length for row in served} == {50}


async def test_the_loop_is_open() -> None:
    slow = EmulatedModel(shape=SHAPE, cost=LinearCost(step_s=0.5))
    most = 0
    async with pipeline("EPD", slow, rules=BatchRules(token_budget=60)) as pipe:
        serving = asyncio.create_task(replay(pipe, rows(4, gap_ms=1.0, output_length=1)))
        while not serving.done():
            most = max(most, len(pipe._frontend.streams))
            await asyncio.sleep(0.01)
        served = await serving
    assert most == 4, "all are there before the first has ended"
    assert [row.finish_reason for row in served] == ["length"] * 4


async def test_a_late_client_says_so_and_its_requests_count_from_their_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trinity.bench.live_replay, "_LEAD_S", -1.0)
    async with pipeline() as pipe:
        with pytest.warns(TrinityWarning, match="sent 3 of 3 requests more than 0.05 s after their arrival"):
            served = await replay(pipe, rows(3))
    for row in served:
        assert row.late_s is not None
        assert row.ttft_s is not None
        assert row.latency_s is not None
        assert row.late_s >= 0.97
        assert min(row.ttft_s, row.latency_s) > row.late_s
    assert not served.attainment(SLO(ttft=0.97, tbt=60.0))


async def test_a_client_in_time_warns_of_nothing() -> None:
    async with pipeline() as pipe:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            await replay(pipe, rows(3), late_s=BEFORE)


async def test_what_fails_or_is_refused_is_a_row() -> None:
    def request_of(row: TraceRow, number: int) -> Request:
        request = EmulatedRequest.of(row, number)
        changes: list[dict[str, Any]] = [
            {},
            {"deadline_s": 1e-9},  # passes before it is prepared
            {"image_tokens": (0,)},  # no such image
            {"text_tokens": 9999},  # too long
            {"deadline_s": 0.05, "max_tokens": 4000},  # passes while it is served
        ]
        return msgspec.structs.replace(request, **changes[number])

    async with pipeline() as pipe:
        served = await replay(pipe, rows(5), request_of=request_of)
        assert pipe.metrics.summary()["refused"] == {"BadMedia": 1, "RequestTooLarge": 1}
    assert [row.finish_reason for row in served] == ["length", "deadline", "refused", "refused", "deadline"]
    assert [row.output_length for row in served][:4] == [4, 0, 0, 0]
    assert [row.ttft_s is None for row in served][:4] == [False, True, True, True]
    assert [row.input_length for row in served] == [50] * 5
    assert served.attainment(SLO(ttft=60.0, tbt=60.0)) == 0.2


async def test_a_full_queue_refuses_and_the_others_go_on() -> None:
    slow = EmulatedModel(shape=SHAPE, cost=LinearCost(step_s=0.2))
    async with pipeline("EPD", slow, max_waiting=1, rules=BatchRules(token_budget=1)) as pipe:
        served = await replay(pipe, rows(5, gap_ms=1.0, output_length=1, text_length=2, input_length=2, images=[]))
    reasons = [row.finish_reason for row in served]
    assert set(reasons) == {"length", "refused"}
    assert reasons[0] == "length"


async def test_a_pipeline_that_closes_ends_the_replay() -> None:
    async with pipeline() as pipe:
        serving = asyncio.create_task(replay(pipe, rows(3, gap_ms=1e6)))
        while not len(pipe.trace):
            await asyncio.sleep(0.01)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert not pipe._frontend.streams
        slow = asyncio.create_task(replay(pipe, rows(1, output_length=2000)))
        while not pipe._frontend.streams:
            await asyncio.sleep(0.01)
    with pytest.raises(ClosedError):
        await slow
    with pytest.raises(ClosedError):
        await replay(pipe, rows(1))


async def test_a_trace_without_requests_is_refused() -> None:
    async with pipeline() as pipe:
        with pytest.raises(TraceError, match="without requests"):
            await replay(pipe, Trace())


async def test_contents_are_shared_within_a_replay_and_not_with_the_one_before() -> None:
    alone, same = rows(4), rows(4, images=[TraceImage(tokens=32, content="cat")])

    def encoded(pipe: Pipeline) -> int:
        """Visual tokens that were encoded so far, in images."""
        return sum(row[-1].get("media tokens", 0) for row in pipe.timeline.rows()) // 32

    seen = [0]
    async with pipeline() as pipe:
        for trace in (alone, alone, same, same):
            await replay(pipe, trace)
            seen.append(encoded(pipe))
    assert [b - a for a, b in pairwise(seen)] == [4, 4, 1, 1]


# ---------------------------------------------------------------- goodput and candidates

OUTPUT = LinearCost(step_s=0.02, encode_s=1e-3)


def stream(count: int = 30) -> Trace:
    return rows(count, gap_ms=50.0, output_length=1, images=[], text_length=8, input_length=8)


async def test_prefixes_of_equal_hash_ids_are_cached_as_in_the_simulator() -> None:
    """Counted in prefilled tokens, which both sides know: a live step's are in the timeline."""
    rows = [
        TraceRow(timestamp=400.0 * at, input_length=length, text_length=length, output_length=2, hash_ids=ids)
        for at, (length, ids) in enumerate([(1200, [1, 2, 3]), (1100, [1, 2, 9]), (700, [1, 8]), (700, [5, 2])])
    ]
    async with pipeline("EPD") as pipe:
        for _ in range(2):  # nothing of the first is in caches of the second
            before = prefilled(pipe)
            await replay(pipe, Trace(rows))
            assert prefilled(pipe) - before == 1200 + (1100 - 1024) + (700 - 512) + 700


def prefilled(pipe: Pipeline) -> int:
    return sum(int(each.args["prefill tokens"]) for each in pipe.timeline.slices() if "prefill tokens" in each.args)


async def test_live_goodput_is_the_search_over_replays() -> None:
    one_at_a_time = EmulatedModel(shape=SHAPE, cost=OUTPUT)  # 50 prompts of 8 tokens a second
    options: dict[str, Any] = {"least_requests": 2, "least_ttfts": 0.1, "step": 2.0, "tolerance": 0.9}
    async with pipeline("EPD", one_at_a_time, rules=BatchRules(token_budget=8)) as pipe:
        found = await live_goodput(pipe, stream(), SLO(ttft=0.25, tbt=9.0), late_s=BEFORE, bound=30.0, **options)
        assert len(pipe.trace) == 30 * len(found.points)
    assert found.points[0].rate == pytest.approx(27.0)
    assert set(found.points[0].attainment) == set(SLO_RULES)
    held, failed = found.rate, [point.rate for point in found.points if point.rate > found.rate * 1.01]
    assert 0 < held < 220, "four times what it can do is too much however busy the machine is"
    assert failed


async def test_each_rate_may_have_a_pipeline_of_its_own() -> None:
    made: list[Pipeline] = []

    def make() -> Pipeline:
        made.append(pipeline("EPD", EmulatedModel(shape=SHAPE, cost=OUTPUT), rules=BatchRules(token_budget=8)))
        return made[-1]

    options: dict[str, Any] = {"least_requests": 2, "least_ttfts": 0.1, "step": 4.0, "tolerance": 9.0, "deepest": 2.0}
    found = await live_goodput(make, stream(12), SLO(ttft=1e-9, tbt=1.0), **options)
    assert found.rate == 0
    assert len(made) == len(found.points) > 1
    assert all(len(pipe.trace) == 12 for pipe in made)


# ---------------------------------------------------------------- the trace that every pipeline writes


async def test_an_emulated_pipeline_writes_every_field_of_its_trace(tmp_path: Path) -> None:
    async with pipeline() as pipe:
        requests = [EmulatedRequest.of(row, number) for number, row in enumerate(rows(2))]
        sized = msgspec.structs.replace(requests[0], request_id="sized", image_tokens=((64, 48),))
        for request in (*requests, sized):
            await pipe.complete(request)
        pipe.trace.save(tmp_path / "trace.jsonl")
    lines = [msgspec.json.decode(line) for line in (tmp_path / "trace.jsonl").read_bytes().splitlines()]
    wanted = {"timestamp", "input_length", "output_length", "text_length", "images", "max_tokens", "session"}
    assert all(wanted <= set(line) for line in lines)
    assert [set(line["images"][0]) for line in lines] == [
        {"tokens", "content"},
        {"tokens", "content"},
        {"tokens", "content", "width", "height"},
    ]
    loaded = Trace.load(tmp_path / "trace.jsonl")
    assert [row.session for row in loaded] == ["s0", "s1", "s0"]
    async with pipeline() as pipe:
        again = await replay(pipe, loaded)
    assert [row.input_length for row in again] == [row.input_length for row in loaded]
