"""Ends of requests are counted, become rows of the trace, and tell by which transport blocks have gone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from trinity.core.messages import PeerUp
from trinity.errors import RequestError
from trinity.metrics import Metrics
from trinity.pipeline.stream import Stream
from trinity.traces.media import describe_media
from trinity.traces.trace import Trace

logger = logging.getLogger("trinity")
MOVED = ("pulled", "store")  # outcomes of transfers that have moved blocks


def record_end(stream: Stream, metrics: Metrics, trace: Trace) -> None:
    """Count a request that has ended, and add it to the trace. What cannot be recorded is logged: its reader waits."""
    try:
        error = type(stream.error).__name__ if isinstance(stream.error, RequestError) else ""
        metrics.add(stream.output, stream.encode_only, error)
        if not stream.encode_only:  # a row is a prompt and an output, to plan on
            trace.append(make_trace_row(stream))
    except Exception:
        logger.exception("request %s has ended and could not be recorded", stream.request.request_id)


def record_refused(stream: Stream, error: RequestError, metrics: Metrics) -> None:
    """Count a request that never started."""
    metrics.add_refused(error, stream.encode_only)


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


class TransferWays:
    """Ways that blocks have gone: kind of block, hosts, and transport. Each new one is a line at INFO."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str, str, str]] = set()

    def note(self, transfers: Iterable[Mapping[str, Any]], peers: Mapping[str, PeerUp]) -> None:
        """Note what moved for a request that has ended. ``peers``: instances by name; those on no host say nothing."""
        for each in transfers:
            source, target = (peers.get(str(each.get(end))) for end in ("source", "target"))
            if each.get("outcome") not in MOVED or source is None or target is None:
                continue
            way = (str(each.get("kind")), source.host, target.host, str(each.get("scheme")))
            if way not in self._known and source.host and target.host:
                self._known.add(way)
                _log_way(*way)


def _log_way(kind: str, source: str, target: str, scheme: str) -> None:
    where = f"stay on host {source}, moved" if source == target else f"go from host {source} to host {target}"
    logger.info("blocks of kind %s %s by %s", kind, where, scheme)
