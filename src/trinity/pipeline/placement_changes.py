"""PlacementChanges: a running pipeline's instances switch roles, come and go, one at a time, and nothing is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

from trinity.adapt.auto import name_shape
from trinity.connector import Connector
from trinity.core.role_changes import RoleChange, Switch, order_changes
from trinity.core.routing import RoutingPolicy, routing_policy
from trinity.errors import ChangeRefused, ClosedError, ConfigError, PlacementError, TrinityError
from trinity.errors.arguments import Number, check_value
from trinity.instance import Instance
from trinity.pipeline.deploy import InstanceOptions, list_plan_options
from trinity.pipeline.frontend_host import FrontendHost
from trinity.pipeline.switch_order import (
    check_added,
    check_removed,
    check_switch,
    describe_instances,
)
from trinity.pipeline.thread_instances import ThreadInstances
from trinity.placement import Placement
from trinity.planner import Plan
from trinity.remote import instance_processes, planned_restart, supervisor
from trinity.remote.instance_client import InstanceClient
from trinity.remote.supervisor_messages import InstanceHealth
from trinity.remote.wire import Setup
from trinity.runtime import loader
from trinity.runtime.host import InstanceHost, LoadedInstance
from trinity.runtime.shielded_wait import carry_through, run_to_end
from trinity.timeline import Timeline

logger = logging.getLogger("trinity")
DRAIN_S = 30.0


class PlacementChanges:
    """Part of ``Pipeline``: its instances change while it serves (EPDServe 3.2.4, TriInfer 4.4).

    A switch is a planned restart: a next life with other roles loads beside the instance, new work goes past that, what
    is there ends or moves on, and the next life takes its place; a removal has none. A request that is still there
    after ``drain_s`` is recovered as after a loss, exactly.
    """

    instances: list[Instance]
    placement: Placement
    hosts: dict[str, InstanceHost]
    timeline: Timeline
    connector: Connector
    routing: str | RoutingPolicy
    hosting: Literal["thread", "process"]
    _options: InstanceOptions
    _secret: bytes | None
    _frontend: FrontendHost
    _serving_config: loader.ServingConfig
    _process_config: supervisor.ProcessConfig
    _processes: instance_processes.InstanceSupervisor | None = None
    _changing = ""

    @property
    def change(self) -> str:
        """The change that is under way, "instance E1 switches to D"; "" where none is."""
        return self._changing

    @property
    def processes(self) -> dict[str, InstanceClient]:
        """The instances in processes of their own, by name."""
        return self._processes.members if self._processes is not None else {}

    @property
    def health(self) -> dict[str, InstanceHealth]:
        """State of the instances in processes of their own, by name: who is away, why, and when it is started again."""
        return self._processes.health() if self._processes is not None else {}

    async def switch(self, name: str, roles: str, *, drain_s: float = DRAIN_S) -> Switch:
        """Have an instance switch to other roles: ``await pipe.switch("E1", "D")``; it keeps its name.

        drain_s: how long requests that are there may take to end. Cancelled before it is empty, it stays as it was.

        Raises ``UnknownName``, ``PlacementError`` for roles that it may not have, or a stage that would be left without
        an instance; ``ChangeRefused`` during another change, or while an instance is away; and the error for which its
        next life cannot be loaded, and nothing has changed, or for which it does not come up, in which case it has its
        former roles again.
        """
        drain_s = check_value("drain_s", drain_s, Number)
        async with self._change(f"instance {name} switches to {roles}"):
            return await self._carry_out(check_switch(self.instances, name, roles), {}, drain_s)

    async def add(self, instance: Instance) -> Switch:
        """Add an instance: ``await pipe.add(trinity.Instance("D"))``; it gets the next free name if it has none.

        Raises ``ConfigError`` for a name that is in use, an address without ``ProcessConfig(secret=...)``, or one that
        the transport does not reach; ``PlacementError`` for roles that the model has no use for; ``ChangeRefused`` as
        ``switch`` does; and the error for which it does not come up. Then, or cancelled, all is as it was.
        """
        spec = check_added(self.instances, check_value("instance", instance, Instance))
        async with self._change(f"instance {spec.name} is added"):
            self._check_new(spec)
            return await self._begin(spec)

    async def remove(self, name: str, *, drain_s: float = DRAIN_S) -> Switch:
        """Remove an instance, as soon as it is empty or ``drain_s`` has passed: ``await pipe.remove("D1")``.

        Cancelled before that, it stays. One that is away itself may be removed. Raises ``UnknownName``;
        ``PlacementError`` for the last one of a stage; ``ChangeRefused`` as ``switch`` does.
        """
        drain_s = check_value("drain_s", drain_s, Number)
        async with self._change(f"instance {name} is removed", but=name):
            return await self._end(check_removed(self.instances, name), drain_s)

    async def apply(
        self, placement: str | Placement | Plan, *, resize: bool = False, drain_s: float = DRAIN_S
    ) -> list[Switch]:
        """Have instances switch, one after another, until they are this placement; return the switches.

        They are the fewest that do, in an order in which no stage is left without an instance, if there is one: else
        requests wait for that stage meanwhile (``FailurePolicy.wait_s``). Of a ``Plan`` they take its settings, too.

        resize (False): take a placement of another number of instances. Those that lack are added first, as the
        pipeline's own keywords make them; those too many are removed last.

        Raises as ``switch`` and ``add`` do, and ``PlacementError`` for another number of instances without ``resize``,
        or a plan for another model. After an error all changes are undone, the last one first.
        """
        drain_s = check_value("drain_s", drain_s, Number)
        async with self._change(f"placement {placement} is applied" if isinstance(placement, str) else "it is changed"):
            wanted = self._read_placement(placement)
            wanted.check(self._frontend.multimodal)
            done: list[Switch] = []
            former = list(self.instances)
            try:
                for change in order_changes(self.instances, wanted, resize):
                    options = list_plan_options(placement, change.roles) if isinstance(placement, Plan) else {}
                    done.append(await self._carry_out(change, options, drain_s))
            except ClosedError:
                raise
            except TrinityError:
                await self._undo(done, former, drain_s)
                raise
            return done

    @property
    def change_obstacle(self) -> str:
        """Reason why no change can be made just now: another one, or an instance that is away; empty if one can."""
        return self._find_obstacle("")

    def _find_obstacle(self, but: str) -> str:
        """Find a reason why no change can be made just now; ``but``: an instance that may be away."""
        if self._process_config.attach:
            return "the pipeline that set the instances up changes them, and this one is attached to them"
        if self._changing:
            return f"another change is under way ({self._changing}); wait until it is done"
        away = {} if self._processes is None else self._processes.health()
        told = [f"{name} is {health.state}" for name, health in away.items() if health.state != "up" and name != but]
        return f"an instance is away ({', '.join(told)}); wait until all are up" if told else ""

    def _read_placement(self, given: str | Placement | Plan) -> Placement:
        if isinstance(given, Plan):
            known = name_shape(self._serving_config.model)
            if known is not None and known != given.model:
                raise PlacementError(f"the plan is for {given.model}, and {known} is served; plan for that")
            given = given.placement
        return Placement.parse(given) if isinstance(given, str) else check_value("placement", given, Placement)

    async def _undo(self, done: Sequence[Switch], former: Sequence[Instance], drain_s: float) -> None:
        """Undo changes, the last one first. What cannot be undone is logged: the error that led here matters more."""
        settings = {each.name: each for each in former}
        for each in reversed(done):
            try:
                if not each.former:
                    await self._end(each.name, drain_s)
                elif not each.roles:
                    await self._begin(settings[each.name])
                else:
                    await self._begin_anew(settings[each.name], drain_s)
            except TrinityError:
                logger.exception("the change of instance %s could not be undone", each.name)

    @asynccontextmanager
    async def _change(self, what: str, but: str = "") -> AsyncIterator[None]:
        """Make this the one change that is under way. Raises ``ChangeRefused`` during another, or a recovery.

        but: an instance that may be away.
        """
        self._frontend.check_open()
        if obstacle := self._find_obstacle(but):
            raise ChangeRefused(obstacle)
        self._changing = what
        try:
            yield
        finally:
            self._changing = ""

    async def _carry_out(self, change: RoleChange, options: Mapping[str, Any], drain_s: float) -> Switch:
        """Carry out one change of an order: of an instance that runs, of a new one, or to none."""
        former = next((each for each in self.instances if each.name == change.name), None)
        if former is None:
            return await self._begin(Instance(change.roles, change.name, **{**options, **self._options}))
        if not change.roles:
            return await self._end(change.name, drain_s)
        return await self._begin_anew(replace(former, roles=change.roles, **options), drain_s)

    def _check_new(self, spec: Instance) -> None:
        """Check that an instance may be added here. Raises ``ConfigError`` or ``PlacementError``."""
        describe_instances([*self.instances, spec]).check(self._frontend.multimodal)
        supervisor.check_hosting(self.hosting, [spec], self._process_config)
        if spec.address is not None and self._secret is None:
            raise ConfigError(
                f"instance {spec.name} runs already, and this pipeline has a secret of its own: start the pipeline "
                "with ProcessConfig(secret=...), and the instance with the same as its TRINITY_SECRET"
            )

    async def _begin(self, spec: Instance) -> Switch:
        """Begin one more instance."""
        instances, began = [*self.instances, spec], time.perf_counter()
        if self._processes is not None:
            by_hand = self._processes.attach(spec)
            setups = self._make_setups(instances)
            loaded_at = await planned_restart.begin_life(self._processes, spec.name, setups, by_hand)
        else:
            loaded = await self._load(spec, instances)
            loaded_at = time.perf_counter()
            self._threads.begin(loaded)
        now = time.perf_counter()
        done = Switch(spec.name, "", spec.roles, 0.0, now - began, True, loaded_at - began)
        return self._note(done, instances, began, began)

    async def _end(self, name: str, drain_s: float) -> Switch:
        """End an instance for good. Cancelled once it is empty, it ends all the same, and is noted."""
        emptying = _Emptying(self._frontend, name, drain_s)
        return await carry_through(self._end_once_empty(name, emptying), emptying.goes_on)

    async def _end_once_empty(self, name: str, emptying: _Emptying) -> Switch:
        former = next(each for each in self.instances if each.name == name)
        instances, began = [each for each in self.instances if each is not former], time.perf_counter()
        if self._processes is not None:
            await planned_restart.end_life(self._processes, name, *emptying.parts())
        else:
            await self._threads.end(name, *emptying.parts())
        emptied, began = emptying.ended_at or began, emptying.began_at or began
        done = Switch(name, former.roles, "", emptied - began, time.perf_counter() - emptied, emptying.emptied)
        return self._note(done, instances, began, emptied)

    async def _begin_anew(self, spec: Instance, drain_s: float) -> Switch:
        """End the present life of an instance, and begin the next one by these settings; cancelled as in ``_end``."""
        emptying = _Emptying(self._frontend, spec.name, drain_s)
        return await carry_through(self._begin_once_empty(spec, emptying), emptying.goes_on)

    async def _begin_once_empty(self, spec: Instance, emptying: _Emptying) -> Switch:
        former = next(each for each in self.instances if each.name == spec.name)
        instances = [spec if each is former else each for each in self.instances]
        began = time.perf_counter()
        if self._processes is not None:
            setups = self._make_setups(instances)
            loaded_at = await planned_restart.replace_life(self._processes, spec.name, setups, *emptying.parts())
        else:
            loaded, loaded_at = await self._load(spec, instances), 0.0
            await self._threads.replace(loaded, *emptying.parts())
        now, ended = time.perf_counter(), emptying.ended_at
        left = emptying.began_at or ended  # the end of an instance that was lost meanwhile was not waited for
        spent = (ended - left, now - ended, emptying.emptied, max(0.0, loaded_at - ended), left - began)
        return self._note(Switch(spec.name, former.roles, spec.roles, *spent), instances, left, ended)

    def _note(self, done: Switch, instances: list[Instance], began: float, emptied: float) -> Switch:
        """Take a change down: the instances as they are now, and its parts on the timeline."""
        self.instances, self.placement = instances, describe_instances(instances)
        if done.prepare_s and self._processes is not None:
            self.timeline.add(
                done.name, "switch", f"preparation of {done.roles}", began - done.prepare_s, done.prepare_s
            )
        if done.former:
            self.timeline.add(done.name, "switch", f"offload {done.former}", began, done.drain_s)
        if done.migration_s and self._processes is not None:  # on threads it was before the offload
            self.timeline.add(done.name, "switch", f"migration to {done.roles}", emptied, done.migration_s)
        if done.roles:
            self.timeline.add(done.name, "switch", f"onload {done.roles}", emptied + done.migration_s, done.onload_s)
        logger.info("instance %s changed from %s to %s", done.name, done.former or "none", done.roles or "none")
        return done

    def _make_setups(self, instances: Sequence[Instance]) -> list[Setup]:
        given = (self._serving_config, self.connector, str(self.routing), self._process_config.supply)
        return supervisor.make_setups(instances, *given)

    async def _load(self, spec: Instance, instances: Sequence[Instance]) -> LoadedInstance:
        began, given = time.perf_counter(), (self._serving_config, [spec], self._frontend.processor, instances)
        [loaded] = await run_to_end(loader.load_instances, *given)
        self._threads.check_weights(loaded)
        self.timeline.add(spec.name, "switch", f"migration to {spec.roles}", began, time.perf_counter() - began)
        return loaded

    @property
    def _threads(self) -> ThreadInstances:
        given = (self.hosts, self._frontend, self.timeline, self.connector)
        return ThreadInstances(*given, lambda: routing_policy(self.routing))


class _Emptying:
    """End of an instance's work: ``emptied``, and when that was waited for from ``began_at`` to ``ended_at`` on.

    Both in seconds, by ``perf_counter``, and 0 before.
    """

    def __init__(self, frontend: FrontendHost, name: str, drain_s: float) -> None:
        self._frontend, self._name, self._drain_s = frontend, name, drain_s
        self.emptied, self.began_at, self.ended_at = False, 0.0, 0.0

    def goes_on(self) -> bool:
        """True before it was waited for to its end: until then the instance may stay as it was."""
        return not self.ended_at

    def parts(self) -> tuple[planned_restart.Emptied, Callable[[], None]]:
        """Return what is called to wait for it, and what is called once the instance's work is done."""
        return self.wait, self.note_end

    def note_end(self) -> None:
        self.ended_at = time.perf_counter()

    async def wait(self) -> bool:
        """Return True once no request is there, False after ``drain_s``. Raises ``ClosedError`` once it is closed."""
        self.began_at = time.perf_counter()
        self.emptied = await self._frontend.wait_empty(self._name, self._drain_s)
        self._frontend.check_open()
        self.ended_at = time.perf_counter()
        return self.emptied
