"""Hardware: the devices that a plan may use, and a simulator for each deployment on them."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from trinity.core.scheduler import BatchRules
from trinity.costs.cluster import Cluster
from trinity.costs.engines import DEFAULT_ENGINE, Engine
from trinity.costs.model_shape import ModelShape
from trinity.costs.step_cost import CostModel, Device, cost_for_device, get_device
from trinity.errors import ConfigError
from trinity.errors.arguments import check_keywords, explain_call
from trinity.planner.bounds import Kind
from trinity.planner.candidates import Deployment
from trinity.planner.prices import label_devices
from trinity.planner.search_config import SearchConfig
from trinity.planner.search_space import simulator_options
from trinity.simulation.rate_sweep import why_on_cores
from trinity.simulation.screening_table import StandIn
from trinity.simulation.simulator import Simulator, SimulatorConfig
from trinity.traces.trace import SLO, Trace

Devices = str | Device | Mapping[str | Device, int]
DEFAULT_DEVICE = "H100"
_SIMULATED = inspect.signature(Simulator).parameters.keys() - {"step_factor"}


def check_simulator_options(options: Mapping[str, Any], own: Iterable[str]) -> dict[str, Any]:
    """Return a planner's options of its simulators, each of its type.

    - ``own``: keywords of the planner itself, to name the nearest of all.

    Raises ``ConfigError`` for one that no simulator has or a plan sets itself, and says where it belongs, and for a
    value of another type or out of bounds.
    """
    hints = {field.name: f": it is a field of search=SearchConfig({field.name}=...)" for field in fields(SearchConfig)}
    hints["step_factor"] = ": a plan tries longer steps itself (Candidate.longer_steps); a Simulator takes it"
    for name in sorted(options.keys() - _SIMULATED):
        if name in hints:
            raise ConfigError(f"HybridPlanner() has no keyword {name!r}{hints[name]}")
        raise ConfigError(explain_call("HybridPlanner", [name], [*own, *sorted(_SIMULATED - set(own))], TypeError()))
    return check_keywords(SimulatorConfig, options)


def choose_cluster(cluster: Cluster | None, device: Devices, instances: int | None, engine: Engine) -> Cluster:
    """Return the cluster that is given, or one of these devices, as ``cluster_of``.

    Raises ``ConfigError`` for a device or an engine beside a cluster, whose devices have theirs.
    """
    if cluster is None:
        return cluster_of(device, instances, engine=engine)
    if (device, engine) != (DEFAULT_DEVICE, DEFAULT_ENGINE):
        raise ConfigError(
            f"device={device!r} and engine={engine!r} are not read beside cluster=, whose devices have their engine: "
            'leave them out, and say Cluster.of("H100", 8, engine="eager")'
        )
    return cluster


def cluster_of(device: Devices, instances: int | None, **links: Any) -> Cluster:
    """Make a cluster of ``instances`` of one device (8 if None), or of a count of each.

    Raises ``ConfigError`` for a count below 1 and where both are given and differ, ``UnknownName`` for a device.
    """
    if instances is not None and instances < 1:
        raise ConfigError(f"a plan is for at least 1 instance, got instances={instances}")
    if isinstance(device, str | Device):
        return Cluster.of(device, 8 if instances is None else instances, **links)
    if not device or any(not isinstance(count, int) or count < 1 for count in device.values()):
        raise ConfigError(f"give at least 1 of each device, got {dict(device)!r}")
    return Cluster.of(*device.items(), **links)


class Hardware:
    """A model on a cluster: kinds of device by name, what fits on which, simulators.

    ``cost`` replaces the roofline of every device, or of each by its name. ``options`` are the simulator's. Raises
    ``ConfigError`` where they are none, and for two different devices of one name.
    """

    def __init__(
        self,
        model: ModelShape,
        cluster: Cluster,
        cost: CostModel | Mapping[str, CostModel] | None,
        prices: Mapping[str, float],
        options: Mapping[str, Any],
    ) -> None:
        self.model, self.cluster, self.cost, self.options = model, cluster, cost, dict(options)
        self.by_name: dict[str, Device] = {}
        for each in cluster.devices:
            if self.by_name.setdefault(each.name, each) != each:
                raise ConfigError(f"two different devices are called {each.name!r}: give each kind a name of its own")
        self.prices = self._prices(prices)
        self.memory_share = float(self.options.get("memory_share", 0.9))
        self.kinds = {
            name: Kind.of(each, cost_for_device(each, model, cost), self.memory_share)
            for name, each in self.by_name.items()
        }
        self.labels = label_devices(self.by_name, {name: kind.cost for name, kind in self.kinds.items()})
        self._simulators: dict[tuple[Any, ...], Simulator] = {}
        self._fitting: dict[tuple[str, str], str] = {}

    def _prices(self, given: Mapping[str, float]) -> dict[str, float | None]:
        for name, price in given.items():
            if name not in self.by_name:
                get_device(name)  # a name that is nobody's
            if not price > 0:
                raise ConfigError(f"the price of {name} must be a positive number, got {price!r}")
        return {name: given.get(name, device.price) for name, device in self.by_name.items()}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.cluster.devices)

    @property
    def available(self) -> Counter[str]:
        return Counter(self.names)

    def price(self, names: Sequence[str]) -> float | None:
        """Return the price of an hour of these devices; None where one has no price."""
        prices = [self.prices[name] for name in names]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    def needed_price(self, names: Sequence[str]) -> float:
        """Return the price as ``price`` does. Raises ``ConfigError`` where a device has none."""
        price = self.price(names)
        if price is None:
            missing = sorted(name for name in set(names) if self.prices[name] is None)
            raise ConfigError(f"no price is known of {', '.join(missing)}: give prices={{{missing[0]!r}: ...}} an hour")
        return price

    def misfit(self, deployment: Deployment) -> str:
        """Return the reason why this deployment cannot hold the model; "" where it can."""
        whys = (self._misfit(roles, name) for _, roles, name in deployment.groups)
        return next((why for why in whys if why), "")

    def _misfit(self, roles: str, name: str) -> str:
        if (roles, name) not in self._fitting:
            try:
                self.model.pools(roles, self.kinds[name].memory)
                self._fitting[roles, name] = ""
            except ConfigError as error:
                self._fitting[roles, name] = f"on {name}: {error}"
        return self._fitting[roles, name]

    def simulator(self, deployment: Deployment, slo: SLO, **options: Any) -> Simulator:
        """Return the simulator of this deployment's devices, in their order, and its settings; made once for each."""
        # Which host an instance is on hangs on its roles, and so do the budgets of a deployment's own settings.
        placed = str(deployment) if self.cluster.hosts or deployment.settings else ""
        key = (deployment.devices, placed, deployment.settings, slo, tuple(options.items()))
        if key not in self._simulators:
            knobs = simulator_options(
                deployment, slo, self.model, self.kinds, self.options.get("rules") or BatchRules()
            )
            self._simulators[key] = Simulator(
                self.model,
                slo,
                cluster=self._select_devices(deployment.devices).arrange_for(deployment.placement),
                cost=self.cost,
                **self.options | knobs | options,
            )
        return self._simulators[key]

    def list_settings(self, deployment: Deployment) -> dict[str, str | int | float]:
        """List the settings to serve a deployment with: its own and, of the planner's, several encoders a request."""
        spread = int(self.options.get("spread", 1))
        own: dict[str, str | int | float] = {"spread": spread} if spread > 1 else {}
        return own | dict(deployment.settings)

    def search_simulator(self, deployment: Deployment, slo: SLO, **options: Any) -> Simulator:
        """Return the simulator that a search replays on.

        It is the screening engine with the nearest settings that it has, or the cores where it has none or the user
        chose them.
        """
        asked = self.simulator(deployment, slo, **options)
        screens = asked.backend == "auto" and asked.screens(deployment.placement)
        return self.simulator(deployment, slo, backend="screening", **options) if screens else asked

    def why_on_cores(self, deployment: Deployment, slo: SLO, trace: Trace) -> str:
        """Return the reason why a search replays on the slow cores although the user did not choose them; else ""."""
        asked = self.simulator(deployment, slo)
        if asked.backend != "auto":
            return ""
        if not asked.screens(deployment.placement):
            return asked.why_python(deployment.placement)
        return why_on_cores(trace, self.model)

    def stand_ins(self, deployment: Deployment, slo: SLO) -> tuple[StandIn, ...]:
        """Return the stand-ins that a search takes for settings; none where its replays are those of the cores."""
        asked = self.search_simulator(deployment, slo)
        return asked.stand_ins(deployment.placement) if asked.backend == "screening" else ()

    def _select_devices(self, names: Sequence[str]) -> Cluster:
        """Select these devices of the cluster, each on its own host."""
        places: dict[str, deque[int]] = defaultdict(deque)
        for place, device in enumerate(self.cluster.devices):
            places[device.name].append(place)
        taken = [places[name].popleft() for name in names]
        hosts = tuple(self.cluster.hosts[place] for place in taken) if self.cluster.hosts else ()
        devices = tuple(self.cluster.devices[place] for place in taken)
        return msgspec.structs.replace(self.cluster, devices=devices, hosts=hosts)
