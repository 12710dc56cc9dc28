"""The pipeline of the simulator as a plain simpy model: stages, batches, links, queues; no pools, caches, messages.

It is what one would write without the cores: a measure for the simulator's speed, and a check of its figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import simpy

from trinity.core.instance.state import Settings
from trinity.simulation.simulator import Simulator
from trinity.simulation.workload import Job, jobs_of
from trinity.traces.trace import Trace

Events = Generator[simpy.Event, Any, None]


@dataclass
class Request:
    job: Job
    visual: int
    left: int  # prompt tokens that are not prefilled
    times: list[float] = field(default_factory=list)


class Instance:
    """One instance of roles E, P or D: what waits for it, and the link into it."""

    def __init__(self, env: simpy.Environment, settings: Settings, cost: Any) -> None:
        self.settings, self.cost = settings, cost
        self.waiting = simpy.Store(env)
        self.port = simpy.Resource(env, capacity=1)

    def batch(self) -> Generator[simpy.Event, Any, list[Request]]:
        """All that waits, at least one."""
        found = [(yield self.waiting.get())]
        found += self.waiting.items
        self.waiting.items.clear()
        return found


class Model:
    """E+P+D of a placement; ``requests`` have the times of their tokens once ``run`` is over."""

    def __init__(self, simulator: Simulator, placement: str, trace: Trace) -> None:
        self.env, self.simulator = simpy.Environment(), simulator
        self.requests = [_request(job) for job in jobs_of(trace, simulator.model)]
        made = [
            Instance(self.env, each, simulator.cost_of(place))
            for place, each in enumerate(simulator.settings(placement, shared=False))
        ]
        by_role = {role: [each for each in made if each.settings.roles == role] for role in "EPD"}
        self.next = {role: cycle(each) for role, each in by_role.items()}
        for role, stage in (("E", self.encode), ("P", self.prefill), ("D", self.decode)):
            for each in by_role[role]:
                self.env.process(stage(each))
        self.env.process(self.arrivals())

    def run(self) -> Sequence[Request]:
        self.env.run()
        return self.requests

    def arrivals(self) -> Events:
        for request in self.requests:
            yield self.env.timeout(request.job.at - self.env.now)
            yield next(self.next["E"]).waiting.put(request)

    def moved(self, request: Request, size: int, role: str) -> Events:
        target = next(self.next[role])
        with target.port.request() as turn:
            yield turn
            yield self.env.timeout(self.simulator.cluster.link.seconds(size))
        yield target.waiting.put(request)

    def encode(self, here: Instance) -> Events:
        queue: deque[Request] = deque()
        while True:
            queue += (yield from here.batch()) if not queue else []
            batch = [queue.popleft()]
            while queue and sum(each.visual for each in (*batch, queue[0])) <= here.settings.rules.image_budget:
                batch.append(queue.popleft())
            yield self.env.timeout(here.cost.at(0, 0, sum(each.visual for each in batch), context=0.0))
            for each in batch:
                self.env.process(self.moved(each, each.visual * self.simulator.model.feature_bytes, "P"))

    def prefill(self, here: Instance) -> Events:
        queue: deque[Request] = deque()
        while True:
            queue += (yield from here.batch()) if not queue else here.waiting.items
            here.waiting.items.clear()
            room, rows = here.settings.rules.token_budget, []
            for each in queue:
                if not room:
                    break
                rows.append((each, min(each.left, room)))
                room -= rows[-1][1]
            done = sum(each.job.prompt - each.left for each, _ in rows) / len(rows)
            tokens = sum(count for _, count in rows)
            yield self.env.timeout(here.cost.at(0, tokens, 0, context=0.0, prefilled=done, prefills=len(rows)))
            for each, count in rows:
                each.left -= count
            while queue and not queue[0].left:
                self.finished(queue.popleft())

    def finished(self, request: Request) -> None:
        request.times.append(self.env.now)
        if request.job.max_tokens > 1:
            self.env.process(self.moved(request, request.job.prompt * self.simulator.model.kv_bytes, "D"))

    def decode(self, here: Instance) -> Events:
        running: list[Request] = []
        while True:
            running += (yield from here.batch()) if not running else here.waiting.items
            here.waiting.items.clear()
            context = sum(each.job.prompt + len(each.times) for each in running) / len(running)
            yield self.env.timeout(here.cost.at(len(running), 0, 0, context=context))
            for each in running:
                each.times.append(self.env.now)
            running = [each for each in running if len(each.times) < each.job.max_tokens]


def _request(job: Job) -> Request:
    return Request(job, sum(tokens for tokens, _ in job.images), job.prompt)
