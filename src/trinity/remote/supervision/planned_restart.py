"""Planned lives: an instance's process ends once it is empty, for a next life with other roles or for none; or one more
begins.

What stages it has is settled as a process starts: so its weights, pools and connections are made by the way that every
start takes, and what dies meanwhile is started again by the supervisor as ever. A next life loads first, beside the
present one: what cannot be loaded changes nothing, and the instance serves nothing only while that ends, and the next
one gets its pools and meets the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from trinity.errors import ClosedError, ConfigError, PeerLost, TrinityError
from trinity.remote.channel.wire import Setup
from trinity.remote.supervision.instance_client import InstanceClient
from trinity.remote.supervision.supervised_lives import LifePhase, Member
from trinity.remote.supervision.supervisor_core import SupervisorCore
from trinity.remote.supervision.supervisor_messages import Add, DropNext, Event, Leave, LoadNext, Remove, Replace
from trinity.runtime.shielded_wait import wait_shielded

MOST_TRIES = 3  # lives of an instance with other roles, before it has its former ones again
AWAY = (LifePhase.ENDING, LifePhase.WAITING)
CLOSED = "the pipeline was closed meanwhile; make a new one"
WHY = "it begins anew with other roles"
WHY_REMOVED = "it is removed"
Emptied = Callable[[], Awaitable[bool]]


class Supervisor(Protocol):
    """Part of ``InstanceSupervisor`` that a planned restart needs.

    - ``setups``: of the next life of each instance. ``members``: the present lives that have come up.
    - ``problems``: why the last life of each ended, or could not be prepared; None where it has not said.
    - ``changed``: set by whatever the core has handled.
    """

    core: SupervisorCore
    setups: dict[str, Setup]
    members: dict[str, InstanceClient]
    problems: dict[str, TrinityError | None]
    changed: asyncio.Event

    def handle(self, event: Event) -> None: ...


async def replace_life(
    supervisor: Supervisor, name: str, setups: Sequence[Setup], emptied: Emptied, note_end: Callable[[], None]
) -> float:
    """Prepare the next life of an instance by these setups of all, end the present one, and return once that serves.

    Returns when it had loaded its weights and pools (s, ``perf_counter``).

    emptied: called and awaited once the next life is prepared, while new work goes past the instance; False where it is
    to end with what is left there. Cancelled until then it goes on as it was; later the caller waits to the end.
    ``note_end`` is called once its work is done: an encoder may still encode what its next stage is known to have.
    Raises the error for which the next life could not be prepared, and nothing has changed; or for which ``MOST_TRIES``
    lives did not come up, and by then the instance has come up as it was before.
    """
    former, client = supervisor.setups, supervisor.members[name]
    epoch = client.setup.epoch
    supervisor.setups = _keep_pipeline(setups, former)
    try:
        supervisor.problems[name] = None
        await _prepare(supervisor, name, epoch)
        supervisor.handle(Leave(name, epoch))
        empty = _is_there(supervisor.core.members[name], epoch) and await emptied()
    except BaseException:
        supervisor.setups = former
        supervisor.handle(DropNext(name, epoch))
        supervisor.handle(Leave(name, epoch, leaving=False))
        _end_later(supervisor, name, epoch)
        raise
    return await wait_shielded(asyncio.ensure_future(_replace(supervisor, client, former, empty, note_end)))


async def _prepare(supervisor: Supervisor, name: str, epoch: int) -> None:
    """Have the next life load beside the present one; return once it has, or the present one is lost and it follows.

    One that dies of it is tried again, one that says why it cannot is not. Raises that, ``PeerLost`` after
    ``MOST_TRIES``, and ``ClosedError``. What is not started on this host is not prepared, as its place is taken: its
    present life looks if the files are those that it has loaded.
    """
    member = supervisor.core.members[name]
    tries = 0
    if member.by_hand and _is_there(member, epoch):
        await supervisor.members[name].check_files()
    while _is_there(member, epoch) and member.next is None and not (member.by_hand or supervisor.core.closing):
        if problem := supervisor.problems.get(name):
            raise problem
        if tries == MOST_TRIES:
            raise PeerLost(f"the next life of {name} died {tries} times as it was prepared", "control", name)
        tries += 1
        supervisor.handle(LoadNext(name, epoch))
        while _is_there(member, epoch) and member.next is not None and not member.next.prepared:
            supervisor.changed.clear()
            await supervisor.changed.wait()
    if supervisor.core.closing:
        raise ClosedError(CLOSED)


def _is_there(member: Member, epoch: int) -> bool:
    return member.phase is LifePhase.UP and member.epoch == epoch


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
            raise ClosedError(CLOSED)
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


async def end_life(supervisor: Supervisor, name: str, emptied: Emptied, note_end: Callable[[], None]) -> None:
    """End an instance for good; return once it is gone. ``emptied``, ``note_end``: as in ``replace_life``."""
    epoch = supervisor.core.members[name].epoch
    supervisor.handle(Leave(name, epoch))
    try:
        empty = await emptied()
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
    name, epoch, member = client.name, client.setup.epoch, supervisor.core.members[client.name]
    if empty:  # its leases have been released, or will be
        client.stop()
        await client.join()
    note_end()
    last = member.newest - (member.next is not None) + MOST_TRIES
    supervisor.handle(Replace(name, epoch, WHY))
    try:
        return await _wait_up(supervisor, name, epoch, last)
    except TrinityError:
        supervisor.setups = former
        await _wait_up(supervisor, name, member.epoch)
        raise


async def _wait_up(supervisor: Supervisor, name: str, epoch: int, last: int | None = None) -> float:
    """Wait until a life after this one serves; return when it had loaded.

    last: epoch after which no other is waited for; None: that of the ``MOST_TRIES``-th after this one. Raises the last
    problem where none of them came up, and ``ClosedError`` once the pipeline is being closed.
    """
    member, loaded_at = supervisor.core.members[name], 0.0
    last = epoch + MOST_TRIES if last is None else last
    while member.phase is not LifePhase.UP or member.epoch <= epoch:
        if supervisor.core.closing:
            raise ClosedError(CLOSED)
        if member.epoch >= last and member.phase in AWAY:
            text = f"instance {name} did not come up: {member.why}"
            raise supervisor.problems.get(name) or PeerLost(text, "control", name)
        loaded_at = 0.0 if member.phase is not LifePhase.MEETING else loaded_at or time.perf_counter()
        supervisor.changed.clear()
        await supervisor.changed.wait()
    return loaded_at or time.perf_counter()
