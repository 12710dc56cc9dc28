"""A pipeline whose instances come from a supply of one's own: elsewhere after each loss, for a while from nowhere."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from remote.test_supervision import emulated, serves
from support import emulated_pipelines
from support.running_instances import LIVENESS_S, tcp
from trinity.errors import ConfigError, PeerLost
from trinity.pipeline import Pipeline
from trinity.remote.channel.channel import Address
from trinity.remote.supervision import instance_processes
from trinity.remote.supervision.fork_client import Launcher, kept_launcher
from trinity.remote.supervision.process_config import ProcessConfig
from trinity.remote.supervision.supply import AttachedSupply, InstanceOrder, InstancePlace

RESTARTS = 2


class Moving:
    """Starts every life at another address, as if on another host: the pipeline has its address alone."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self.refusing = launcher, False
        self.places: dict[tuple[str, int], Address] = {}
        self.processes: dict[tuple[str, int], int] = {}
        self.ended: list[tuple[str, int]] = []
        self.closed = 0

    async def begin(self, order: InstanceOrder) -> InstancePlace:
        if self.refusing:
            raise PeerLost("no host has room", "control", order.name)
        life, address = (order.name, order.epoch), tcp()
        process = await self.launcher.launch(address, order.secret, order.model)
        self.places[life], self.processes[life] = address, process.number
        return InstancePlace(address)

    async def end(self, name: str, epoch: int) -> None:
        self.ended.append((name, epoch))
        process = self.processes.pop((name, epoch), 0)
        if process:
            os.kill(process, signal.SIGKILL)

    async def aclose(self) -> None:
        self.closed += 1


async def test_each_life_is_where_its_supply_says() -> None:
    async with kept_launcher(torch=False) as launcher, asyncio.timeout(LIVENESS_S):
        supply = Moving(launcher)
        async with emulated(supply=supply) as pipe:
            await serves(pipe)
            assert {each.process for each in pipe.processes.values()} == {0}, "they are none of this pipeline's own"
            for epoch in range(RESTARTS):
                os.kill(supply.processes["D0", epoch], signal.SIGKILL)
                while pipe.health["D0"].epoch == epoch:
                    await asyncio.sleep(0.01)
                await serves(pipe)
        assert len({address.port for (name, _), address in supply.places.items() if name == "D0"}) == RESTARTS + 1
        assert set(supply.ended) == set(supply.places), "every life was ended"
        assert supply.closed == 1


async def test_while_it_has_none_the_others_serve_on() -> None:
    async with kept_launcher(torch=False) as launcher, asyncio.timeout(LIVENESS_S):
        supply = Moving(launcher)
        async with emulated(supply=supply, placement="1E2PD") as pipe:
            await serves(pipe)
            supply.refusing = True
            os.kill(supply.processes["PD1", 0], signal.SIGKILL)
            while not (pipe.health["PD1"].epoch and pipe.health["PD1"].state == "lost"):
                await asyncio.sleep(0.01)
            assert "no host has room" in pipe.health["PD1"].why
            assert pipe.health["PD0"].state == "up"
            supply.refusing = False
            await serves(pipe)


async def test_one_that_has_none_at_the_start_fails_it_with_its_own_error() -> None:
    async with kept_launcher(torch=False) as launcher:
        supply = Moving(launcher)
        supply.refusing = True
        with pytest.raises(PeerLost, match="no host has room"):
            await emulated(supply=supply).start()
        assert supply.closed == 1


async def test_an_error_of_its_own_end_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of a life is certain, no other of its name begins."""
    async with kept_launcher(torch=False) as launcher, asyncio.timeout(LIVENESS_S):
        supply = Moving(launcher)
        real, failed = supply.end, list[tuple[str, int]]()

        async def end(name: str, epoch: int) -> None:
            if not failed:
                failed.append((name, epoch))
                raise OSError("the scheduler does not answer")
            await real(name, epoch)

        monkeypatch.setattr(supply, "end", end)
        async with emulated(supply=supply) as pipe:
            os.kill(supply.processes["D0", 0], signal.SIGKILL)
            while not failed:
                await asyncio.sleep(0.01)
            assert ("D0", 1) not in supply.places
            await serves(pipe)
        assert failed == [("D0", 0)]


@pytest.mark.parametrize("hangs", [False, True])
async def test_one_that_is_not_closed_does_not_keep_the_pipeline(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with kept_launcher(torch=False) as launcher, asyncio.timeout(LIVENESS_S):
        supply, cancelled = Moving(launcher), list[bool]()

        async def aclose() -> None:
            if not hangs:
                raise OSError("the scheduler does not answer")
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(True)

        monkeypatch.setattr(supply, "aclose", aclose)
        async with emulated(supply=supply) as pipe:
            await serves(pipe)
            assert pipe._served.supervisor is not None
            folder = pipe._served.supervisor._folder.path
            monkeypatch.setattr(instance_processes, "INSTANCE_STOP_S", 1.0)
        assert cancelled == [True] * hangs
        assert not folder.exists()


@pytest.mark.parametrize("given", ["ray", 3, Moving])
def test_what_is_no_supply_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="supply"):
        emulated(supply=given)


def test_one_for_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="hosting='process'"):
        Pipeline(emulated_pipelines.MODEL, hosting="thread", processes=ProcessConfig(supply=AttachedSupply({})))
