"""PlacementChanges: a running pipeline's instances switch roles, come and go, one at a time, and nothing is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from trinity.adapt.auto import name_shape
from trinity.core.messages import FRONTEND
from trinity.core.role_changes import RoleChange, Switch, find_free_name, may_have, order_changes
from trinity.errors import ChangeRefused, ClosedError, ConfigError, PlacementError, TrinityError, UnknownName
from trinity.errors.arguments import Number, check_value
from trinity.instance import Instance
from trinity.pipeline.deploy import list_plan_options
from trinity.pipeline.frontend_host import FrontendHost
from trinity.pipeline.served_instances import ServedInstances
from trinity.placement import Group, Placement
from trinity.planner import Plan
from trinity.runtime.shielded_wait import carry_through
from trinity.stage_kinds import all_letters, order_letters
from trinity.timeline import Timeline

logger = logging.getLogger("trinity")
DRAIN_S = 30.0


class PlacementChanges:
    """Changes of the instances of a pipeline while it serves (EPDServe 3.2.4, TriInfer 4.4), one at a time.

    A switch is a planned restart: a next life with other roles loads beside the instance, new work goes past that, what
    is there ends or moves on, and the next life takes its place; a removal has none. A request that is still there
    after ``drain_s`` is recovered as after a loss, exactly.

    - ``served``: the instances. ``frontend``, ``timeline``: the pipeline's.
    - ``options``: keywords that the pipeline has for instances that a placement names, those that are added too.

    ``under_way`` describes the present change; it is "" where there is none.
    """

    def __init__(
        self, served: ServedInstances, frontend: FrontendHost, timeline: Timeline, options: Mapping[str, Any]
    ) -> None:
        self._served, self._frontend = served, frontend
        self._timeline, self._options = timeline, options
        self.under_way = ""

    async def switch(self, name: str, roles: str, drain_s: float) -> Switch:
        """As ``Pipeline.switch``."""
        drain_s = check_value("drain_s", drain_s, Number)
        async with self._change(f"instance {name} switches to {roles}"):
            return await self._carry_out(check_switch(self._served.specs, name, roles), {}, drain_s)

    async def add(self, instance: Instance) -> Switch:
        """As ``Pipeline.add``."""
        spec = check_added(self._served.specs, check_value("instance", instance, Instance))
        async with self._change(f"instance {spec.name} is added"):
            describe_instances([*self._served.specs, spec]).check(self._frontend.multimodal)
            self._served.check_place(spec)
            return await self._begin(spec)

    async def remove(self, name: str, drain_s: float) -> Switch:
        """As ``Pipeline.remove``."""
        drain_s = check_value("drain_s", drain_s, Number)
        async with self._change(f"instance {name} is removed", but=name):
            return await self._end(check_removed(self._served.specs, name), drain_s)

    async def apply(self, placement: str | Placement | Plan, *, resize: bool, drain_s: float) -> list[Switch]:
        """As ``Pipeline.apply``."""
        drain_s = check_value("drain_s", drain_s, Number)
        async with self._change(f"placement {placement} is applied" if isinstance(placement, str) else "it is changed"):
            wanted = self._read_placement(placement)
            wanted.check(self._frontend.multimodal)
            done: list[Switch] = []
            former = list(self._served.specs)
            try:
                for change in order_changes(self._served.specs, wanted, resize):
                    options = list_plan_options(placement, change.roles) if isinstance(placement, Plan) else {}
                    done.append(await self._carry_out(change, options, drain_s))
            except ClosedError:
                raise
            except TrinityError:
                await self._undo(done, former, drain_s)
                raise
            return done

    def find_obstacle(self, but: str = "") -> str:
        """Find a reason why no change can be made just now; empty if one can.

        but: an instance that may be away.
        """
        if self._served.terms.attach:
            return "the pipeline that set the instances up changes them, and this one is attached to them"
        if self.under_way:
            return f"another change is under way ({self.under_way}); wait until it is done"
        away = self._served.health
        told = [f"{name} is {health.state}" for name, health in away.items() if health.state != "up" and name != but]
        return f"an instance is away ({', '.join(told)}); wait until all are up" if told else ""

    def _read_placement(self, given: str | Placement | Plan) -> Placement:
        if isinstance(given, Plan):
            known = name_shape(self._served.config.model)
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
        if obstacle := self.find_obstacle(but):
            raise ChangeRefused(obstacle)
        self.under_way = what
        try:
            yield
        finally:
            self.under_way = ""

    async def _carry_out(self, change: RoleChange, options: Mapping[str, Any], drain_s: float) -> Switch:
        """Carry out one change of an order: of an instance that runs, of a new one, or to none."""
        former = self._served.find(change.name)
        if former is None:
            return await self._begin(Instance(change.roles, change.name, **{**options, **self._options}))
        if not change.roles:
            return await self._end(change.name, drain_s)
        return await self._begin_anew(replace(former, roles=change.roles, **options), drain_s)

    async def _begin(self, spec: Instance) -> Switch:
        """Begin one more instance."""
        after, began = [*self._served.specs, spec], time.perf_counter()
        loaded_at = await self._served.begin(spec, after)
        done = Switch(
            spec.name,
            "",
            spec.roles,
            drain_s=0.0,
            change_s=time.perf_counter() - began,
            emptied=True,
            migration_s=loaded_at - began,
        )
        return self._note(done, after, began, began)

    async def _end(self, name: str, drain_s: float) -> Switch:
        """End an instance for good. Cancelled once it is empty, it ends all the same, and is noted."""
        emptying = _Emptying(self._frontend, name, drain_s)
        return await carry_through(self._end_once_empty(name, emptying), emptying.goes_on)

    async def _end_once_empty(self, name: str, emptying: _Emptying) -> Switch:
        former = next(each for each in self._served.specs if each.name == name)
        after, began = [each for each in self._served.specs if each is not former], time.perf_counter()
        await self._served.end(name, emptying.wait, emptying.note_end)
        emptied, began = emptying.ended_at or began, emptying.began_at or began
        change_s = time.perf_counter() - emptied
        done = Switch(name, former.roles, "", drain_s=emptied - began, change_s=change_s, emptied=emptying.emptied)
        return self._note(done, after, began, emptied)

    async def _begin_anew(self, spec: Instance, drain_s: float) -> Switch:
        """End the present life of an instance, and begin the next one by these settings; cancelled as in ``_end``."""
        emptying = _Emptying(self._frontend, spec.name, drain_s)
        return await carry_through(self._begin_once_empty(spec, emptying), emptying.goes_on)

    async def _begin_once_empty(self, spec: Instance, emptying: _Emptying) -> Switch:
        former = next(each for each in self._served.specs if each.name == spec.name)
        after = [spec if each is former else each for each in self._served.specs]
        began = time.perf_counter()
        loaded_at = await self._served.replace(spec, after, emptying.wait, emptying.note_end)
        now, ended = time.perf_counter(), emptying.ended_at
        left = emptying.began_at or ended  # the end of an instance that was lost meanwhile was not waited for
        done = Switch(
            spec.name,
            former.roles,
            spec.roles,
            drain_s=ended - left,
            change_s=now - ended,
            emptied=emptying.emptied,
            migration_s=max(0.0, loaded_at - ended),
            prepare_s=left - began,
        )
        return self._note(done, after, left, ended)

    def _note(self, done: Switch, after: list[Instance], began: float, emptied: float) -> Switch:
        """Take a change down: the instances as they are now, and its parts on the timeline."""
        self._served.specs, self._served.placement = after, describe_instances(after)
        in_processes = self._served.hosting == "process"
        if done.prepare_s and in_processes:
            self._timeline.add(
                done.name, "switch", f"preparation of {done.roles}", began - done.prepare_s, done.prepare_s
            )
        if done.former:
            self._timeline.add(done.name, "switch", f"offload {done.former}", began, done.drain_s)
        if done.migration_s and in_processes:  # on threads it was before the offload
            self._timeline.add(done.name, "switch", f"migration to {done.roles}", emptied, done.migration_s)
        if done.roles:
            self._timeline.add(done.name, "switch", f"onload {done.roles}", emptied + done.migration_s, done.onload_s)
        logger.info("instance %s changed from %s to %s", done.name, done.former or "none", done.roles or "none")
        return done


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

    def note_end(self) -> None:
        """Note that the instance's work is done."""
        self.ended_at = time.perf_counter()

    async def wait(self) -> bool:
        """Return True once no request is there, False after ``drain_s``. Raises ``ClosedError`` once it is closed."""
        self.began_at = time.perf_counter()
        self.emptied = await self._frontend.wait_empty(self._name, self._drain_s)
        self._frontend.check_open()
        self.ended_at = time.perf_counter()
        return self.emptied


