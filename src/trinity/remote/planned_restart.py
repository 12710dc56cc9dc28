"""Planned restarts: an instance's process ends once it is empty, and its next life has other roles.

What stages it has is settled as a process starts: so its weights, pools and connections are made by the way that every
start takes, and what dies meanwhile is started again by the supervisor as ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol

import msgspec

from trinity.errors import PeerLost, TrinityError
from trinity.remote.instance_client import InstanceClient
from trinity.remote.supervisor_core import LifePhase, SupervisorCore
from trinity.remote.supervisor_messages import Event, Leave, Replace
from trinity.remote.wire import Setup
from trinity.runtime.shielded_wait import wait_shielded

MOST_TRIES = 3  # lives of an instance with other roles, before it has its former ones again
AWAY = (LifePhase.ENDING, LifePhase.WAITING)
WHY = "it begins anew with other roles"


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


async def replace_life(supervisor: Supervisor, name: str, setups: Sequence[Setup], emptied: Awaitable[bool]) -> None:
    """End an instance's life, and begin the next one by these setups of all; return once that serves.

    emptied: awaited while new work goes past the instance; False where it is to end with what is left there. Cancelled
    meanwhile it goes on as it was; later the caller waits to the end. Raises the error for which ``MOST_TRIES`` lives
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
    await wait_shielded(asyncio.ensure_future(_replace(supervisor, client, former, empty)))


def _keep_pipeline(setups: Sequence[Setup], former: Mapping[str, Setup]) -> dict[str, Setup]:
    """Leave the instances members of the same pipeline: they refuse others."""
    return {each.name: msgspec.structs.replace(each, pipeline=former[each.name].pipeline) for each in setups}


def _end_later(supervisor: Supervisor, name: str, epoch: int) -> None:
    """End a later life than this one, which began as the instance was lost meanwhile: it has the other roles."""
    member = supervisor.core.members[name]
    if member.epoch > epoch:
        supervisor.handle(Replace(name, member.epoch, "it begins anew with its former roles"))


async def _replace(supervisor: Supervisor, client: InstanceClient, former: dict[str, Setup], empty: bool) -> None:
    name, epoch = client.name, client.setup.epoch
    if empty:  # its leases have been released, or will be
        client.stop()
        await client.join()
    supervisor.handle(Replace(name, epoch, WHY))
    try:
        await _wait_up(supervisor, name, epoch)
    except TrinityError:
        supervisor.setups = former
        await _wait_up(supervisor, name, supervisor.core.members[name].epoch)
        raise


async def _wait_up(supervisor: Supervisor, name: str, epoch: int) -> None:
    """Wait until a life after this one serves. Raises the last problem where ``MOST_TRIES`` did not come up."""
    member, last = supervisor.core.members[name], epoch + MOST_TRIES
    while member.phase is not LifePhase.UP or member.epoch <= epoch:
        if member.phase is LifePhase.CLOSED or (member.epoch >= last and member.phase in AWAY):
            text = f"instance {name} did not come up: {member.why}"
            raise supervisor.problems.get(name) or PeerLost(text, "control", name)
        supervisor.changed.clear()
        await supervisor.changed.wait()
