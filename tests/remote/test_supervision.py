"""Instances that fall silent, or are lost several at once: fenced, started again, and exact afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import trinity.remote.supervision.fork_client
import trinity.remote.supervision.instance_processes
from support import emulated_pipelines
from support.checkpoint_files import checkpoint
from support.freezing import freeze
from support.pipeline_options import pipeline_options
from support.running_instances import LIVENESS_S, by_hand, pipeline, recovered, request, tcp
from support.shared_launcher import sharing
from support.thinned import thinned
from trinity.core.failure_policy import NO_RECOVERY
from trinity.emulation.model import EmulatedRequest
from trinity.errors import ConfigError, Overloaded, PeerLost, RequestError
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.remote.channel.channel import Address
from trinity.remote.supervision import leftovers
from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.instance_processes import InstanceSupervisor
from trinity.remote.supervision.process_config import ProcessConfig
from trinity.remote.supervision.process_identity import has_ended, read_start
from trinity.remote.supervision.supervisor_messages import InstanceHealth
from trinity.remote.supervision.warm_launchers import close_idle
from trinity.testing.oracle import Oracle
from trinity.timeline import Timeline

SILENCE_S = 2.0


@pytest.fixture(scope="module")
def launcher(torch_launcher: Launcher) -> Iterator[Launcher]:
    wanted()
    with sharing(torch_launcher):
        yield torch_launcher


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


@pytest.mark.parametrize("victim", thinned(("E0", "P0", "D0"), ("P0",).__contains__))
async def test_a_frozen_instance_is_killed_and_started_again(launcher: Launcher, victim: str) -> None:
    async with three(silence_s=SILENCE_S) as pipe:
        process = pipe.processes[victim].process
        freeze(process)
        with pytest.raises(RequestError):  # without a deadline of its own
            await asyncio.wait_for(pipe.complete(request()), LIVENESS_S)
        assert (await recovered(pipe, request())).token_ids == wanted()
        assert pipe.processes[victim].setup.epoch >= 1
        assert gone(process)
        await asyncio.wait_for(pipe.wait_idle(), LIVENESS_S)


async def test_a_frozen_one_that_was_started_by_hand_is_attached_again(launcher: Launcher) -> None:
    async with by_hand(launcher, tcp()) as (one,):
        async with pipeline(Instance("EP"), one.instance("D"), silence_s=SILENCE_S) as pipe:
            freeze(one.process)
            with pytest.raises(RequestError):
                await asyncio.wait_for(pipe.complete(request()), LIVENESS_S)
            os.kill(one.process, signal.SIGCONT)
            assert (await recovered(pipe, request())).token_ids == wanted()
        assert not one.life.has_ended()


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
        "    mark = json.loads(line)['id']\n"
        "    print(json.dumps({'taken': mark}), flush=True)\n"
        "    print(json.dumps({'id': mark, 'process': 5_000_000, 'born': 1}), flush=True)",
    )


async def test_a_start_given_up_takes_nothing_from_others_that_share_the_launcher() -> None:
    launcher, address = SlowLauncher(torch=False), Address("unix", path="nowhere")
    try:
        given_up, other = (asyncio.ensure_future(launcher.launch(address, b"", "")) for _ in range(2))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        launcher._write({})
        assert (await asyncio.wait_for(other, LIVENESS_S)).number == 5_000_000
    finally:
        await asyncio.to_thread(launcher.close)


async def test_a_launcher_that_does_not_answer_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trinity.remote.supervision.fork_client, "INSTANCE_START_S", 0.01)
    launcher = SlowLauncher(torch=False)
    try:
        with pytest.raises(PeerLost, match="was not ready"):
            await launcher.launch(Address("unix", path="nowhere"), b"", "")
    finally:
        await asyncio.to_thread(launcher.close)


def test_a_process_does_not_outlive_a_holder_that_was_gone_when_it_came() -> None:
    watched, held = os.pipe()
    program = f"from trinity.errors.parent_process import die_with_holder; die_with_holder({watched}); print('lives')"
    for codes, said in ((0, b"lives\n"), (1, b"")):
        done = subprocess.run([sys.executable, "-c", program], check=False, pass_fds=[watched], stdout=subprocess.PIPE)
        assert (done.returncode, done.stdout) == (codes, said)
        if not codes:
            os.close(held)
    os.close(watched)


def children(launcher: Launcher) -> set[int]:
    main = launcher._process.pid
    return set(map(int, Path(f"/proc/{main}/task/{main}/children").read_text().split()))


def launcher_of(pipe: Pipeline) -> Launcher:
    assert pipe._served.supervisor is not None
    opening = pipe._served.supervisor.forks.opening
    assert opening is not None
    assert opening.done()
    return opening.result()[0]


def test_too_short_a_silence() -> None:
    for silence_s in (0.0, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="silence_s"):
            Pipeline(checkpoint("llava"), hosting="process", processes=ProcessConfig(silence_s=silence_s))


# ---------------------------------------------------------------- emulated instances, which start at once


def emulated(**named: Any) -> Pipeline:
    settings = {
        "placement": "1E1P1D",
        "pools": emulated_pipelines.POOLS,
        "silence_s": SILENCE_S,
        "failures": NO_RECOVERY,
        **named,
    }
    return Pipeline(emulated_pipelines.MODEL, hosting="process", **pipeline_options(settings))


async def serves(pipe: Pipeline) -> None:
    """Until it does, and every instance is up."""
    asked = EmulatedRequest(text_tokens=18, image_tokens=(576,), max_tokens=5)
    output = await recovered(pipe, cast(Any, asked))
    assert output.token_ids == emulated_pipelines.right(asked)
    async with asyncio.timeout(LIVENESS_S):
        while {health.state for health in pipe.health.values()} != {"up"}:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("gap_s", [0.0, 0.12, 0.16, 0.2, 0.24, 0.3])
async def test_two_losses_close_together(gap_s: float) -> None:
    """At f13ec65 a loss while another instance met its peers stopped the pipeline for 61 s."""
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S / 2):
        os.kill(pipe.processes["E0"].process, signal.SIGKILL)
        await asyncio.sleep(gap_s)
        os.kill(pipe.processes["D0"].process, signal.SIGKILL)
        await serves(pipe)


async def test_a_loss_while_another_is_frozen() -> None:
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S / 2):
        freeze(pipe.processes["D0"].process)
        os.kill(pipe.processes["E0"].process, signal.SIGKILL)
        await serves(pipe)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_loss_after_that_of_the_launcher(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At f13ec65 the pipeline was dead for ever, or D0 was, and aclose() raised a bare TimeoutError."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    async with emulated() as pipe, asyncio.timeout(LIVENESS_S):
        first = launcher_of(pipe)._process
        os.kill(first.pid, sent)
        with suppress(ProcessLookupError):
            os.kill(pipe.processes["D0"].process, signal.SIGKILL)
        await serves(pipe)
        second = launcher_of(pipe)._process
        assert second.pid != first.pid
    assert first.returncode is not None
    await asyncio.to_thread(close_idle)  # else it waits for another pipeline
    assert second.returncode is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "victims",
    [*(pytest.param((each,), marks=pytest.mark.slow) for each in ("P0", "launcher")), ("E0", "P0", "D0", "launcher")],
)
async def test_closing_does_not_wait_for_who_is_frozen(victims: tuple[str, ...]) -> None:
    async with asyncio.timeout(LIVENESS_S), emulated(silence_s=1000.0) as pipe:
        launcher = launcher_of(pipe)._process
        processes = {"launcher": launcher.pid} | {name: each.process for name, each in pipe.processes.items()}
        starts = {process: read_start(process) for process in processes.values()}
        for name in victims:
            freeze(processes[name])
    await asyncio.to_thread(close_idle)
    assert all(has_ended(process, start) for process, start in starts.items())  # who reaps them is not our business


async def test_changes_are_told_with_their_reasons() -> None:
    told: list[InstanceHealth] = []
    async with emulated(on_change=told.append) as pipe, asyncio.timeout(LIVENESS_S):
        os.kill(pipe.processes["P0"].process, signal.SIGKILL)
        refusal: object = None
        while not isinstance(refusal, Overloaded):
            (refusal,) = await asyncio.gather(pipe.complete(EmulatedRequest(max_tokens=5)), return_exceptions=True)
        assert "P0 is started again: its control channel ended" in str(refusal)
        await serves(pipe)
    of_one = [(health.state, health.epoch) for health in told if health.name == "P0"]
    starts = [("starting", 0), ("up", 0), ("lost", 0), ("starting", 1), ("up", 1)]
    assert [each for each in of_one if each[0] != "silent"][:5] == starts
    assert of_one[-1][0] == "closed"


async def test_a_loss_while_the_pipeline_is_being_closed_is_not_made_good() -> None:
    async with emulated() as pipe:
        os.kill(pipe.processes["P0"].process, signal.SIGKILL)
        closing = asyncio.ensure_future(pipe.aclose())
        os.kill(pipe.processes["D0"].process, signal.SIGKILL)
        await asyncio.wait_for(closing, LIVENESS_S)
        assert {each.state for each in pipe.health.values()} == {"closed"}


# ---------------------------------------------------------------- the clock of the watch


async def listened(monkeypatch: pytest.MonkeyPatch, heard: list[float], wakes: list[float]) -> list[float]:
    """The watch wakes at these times of one that spoke at those; the longest silence that each wake told of."""
    now, waking, told = [0.0], iter(wakes), list[float]()
    client = SimpleNamespace(last_heard=0.0, alive=True, step=None, process=0)

    async def sleep(seconds: float) -> None:
        now[0] = next(waking)
        client.last_heard = max([client.last_heard, *(at for at in heard if at <= now[0])])

    processes = InstanceSupervisor(cast(Any, None), Timeline(), {}, None, ProcessConfig(silence_s=8.0))
    processes._lives = cast(Any, {("E0", 0): client})
    monkeypatch.setattr(trinity.remote.supervision.instance_processes, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(
        trinity.remote.supervision.instance_processes, "time", SimpleNamespace(monotonic=lambda: now[0])
    )
    monkeypatch.setattr(processes, "handle", lambda quiet: told.append(quiet.seconds))
    with pytest.raises(RuntimeError):  # the wakes have run out
        await processes._watch_silence()
    monkeypatch.undo()
    processes._lives = {}
    await processes.aclose()
    return told


async def test_silence_is_counted_from_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = [0.5 * number for number in range(1, 8)]
    assert await listened(monkeypatch, [], wakes) == wakes
    assert await listened(monkeypatch, [2.0], wakes) == [0.5, 1.0, 1.5, 0.0, 0.5, 1.0, 1.5]


async def test_a_loop_that_was_held_up_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(await listened(monkeypatch, [], [0.5, 1.0, 60.0, 60.5])) == 2.0
