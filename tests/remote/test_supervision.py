"""Instances that fall silent, or are lost several at once: fenced, started again, and exact afterwards."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import trinity.remote.fork_client
import trinity.remote.supervisor
from support.checkpoint_files import checkpoint
from support.running_instances import LIVENESS_S, by_hand, pipeline, recovered, request, tcp
from trinity.errors import ConfigError, PeerLost, RequestError
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.remote.channel import Address
from trinity.remote.fork_client import Launcher, kept_launcher
from trinity.remote.supervisor import InstanceSupervisor, ProcessConfig
from trinity.testing.oracle import Oracle
from trinity.timeline import Timeline

SILENCE_S = 2.0


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    wanted()
    with kept_launcher() as kept:
        yield kept


@cache
def wanted() -> list[int]:
    return Oracle(checkpoint("llava")).generate(request())


def three(**named: Any) -> Any:
    return pipeline(Instance("E"), Instance("P"), Instance("D"), **named)


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("victim", ["E0", "P0", "D0"])
async def test_a_frozen_instance_is_killed_and_started_again(launcher: Launcher, victim: str) -> None:
    async with three(silence_s=SILENCE_S) as pipe:
        process = pipe.processes[victim].process
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(RequestError):  # without a deadline of its own
            await asyncio.wait_for(pipe.complete(request()), LIVENESS_S)
        assert (await recovered(pipe, request())).token_ids == wanted()
        assert pipe.processes[victim].setup.epoch >= 1
        assert gone(process)
        await asyncio.wait_for(pipe.wait_idle(), LIVENESS_S)


async def test_a_frozen_one_that_was_started_by_hand_is_attached_again(launcher: Launcher) -> None:
    async with by_hand(launcher, tcp()) as (one,):
        async with pipeline(Instance("EP"), one.instance("D"), silence_s=SILENCE_S) as pipe:
            os.kill(one.process, signal.SIGSTOP)
            with pytest.raises(RequestError):
                await asyncio.wait_for(pipe.complete(request()), LIVENESS_S)
            os.kill(one.process, signal.SIGCONT)
            assert (await recovered(pipe, request())).token_ids == wanted()
        assert not one.exit_code.done()


async def test_idle_instances_are_heard_of(launcher: Launcher) -> None:
    async with three(silence_s=SILENCE_S) as pipe:
        processes = {name: member.process for name, member in pipe.processes.items()}
        await asyncio.sleep(2 * SILENCE_S)
        assert {name: member.process for name, member in pipe.processes.items()} == processes
        assert (await pipe.complete(request())).token_ids == wanted()


async def test_all_at_once(launcher: Launcher) -> None:
    async with three() as pipe:
        for member in pipe.processes.values():
            os.kill(member.process, signal.SIGKILL)
        assert (await recovered(pipe, request())).token_ids == wanted()
        assert [member.setup.epoch for member in pipe.processes.values()] == [1, 1, 1]


async def test_lost_again_while_it_is_started_again(launcher: Launcher) -> None:
    async with three() as pipe:
        before = children(launcher)
        os.kill(pipe.processes["P0"].process, signal.SIGKILL)
        async with asyncio.timeout(LIVENESS_S):
            while not (new := children(launcher) - before):
                await asyncio.sleep(0)
        with suppress(ProcessLookupError):
            os.kill(new.pop(), signal.SIGKILL)
        assert (await recovered(pipe, request())).token_ids == wanted()
        assert pipe.processes["P0"].setup.epoch == 2


@pytest.mark.parametrize("victim", ["E0", "D0"])
async def test_lost_after_all_have_met_and_before_the_pipeline_runs(
    launcher: Launcher, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end is not to learn of it as one that is there, after it was told of its loss."""
    whole = InstanceSupervisor.start

    async def start(processes: InstanceSupervisor, setups: Any) -> Any:
        members = await whole(processes, setups)
        os.kill(members[victim].process, signal.SIGKILL)
        async with asyncio.timeout(LIVENESS_S):
            while members[victim].alive:
                await asyncio.sleep(0.005)
        return members

    monkeypatch.setattr(InstanceSupervisor, "start", start)
    async with three() as pipe:
        assert (await recovered(pipe, request())).token_ids == wanted()
        assert pipe.processes[victim].setup.epoch == 1


