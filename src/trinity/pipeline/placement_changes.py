"""PlacementChanges: a running pipeline's instances switch roles, one at a time, and nothing that is served is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from trinity.adapt.auto import name_shape
from trinity.connector import Connector
from trinity.core.messages import PeerDown, PeerUp
from trinity.core.peer_exit import PeerLeaving
from trinity.core.routing import RoutingPolicy, routing_policy
from trinity.errors import ChangeRefused, ClosedError, PlacementError, TrinityError
from trinity.errors.arguments import Number, check_value
from trinity.instance import Instance
from trinity.pipeline.deploy import list_plan_options
from trinity.pipeline.frontend_host import FrontendHost
from trinity.pipeline.switch_order import (
    RoleChange,
    check_switch,
    describe_instances,
    order_switches,
)
from trinity.placement import Placement
from trinity.planner import Plan
from trinity.remote import instance_processes, planned_restart, supervisor
from trinity.runtime import loader
from trinity.runtime.host import InstanceHost, LoadedInstance
from trinity.runtime.shielded_wait import run_to_end, wait_shielded
from trinity.timeline import Timeline

logger = logging.getLogger("trinity")
DRAIN_S = 30.0


class Switch(msgspec.Struct, frozen=True):
    """Record of an instance's switch to other roles.

    - ``name``, ``former``, ``roles``: the instance, what it was, and what it is.
    - ``drain_s``, ``change_s`` (seconds): until it was empty, and from then until it served in its new roles.
    - ``emptied``: False where its last requests had to go on elsewhere, with their tokens so far.
    """

    name: str
    former: str
    roles: str
    drain_s: float
    change_s: float
    emptied: bool


class PlacementChanges:
    """Part of ``Pipeline``: roles of its instances change while it serves (EPDServe 3.2.4, TriInfer 4.4).

    A switch is a planned restart: new work goes past the instance, what is there ends, and its next life has other
    roles. A request that it still has after ``drain_s`` is recovered as after a loss, exactly.
    """

    instances: list[Instance]
    placement: Placement
    hosts: dict[str, InstanceHost]
    timeline: Timeline
    connector: Connector
    routing: str | RoutingPolicy
    _frontend: FrontendHost
    _serving_config: loader.ServingConfig
    _process_config: supervisor.ProcessConfig
    _processes: instance_processes.InstanceSupervisor | None = None
    _changing = ""

    async def switch(self, name: str, roles: str, *, drain_s: float = DRAIN_S) -> Switch:
        """Have an instance switch to other roles: ``await pipe.switch("E1", "D")``; it keeps its name.

        drain_s: how long requests that are there may take to end. Cancelled before it is empty, it stays as it was.

        Raises ``UnknownName``, ``PlacementError`` for roles that it may not have, or a stage that would be left without
        an instance; ``ChangeRefused`` during another change, or while an instance is away; and the error for which its
        next life does not come up, in which case it has its former roles again.
        """
        drain_s = check_value("drain_s", drain_s, Number)
        async with self._change(f"instance {name} switches to {roles}"):
            change = check_switch(self.instances, name, roles)
            return await self._switch(change, {}, drain_s)

    async def apply(self, placement: str | Placement | Plan, *, drain_s: float = DRAIN_S) -> list[Switch]:
        """Have instances switch, one after another, until they are this placement; return the switches.

        They are the fewest that do, in an order in which no stage is left without an instance, if there is one: else
        requests wait for that stage meanwhile (``FailurePolicy.wait_s``). Of a ``Plan`` they take its settings, too.

        Raises as ``switch`` does, and ``PlacementError`` for another number of instances, or a plan for another model.
        After an error all instances are switched back.
        """
        drain_s = check_value("drain_s", drain_s, Number)
        async with self._change(f"placement {placement} is applied" if isinstance(placement, str) else "it is changed"):
            wanted = self._read_placement(placement)
            wanted.check(self._frontend.multimodal)
            done: list[Switch] = []
            former = list(self.instances)
            try:
                for change in order_switches(self.instances, wanted):
                    options = list_plan_options(placement, change.roles) if isinstance(placement, Plan) else {}
                    done.append(await self._switch(change, options, drain_s))
            except ClosedError:
                raise
            except TrinityError:
                await self._switch_back(done, former, drain_s)
                raise
            return done

    @property
    def change_obstacle(self) -> str:
        """Reason why no change can be made just now: another one, or an instance that is away; empty if one can."""
        if self._changing:
            return f"another change is under way ({self._changing}); wait until it is done"
        away = {} if self._processes is None else self._processes.health()
        told = [f"{name} is {health.state}" for name, health in away.items() if health.state != "up"]
        return f"an instance is away ({', '.join(told)}); wait until all are up" if told else ""

    def _read_placement(self, given: str | Placement | Plan) -> Placement:
        if isinstance(given, Plan):
            known = name_shape(self._serving_config.model)
            if known is not None and known != given.model:
                raise PlacementError(f"the plan is for {given.model}, and {known} is served; plan for that")
            given = given.placement
        return Placement.parse(given) if isinstance(given, str) else check_value("placement", given, Placement)

    async def _switch_back(self, done: Sequence[Switch], former: Sequence[Instance], drain_s: float) -> None:
        """Undo switches, the last one first. What cannot be undone is logged: the error that led here matters more."""
        settings = {each.name: each for each in former}
        for each in reversed(done):
            try:
                await self._begin_anew(settings[each.name], drain_s)
            except TrinityError:
                logger.exception("instance %s could not switch back to %s", each.name, each.former)

    @asynccontextmanager
    async def _change(self, what: str) -> AsyncIterator[None]:
        """Make this the one change that is under way. Raises ``ChangeRefused`` during another, or a recovery."""
        self._frontend.check_open()
        if obstacle := self.change_obstacle:
            raise ChangeRefused(obstacle)
        self._changing = what
        try:
            yield
        finally:
            self._changing = ""

    async def _switch(self, change: RoleChange, options: Mapping[str, Any], drain_s: float) -> Switch:
        former = next(each for each in self.instances if each.name == change.name)
        return await self._begin_anew(replace(former, roles=change.roles, **options), drain_s)

    async def _begin_anew(self, spec: Instance, drain_s: float) -> Switch:
        """End the present life of an instance, and begin the next one by these settings."""
        former = next(each for each in self.instances if each.name == spec.name)
        instances = [spec if each.name == spec.name else each for each in self.instances]
        began = time.perf_counter()
        emptying = _Emptying(self._frontend, spec.name, drain_s)
        if self._processes is not None:
            setups = supervisor.make_setups(
                instances, self._serving_config, self.connector, str(self.routing), self._process_config.supply
            )
            await planned_restart.replace_life(self._processes, spec.name, setups, emptying.wait())
        else:
            await self._replace_host(spec, instances, emptying)
        self.instances, self.placement = instances, describe_instances(instances)
        emptied, now = emptying.ended_at or began, time.perf_counter()
        done = Switch(spec.name, former.roles, spec.roles, emptied - began, now - emptied, emptying.emptied)
        self.timeline.add(spec.name, "switch", f"drain {former.roles}", began, done.drain_s)
        self.timeline.add(spec.name, "switch", f"become {spec.roles}", emptied, done.change_s)
        logger.info("instance %s switched from %s to %s", spec.name, former.roles, spec.roles)
        return done

    async def _replace_host(self, spec: Instance, instances: Sequence[Instance], emptying: _Emptying) -> None:
        """Put a new host in the place of one on threads of this process; it is loaded before the other one ends."""
        old = self.hosts[spec.name]
        given = (self._serving_config, [spec], self._frontend.processor, instances)
        [loaded] = await run_to_end(loader.load_instances, *given)
        epoch = old.announcement().epoch
        loaded.settings = replace(loaded.settings, epoch=epoch + 1)
        self._announce(PeerLeaving(old.name, epoch, leaving=True))
        try:
            empty = await emptying.wait()
        except BaseException:
            self._announce(PeerLeaving(old.name, epoch, leaving=False))
            loaded.release()
            raise
        await wait_shielded(asyncio.ensure_future(self._exchange(old, loaded, empty)))

    async def _exchange(self, old: InstanceHost, loaded: LoadedInstance, empty: bool) -> None:
        pools = dict(old.loaded.memory)
        old.stop(at_once=not empty)
        await old.join()
        if self._frontend.opened == "closed":  # meanwhile: nobody would end a new one
            loaded.release()
            self._frontend.check_open()
        self._announce(PeerDown(old.name, planned_restart.WHY, planned=True))
        self.connector.unbind(pools)
        self.connector.forget(old.name)
        made = loader.make_hosts([loaded], self._frontend, self.timeline, lambda: routing_policy(self.routing))
        [host] = made.values()
        for other in self.hosts.values():
            if other is not old:
                host.post(other.announcement())
        self.hosts[host.name] = self._frontend.reached[host.name] = host
        host.start()
        self._announce(host.announcement())

    def _announce(self, message: PeerUp | PeerDown | PeerLeaving) -> None:
        """Tell the front end and every other instance on threads of this process."""
        for host in self.hosts.values():
            if host.name != message.name:
                host.post(message)
        self._frontend.post(message)


class _Emptying:
    """End of an instance's work: ``emptied``, and ``ended_at`` (s, ``perf_counter``) once it was waited for."""

    def __init__(self, frontend: FrontendHost, name: str, drain_s: float) -> None:
        self._frontend, self._name, self._drain_s = frontend, name, drain_s
        self.emptied, self.ended_at = False, 0.0

    async def wait(self) -> bool:
        """Return True once no request is there, False after ``drain_s``. Raises ``ClosedError`` once it is closed."""
        self.emptied = await self._frontend.wait_empty(self._name, self._drain_s)
        self._frontend.check_open()
        self.ended_at = time.perf_counter()
        return self.emptied
