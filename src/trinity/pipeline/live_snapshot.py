"""LiveSnapshot: what a pipeline does at one moment, small enough to be sent several times a second.

::

    msgspec.json.encode(take_snapshot(pipe))

It has no prompts, outputs or pictures: of a request its name, its place and its counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from trinity.core.messages import PeerLoad
from trinity.emulation.model import EmulatedModel
from trinity.metrics import SPANS, Metrics
from trinity.pipeline.stream import Stream
from trinity.remote.supervision.supervisor_messages import InstanceHealth

if TYPE_CHECKING:
    from trinity.pipeline.pipeline import Pipeline

MOST_SHOWN = 200  # requests of a snapshot; the others are counted
MOST_PAIRS = 200  # rows of transfers, those with most bytes


class LiveInstance(msgspec.Struct, frozen=True):
    """An instance.

    - ``state``: as ``InstanceHealth`` has it; that of the pipeline where instances are threads.
    - ``epoch``, ``planned``: lives so far but the first; True where the last one ended for a change of the placement.
    - ``why``, ``next_start_s``: why that ended, seconds until the next start.
    - ``pools`` (blocks): free and all, by kind. ``ahead_s`` (seconds): predicted work that waits, by stage.
    - ``waiting``, ``decoding``: requests here without a token so far, and with one.
    """

    name: str
    roles: str
    state: str
    epoch: int = 0
    planned: bool = False
    why: str = ""
    next_start_s: float | None = None
    pools: dict[str, tuple[int, int]] = {}
    ahead_s: dict[str, float] = {}
    preemptions: int = 0
    waiting: int = 0
    decoding: int = 0


class LiveRequest(msgspec.Struct, frozen=True):
    """A request that is served: its instance ("" while it is prepared), media, tokens so far, age in seconds."""

    id: str
    at: str
    media: int
    tokens: int
    age_s: float


class LiveEnd(msgspec.Struct, frozen=True):
    """A request that has ended since the last snapshot: why, the instances that it was at, bytes moved for it."""

    id: str
    reason: str
    route: tuple[str, ...]
    bytes: int


class LiveTransfer(msgspec.Struct, frozen=True):
    """Transfers of one kind of block between two instances, by all requests that have ended."""

    kind: str
    scheme: str
    source: str
    target: str
    outcome: str
    count: int
    bytes: int
    seconds: float


class LiveSnapshot(msgspec.Struct, frozen=True):
    """State of a pipeline.

    - ``time`` (seconds since 1970); ``number``: counts the snapshots of one feed.
    - ``slo`` (seconds): TTFT and TBT bounds. ``judged``: ended requests that these are for; ``met``: of them those that
      met them, by rule.
    - ``change``: the change of the placement that is under way, as ``Pipeline.change`` has it.
    - ``requests``, ``unlisted``: up to 200 that are served now, oldest first, and how many more there are.
    - ``ended``: since the last snapshot, of those that it listed.
    - ``output_tokens``: of all requests so far, those served now included.
    - ``finished``, ``refused``, ``spans``, ``transfers``: of all requests that have ended. ``spans`` are [seconds,
      requests that had it] by name. ``recoveries``: losses of an instance after which they went on.
    """

    time: float
    number: int
    state: str
    model: str
    placement: str
    hosting: str
    slo: tuple[float, float] | None
    change: str
    instances: tuple[LiveInstance, ...]
    requests: tuple[LiveRequest, ...]
    unlisted: int
    ended: tuple[LiveEnd, ...]
    finished: dict[str, int]
    refused: dict[str, int]
    judged: int
    met: dict[str, int] | None
    output_tokens: int
    preemptions: int
    recoveries: int
    spans: dict[str, tuple[float, int]]
    transfers: tuple[LiveTransfer, ...]


def take_snapshot(pipe: Pipeline, number: int = 1, watched: Iterable[Stream] = ()) -> LiveSnapshot:
    """Describe a pipeline as it is now; on its loop's thread.

    ``watched``: streams of the requests that the last snapshot listed, to tell which have ended.
    """
    streams, now = pipe.streams, time.monotonic()
    counts, slo = pipe.metrics.counts(), pipe.slo
    return LiveSnapshot(
        time=time.time(),
        number=number,
        state=pipe.state,
        model="emulated" if isinstance(pipe.model, EmulatedModel) else pipe.model.name,
        placement=name_placement(pipe),
        hosting=pipe.hosting,
        slo=None if slo is None else (slo.ttft, slo.tbt),
        change=pipe.change,
        instances=_describe_instances(pipe, streams),
        requests=tuple(_describe_request(each, now) for each in streams[:MOST_SHOWN]),
        unlisted=max(0, len(streams) - MOST_SHOWN),
        ended=tuple(_describe_end(each) for each in islice(watched, MOST_SHOWN) if each.done),
        finished=counts["finished"],
        refused=counts["refused"],
        judged=counts["judged"],
        met=counts["met"],
        output_tokens=counts["tokens"]["output"] + sum(each.token_count for each in streams),
        preemptions=counts["preemptions"],
        recoveries=counts["recoveries"],
        spans=_sum_spans(pipe.metrics),
        transfers=_list_transfers(pipe.metrics),
    )


def name_placement(pipe: Pipeline) -> str:
    """Name the placement with equal instances counted together: "2E2P1D"."""
    counts = Counter(each.roles for each in pipe.instances)
    return "".join(f"{count}{roles}" for roles, count in counts.items())


def _describe_instances(pipe: Pipeline, streams: Iterable[Stream]) -> tuple[LiveInstance, ...]:
    waiting, decoding = Counter[str](), Counter[str]()
    for each in streams:
        (decoding if each.token_count else waiting)[each.place] += 1
    loads, pools, health = pipe.loads, pipe.pools, pipe.health
    made = []
    for instance in pipe.instances:
        name = instance.name or ""
        load, life = loads.get(name) or PeerLoad(name), health.get(name) or InstanceHealth(name, "up", 0)
        made.append(
            LiveInstance(
                name=name,
                roles=instance.roles,
                state=life.state if pipe.state == "running" else pipe.state,
                epoch=life.epoch,
                planned=life.planned,
                why=life.why,
                next_start_s=life.next_start_s,
                pools={kind: (load.free.get(kind, size), size) for kind, size in pools.get(name, {}).items()},
                ahead_s=load.predicted_s,
                preemptions=load.preemptions,
                waiting=waiting[name],
                decoding=decoding[name],
            )
        )
    return tuple(made)


def _describe_request(stream: Stream, now: float) -> LiveRequest:
    media = len(stream.processed.work.given_media) if stream.processed else 0
    return LiveRequest(stream.request.request_id, stream.place, media, stream.token_count, now - stream.arrived)


def _describe_end(stream: Stream) -> LiveEnd:
    output = stream.output
    moved = sum(int(each.get("bytes", 0)) for each in output.transfers)
    return LiveEnd(output.request_id, output.finish_reason, tuple(output.route), moved)


def _sum_spans(metrics: Metrics) -> dict[str, tuple[float, int]]:
    counted = {span: metrics.histograms[f"{span}_span_s"] for span in SPANS}
    return {span: (each.total, sum(each.counts)) for span, each in counted.items()}


def _list_transfers(metrics: Metrics) -> tuple[LiveTransfer, ...]:
    rows = [
        LiveTransfer(kind, scheme, source, target, outcome, int(count), int(moved), seconds)
        for (kind, scheme, source, target, outcome), (count, moved, seconds) in metrics.transfers.items()
    ]
    return tuple(sorted(rows, key=lambda each: -each.bytes)[:MOST_PAIRS])
