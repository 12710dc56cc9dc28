"""A command of the supervisor's core that raises costs one life: none behind it is lost, and the watch goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, cast

import pytest

from remote.test_supervision import emulated, serves
from support.freezing import freeze
from support.running_instances import LIVENESS_S
from trinity.remote.supervision.fork_supply import ForkSupply
from trinity.remote.supervision.instance_client import InstanceClient
from trinity.remote.supervision.instance_processes import InstanceSupervisor
from trinity.remote.supervision.supervisor_core import SupervisorCore
from trinity.remote.supervision.supervisor_messages import Event, Introduce, Launch, Lost, Proceed, Quiet, Separate, Up


def raising_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, when: Any = lambda *given: True) -> list[Any]:
    """Have a method raise at its first call that ``when`` picks; the calls that did are listed."""
    real, raised = getattr(owner, name), list[Any]()

    def call(*given: Any) -> Any:
        if not raised and when(*given):
            raised.append(given)
            raise RuntimeError("this one fails")
        return real(*given)

    monkeypatch.setattr(owner, name, call)
    return raised


@pytest.mark.parametrize("kind", [Launch, Introduce, Separate, Up])
async def test_a_command_that_raises_costs_one_life(kind: type[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 19bbccc the commands behind it were lost, and with them an instance for ever."""
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S):
        process = pipe.processes["E0"].process
        raised = raising_once(
            monkeypatch, InstanceSupervisor, "_carry_out", lambda self, command: isinstance(command, kind)
        )
        os.kill(process, signal.SIGKILL)
        while not raised:
            await asyncio.sleep(0.01)
        await serves(pipe)


@pytest.mark.parametrize("kind", [Launch, Proceed])
async def test_a_command_of_a_switch_that_raises_costs_one_life(
    kind: type[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A next life that could not be launched is prepared again; one that did not get the word is started again."""
    async with emulated(placement="1E1P2D") as pipe, asyncio.timeout(LIVENESS_S):
        raised = raising_once(
            monkeypatch, InstanceSupervisor, "_carry_out", lambda self, command: isinstance(command, kind)
        )
        assert (await pipe.switch("D1", "E")).roles == "E"
        assert len(raised) == 1
        assert pipe.health["D1"].losses == (kind is Proceed)
        await serves(pipe)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(InstanceClient, "cut"), (InstanceClient, "attach"), (ForkSupply, "begin"), (ForkSupply, "end")],
)
async def test_a_part_of_a_life_that_raises_costs_that_life(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S):
        process = pipe.processes["E0"].process
        raised = raising_once(monkeypatch, owner, name)
        os.kill(process, signal.SIGKILL)
        while not raised:
            await asyncio.sleep(0.01)
        await serves(pipe)


async def test_the_watch_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S):
        raised = raising_once(monkeypatch, SupervisorCore, "handle", lambda self, event, now: isinstance(event, Quiet))
        while not raised:
            await asyncio.sleep(0.01)
        freeze(pipe.processes["D0"].process)
        await serves(pipe)
        assert pipe.health["D0"].epoch >= 1


async def test_a_fence_kills_before_it_waits_for_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that ends late, whatever it awaits, holds neither channel nor process of a life that is lost."""
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S):
        supervisor = pipe._served.supervisor
        assert supervisor is not None
        life, client = ("E0", 0), cast(Any, pipe.processes["E0"])

        async def stubborn() -> None:
            while not client._process.has_ended():
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue

        freeze(client.process)  # else it ends by itself, once its channel is cut
        supervisor._launches[life] = asyncio.ensure_future(stubborn())
        await asyncio.sleep(0.05)
        supervisor.handle(Lost(*life, "for this test"))
        await serves(pipe)
