"""Ends of requests are counted, and become rows of the trace."""

from __future__ import annotations

import logging
from typing import Any

from trinity.errors import RequestError
from trinity.metrics import Metrics
from trinity.pipeline.stream import Stream
from trinity.traces.media import describe_media
from trinity.traces.trace import Trace

logger = logging.getLogger("trinity")


def record_end(stream: Stream, metrics: Metrics, trace: Trace) -> None:
    """Count a request that has ended, and add it to the trace. What cannot be recorded is logged: its reader waits."""
    try:
        error = type(stream._error).__name__ if isinstance(stream._error, RequestError) else ""
        metrics.add(stream.output, stream._encode_only, error)
        if not stream._encode_only:  # a row is a prompt and an output, to plan on
            trace.append(make_trace_row(stream))
    except Exception:
        logger.exception("request %s has ended and could not be recorded", stream.request.request_id)


def record_refused(stream: Stream, error: RequestError, metrics: Metrics) -> None:
    """Count a request that never started."""
    metrics.add_refused(error, stream._encode_only)


def make_trace_row(stream: Stream) -> dict[str, Any]:
    """Make the trace row of a request that has ended."""
    output, work = stream.output, stream.processed.work if stream.processed else None
    media = work.media if work else ()
    return {
        "timestamp": max(0.0, stream.arrived_at * 1000),  # a wall clock may stand before 1970
        "request_id": output.request_id,
        "session": stream.request.session,
        "input_length": output.prompt_tokens,
        "text_length": output.prompt_tokens - output.media_tokens,
        "output_length": len(output.token_ids),
        "max_tokens": output.max_tokens,
        **describe_media(media),
        "finish_reason": output.finish_reason,
        "ttft_s": output.ttft_s,
        "itl_s": output.itl_s,
        "latency_s": output.latency_s,
        "spans": output.spans,
        "emulated": output.emulated,
    }
