"""A case: one trace on one hardware under one SLO, with the candidates, their bounds and their trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from trinity.costs.step_cost import interference_of
from trinity.planner import algorithm2
from trinity.planner.algorithm2 import Profile, Split, profiled
from trinity.planner.bounds import Bounds
from trinity.planner.candidates import Deployment, deployments, methods_for
from trinity.planner.hardware import Hardware
from trinity.planner.race import race
from trinity.planner.search import Entry, Found, exhaustive, likely_first
from trinity.planner.trials import Progress, Trials
from trinity.traces import resample
from trinity.traces.goodput import LEAST_REQUESTS, LEAST_TTFTS, SHARE, ServeFunction
from trinity.traces.trace import SLO, SLORule, Trace

DEAR_RUNS = 12  # replays of a search on the cores, once a rate holds
FINEST = 32  # instances up to which every ratio is tried; of more, some, then all near the best


class Question(NamedTuple):
    """When a rate holds: ``share`` of the requests in time by ``rule`` and, where ``stable``, completions keep up."""

    slo: SLO
    rule: SLORule = "guard"
    stable: bool = True
    share: float = SHARE
    least_requests: int = LEAST_REQUESTS
    least_ttfts: float = LEAST_TTFTS


class Case:
    """What every strategy and objective searches. ``offline``: there is no SLO, and no rate.

    ``dear``: replays are, and a search makes few.

    Raises ``TraceTooShort`` and ``TraceError`` as ``Trials`` and ``workload`` do.
    """

    def __init__(
        self,
        hardware: Hardware,
        trace: Trace,
        asked: Question,
        progress: Progress | None,
        offline: bool = False,
        dear: bool = False,
    ) -> None:
        self.hardware, self.trace, self.asked, self.offline, self.dear = hardware, trace, asked, offline, dear
        options = hardware.options
        rules = options.get("rules")
        costs = {name: kind.cost for name, kind in hardware.kinds.items()}
        self.bounds = Bounds(
            trace,
            asked.slo,
            hardware.model,
            hardware.kinds,
            rule=asked.rule,
            stable=asked.stable,
            share=1.0 if offline else asked.share,
            order=rules.order if rules is not None else "fcfs",
            lanes=options.get("lanes", ("joint",)),
            interference=options.get("interference") or interference_of(costs),
            offline=offline,
        )
        self.methods = methods_for(self.bounds.load.multimodal)
        self.progress = progress
        self.trials = self.tried(trace, progress=progress, most_runs=DEAR_RUNS if dear else math.inf)
        self._redrawn: dict[int, Trials] = {}

    def tried(
        self, trace: Trace, serve_of: Callable[[Deployment], ServeFunction] | None = None, **options: Any
    ) -> Trials:
        """Trials of the same question on a trace, by what the search replays on, or by ``serve_of``."""
        asked = self.asked
        usual: dict[str, Any] = {
            "rule": asked.rule,
            "stable": asked.stable,
            "share": asked.share,
            "least_requests": 2 if self.offline else asked.least_requests,
            "least_ttfts": asked.least_ttfts,
        }
        return Trials(serve_of or self._serve, trace, asked.slo, **usual | options)

    def redrawn(self, seed: int) -> Trials:
        """Trials of the same question on this trace drawn again; made once for each seed."""
        if seed not in self._redrawn:
            self._redrawn[seed] = self.tried(resample(self.trace, len(self.trace), seed=seed))
        return self._redrawn[seed]

    def _serve(self, deployment: Deployment) -> Any:
        return self.hardware.screening(deployment, self.asked.slo).serve(deployment.placement)

    def entry(self, deployment: Deployment, worth: float = 1.0) -> Entry:
        bounds = self.bounds
        return Entry(deployment, bounds.upper(deployment), bounds.nominal(deployment), worth, bounds.likely(deployment))

    def entries(self, devices: Sequence[str], step: int = 1, worth: float = 1.0) -> list[Entry]:
        """Every deployment on these devices that holds the model, the likely best first."""
        return likely_first(self._fitting(deployments(devices, self.methods, step), worth))

    def _fitting(self, found: Iterable[Deployment], worth: float) -> Iterator[Entry]:
        return (self.entry(each, worth) for each in found if not self.hardware.misfit(each))

    def misfits(self, devices: Sequence[str]) -> str:
        """Why the first deployment that does not hold the model does not."""
        return next((why for each in deployments(devices, self.methods) if (why := self.hardware.misfit(each))), "")

    def profile(self) -> Profile:
        """Of Algorithm 2, on the first device."""
        device = self.hardware.cluster.devices[0]
        kind = self.hardware.kinds[device.name]
        return profiled(self.bounds.load, kind.cost, self.asked.slo, self.hardware.model, kind.memory)

    def paper(self, devices: Sequence[str], split: Split) -> list[Entry]:
        """What Algorithm 2 replays, in its order; those that hold the model."""
        placed = algorithm2.deployments(len(devices), self.profile().seconds, split)
        return list(self._fitting((Deployment.of(each, devices) for each in placed), 1.0))

    # ------------------------------------------------------------ strategies by goodput

    def searched(self, strategy: str, entries: Sequence[Entry], known: Sequence[Found] = ()) -> list[Found]:
        """By "exhaustive" or "race", from what is ``known``."""
        if strategy == "exhaustive":
            return exhaustive(self.trials, entries)
        return race(self.trials, entries, known)

    def refined(self, found: list[Found], devices: Sequence[str], step: int) -> list[Found]:
        """Placements of the best one's method nearer and nearer to it, down to every ratio."""
        while step > 1:
            near, step = step, max(1, step // 4)
            best = found[0].entry.deployment
            groups = {group.roles: group.count for group in best.placement.groups}
            close = [
                each
                for each in deployments(devices, [best.method], step)
                if all(abs(group.count - groups[group.roles]) <= near for group in each.placement.groups)
            ]
            found = self.searched("race", likely_first(self._fitting(close, found[0].entry.worth)), found)
        return found


def coarse(count: int) -> int:
    """Every so many-th ratio is tried first."""
    return 1 if count <= FINEST else -(-count // FINEST)