class SlowLauncher(Launcher):
    """One that is ready once its first line is there."""

    program = (
        "-c",
        "import json, sys\nsys.stdin.readline()\nprint(json.dumps({'ready': 1}), flush=True)\nfor line in sys.stdin:\n"
        "    print(json.dumps({'id': json.loads(line)['id'], 'process': 5_000_000}), flush=True)",
    )


async def test_a_start_given_up_takes_nothing_from_others_that_share_the_launcher() -> None:
    launcher, address = SlowLauncher(torch=False), Address("unix", path="nowhere")
    try:
        given_up, other = (asyncio.ensure_future(launcher.launch(address, b"", "")) for _ in range(2))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        launcher._write({})
        process, _ = await asyncio.wait_for(other, LIVENESS_S)
        assert process == 5_000_000
    finally:
        await asyncio.to_thread(launcher.close)


async def test_a_launcher_that_does_not_answer_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trinity.remote.fork_client, "INSTANCE_START_S", 0.01)
    launcher = SlowLauncher(torch=False)
    try:
        with pytest.raises(PeerLost, match="was not ready"):
            await launcher.launch(Address("unix", path="nowhere"), b"", "")
    finally:
        await asyncio.to_thread(launcher.close)


@pytest.mark.parametrize(("parent", "code"), [("os.getppid()", 0), ("1 + os.getppid()", 1)])
def test_an_instance_does_not_outlive_a_launcher_that_was_gone_when_it_came(parent: str, code: int) -> None:
    program = f"import os; from trinity.remote.fork_server import die_with_parent; die_with_parent({parent})"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == code


def children(launcher: Launcher) -> set[int]:
    main = launcher._process.pid
    return set(map(int, Path(f"/proc/{main}/task/{main}/children").read_text().split()))


async def test_without_its_launcher_a_pipeline_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with kept_launcher() as own, caplog.at_level(logging.ERROR):
        async with pipeline(Instance("EPD")) as pipe:
            own._process.kill()
            async with asyncio.timeout(LIVENESS_S):
                while "the launcher of instance processes has ended" not in caplog.text:
                    await asyncio.sleep(0.02)
            with pytest.raises(RequestError):
                await pipe.complete(request())


def test_too_short_a_silence() -> None:
    for silence_s in (0.0, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="silence_s"):
            Pipeline(checkpoint("llava"), hosting="process", processes=ProcessConfig(silence_s=silence_s))


# ---------------------------------------------------------------- the clock of the watch


@dataclass
class Member:
    last_heard: float
    alive: bool = True
    why: str = ""

    def end(self, why: str) -> None:
        self.why, self.alive = why, False


async def listened(monkeypatch: pytest.MonkeyPatch, members: dict[str, Member], wakes: list[float]) -> None:
    """The watch wakes at these times; who speaks is heard just before it does."""
    now, waking = [0.0], iter(wakes)

    async def sleep(seconds: float) -> None:
        now[0] = next(waking)

    fake = SimpleNamespace(get_running_loop=lambda: SimpleNamespace(time=lambda: now[0]), sleep=sleep)
    processes = InstanceSupervisor(cast(Any, None), Timeline(), {}, None, 8.0)
    processes.members = cast(Any, members)
    monkeypatch.setattr(trinity.remote.supervisor, "asyncio", fake)
    with pytest.raises(RuntimeError):  # the wakes have run out
        await processes._watch_silence()
    monkeypatch.undo()
    processes.members = {}
    await processes.aclose()


async def test_who_is_silent_for_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"quiet": Member(0.0), "loud": Member(5.0), "lost": Member(0.0, alive=False)}
    await listened(monkeypatch, members, [float(second) for second in range(1, 10)])
    assert members["quiet"].why == "it said nothing for 9.0 s"
    assert members["loud"].alive
    assert members["lost"].why == ""


async def test_a_loop_that_was_held_up_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"E0": Member(0.0)}
    await listened(monkeypatch, members, [1.0, 2.0, 60.0, 61.0])
    assert members["E0"].alive
    members = {"E0": Member(0.0)}
    await listened(monkeypatch, members, [1.0, 2.0, 60.0, *map(float, range(61, 69))])
    assert not members["E0"].alive
