"""What a pipeline that serves a trace would know of its requests, second by second, out of a simulated replay."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from trinity.traces.goodput import RequestOutcome
from trinity.traces.survival import RUNNING
from trinity.traces.trace import COMPLETE, Trace, TraceRow


def iter_live_rows(
    trace: Trace, outcomes: Sequence[RequestOutcome], every_s: float, until_s: float
) -> Iterator[TraceRow]:
    """Every ``every_s`` seconds of each request that has come what it has so far, or once what it ended with.

    Nothing of a row's own ``output_length`` is told before it has ended.
    """
    waiting = iter(sorted(zip(trace, outcomes, strict=True), key=lambda pair: pair[0].timestamp))
    known: dict[int, tuple[TraceRow, list[float], str]] = {}
    following = next(waiting, None)
    for poll in range(1, int(until_s / every_s) + 1):
        now = poll * every_s
        while following is not None and following[0].timestamp / 1000 <= now:
            known[len(known) if not known else max(known) + 1] = (following[0], *_token_times(*following))
            following = next(waiting, None)
        for number, (row, times, reason) in list(known.items()):
            came = bisect_right(times, now)
            ended = reason not in COMPLETE or came == len(times)
            told = {"request_id": str(number), "output_length": came, "finish_reason": reason if ended else RUNNING}
            yield msgspec.structs.replace(row, **told, latency_s=max(0.0, now - row.timestamp / 1000))
            if ended:
                del known[number]


def _token_times(row: TraceRow, outcome: RequestOutcome) -> tuple[list[float], str]:
    """Times in s at which its tokens come, and how it ends. One that was refused ends as it arrives."""
    if outcome.ttft_s is None:
        return [], outcome.finish_reason
    return list(accumulate(outcome.itl_s, initial=row.timestamp / 1000 + outcome.ttft_s)), outcome.finish_reason
