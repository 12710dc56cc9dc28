"""Replay: what a trace on a placement came to in virtual time, as either engine has run it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import inf

import msgspec

from trinity.core.role_changes import Switch
from trinity.simulation import compiled_engine
from trinity.simulation.cluster_model import SimulatedCluster, SimulatedInstance
from trinity.simulation.rate_sweep import TraceRequests, collect_outcomes
from trinity.simulation.workload import Job
from trinity.timeline import Slice
from trinity.traces.goodput import RequestOutcome


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a trace on a placement.

    - ``outcomes``: one for each row, in the trace's order.
    - ``duration_s`` (seconds): from the first arrival to the last end.
    - ``busy_s`` (seconds): work of each instance at each of its stages.
    - ``peak_blocks``, ``pools`` (blocks): the most held by each instance, and what it has, by kind.
    - ``moved_bytes`` (bytes): migrated between instances, by kind.
    - ``events``: handled by the engine.
    - ``backend``: "python" or "compiled".
    - ``timeline``: steps and migrations, where recorded.
    - ``preemptions``: of all requests.
    - ``switches``: of instances to other roles, in their order.
    """

    outcomes: list[RequestOutcome]
    duration_s: float
    busy_s: dict[str, dict[str, float]]
    peak_blocks: dict[str, dict[str, int]]
    pools: dict[str, dict[str, int]]
    moved_bytes: dict[str, int]
    events: int
    backend: str
    timeline: tuple[Slice, ...] = ()
    preemptions: int = 0
    switches: tuple[Switch, ...] = ()

    @property
    def utilisation(self) -> dict[str, dict[str, float]]:
        """Share of the duration that each instance worked at each of its stages."""
        span = self.duration_s or inf
        return {name: {stage: busy / span for stage, busy in each.items()} for name, each in self.busy_s.items()}


def describe_compiled(
    requests: TraceRequests, deployed: compiled_engine.CompiledPlacement, replay: compiled_engine.CompiledReplay
) -> Replay:
    """Describe a replay of the compiled engine."""
    names = [each.name for each in deployed.settings]
    first = min((job.at for job in requests.jobs), default=0.0)
    return Replay(
        outcomes=collect_outcomes(requests, replay),
        duration_s=max(0.0, replay.ended - first),
        busy_s=dict(zip(names, replay.busy, strict=True)),
        peak_blocks=dict(zip(names, replay.peak, strict=True)),
        pools={each.name: dict(each.pools) for each in deployed.settings},
        moved_bytes=replay.moved,
        events=replay.events,
        backend="compiled",
        preemptions=replay.preemptions,
    )


def describe_cores(run: SimulatedCluster) -> Replay:
    """Describe a run of the cores that has ended."""
    first = min((job.at for job in run.jobs), default=0.0)
    workers: Mapping[str, SimulatedInstance] = run.workers
    return Replay(
        outcomes=[_outcome(*each) for each in zip(run.jobs, run.times.values(), run.reasons, strict=True)],
        duration_s=max(0.0, run.ended - first),
        busy_s={name: worker.busy for name, worker in workers.items()},
        peak_blocks={name: worker.peak for name, worker in workers.items()},
        pools={name: dict(core.settings.pools) for name, core in run.cores.items()},
        moved_bytes=dict(run.moved),
        events=run.events,
        backend="python",
        timeline=tuple(run.timeline or ()),
        preemptions=run.past_preemptions + sum(core.state.preemptions for core in run.cores.values()),
        switches=tuple(run.switches),
    )


def _outcome(job: Job, times: list[float], reason: str) -> RequestOutcome:
    if not times:
        return RequestOutcome(None, (), reason)
    return RequestOutcome(times[0] - job.at, [after - before for before, after in pairwise(times)], reason)
