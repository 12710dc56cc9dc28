"""Requests of a running pipeline as rows: those that run, that ended, and that were refused at the door."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import msgspec

from trinity.errors import ConfigError
from trinity.traces.media import make_media
from trinity.traces.survival import RUNNING
from trinity.traces.trace import Trace, TraceRow


class RunningRequest(Protocol):
    """Request that is served, as ``Pipeline.streams`` has it.

    ``request``: has a ``request_id``. ``arrived_at`` (s): its arrival by the wall clock. ``processed``: has its
    ``work``; None until it was prepared.
    """

    request: Any
    arrived_at: float

    @property
    def processed(self) -> Any: ...
    @property
    def token_count(self) -> int: ...


class CountedRequests(Protocol):
    """Metrics that count requests by how they ended."""

    def counts(self) -> dict[str, Any]: ...


class WatchedPipeline(Protocol):
    """Pipeline whose requests can be followed, such as a ``trinity.Pipeline``."""

    @property
    def trace(self) -> Trace: ...
    @property
    def metrics(self) -> CountedRequests: ...
    @property
    def streams(self) -> Sequence[RunningRequest]: ...


async def follow_requests(pipe: WatchedPipeline, every_s: float = 1.0) -> AsyncGenerator[TraceRow, None]:
    """Yield a row of each request that comes from now on, while it runs and as it ends; polls without end.

    A request that runs is told at each poll, every ``every_s`` seconds, once it was prepared: its ``finish_reason`` is
    "running", its ``output_length`` what it has so far. One that was refused because too many waited was never
    prepared: it is told with the prompt and images of another that came about then. Raises ``ConfigError`` unless
    ``every_s`` is positive.
    """
    if not every_s > 0:
        raise ConfigError(f"every_s, the seconds between two polls of a pipeline, must be positive, got {every_s!r}")
    door = _Door(pipe.metrics.counts())
    seen = len(pipe.trace) + pipe.trace.dropped
    while True:
        now = time.time()
        new = min(len(pipe.trace), len(pipe.trace) + pipe.trace.dropped - seen)
        seen = len(pipe.trace) + pipe.trace.dropped
        ended = list(islice(reversed(pipe.trace), new))[::-1]
        rows = [*ended, *iter_running(pipe.streams, now)]
        for row in [*rows, *door.refused(pipe.metrics.counts(), rows, now)]:
            yield row
        await asyncio.sleep(every_s)


def iter_running(streams: Sequence[RunningRequest], now: float) -> Iterator[TraceRow]:
    """Iterate over rows of the requests that run at ``now`` (s, wall clock), without those that only encode."""
    for stream in streams:
        work = stream.processed.work if stream.processed is not None else None
        if work is not None and not work.encode_only:
            media = sum(span.tokens for span in work.media)
            yield TraceRow(
                timestamp=max(0.0, 1000 * stream.arrived_at),
                request_id=stream.request.request_id,
                input_length=len(work.prompt),
                text_length=len(work.prompt) - media,
                output_length=stream.token_count,
                max_tokens=work.max_tokens,
                **make_media(work.media),
                finish_reason=RUNNING,
                latency_s=max(0.0, now - stream.arrived_at),
            )


class _Door:
    """Counts the requests refused for their number, and tells a row of each."""

    def __init__(self, counts: Mapping[str, Any]) -> None:
        self._counted = _refusals(counts)
        self._like: list[TraceRow] = []  # rows of the last poll that had any

    def refused(self, counts: Mapping[str, Any], rows: Sequence[TraceRow], now: float) -> list[TraceRow]:
        """Make rows of those refused since the last call, like ``rows`` in turn (a hot deck); none without any."""
        new, self._counted = _refusals(counts) - self._counted, _refusals(counts)
        self._like = list(rows) or self._like
        return [_refuse(self._like[place % len(self._like)], now) for place in range(new) if self._like]


def _refusals(counts: Mapping[str, Any]) -> int:
    return int(counts["refused"].get("Overloaded", 0))


def _refuse(row: TraceRow, now: float) -> TraceRow:
    like = row.request_at(max(0.0, 1000 * now))
    return msgspec.structs.replace(like, request_id="", output_length=0, finish_reason="refused")
