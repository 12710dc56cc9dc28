"""What serves traces on a placement in virtual time: by the compiled twin where it can, and then fast at many rates."""

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
from trinity.simulation import compiled
from trinity.simulation.compiled import Deployed, Told
from trinity.simulation.compiled_workload import Workload
from trinity.simulation.workload import Job, Sizes, jobs_of, shares, sizes_of
from trinity.traces.goodput import RatePoint, RequestOutcome, completion_ratio
from trinity.traces.statistics import arrival_rate
from trinity.traces.trace import SLO, SLO_RULES, Trace

Floats = npt.NDArray[np.float64]


@dataclass
class Requests:
    """A trace as a model sees it, made once for all replays of it at any rate."""

    length: int
    stamps: Floats  # arrivals in ms
    model: ModelShape
    jobs: list[Job]
    shared: bool
    _works: dict[tuple[int, int, str, int], Workload] = field(default_factory=dict)

    def work(self, deployed: Deployed) -> Workload:
        """For instances with these blocks; caches are on where content is shared."""
        like = deployed.settings[0]
        key = (like.image_block_size, like.kv_block_size, like.reservation, deployed.ask)
        if key not in self._works:
            self._works[key] = Workload.of(self.jobs, like, deployed.ask, self.model.context, self.sizes)
        return self._works[key]

    @cached_property
    def sizes(self) -> Sizes:
        return sizes_of(self.jobs)

    @cached_property
    def asked(self) -> npt.NDArray[np.int32]:
        """Those that the model can take."""
        return np.flatnonzero(self.sizes.taken).astype(np.int32)

    @cached_property
    def ascending(self) -> bool:
        return bool(np.all(self.stamps[1:] >= self.stamps[:-1]))

    @cached_property
    def rate(self) -> float | None:
        """Requests a second, as ``Trace.scale`` takes it."""
        return arrival_rate(np.sort(self.stamps / 1000).tolist())

    def arrivals(self, rate: float | None) -> Floats | None:
        """In seconds, at this rate as ``Trace.scale`` makes it; None where that would change the order of the rows, or
        is refused."""
        if not len(self.stamps) or not self.ascending:
            return None
        stamps = self.stamps
        if rate is not None:
            if self.rate is None or not 0 < rate < math.inf:
                return None
            stamps = stamps / (rate / self.rate)
        at = stamps / 1000
        return at if np.isfinite(at[-1]) else None


_known: WeakKeyDictionary[Trace, Requests] = WeakKeyDictionary()


def requests_of(trace: Trace, model: ModelShape) -> Requests:
    """Made anew only for another trace, a longer one, or another model. Raises as ``jobs_of``."""
    known = _known.get(trace)
    length = len(trace) + trace.dropped
    if known is None or known.length != length or known.model is not model:
        jobs, stamps = jobs_of(trace, model), np.array([row.timestamp for row in trace], np.float64)
        known = _known[trace] = Requests(length, stamps, model, jobs, shares(jobs))
    return known


class Usage(NamedTuple):
    """What a replay made of the instances, by name: ``utilisation`` is the share of the duration that each worked at
    each of its stages, ``peak_blocks`` the most that it held of its ``pools`` by kind."""

    utilisation: dict[str, dict[str, float]]
    peak_blocks: dict[str, dict[str, int]]
    pools: dict[str, dict[str, int]]
    engine: str = "compiled"


class _Did(NamedTuple):
    """What is kept of a replay of ``requests()``, which took ``span`` seconds."""

    requests: ref[Requests]
    busy: Floats
    peak: compiled.Ints
    span: float


