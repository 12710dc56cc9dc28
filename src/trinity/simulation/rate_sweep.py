"""Evaluates one placement at many request rates in virtual time, on the compiled engine where that can run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
import numpy.typing as npt

from trinity.costs.model_shape import ModelShape
from trinity.simulation import compiled_engine
from trinity.simulation.compiled_engine import CompiledPlacement, CompiledReplay
from trinity.simulation.compiled_workload import CompiledWorkload, Floats, Ints
from trinity.simulation.workload import Job, Sizes, has_own_work, has_shared_content, jobs_of, sizes_of
from trinity.traces.goodput import RatePoint, RequestOutcome, completion_ratio
from trinity.traces.statistics import arrival_rate
from trinity.traces.trace import SLO, SLO_RULES, Trace


@dataclass
class TraceRequests:
    """A trace's requests as a model sees them, prepared once for replays at any rate."""

    length: int
    stamps: Floats  # arrivals in ms
    model: ModelShape
    jobs: list[Job]
    shared: bool
    weighed: bool  # some media cost other than their tokens do: a replay on the cores
    _works: dict[tuple[int, int, str, int], CompiledWorkload] = field(default_factory=dict)

    def work(self, deployed: CompiledPlacement) -> CompiledWorkload:
        """Return the workload in the engine's form, for instances with these block sizes and caches."""
        like = deployed.settings[0]
        key = (like.image_block_size, like.kv_block_size, like.reservation, deployed.ask)
        if key not in self._works:
            self._works[key] = CompiledWorkload.of(self.jobs, like, deployed.ask, self.model.context, self.sizes)
        return self._works[key]

    @cached_property
    def sizes(self) -> Sizes:
        return sizes_of(self.jobs)

    @cached_property
    def valid_rows(self) -> npt.NDArray[np.int32]:
        """Numbers of the requests that the model can take."""
        return np.flatnonzero(self.sizes.taken).astype(np.int32)

    @cached_property
    def is_ascending(self) -> bool:
        return bool(np.all(self.stamps[1:] >= self.stamps[:-1]))

    @cached_property
    def rate(self) -> float | None:
        """Requests/s, as ``Trace.scale`` takes it; None where the trace has none."""
        return arrival_rate(np.sort(self.stamps / 1000).tolist())

    def arrivals(self, rate: float | None) -> Floats | None:
        """Return arrivals in seconds, scaled to this rate (None: its own) as ``Trace.scale`` does.

        None where the rows are not in order of arrival, or ``Trace.scale`` would raise.
        """
        if not len(self.stamps) or not self.is_ascending:
            return None
        stamps = self.stamps
        if rate is not None:
            if self.rate is None or not 0 < rate < math.inf:
                return None
            stamps = stamps / (rate / self.rate)
        at = stamps / 1000
        return at if np.isfinite(at[-1]) else None


_known: WeakKeyDictionary[Trace, TraceRequests] = WeakKeyDictionary()


def prepare_requests(trace: Trace, model: ModelShape) -> TraceRequests:
    """Prepare a trace for a model; kept until the trace grows or the model is another. Raises as ``jobs_of``."""
    known = _known.get(trace)
    length = len(trace) + trace.dropped
    if known is None or known.length != length or known.model is not model:
        jobs, stamps = jobs_of(trace, model), np.array([row.timestamp for row in trace], np.float64)
        known = _known[trace] = TraceRequests(length, stamps, model, jobs, has_shared_content(jobs), has_own_work(jobs))
    return known


def why_on_cores(trace: Trace, model: ModelShape) -> str:
    """Return the reason why the compiled engine cannot replay a trace's media; "" where it can."""
    if any(row.clips for row in trace) and prepare_requests(trace, model).weighed:
        return "media whose encoding does not cost what their tokens do"
    return ""


class InstanceUsage(NamedTuple):
    """Use of the instances in a replay, by name.

    - ``utilisation``: share of the duration that the instance worked at each of its stages.
    - ``peak_blocks``: most blocks held, by kind.
    - ``pools``: blocks it has, by kind.
    - ``backend``: the engine of the replay.
    """

    utilisation: dict[str, dict[str, float]]
    peak_blocks: dict[str, dict[str, int]]
    pools: dict[str, dict[str, int]]
    backend: str = "compiled"


class _ReplayUsage(NamedTuple):
    """Raw figures of a replay of ``requests()``, which took ``span`` seconds."""

    requests: ref[TraceRequests]
    busy: Floats
    peak: Ints
    span: float


