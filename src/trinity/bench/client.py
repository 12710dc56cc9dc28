"""The open-loop client: sends requests at their times and records when their tokens arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from trinity.bench.servers import BenchRequest, BenchServer, ServerAnswer
from trinity.traces.trace import Trace, TraceRow

LEAD_S = 0.05  # before the first arrival
FINISH_TIMEOUT_S = 120.0  # after the last arrival; requests that have not ended by then have failed


async def replay_to_server(
    server: BenchServer, offered: Trace, requests: Sequence[BenchRequest], patience_s: float = FINISH_TIMEOUT_S
) -> Trace:
    """Send the rows at their times on an absolute schedule (open loop) and wait for all; returns a row for each.

    ``ttft_s`` and ``latency_s`` count from the scheduled arrival, ``late_s`` is the delay of sending. ``finish_reason``
    is "error" where the engine failed or had not finished the request ``patience_s`` seconds after the last arrival.
    """
    rows = list(offered)
    first = min(row.timestamp for row in rows)
    start = time.monotonic() + LEAD_S
    due = [start + (row.timestamp - first) / 1000 for row in rows]
    sent: dict[int, tuple[float, ServerAnswer]] = {}
    for number in sorted(range(len(rows)), key=due.__getitem__):
        await asyncio.sleep(due[number] - time.monotonic())
        sent[number] = (time.monotonic(), server.ask(requests[number]))
    await _wait_for_all([answer for _, answer in sent.values()], patience_s)
    return Trace(_measured_row(rows[number], due[number], *sent[number]) for number in range(len(rows)))


async def _wait_for_all(answers: Sequence[ServerAnswer], patience_s: float) -> None:
    try:
        async with asyncio.timeout(patience_s):
            for answer in answers:
                await answer.done.wait()
    except TimeoutError:
        for answer in answers:
            if not answer.done.is_set():
                answer.finish("error: not ended in time", time.monotonic())


def _measured_row(row: TraceRow, due: float, sent: float, answer: ServerAnswer) -> TraceRow:
    """Make the row of one answer. Fewer tokens than requested are a failure too: output lengths are fixed."""
    whole = answer.end == "length" and len(answer.tokens) == row.output_length
    times = list(answer.times)
    return msgspec.structs.replace(
        row.request_at(row.timestamp),
        output_length=len(answer.tokens),
        max_tokens=row.output_length,
        ttft_s=max(0.0, times[0] - due) if times else None,
        itl_s=[max(0.0, b - a) for a, b in pairwise(times)],
        latency_s=max(0.0, answer.ended_at - due),
        finish_reason="length" if whole else "error",
        late_s=max(0.0, sent - due),
    )