@dataclass
class Serving:
    """A ``Serve`` for ``trinity.traces.goodput`` that also answers ``point`` and ``usage``, where the twin runs its
    placement.

    ``replay`` serves a trace by whatever engine. ``deploy(shared)`` gives the instances in the twin's form, with caches
    where content is shared, or None where it cannot run them.
    """

    replay: Callable[[Trace], Sequence[RequestOutcome]]
    deploy: Callable[[bool], Deployed | None]
    model: ModelShape
    _deployed: dict[bool, Deployed | None] = field(default_factory=dict)
    _did: dict[float | None, _Did] = field(default_factory=dict)

    def __call__(self, trace: Trace) -> Sequence[RequestOutcome]:
        return self.replay(trace)

    def deployed(self, shared: bool) -> Deployed | None:
        if shared not in self._deployed:
            self._deployed[shared] = self.deploy(shared)
        return self._deployed[shared]

    def point(self, trace: Trace, slo: SLO, rate: float | None) -> RatePoint | None:
        """What ``goodput.measure_point`` comes to, to the last bit, without a row or an outcome made for each request.

        None where it has to be asked itself.
        """
        requests = requests_of(trace, self.model)
        deployed, at = self.deployed(requests.shared), requests.arrivals(rate)
        if deployed is None or at is None:
            return None
        work = requests.work(deployed)
        found = deployed.tried(work, at, requests.asked, slo)
        check_settled(found.unsettled, found.settled == len(requests.asked))
        span, ended = float(at[-1] - at[0]), max(0.0, found.ended - float(at[0]))
        self._did[rate] = _Did(ref(requests), found.busy, found.peak, ended)
        return RatePoint(
            rate=(len(at) - 1) / span if span > 0 else math.inf,
            duration_s=span,
            attainment={rule: getattr(found, rule) / len(at) for rule in SLO_RULES},
            completed=completion_ratio(at, found.finishes),
            ttft_attainment=found.first / len(at),
            load=compiled.load(found, deployed.settings, float(at[0]), span),
        )

    def usage(self, trace: Trace, slo: SLO, rate: float | None) -> Usage | None:
        """Of the replay behind ``point``, which is made if it was not yet. None where there is no ``point``."""
        requests = requests_of(trace, self.model)
        if (rate not in self._did or self._did[rate].requests() is not requests) and not self.point(trace, slo, rate):
            return None
        did, deployed = self._did[rate], self.deployed(requests.shared)
        assert deployed is not None
        settings, span = deployed.settings, did.span or math.inf
        names = [each.name for each in settings]
        shares = [{role: each / span for role, each in own.items()} for own in compiled.worked(did.busy, settings)]
        return Usage(
            dict(zip(names, shares, strict=True)),
            dict(zip(names, compiled.held(did.peak, settings), strict=True)),
            {each.name: dict(each.pools) for each in settings},
        )


def replayed(
    trace: Trace, model: ModelShape, deploy: Callable[[bool], Deployed | None]
) -> tuple[Requests, Deployed, Told]:
    """A whole replay by the twin, which can run it."""
    requests = requests_of(trace, model)
    deployed = deploy(requests.shared)
    assert deployed is not None
    work, at = requests.work(deployed), requests.stamps[requests.asked] / 1000
    order = np.argsort(at, kind="stable")
    raw = deployed.run(work, at[order], requests.asked[order], np.zeros(len(at), np.uint8))
    check_settled(raw.unsettled, int(np.count_nonzero(raw.reasons)) == len(at))
    return requests, deployed, compiled.told(raw, work, deployed.settings)


def check_settled(unsettled: int, ended: bool) -> None:
    """Raise ``AssertionError``: a fault of trinity."""
    if unsettled or not ended:
        raise AssertionError(f"{unsettled} instances still hold something at the end, or a request never ended")


def outcomes(requests: Requests, told: Told) -> list[RequestOutcome]:
    """One for each row, in the trace's order."""
    if not len(told.times):
        return []
    first, gaps = told.first.tolist(), np.diff(told.times).tolist()
    ttfts = (told.times[told.first] - requests.stamps / 1000).tolist()
    return [
        RequestOutcome(ttft, gaps[start : start + count - 1], reason)
        if count
        else RequestOutcome(None, (), reason or "error")
        for ttft, start, count, reason in zip(ttfts, first, told.counts.tolist(), told.reasons, strict=True)
    ]
