"""Analytic: in the place of the simulator, queues in a row whose times are a formula; thousands of requests in ms."""

from __future__ import annotations

import heapq
from typing import Any

from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import ModelShape
from trinity.costs.step_cost import CostModel, Roofline
from trinity.errors import UnknownName
from trinity.placement import Placement
from trinity.simulation.simulator import Replay
from trinity.simulation.workload import Job, jobs_of
from trinity.traces.goodput import RequestOutcome, ServeFunction
from trinity.traces.trace import SLO, Trace

BATCH = 32  # decodes that share a step, always


class Analytic:
    """Each instance serves one request after the other at each stage it has; the first that is free takes the next.

    A step's cost is that of the ``CostModel`` given, else of a roofline of the device. A decode is one of 32.
    """

    made = 0

    def __init__(
        self,
        model: ModelShape,
        slo: SLO,
        *,
        cluster: Cluster,
        cost: CostModel | None = None,
        backend: str = "auto",
        **rest: Any,
    ) -> None:
        if backend not in ("auto", "python", "compiled"):
            raise UnknownName("backend", backend, ("auto", "python", "compiled"))
        self.model, self.slo, self.cluster, self.rest = model, slo, cluster, rest
        self.backend = "python" if backend == "auto" else backend
        self.costs = [cost or Roofline(model=model, device=device) for device in cluster.devices]
        Analytic.made += 1

    def why_python(self, placement: Placement) -> str:
        return "it is a formula"

    def serve(self, placement: Placement) -> ServeFunction:
        return lambda trace: self.replay(trace, placement).outcomes

    def replay(self, trace: Trace, placement: Placement, *, record: bool = False) -> Replay:
        jobs, names = jobs_of(trace, self.model), placement.instances()
        busy = {name: dict.fromkeys(roles, 0.0) for name, roles in names}
        free: dict[str, list[tuple[float, int]]] = {}
        for place, (_, roles) in enumerate(names):
            heapq.heappush(free.setdefault(roles, []), (0.0, place))
        servers = {letter: each for roles, each in free.items() for letter in roles}
        ready = [(job.at, number, "E" if "E" in servers and job.images else "P") for number, job in enumerate(jobs)]
        heapq.heapify(ready)
        first, waits, gaps = ([0.0] * len(jobs) for _ in range(3))
        last = 0.0
        while ready:
            now, number, letter = heapq.heappop(ready)
            at, place = heapq.heappop(servers[letter])
            began, seconds = max(at, now), self._seconds(jobs[number], letter, place)
            busy[names[place][0]][letter] += seconds
            heapq.heappush(servers[letter], (began + seconds, place))
            if letter != "D":
                heapq.heappush(ready, (began + seconds, number, "P" if letter == "E" else "D"))
            if letter == "P":
                first[number] = began + seconds
            if letter == "D":
                waits[number], gaps[number] = began - now, BATCH * seconds / max(1, jobs[number].max_tokens - 1)
            last = max(last, began + seconds)
        return Replay(
            outcomes=[_outcome(*each) for each in zip(jobs, first, waits, gaps, strict=True)],
            duration_s=last - min((job.at for job in jobs), default=0.0),
            busy_s=busy,
            peak_blocks={name: {"kv": 5} for name, _ in names},
            pools={name: {"kv": 10} for name, _ in names},
            moved_bytes={},
            events=0,
            backend=self.backend,
        )

    def _seconds(self, job: Job, letter: str, place: int) -> float:
        cost = self.costs[place]
        if letter == "E":
            return cost.at(0, 0, sum(count for count, _ in job.images), context=0)
        if letter == "P":
            return cost.at(0, job.prompt, 0, context=0)
        return (job.max_tokens - 1) * cost.at(BATCH, 0, 0, context=job.prompt) / BATCH


def _outcome(job: Job, first: float, wait: float, gap: float) -> RequestOutcome:
    gaps = job.max_tokens - 1
    return RequestOutcome(first - job.at, [gap + wait, *[gap] * (gaps - 1)] if gaps else [])
