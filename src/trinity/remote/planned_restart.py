"""Planned lives: an instance's process ends once it is empty, for a next life with other roles or for none; or one more
begins.

What stages it has is settled as a process starts: so its weights, pools and connections are made by the way that every
start takes, and what dies meanwhile is started again by the supervisor as ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from trinity.errors import ClosedError, ConfigError, PeerLost, TrinityError
from trinity.remote.instance_client import InstanceClient
from trinity.remote.supervisor_core import LifePhase, SupervisorCore
from trinity.remote.supervisor_messages import Add, Event, Leave, Remove, Replace
from trinity.remote.wire import Setup
from trinity.runtime.shielded_wait import wait_shielded

MOST_TRIES = 3  # lives of an instance with other roles, before it has its former ones again
AWAY = (LifePhase.ENDING, LifePhase.WAITING)
WHY = "it begins anew with other roles"
WHY_REMOVED = "it is removed"


class Supervisor(Protocol):
    """Part of ``InstanceSupervisor`` that a planned restart needs.

    - ``setups``: of the next life of each instance. ``members``: the present lives that have come up.
    - ``problems``: why the last life of each ended. ``changed``: set by whatever the core has handled.
    """

    core: SupervisorCore
    setups: dict[str, Setup]
    members: dict[str, InstanceClient]
    problems: dict[str, TrinityError | None]
    changed: asyncio.Event

    def handle(self, event: Event) -> None: ...


async def replace_life(
    supervisor: Supervisor, name: str, setups: Sequence[Setup], emptied: Awaitable[bool], note_end: Callable[[], None]
) -> float:
    """End an instance's life, and begin the next one by these setups of all; return once that serves.

    Returns when it had loaded its weights (s, ``perf_counter``).

    emptied: awaited while new work goes past the instance; False where it is to end with what is left there. Cancelled
    meanwhile it goes on as it was; later the caller waits to the end. ``note_end`` is called once its work is done: an
    encoder may still encode what its next stage is known to have. Raises the error for which ``MOST_TRIES`` lives
    did not come up; by then the instance has come up as it was before.
    """
    former, client = supervisor.setups, supervisor.members[name]
    epoch = client.setup.epoch
    supervisor.setups = _keep_pipeline(setups, former)
    supervisor.handle(Leave(name, epoch))
    try:
        empty = await emptied
    except BaseException:
        supervisor.setups = former
        supervisor.handle(Leave(name, epoch, leaving=False))
        _end_later(supervisor, name, epoch)
        raise
    return await wait_shielded(asyncio.ensure_future(_replace(supervisor, client, former, empty, note_end)))


async def begin_life(supervisor: Supervisor, name: str, setups: Sequence[Setup], by_hand: bool) -> float:
    """Begin one more instance by these setups of all; return once it serves, as ``replace_life`` does.

    by_hand: it is not started on this host. Cancelled, it is removed. Raises ``ConfigError`` where blocks would have to
    move otherwise than they do, and the error for which ``MOST_TRIES`` lives did not come up.
    """
    former, supervisor.setups = supervisor.setups, _keep_pipeline(setups, supervisor.setups)
    try:
        _check_routes(supervisor.setups[name], next(iter(former.values())))
        supervisor.handle(Add(name, by_hand))
        if name not in supervisor.core.members:
            raise ClosedError("the pipeline was closed meanwhile; make a new one")
        return await _wait_up(supervisor, name, supervisor.core.members[name].epoch - 1)
    except BaseException:
        await wait_shielded(asyncio.ensure_future(_remove(supervisor, name)))
        supervisor.setups = former
        raise


def _check_routes(setup: Setup, running: Setup) -> None:
    """Raise ``ConfigError`` where the transports of those that run do not reach this one."""
    if setup.routes != running.routes:
        schemes = ", ".join(sorted({each.transport for each in running.routes.values()}))
        raise ConfigError(
            f"instance {setup.name} is elsewhere, and the instances here move blocks by {schemes}: give the pipeline a "
            "connector that leaves the host, by name, or one instance at an address from its start"
        )


async def end_life(supervisor: Supervisor, name: str, emptied: Awaitable[bool], note_end: Callable[[], None]) -> None:
    """End an instance for good; return once it is gone. ``emptied``, ``note_end``: as in ``replace_life``."""
    epoch = supervisor.core.members[name].epoch
    supervisor.handle(Leave(name, epoch))
    try:
        empty = await emptied
    except BaseException:
        supervisor.handle(Leave(name, epoch, leaving=False))
        raise
    await wait_shielded(asyncio.ensure_future(_end(supervisor, name, empty, note_end)))


async def _end(supervisor: Supervisor, name: str, empty: bool, note_end: Callable[[], None]) -> None:
    if empty and supervisor.core.members[name].phase is LifePhase.UP:
        client = supervisor.members[name]
        client.stop()
        await client.join()
    note_end()
    await _remove(supervisor, name)


async def _remove(supervisor: Supervisor, name: str) -> None:
    if name in supervisor.core.members:
        supervisor.handle(Remove(name, WHY_REMOVED))
    while name in supervisor.core.members:
        supervisor.changed.clear()
        await supervisor.changed.wait()


def _keep_pipeline(setups: Sequence[Setup], former: Mapping[str, Setup]) -> dict[str, Setup]:
    """Leave the instances members of the same pipeline: they refuse others."""
    pipeline = next(iter(former.values())).pipeline
    return {each.name: msgspec.structs.replace(each, pipeline=pipeline) for each in setups}


def _end_later(supervisor: Supervisor, name: str, epoch: int) -> None:
    """End a later life than this one, which began as the instance was lost meanwhile: it has the other roles."""
    member = supervisor.core.members[name]
    if member.epoch > epoch:
        supervisor.handle(Replace(name, member.epoch, "it begins anew with its former roles"))


async def _replace(
    supervisor: Supervisor, client: InstanceClient, former: dict[str, Setup], empty: bool, note_end: Callable[[], None]
) -> float:
    name, epoch = client.name, client.setup.epoch
    if empty:  # its leases have been released, or will be
        client.stop()
        await client.join()
    note_end()
    supervisor.handle(Replace(name, epoch, WHY))
    try:
        return await _wait_up(supervisor, name, epoch)
    except TrinityError:
        supervisor.setups = former
        await _wait_up(supervisor, name, supervisor.core.members[name].epoch)
        raise


async def _wait_up(supervisor: Supervisor, name: str, epoch: int) -> float:
    """Wait until a life after this one serves; return when it had loaded.

    Raises the last problem where ``MOST_TRIES`` did not come up.
    """
    member, last, loaded_at = supervisor.core.members[name], epoch + MOST_TRIES, 0.0
    while member.phase is not LifePhase.UP or member.epoch <= epoch:
        if member.phase is LifePhase.CLOSED or (member.epoch >= last and member.phase in AWAY):
            text = f"instance {name} did not come up: {member.why}"
            raise supervisor.problems.get(name) or PeerLost(text, "control", name)
        loaded_at = 0.0 if member.phase is not LifePhase.MEETING else loaded_at or time.perf_counter()
        supervisor.changed.clear()
        await supervisor.changed.wait()
    return loaded_at or time.perf_counter()
