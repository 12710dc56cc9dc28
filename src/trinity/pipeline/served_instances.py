"""ServedInstances: instances of a pipeline, on threads of its process or in processes of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

from trinity.connector import Connector
from trinity.core.routing.router import RoutingPolicy, routing_policy
from trinity.errors import ConfigError
from trinity.instance import Instance
from trinity.pipeline.frontend_host import FrontendHost
from trinity.pipeline.thread_instances import ThreadInstances
from trinity.placement import Placement
from trinity.preprocess.processor import RequestProcessor
from trinity.remote.channel.wire import Setup
from trinity.remote.supervision import attached_instances, instance_processes, planned_restart
from trinity.remote.supervision import process_config as supervisor
from trinity.remote.supervision.instance_client import InstanceClient
from trinity.remote.supervision.supervisor_messages import InstanceHealth
from trinity.runtime import loader
from trinity.runtime.host import InstanceHost, LoadedInstance
from trinity.runtime.shielded_wait import run_to_end
from trinity.timeline import Timeline


class ServedInstances:
    """Instances of one pipeline as they are placed now, and how they begin, end and follow one another.

    - ``specs``: them, with their settings. ``placement``: the placement that they are.
    - ``supervisor`` (None): starts, watches and ends those in processes, once they were started.
    - ``config``, ``connector``, ``routing``, ``hosting``, ``terms`` (its ``ProcessConfig``), ``secret``, ``frontend``,
      ``timeline``: the pipeline's.
    """

    def __init__(
        self,
        specs: Sequence[Instance],
        placement: Placement,
        *,
        config: loader.ServingConfig,
        connector: Connector,
        routing: str | RoutingPolicy,
        hosting: Literal["thread", "process"],
        terms: supervisor.ProcessConfig,
        secret: bytes | None,
        frontend: FrontendHost,
        timeline: Timeline,
    ) -> None:
        self.specs, self.placement = list(specs), placement
        self.config, self.hosting, self.terms = config, hosting, terms
        self.supervisor: instance_processes.InstanceSupervisor | None = None
        self._connector, self._routing, self._secret = connector, routing, secret
        self._frontend, self._timeline = frontend, timeline
        self._threads = ThreadInstances(frontend, timeline, connector, lambda: routing_policy(routing))

    @property
    def hosts(self) -> dict[str, InstanceHost]:
        """Instances of this process, by name."""
        return self._threads.hosts

    @property
    def clients(self) -> dict[str, InstanceClient]:
        """Instances in processes of their own, by name."""
        return self.supervisor.members if self.supervisor is not None else {}

    @property
    def health(self) -> dict[str, InstanceHealth]:
        """State of the instances in processes of their own, by name."""
        return self.supervisor.health() if self.supervisor is not None else {}

    def find(self, name: str) -> Instance | None:
        """Return an instance's settings; None where none has this name."""
        return next((each for each in self.specs if each.name == name), None)

    # ---------------------------------------------------------------- start and end of all

    async def start(self, processor: RequestProcessor) -> None:
        """Load all and have the front end reach them. Raises the error for which one could not be started."""
        if self.hosting == "thread":
            self._threads.start(await run_to_end(loader.load_instances, self.config, self.specs, processor))
            return
        setups = self.make_setups(self.specs)
        self.supervisor = attached_instances.supervise(
            self._frontend.core.name,
            self._frontend,
            self._timeline,
            supervisor.parse_addresses(self.specs),
            secret=self._secret,
            config=self.terms,
        )
        self._frontend.reached.update(await self.supervisor.start(setups))

    def watch(self) -> None:
        """Tell the front end of losses and returns from now on: it must know an instance before it is lost."""
        if self.supervisor is not None:
            self.supervisor.watch()

    async def drain(self, idle: Coroutine[Any, Any, None]) -> None:
        """Start none any more, and wait until they are idle; of those in processes not for ever."""
        await (idle if self.supervisor is None else self.supervisor.drain(idle))

    async def aclose(self) -> None:
        """End every process, in which nothing runs any more."""
        if self.supervisor is not None:
            await self.supervisor.aclose()

    def make_setups(self, specs: Sequence[Instance]) -> list[Setup]:
        """Build the setup message of each instance, where these are all."""
        return supervisor.make_setups(specs, self.config, self._connector, str(self._routing), self.terms.supply)

    # ---------------------------------------------------------------- one that changes

    def check_place(self, spec: Instance) -> None:
        """Check that one more instance may run where it says. Raises ``ConfigError``."""
        supervisor.check_hosting(self.hosting, [spec], self.terms)
        if spec.address is not None and self._secret is None:
            raise ConfigError(
                f"instance {spec.name} runs already, and this pipeline has a secret of its own: start the pipeline "
                "with ProcessConfig(secret=...), and the instance with the same as its TRINITY_SECRET"
            )

    async def begin(self, spec: Instance, after: Sequence[Instance]) -> float:
        """Begin one more instance; return when it had loaded its weights and pools (s, ``perf_counter``).

        after: all instances as they are then. Raises the error for which it does not come up, and all is as it was.
        """
        if self.supervisor is not None:
            by_hand = self.supervisor.attach(spec)
            return await planned_restart.begin_life(self.supervisor, spec.name, self.make_setups(after), by_hand)
        loaded = await self._load(spec, after)
        loaded_at = time.perf_counter()
        self._threads.begin(loaded)
        return loaded_at

    async def end(self, name: str, emptied: planned_restart.Emptied, note_end: Callable[[], None]) -> None:
        """End an instance for good. ``emptied``, ``note_end``: as ``planned_restart.replace_life`` has them."""
        if self.supervisor is not None:
            await planned_restart.end_life(self.supervisor, name, emptied, note_end)
        else:
            await self._threads.end(name, emptied, note_end)

    async def replace(
        self,
        spec: Instance,
        after: Sequence[Instance],
        emptied: planned_restart.Emptied,
        note_end: Callable[[], None],
    ) -> float:
        """End the present life of an instance, and begin the next one by these settings.

        Returns when that had loaded (s, ``perf_counter``); on threads 0.0, as it loads before the present one ends.
        """
        if self.supervisor is not None:
            setups = self.make_setups(after)
            return await planned_restart.replace_life(self.supervisor, spec.name, setups, emptied, note_end)
        await self._threads.replace(await self._load(spec, after), emptied, note_end)
        return 0.0

    async def _load(self, spec: Instance, after: Sequence[Instance]) -> LoadedInstance:
        began = time.perf_counter()
        [loaded] = await run_to_end(loader.load_instances, self.config, [spec], self._frontend.processor, after)
        self._threads.check_weights(loaded)
        self._timeline.add(spec.name, "switch", f"migration to {spec.roles}", began, time.perf_counter() - began)
        return loaded
