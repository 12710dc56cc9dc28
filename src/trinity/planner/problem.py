"""PlanningProblem: one trace on one hardware under one SLO, with its candidates, their bounds and their trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from trinity.costs.step_cost import interference_of
from trinity.planner import algorithm2
from trinity.planner.algorithm2 import CACHE_SHARE, Profile, Split, profile_device
from trinity.planner.bounds import Bounds
from trinity.planner.candidates import Deployment, list_deployments, methods_for
from trinity.planner.hardware import Hardware
from trinity.planner.progress import Report
from trinity.planner.race import race
from trinity.planner.search import BoundedCandidate, SearchResult, search_all, sort_by_guess
from trinity.planner.trials import Trials
from trinity.traces import resample
from trinity.traces.goodput import LEAST_REQUESTS, LEAST_TTFTS, SHARE, ServeFunction
from trinity.traces.trace import SLO, SLORule, Trace

DEAR_RUNS = 12  # replays of a search on the cores, once a rate holds
FINEST = 32  # instances up to which every ratio is tried; of more, some, then all near the best


class GoodputCriterion(NamedTuple):
    """Criterion by which a rate holds: ``share`` of the requests in time by ``rule`` and, if ``stable``, no backlog.

    - ``slo``: bounds on TTFT and TBT.
    - ``rule`` ("guard"): of ``SLO.is_met``.
    - ``stable`` (True): completions must keep up with arrivals.
    - ``share`` (0.9): of the requests.
    - ``least_requests``, ``least_ttfts`` (TTFT bounds): how long the trace must be.
    """

    slo: SLO
    rule: SLORule = "guard"
    stable: bool = True
    share: float = SHARE
    least_requests: int = LEAST_REQUESTS
    least_ttfts: float = LEAST_TTFTS


class PlanningProblem:
    """Problem that every strategy and objective searches.

    - ``hardware``, ``trace``: the devices and the requests.
    - ``asked``: the criterion of goodput.
    - ``progress``: reports replays.
    - ``offline`` (False): there is no SLO, and no rate.
    - ``dear`` (False): replays are slow, and a search makes few.

    Raises ``TraceTooShort`` and ``TraceError`` as ``Trials`` and ``measure_workload`` do.
    """

    def __init__(
        self,
        hardware: Hardware,
        trace: Trace,
        asked: GoodputCriterion,
        progress: Report | None,
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
        self.trials = self.make_trials(trace, progress=progress, most_runs=DEAR_RUNS if dear else math.inf)
        self._redrawn: dict[int, Trials] = {}
        self._longer: dict[float, Trials] = {}
        self.longer_steps: dict[Deployment, tuple[tuple[float, float], ...]] = {}  # (factor, requests/s) of each

    def make_trials(
        self, trace: Trace, serve_of: Callable[[Deployment], ServeFunction] | None = None, **options: Any
    ) -> Trials:
        """Make trials by the same criterion on a trace, served by ``serve_of`` or by what the search replays on."""
        asked = self.asked
        usual: dict[str, Any] = {
            "rule": asked.rule,
            "stable": asked.stable,
            "share": asked.share,
            "least_requests": 2 if self.offline else asked.least_requests,
            "least_ttfts": asked.least_ttfts,
        }
        return Trials(serve_of or self._serve, trace, asked.slo, **usual | options)

    def make_redrawn_trials(self, seed: int) -> Trials:
        """Make trials by the same criterion on this trace drawn again; once for each seed."""
        if seed not in self._redrawn:
            self._redrawn[seed] = self.make_trials(resample(self.trace, len(self.trace), seed=seed))
        return self._redrawn[seed]

    def make_longer_trials(self, factor: float) -> Trials:
        """Make trials whose steps take ``factor`` times as long at the same budgets; once for each factor."""
        if factor not in self._longer:

            def serve(deployment: Deployment) -> ServeFunction:
                slo = self.asked.slo
                return self.hardware.search_simulator(deployment, slo, step_factor=factor).serve(deployment.placement)

            self._longer[factor] = self.make_trials(self.trace, serve, progress=self.progress)
        return self._longer[factor]

    def _serve(self, deployment: Deployment) -> Any:
        return self.hardware.search_simulator(deployment, self.asked.slo).serve(deployment.placement)

    def bound_deployment(self, deployment: Deployment, worth: float = 1.0) -> BoundedCandidate:
        bounds = self.bounds
        return BoundedCandidate(
            deployment, bounds.upper(deployment), bounds.nominal(deployment), worth, bounds.likely(deployment)
        )

    def bound_deployments(self, devices: Sequence[str], step: int = 1, worth: float = 1.0) -> list[BoundedCandidate]:
        """List every deployment on these devices that holds the model, with bounds, the likely best first."""
        return sort_by_guess(self._bound_fitting(list_deployments(devices, self.methods, step), worth))

    def _bound_fitting(self, found: Iterable[Deployment], worth: float) -> Iterator[BoundedCandidate]:
        return (self.bound_deployment(each, worth) for each in found if not self.hardware.misfit(each))

    def misfits(self, devices: Sequence[str]) -> str:
        """Return the reason why the first deployment that does not hold the model does not; "" where all do."""
        return next(
            (why for each in list_deployments(devices, self.methods) if (why := self.hardware.misfit(each))), ""
        )

    def profile(self) -> Profile:
        """Compute Algorithm 2's profile, on the first device."""
        device = self.hardware.cluster.devices[0]
        kind = self.hardware.kinds[device.name]
        # The device's whole memory: of what the weights leave of it, line 9 takes its own share.
        whole = device.memory * min(1.0, self.hardware.memory_share / CACHE_SHARE)
        return profile_device(self.bounds.load, kind.cost, self.asked.slo, self.hardware.model, whole)

    def bound_paper_choices(self, devices: Sequence[str], split: Split) -> list[BoundedCandidate]:
        """List Algorithm 2's deployments in its order, with bounds; those that hold the model."""
        placed = algorithm2.choose_placements(len(devices), self.profile().seconds, split)
        return list(self._bound_fitting((Deployment.of(each, devices) for each in placed), 1.0))

    # ------------------------------------------------------------ strategies by goodput

    def search(
        self, strategy: str, entries: Sequence[BoundedCandidate], known: Sequence[SearchResult] = ()
    ) -> list[SearchResult]:
        """Search by the strategy "exhaustive" or "race", from results that are ``known``."""
        if strategy == "exhaustive":
            return search_all(self.trials, entries)
        return race(self.trials, entries, known)

    def refine(self, found: list[SearchResult], devices: Sequence[str], step: int) -> list[SearchResult]:
        """Search placements of the best one's method, nearer and nearer to it, down to every ratio."""
        while step > 1:
            near, step = step, max(1, step // 4)
            best = found[0].entry.deployment
            groups = {group.roles: group.count for group in best.placement.groups}
            close = [
                each
                for each in list_deployments(devices, [best.method], step)
                if all(abs(group.count - groups[group.roles]) <= near for group in each.placement.groups)
            ]
            found = self.search("race", sort_by_guess(self._bound_fitting(close, found[0].entry.worth)), found)
        return found


def choose_ratio_step(count: int) -> int:
    """Return the step between ratios that are searched first."""
    return 1 if count <= FINEST else -(-count // FINEST)