def switch_instances(instances: Iterable[Instance], change: RoleChange) -> list[Instance]:
    """List the instances as they are after a switch."""
    return [replace(each, roles=change.roles) if each.name == change.name else each for each in instances]


def check_switch(instances: Sequence[Instance], name: str, roles: str) -> RoleChange:
    """Check that an instance may have these roles, and that all stages of before are had by one.

    Raises ``UnknownName`` for an instance that is not there, else ``PlacementError``.
    """
    found = _find(instances, name)
    change = RoleChange(name, Group.parse(roles).roles)
    if change.roles == found.roles:
        raise PlacementError(f"instance {name} has the roles {change.roles} already")
    if not may_have(found, change.roles):
        raise PlacementError(f"instance {name} may have the roles {found.may}, and not {change.roles} (Instance.may)")
    after = {letter for each in switch_instances(instances, change) for letter in each.roles}
    missing = order_letters({letter for each in instances for letter in each.roles} - after)
    if missing:
        text = f"no instance would have stage {' and '.join(missing)} once {name} is {change.roles}"
        raise PlacementError(f"{text}; switch another one to it first")
    return change


def check_added(instances: Sequence[Instance], added: Instance) -> Instance:
    """Return an instance with its name, a free one if it has none. Raises ``ConfigError`` for a name that is in use."""
    taken = {each.name for each in instances}
    named = replace(added, name=added.name or find_free_name(taken, added.roles))
    if named.name in taken or named.name == FRONTEND:
        raise ConfigError(f"an instance {named.name} runs already: give another name, or none for {added.roles}0 or so")
    return named


def check_removed(instances: Sequence[Instance], name: str) -> str:
    """Check that all stages are had by others than this one.

    Raises ``UnknownName`` for an instance that is not there, else ``PlacementError``.
    """
    found = _find(instances, name)
    rest = {letter for each in instances if each is not found for letter in each.roles}
    missing = [letter for letter in found.roles if letter not in rest]
    if missing:
        text = f"no instance would have stage {' and '.join(missing)} without {name}"
        raise PlacementError(f"{text}; add another one first, or have one switch to it")
    return name


def _find(instances: Sequence[Instance], name: str) -> Instance:
    found = next((each for each in instances if each.name == name), None)
    if found is None:
        raise UnknownName("instance", name, [each.name for each in instances])
    return found


def describe_instances(instances: Iterable[Instance]) -> Placement:
    """The placement that these instances are, in the order of their stages."""
    return Placement.of(
        sorted((each.group for each in instances), key=lambda group: all_letters().index(group.roles[0]))
    )
