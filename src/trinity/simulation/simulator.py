"""Simulator: replays a trace on a placement in virtual time, by the cores, scheduler, routing and pools that serve.

::

    simulator = Simulator("llava-1.5-7b", SLO(0.25, 0.04), cluster=Cluster.of("H100", 8))
    replay = simulator.replay(trace, "1E3P4D")
    goodput(simulator.serve("1E3P4D"), trace, simulator.slo)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any

import msgspec

from trinity.config_classes import documented_by, pick_fields, takes
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import FrontendOptions
from trinity.core.instance.settings import CoreOptions, SchedulingOptions
from trinity.core.instance.state import Settings
from trinity.core.routing.router import DEFAULT_ROUTING, RoutingOptions, RoutingPolicy, routing_policy
from trinity.core.scheduler import BatchRules, latency_bound
from trinity.costs.budgets import StepBudgets, predict_budgets
from trinity.costs.cluster import Cluster
from trinity.costs.given_costs import GivenCosts, check_costs, load_costs
from trinity.costs.longer_steps import stretch_cost
from trinity.costs.model_config import find_model_shape
from trinity.costs.model_shape import ModelShape
from trinity.costs.step_cost import CostModel, cost_for_device, interference_of
from trinity.errors import ConfigError, PlacementError, UnknownName
from trinity.errors.arguments import Count, Positive, Share, check_arguments, check_call
from trinity.placement import Placement
from trinity.simulation import compiled_engine
from trinity.simulation.cluster_model import SimulatedCluster
from trinity.simulation.rate_sweep import RateSweep, replay_compiled, why_on_cores
from trinity.simulation.replay_result import Replay as Replay
from trinity.simulation.replay_result import describe_compiled, describe_cores
from trinity.simulation.role_switches import AdaptiveCluster, PlacementChange, plan_switches
from trinity.simulation.screening_table import ScreenedInstances, StandIn, screen_settings
from trinity.simulation.workload import has_shared_content, jobs_of
from trinity.stage_kinds import roles_of
from trinity.traces.goodput import ServeFunction
from trinity.traces.trace import SLO, Trace

SIMULATOR_BACKENDS = ("auto", "python", "compiled", "screening")


@check_arguments
@dataclass(frozen=True)
class SimulatorConfig(CoreOptions, RoutingOptions, SchedulingOptions):
    """Arguments of a ``Simulator``.

    - ``model``: a ``ModelShape``, its name, or a checkpoint's folder or hub id.
    - ``slo`` (s): bounds that budgets keep and requests are judged by.
    - ``cluster``: devices, hosts and links.
    - ``cost`` (None): seconds of a step, or the file of measured tables, for every device or by its name. None: a
      roofline of the model and each device. Tables are of this model and these devices, with the seconds of all stages
      that a placement has there.
    - ``budgets`` (None): ``StepBudgets`` of every instance, or by roles. None: the largest that keep a step within the
      latency bound of the instance's roles, as a pipeline with this SLO searches them (Algorithm 1, line 5).
    - ``interference`` (factor, None): slow-down of each of two lanes while both are busy. None: as in ``cost``.
    - ``memory_share`` (0.9): share of a device's memory; pools are what the weights leave of it.
    - ``ask`` (tokens, 0): least ``max_tokens`` of every request, though it stops after its output; rows with
      ``max_tokens`` ask for these.
    - ``step_factor`` (1.0): how much longer steps take than their costs say, at the budgets searched by these.
    - ``backend`` ("auto"): "python", the cores themselves; "compiled", the screening engine where its replays are
      theirs to the bit; "auto", that one where they are (``why_python``), else the cores; "screening", that one with
      the nearest settings that it has (``stand_ins``), and the cores for media that it does not know.
    """

    model: ModelShape | str | Path
    slo: SLO
    _: KW_ONLY
    cluster: Cluster
    cost: GivenCosts = None
    budgets: StepBudgets | Mapping[str, StepBudgets] | None = None
    interference: Annotated[float, msgspec.Meta(ge=1)] | None = None
    memory_share: Share = 0.9
    ask: Count = 0
    step_factor: Positive = 1.0
    backend: str = "auto"

    def __post_init__(self) -> None:
        self.check()
        if self.backend not in SIMULATOR_BACKENDS:
            raise UnknownName("backend", self.backend, SIMULATOR_BACKENDS)
        if not isinstance(self.routing, str | None):
            raise ConfigError("a simulation makes a policy for each of its cores: give routing= the name of one")


@documented_by(SimulatorConfig)
class Simulator:
    """Replays traces on placements of one model on one cluster.

    {settings}

    Budgets of the ``rules`` are those of ``budgets``. Transfers with ``kv="auto"`` are taken as "off": streaming gains
    a goodput 2 % at most (decision 0033), and a replay of it takes the cores, which are slow; so does one of requests
    whose images may have several encoders (``spread``). Raises ``ConfigError`` (``UnknownName``, ``PlacementError``)
    for what cannot be.
    """

    @takes(SimulatorConfig)
    def __init__(self, config: SimulatorConfig, _: Set[str]) -> None:
        self.config, self.slo, self.cluster, self.backend = config, config.slo, config.cluster, config.backend
        self.model, self.cost = find_model_shape(config.model), load_costs(config.cost)
        check_costs(self.cost, self.model, self.cluster.devices, stages="")  # of those that it has where one is placed
        self.interference = interference_of(self.cost) if config.interference is None else config.interference
        if not 1 <= self.interference < inf:  # the costs' own
            raise ConfigError(f"interference is at least 1, got {self.interference!r}")
        self.rules, self.routing = config.rules or BatchRules(), str(config.routing or DEFAULT_ROUTING)
        self.informed = bool(getattr(routing_policy(self.routing), "informed", False))
        self._known: dict[tuple[str, int], tuple[BatchRules, dict[str, int]]] = {}
        self._last: tuple[Placement, bool, list[Settings]] | None = None

    @check_call
    def check(self, placement: Placement | str) -> None:
        """Raise ``PlacementError`` where a placement has not one instance for each device, or is none; ``ConfigError``
        that says how much memory is missing where the model's parts do not fit a device."""
        self.settings(placement)

    @check_call
    def settings(self, placement: Placement | str, *, shared: bool = True) -> list[Settings]:
        """Return the settings of each instance's core; caches are on where content is ``shared``."""
        parsed = Placement.parse(placement) if isinstance(placement, str) else placement
        if parsed.size != self.cluster.size:
            raise PlacementError(
                f"placement {parsed} has {parsed.size} instance(s) and the cluster {self.cluster.size} device(s): "
                "one runs on each"
            )
        if self._last is None or self._last[:2] != (parsed, shared):
            instances, given = enumerate(parsed.instances()), (shared, self._spread_on(parsed) > 1)
            found = [self._settings(name, roles, place, *given) for place, (name, roles) in instances]
            self._last = (parsed, shared, found)
        return list(self._last[2])

    def _spread_on(self, placement: Placement | str) -> int:
        """Count the encoders that a request may have: one where no other instance with E could help."""
        parsed = Placement.parse(placement) if isinstance(placement, str) else placement
        count = sum(roles_of(roles).encodes for _, roles in parsed.instances())
        return self.config.spread or 1 if count > 1 else 1

    def _settings(self, name: str, roles: str, place: int, shared: bool, helped: bool) -> Settings:
        rules, pools = self._sizes_of_roles(roles, place)
        own, transfers = self.config, self.config.transfers
        caches = {
            "image_cache": own.image_cache and (shared or helped),
            "prefix_cache": own.prefix_cache and shared,
        }
        return Settings(
            name,
            roles,
            dict(pools),
            rules,
            layers=self.model.kv_layers,
            transfers=replace(transfers, kv="off") if transfers.kv == "auto" else transfers,
            lease_s=inf,
            report_s=Settings.report_s if self.informed or helped else inf,
            **pick_fields(CoreOptions, own) | caches | {"lanes": own.lanes_of(roles)},
        )

    def _sizes_of_roles(self, roles: str, place: int) -> tuple[BatchRules, dict[str, int]]:
        """Return rules with their budgets, and pools, of an instance of these roles; once for equal devices."""
        device = self.cluster.devices[place]
        first = self.cluster.devices.index(device)
        known = self._known.get((roles, first))
        if known is None:
            check_costs(self.cost, self.model, [device], roles)
            pools = self.model.pools(roles, self.config.memory_share * device.memory)
            budgets, cost = self._budgets_of(roles, place), self.rules.cost or self.cost_of(place)
            rules = replace(
                self.rules,
                token_budget=budgets.token_budget,
                image_budget=budgets.image_budget,
                limit_s=budgets.limit_s,
                cost=cost,
            )
            known = self._known[roles, first] = (rules, pools)
        return known

    def _budgets_of(self, roles: str, place: int) -> StepBudgets:
        given = self.config.budgets
        if isinstance(given, StepBudgets):
            return given
        if given is not None:
            if roles not in given:
                raise ConfigError(f"no budgets are given for instances of roles {roles}: there are {', '.join(given)}")
            return given[roles]
        limit = latency_bound(roles, self.slo.ttft, self.slo.tbt)
        image = self.model.image_tokens if self.model.encoder else 0
        beside = self.interference if len(self.config.lanes_of(roles)) > 1 else 1.0
        return predict_budgets(self.cost_of(place).seconds, roles, limit, image, warn=False, interference=beside)

    @check_call
    def cost_of(self, place: int) -> CostModel:
        """Return the cost model of the device at this place."""
        if not 0 <= place < self.cluster.size:
            raise ConfigError(f"devices are numbered from 0 to {self.cluster.size - 1}, got {place}")
        return cost_for_device(self.cluster.devices[place], self.model, self.cost)

    def _step_costs(self, count: int) -> list[CostModel]:
        """Return what steps cost in a replay, of the first ``count`` devices."""
        return [stretch_cost(self.cost_of(place), self.config.step_factor) for place in range(count)]

    @check_call
    def serve(self, placement: Placement | str) -> ServeFunction:
        """Return what serves traces on this placement, for ``trinity.traces.goodput``. Raises as ``check``."""
        self.check(placement)
        return RateSweep(
            lambda trace: self.replay(trace, placement).outcomes,
            lambda shared: None if self.why_python(placement) else self._compile(placement, shared),
            self.model,
        )

    @check_call
    def why_python(
        self,
        placement: Placement | str,
        *,
        record: bool = False,
        changes: Sequence[PlacementChange] = (),
        trace: Trace | None = None,
    ) -> str:
        """Return the reason why the Python engine replays this placement, or this trace on it; "" where the compiled
        one does.

        Raises ``ConfigError`` where ``backend`` is "compiled" or "screening" and that cannot run it (decision 0033).
        """
        if self.backend == "python":
            return "it was asked for"
        found = self._screen(placement, shared=True)
        why = compiled_engine.why_unavailable() or (found.missing if self.backend == "screening" else found.inexact)
        why = why or ("timelines" if record else "instances that switch roles" if changes else "")
        if not why and trace is not None and (why := why_on_cores(trace, self.model)) and self.backend == "screening":
            return why
        if why and self.backend != "auto":
            raise ConfigError(
                f"the {self.backend} engine cannot do this ({why}): take backend='auto', which replays in Python"
            )
        return why

    @check_call
    def screens(self, placement: Placement | str) -> bool:
        """Check if the screening engine is available and has a value or a stand-in for every setting."""
        return not (compiled_engine.why_unavailable() or self._screen(placement, shared=True).missing)

    @check_call
    def stand_ins(self, placement: Placement | str) -> tuple[StandIn, ...]:
        """Return the stand-ins that the screening engine takes; none where its replays are the cores' own."""
        return self._screen(placement, shared=True).stand_ins

    def _screen(self, placement: Placement | str, *, shared: bool) -> ScreenedInstances:
        settings = self.settings(placement, shared=shared)
        return screen_settings(settings, self._step_costs(len(settings)), self.routing, self._spread_on(placement))

    def _compile(self, placement: Placement | str, shared: bool) -> compiled_engine.CompiledPlacement:
        found = self._screen(placement, shared=shared)
        return compiled_engine.CompiledPlacement(
            found.settings,
            cluster=self.cluster,
            costs=self._step_costs(len(found.settings)),
            model=self.model,
            max_waiting=self.config.max_waiting,
            interference=self.interference,
            ask=self.config.ask,
            least_loaded=found.least_loaded,
        )

    @check_call
    def replay(
        self,
        trace: Trace,
        placement: Placement | str,
        *,
        record: bool = False,
        changes: Sequence[PlacementChange] = (),
    ) -> Replay:
        """Replay every request of the trace at its time, until the last has ended. ``record``: the timeline too.

        changes (()): placements that instances switch to meanwhile, by the cores that switch live.

        Raises as ``check``, ``TraceError`` for invalid time stamps, and ``AssertionError`` where a request did not end
        or blocks did not come back, which is a fault of trinity.
        """
        if not self.why_python(placement, record=record, changes=changes, trace=trace):
            return describe_compiled(
                *replay_compiled(trace, self.model, lambda shared: self._compile(placement, shared))
            )
        run = self.prepare(trace, placement, record=record, changes=changes)
        run.run()
        _check_end(run)
        return describe_cores(run)

    @check_call
    def prepare(
        self,
        trace: Trace,
        placement: Placement | str,
        *,
        record: bool = False,
        changes: Sequence[PlacementChange] = (),
    ) -> SimulatedCluster:
        """Set up the cores and the requests, before the first event."""
        spread = max(map(self._spread_on, (placement, *(each.placement for each in changes))))
        jobs = jobs_of(trace, self.model, tiled=spread > 1)
        shared = has_shared_content(jobs)
        settings = self.settings(placement, shared=shared)
        options: dict[str, Any] = {
            "cluster": self.cluster,
            "costs": self._step_costs(len(settings)),
            "model": self.model,
            "routing": self._policy(),
            "frontend": FrontendOptions(spread=spread, max_waiting=self.config.max_waiting, failures=NO_RECOVERY),
            "interference": self.interference,
            "shared": shared,
            "record": record,
            "ask": self.config.ask,
        }
        if not changes:
            return SimulatedCluster(settings, jobs, **options)
        places, helped = {each.name: place for place, each in enumerate(settings)}, spread > 1

        def become(name: str, roles: str) -> Settings:
            return self._settings(name, roles, places[name], shared, helped)

        plans = plan_switches(changes, settings, become)
        return AdaptiveCluster([become(each.name, each.roles) for each in settings], jobs, plans, **options)

    def _policy(self) -> Callable[[], RoutingPolicy]:
        return lambda: routing_policy(self.routing)


def _check_end(run: SimulatedCluster) -> None:
    open_ones = [number for number, reason in enumerate(run.reasons) if not reason]
    if open_ones:
        raise AssertionError(f"{len(open_ones)} requests never ended, such as number {open_ones[0]}")
    for name, core in run.cores.items():
        if not core.idle():
            raise AssertionError(f"instance {name} still holds something when all requests have ended")
        core.check()
