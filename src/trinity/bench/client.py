"""The client: sends requests at their times whatever becomes of them, and notes when tokens come. It serves nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from trinity.bench.servers import Answer, Asked, Peer
from trinity.traces.trace import Trace, TraceRow

LEAD_S = 0.05  # before the first arrival
PATIENCE_S = 120.0  # after the last arrival, for all that was asked; what has not ended then has failed


async def replayed(server: Peer, offered: Trace, requests: Sequence[Asked], patience_s: float = PATIENCE_S) -> Trace:
    """Serve the rows at their times on an absolute schedule (open loop), to the end of the last: a row for each.

    ``ttft_s`` and ``latency_s`` count from the scheduled arrival, ``late_s`` says how much later it was sent,
    ``finish_reason`` is "error" where the engine failed, or has not ended it ``patience_s`` after the last arrival.
    """
    rows = list(offered)
    first = min(row.timestamp for row in rows)
    start = time.monotonic() + LEAD_S
    due = [start + (row.timestamp - first) / 1000 for row in rows]
    sent: dict[int, tuple[float, Answer]] = {}
    for number in sorted(range(len(rows)), key=due.__getitem__):
        await asyncio.sleep(due[number] - time.monotonic())
        sent[number] = (time.monotonic(), server.ask(requests[number]))
    await _ended([answer for _, answer in sent.values()], patience_s)
    return Trace(_row(rows[number], due[number], *sent[number]) for number in range(len(rows)))


async def _ended(answers: Sequence[Answer], patience_s: float) -> None:
    try:
        async with asyncio.timeout(patience_s):
            for answer in answers:
                await answer.done.wait()
    except TimeoutError:
        for answer in answers:
            if not answer.done.is_set():
                answer.finish("error: not ended in time", time.monotonic())


def _row(row: TraceRow, due: float, sent: float, answer: Answer) -> TraceRow:
    """Fewer tokens than asked for are a failure too: output lengths are fixed."""
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
