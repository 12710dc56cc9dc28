"""Kills amid a switch between processes, in each of its phases: it is done in the end, and every request is whole."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from e2e.test_switched import LONG, MIXED, asking, emulated, until_decoding
from support.emulated_pipelines import LIVENESS_S
from support.shared_launcher import sharing
from trinity.errors import PeerLost
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.planned_restart import MOST_TRIES
from trinity.remote.supervision.supervised_lives import LifePhase, Member


@pytest.fixture(autouse=True)
def launcher(torch_launcher: Launcher) -> Iterator[None]:
    with sharing(torch_launcher):
        yield


PHASES: dict[str, Callable[[Member], bool]] = {  # what EPDServe (3.2.4) calls them, and how an instance's life has them
    "preparation": lambda member: member.next is not None and not member.next.prepared,
    "prepared": lambda member: member.next is not None and member.next.prepared,  # before it is given the word
    "offload": lambda member: member.leaving,
    "end": lambda member: member.phase is LifePhase.ENDING and member.planned,
    "migration": lambda member: member.phase is LifePhase.LOADING and member.epoch == 1,  # after the word
    "onload": lambda member: member.phase is LifePhase.MEETING and member.epoch == 1,
    "after": lambda member: member.phase is LifePhase.UP and member.epoch == 1,
}
BESIDE = ("preparation", "prepared")  # its next life is there beside it
OFTEN = {*((phase, "D1") for phase in (*BESIDE, "offload", "migration", "onload")), ("onload", "P1")}


def list_kills() -> list[Any]:
    """Each phase, whom of those concerned, and over what; most of them slow."""
    every = [(phase, victim, way) for phase in PHASES for victim in ("D1", "D0", "P1") for way in ("shm", "nixl")]
    slow = pytest.mark.slow
    return [pytest.param(*each, marks=() if each[:2] in OFTEN and each[2] == "shm" else slow) for each in every]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("phase", "victim", "connector"), list_kills())
async def test_a_kill_in_each_phase_of_a_switch(phase: str, victim: str, connector: str) -> None:
    """Of the one that switches, of where its decodes go, of one that hands requests on: the switch is done in the end,
    and every request is whole."""
    async with (
        emulated("1E2P2D", connector=connector) as pipe,
        asking(pipe, MIXED) as ended,
    ):
        assert pipe._served.supervisor is not None
        await until_decoding(pipe)
        switching = asyncio.ensure_future(pipe.switch("D1", "E", drain_s=0.3))
        async with asyncio.timeout(LIVENESS_S):
            while not PHASES[phase](pipe._served.supervisor.core.members["D1"]):
                await asyncio.sleep(0)
        killed = await kill(pipe, victim, phase)
        done = await asyncio.wait_for(switching, LIVENESS_S)
        assert done.roles == "E"
        async with asyncio.timeout(LIVENESS_S):
            while {each.state for each in pipe.health.values()} != {"up"} or pipe.processes[victim].process == killed:
                await asyncio.sleep(0.01)
            before = list(ended)
            while any(now == then for now, then in zip(ended, before, strict=True)):
                await asyncio.sleep(0.01)
        assert pipe.processes["D1"].announcement().roles == "E"


@pytest.mark.parametrize("phase", BESIDE)
async def test_one_that_dies_beside_its_next_life_is_followed_by_it(phase: str) -> None:
    """It is a loss, and what takes over has the other roles, without another start."""
    async with emulated("1E2P2D") as pipe, asking(pipe, MIXED) as ended:
        assert pipe._served.supervisor is not None
        member = pipe._served.supervisor.core.members["D1"]
        await until_decoding(pipe)
        switching = asyncio.ensure_future(pipe.switch("D1", "E", drain_s=5.0))
        async with asyncio.timeout(LIVENESS_S):
            while not PHASES[phase](member):
                await asyncio.sleep(0)
            os.kill(pipe.processes["D1"].process, signal.SIGKILL)
            done = await switching
            assert (done.roles, member.epoch, member.losses) == ("E", 1, 1)
            before = list(ended)
            while any(now == then for now, then in zip(ended, before, strict=True)):
                await asyncio.sleep(0.01)


async def test_a_next_life_that_dies_again_and_again_changes_nothing() -> None:
    async with emulated("1E1P2D") as pipe, asking(pipe, LONG):
        assert pipe._served.supervisor is not None
        member, process = pipe._served.supervisor.core.members["D1"], pipe.processes["D1"].process
        switching = asyncio.ensure_future(pipe.switch("D1", "E"))
        killed = set()
        async with asyncio.timeout(LIVENESS_S):
            while not switching.done():
                if member.next is not None and (
                    found := pipe._served.supervisor._lives["D1", member.next.epoch].process
                ):
                    assert not member.next.prepared
                    killed.add(found)
                    with suppress(ProcessLookupError):
                        os.kill(found, signal.SIGKILL)
                await asyncio.sleep(0)
        with pytest.raises(PeerLost, match="the next life of D1 died 3 times as it was prepared"):
            await switching
        assert len(killed) == MOST_TRIES
        assert (pipe.health["D1"].state, pipe.health["D1"].epoch, str(pipe.placement)) == ("up", 0, "1E1P2D")
        assert pipe.processes["D1"].process == process
        await asyncio.wait_for(pipe.switch("D1", "E"), LIVENESS_S)


async def kill(pipe: Pipeline, victim: str, phase: str) -> int:
    """Kill the life that is there, of the one that switches the next one; return its process."""
    assert pipe._served.supervisor is not None
    member = pipe._served.supervisor.core.members[victim]
    epoch = member.next.epoch if member.next is not None and phase in BESIDE else member.epoch
    async with asyncio.timeout(LIVENESS_S):
        while not (process := pipe._served.supervisor._lives[victim, epoch].process):
            await asyncio.sleep(0)  # it is being forked
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    if victim != "D1" or phase in ("migration", "onload", *BESIDE):
        assert pipe._served.supervisor._lives[victim, epoch].process == process, "it was the life of that phase"
    return process