@dataclass
class RateSweep:
    """Evaluates one placement at many request rates, compiled where supported.

    A ``ServeFunction`` for ``trinity.traces.goodput`` that also answers ``point`` and ``usage`` where the compiled
    engine runs its placement.

    - ``replay(trace)``: serves a trace by whatever engine.
    - ``deploy(shared)``: the instances in the compiled engine's form, with caches if requests share content; None
      where that engine cannot run them.
    - ``model``: the served model.
    """

    replay: Callable[[Trace], Sequence[RequestOutcome]]
    deploy: Callable[[bool], CompiledPlacement | None]
    model: ModelShape
    _deployed: dict[bool, CompiledPlacement | None] = field(default_factory=dict)
    _did: dict[float | None, _ReplayUsage] = field(default_factory=dict)

    def __call__(self, trace: Trace) -> Sequence[RequestOutcome]:
        return self.replay(trace)

    def compile_placement(self, shared: bool) -> CompiledPlacement | None:
        if shared not in self._deployed:
            self._deployed[shared] = self.deploy(shared)
        return self._deployed[shared]

    def point(self, trace: Trace, slo: SLO, rate: float | None) -> RatePoint | None:
        """Compute the result of ``goodput.measure_point`` to the last bit, without an object for each request.

        None where the compiled engine cannot: then call ``measure_point``.
        """
        requests = prepare_requests(trace, self.model)
        if requests.weighed:
            return None
        deployed, at = self.compile_placement(requests.shared), requests.arrivals(rate)
        if deployed is None or at is None:
            return None
        work = requests.work(deployed)
        found = deployed.score(work, at, requests.valid_rows, slo)
        check_ended(found.unsettled, found.settled == len(requests.valid_rows))
        span, ended = float(at[-1] - at[0]), max(0.0, found.ended - float(at[0]))
        self._did[rate] = _ReplayUsage(ref(requests), found.busy, found.peak, ended)
        return RatePoint(
            rate=(len(at) - 1) / span if span > 0 else math.inf,
            duration_s=span,
            attainment={rule: getattr(found, rule) / len(at) for rule in SLO_RULES},
            completed=completion_ratio(at, found.finishes),
            ttft_attainment=found.first / len(at),
            load=compiled_engine.measure_load(found, deployed.settings, float(at[0]), span),
        )

    def usage(self, trace: Trace, slo: SLO, rate: float | None) -> InstanceUsage | None:
        """Return the use of instances in the replay of ``point``, which is run if needed; None where ``point`` is."""
        requests = prepare_requests(trace, self.model)
        if (rate not in self._did or self._did[rate].requests() is not requests) and not self.point(trace, slo, rate):
            return None
        did, deployed = self._did[rate], self.compile_placement(requests.shared)
        assert deployed is not None
        settings, span = deployed.settings, did.span or math.inf
        names = [each.name for each in settings]
        shares = [
            {role: each / span for role, each in own.items()}
            for own in compiled_engine.to_busy_seconds(did.busy, settings)
        ]
        return InstanceUsage(
            dict(zip(names, shares, strict=True)),
            dict(zip(names, compiled_engine.to_peak_blocks(did.peak, settings), strict=True)),
            {each.name: dict(each.pools) for each in settings},
        )


def replay_compiled(
    trace: Trace, model: ModelShape, deploy: Callable[[bool], CompiledPlacement | None]
) -> tuple[TraceRequests, CompiledPlacement, CompiledReplay]:
    """Replay a trace on the compiled engine, with the times of all tokens. ``deploy`` must not give None."""
    requests = prepare_requests(trace, model)
    deployed = deploy(requests.shared)
    assert deployed is not None
    work, at = requests.work(deployed), requests.stamps[requests.valid_rows] / 1000
    order = np.argsort(at, kind="stable")
    raw = deployed.run(work, at[order], requests.valid_rows[order], np.zeros(len(at), np.uint8))
    check_ended(raw.unsettled, int(np.count_nonzero(raw.reasons)) == len(at))
    return requests, deployed, compiled_engine.unpack_replay(raw, work, deployed.settings)


def check_ended(unsettled: int, ended: bool) -> None:
    """Raise ``AssertionError`` unless all requests ended and all blocks came back: else it is a fault of trinity."""
    if unsettled or not ended:
        raise AssertionError(f"{unsettled} instances still hold something at the end, or a request never ended")


def collect_outcomes(requests: TraceRequests, replay: CompiledReplay) -> list[RequestOutcome]:
    """Collect one outcome for each row, in the trace's order."""
    if not len(replay.times):
        return []
    first, gaps = replay.first.tolist(), np.diff(replay.times).tolist()
    ttfts = (replay.times[replay.first] - requests.stamps / 1000).tolist()
    return [
        RequestOutcome(ttft, gaps[start : start + count - 1], reason)
        if count
        else RequestOutcome(None, (), reason or "error")
        for ttft, start, count, reason in zip(ttfts, first, replay.counts.tolist(), replay.reasons, strict=True)
    ]
