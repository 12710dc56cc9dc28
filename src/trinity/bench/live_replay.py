"""Replay traces on live pipelines in open loop, and measure goodput with them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import msgspec

from trinity.bench.lookalike import Lookalikes
from trinity.emulation.model import EmulatedRequest
from trinity.emulation.processor import EmulatedProcessor
from trinity.errors import ClosedError, RequestError, TraceError, TrinityError, warn_caller
from trinity.pipeline import Pipeline
from trinity.pipeline.frontend_host import make_trace_row
from trinity.pipeline.stream import Stream
from trinity.request import Request
from trinity.traces.cut_short import fill_cut_outputs
from trinity.traces.goodput import Goodput, GoodputOptions, search_goodput
from trinity.traces.trace import SLO, Trace, TraceRow

T = TypeVar("T")
RequestFactory = Callable[[TraceRow, int], Request]  # of a row and its number in the trace
LATE_WARNING_S = 0.05  # seconds after its arrival; a request sent later is the client's fault
_LEAD_S = 0.05  # before the first arrival, so that starting the replay does not make the first request late
_DEEPEST_SEARCH = 16.0
_salts = itertools.count(1)


async def replay(
    pipe: Pipeline,
    trace: Trace,
    *,
    rate: float | None = None,
    request_of: RequestFactory | None = None,
    late_s: float = LATE_WARNING_S,
) -> Trace:
    """Serve a trace's requests at their times, or scaled to ``rate`` requests/s; returns a row for each, in order.

    Open loop on an absolute schedule: a request is sent when the time since the first arrival says so, never because
    another has ended. Each row has the sizes as served, the scheduled ``timestamp``, ``ttft_s`` and ``latency_s`` from
    that time on, ``late_s`` (the delay of sending), and ``finish_reason`` "refused" where the pipeline did not take it.
    Warns (``TrinityWarning``) where the client itself was more than ``late_s`` seconds late.

    All requests are made before the first is sent: ``request_of(row, number)``, else an ``EmulatedRequest`` for an
    emulated pipeline and ``trinity.bench.lookalike.Lookalikes`` for others. Contents that rows share are shared;
    nothing is shared with an earlier replay, so that its caches do not help this one. Of a recorded row that was cut
    short (cancelled, refused) the output expected of it is asked for (``trinity.traces.cut_short``).

    Raises ``TraceError`` for a trace without requests, ``ClosedError`` where the pipeline fails or is closed.
    """
    offered = trace if rate is None else trace.scale(rate=rate)
    if not len(offered):
        raise TraceError("a trace without requests cannot be replayed")
    rows = list(fill_cut_outputs(offered))
    make = request_of or _request_factory(pipe)
    requests = await asyncio.to_thread(lambda: [make(row, number) for number, row in enumerate(rows)])
    await pipe.wait_idle()
    served = Trace(await _serve_all(pipe, rows, requests))
    _report_lateness(served, late_s)
    return served


def _request_factory(pipe: Pipeline) -> RequestFactory:
    salt = f"replay {next(_salts)}/"
    if isinstance(pipe.processor, EmulatedProcessor):
        return lambda row, number: EmulatedRequest.of(row, number, salt)
    return Lookalikes(pipe.processor, salt)


async def _serve_all(pipe: Pipeline, rows: list[TraceRow], requests: list[Request]) -> list[TraceRow]:
    first = min(row.timestamp for row in rows)
    start = time.monotonic() + _LEAD_S
    tasks: dict[int, asyncio.Task[TraceRow]] = {}
    try:
        async with asyncio.TaskGroup() as group:
            for number in sorted(range(len(rows)), key=lambda each: rows[each].timestamp):
                due = start + (rows[number].timestamp - first) / 1000
                await asyncio.sleep(due - time.monotonic())
                tasks[number] = group.create_task(_serve_one(pipe, rows[number], requests[number], due))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [tasks[number].result() for number in range(len(rows))]


async def _serve_one(pipe: Pipeline, row: TraceRow, request: Request, due: float) -> TraceRow:
    stream = pipe.stream(request)
    try:
        async with stream:
            await stream.collect()
    except TrinityError as error:
        failed = isinstance(error, RequestError) or stream.done  # the rest is the pipeline's end, not this request's
        if isinstance(error, ClosedError) or not failed:
            raise
    late = max(0.0, stream.arrived - due)
    return (
        _served_row(row, stream, late) if stream.done and stream.processed else _refused_row(row, request, late, stream)
    )


def _served_row(row: TraceRow, stream: Stream, late: float) -> TraceRow:
    found = msgspec.convert(make_trace_row(stream), TraceRow)
    changes: dict[str, Any] = {"timestamp": row.timestamp, "hash_ids": row.hash_ids, "late_s": late}
    changes["latency_s"] = late + stream.output.latency_s
    if found.ttft_s is not None:
        changes["ttft_s"] = late + found.ttft_s
    return msgspec.structs.replace(found, **changes)


def _refused_row(row: TraceRow, request: Request, late: float, stream: Stream) -> TraceRow:
    """Make the row of a request that was not taken, or expired before it was prepared, with its requested sizes."""
    reason = stream.output.finish_reason if stream.done else "refused"
    asked = {"request_id": request.request_id, "max_tokens": request.max_tokens, "output_length": 0}
    return msgspec.structs.replace(row.request_at(row.timestamp), **asked, finish_reason=reason, late_s=late)


def _report_lateness(served: Trace, late_s: float) -> None:
    late = [row.late_s or 0.0 for row in served]
    count = sum(each > late_s for each in late)
    if count:
        warn_caller(
            f"the client sent {count} of {len(served)} requests more than {late_s:g} s after their arrival, the latest "
            f"by {max(late):.3f} s (row.late_s); latencies count from the arrival all the same. Give it a processor of "
            "its own, or replay at a lower rate",
        )


async def live_goodput(
    pipe: Pipeline | Callable[[], Pipeline],
    trace: Trace,
    slo: SLO,
    *,
    request_of: RequestFactory | None = None,
    late_s: float = LATE_WARNING_S,
    **options: Unpack[GoodputOptions],
) -> Goodput:
    """Measure a live pipeline's goodput: ``trinity.traces.goodput.goodput`` over replays, with its options.

    A function that makes pipelines gives every rate a new one. A search takes about seven replays at 2 %; a coarser
    one (``step=1.1, tolerance=0.05``) that starts from a simulated goodput (``bound=``) takes three or four. Where no
    rate holds, it gives up (``deepest``) 16 times below the first rate: a replay takes as long as its trace.
    """
    search = search_goodput(trace, slo, {"deepest": _DEEPEST_SEARCH, **options})
    offered = next(search)
    while True:
        served = await _replay_once(pipe, offered, request_of, late_s)
        try:
            offered = search.send(served)
        except StopIteration as end:
            found: Goodput = end.value
            return found


async def _replay_once(
    pipe: Pipeline | Callable[[], Pipeline], offered: Trace, request_of: RequestFactory | None, late_s: float
) -> Trace:
    if isinstance(pipe, Pipeline):
        return await replay(pipe, offered, request_of=request_of, late_s=late_s)
    async with pipe() as made:
        return await replay(made, offered, request_of=request_of, late_s=late_s)
