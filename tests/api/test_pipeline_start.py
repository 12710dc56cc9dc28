"""A start that is cancelled, timed out or closed over, at many points: it says so, and nothing of it stays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoint_files import checkpoint
from support.emulated_pipelines import MODEL
from trinity.emulation.processor import EmulatedProcessor
from trinity.errors import ClosedError, ConfigError
from trinity.pipeline import Pipeline
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.worker_processes import KillableProcessor
from trinity.remote.supervision.supervised_lives import LifePhase
from trinity.runtime import loader
from trinity.runtime.shielded_wait import run_to_end

LIVENESS_S = 120.0
HOSTINGS: list[Any] = ["thread", "process"]


@pytest.fixture(scope="module")
def llama() -> Path:
    return checkpoint("llama")


def assert_closed(pipe: Pipeline) -> None:
    assert pipe.state == "closed"
    assert pipe._closing is not None
    assert pipe._closing.done()
    for host in pipe.hosts.values():
        assert not host._thread.thread.is_alive()
    if pipe._served.supervisor is not None:
        phases = {member.phase for member in pipe._served.supervisor.core.members.values()}
        assert phases <= {LifePhase.CLOSED}, phases
        assert pipe._served.supervisor.forks.opening is None
        assert not Path(pipe._served.supervisor._folder.path).exists()


async def turns(count: int) -> None:
    """Let the loop turn: steps of a start are found by count, whatever the machine's speed."""
    for _ in range(count):
        await asyncio.sleep(0)


async def by_turns(number: int) -> None:
    await turns(number * 2)


async def by_time(number: int) -> None:
    await asyncio.sleep(0.004 * number * number)


@pytest.mark.parametrize("pause", [by_turns, by_time])
@pytest.mark.parametrize("hosting", HOSTINGS)
async def test_closed_at_any_point_of_its_start(hosting: Any, pause: Callable[[int], Any]) -> None:
    outcomes = []
    for number in range(8):
        pipe = Pipeline(MODEL, "E+PD", hosting=hosting)
        starting = asyncio.ensure_future(pipe.start())
        await pause(number)
        async with asyncio.timeout(LIVENESS_S):
            await pipe.aclose()
            (outcome,) = await asyncio.gather(starting, return_exceptions=True)
        assert outcome is None or type(outcome) is ClosedError, repr(outcome)
        outcomes.append(outcome)
        assert_closed(pipe)
        with pytest.raises(ClosedError):
            pipe._frontend.check_open()
    assert any(outcomes)


@pytest.mark.parametrize("hosting", HOSTINGS)
async def test_cancelled_at_any_point_of_its_start(hosting: Any) -> None:
    for number in range(7):
        pipe = Pipeline(MODEL, "E+PD", hosting=hosting)
        starting = asyncio.ensure_future(pipe.start())
        await by_time(number)
        started = starting.done()
        starting.cancel()
        async with asyncio.timeout(LIVENESS_S):
            (outcome,) = await asyncio.gather(starting, return_exceptions=True)
            if started:
                await pipe.aclose()
        assert started or isinstance(outcome, asyncio.CancelledError), repr(outcome)
        assert_closed(pipe)


class Held:
    """A load that takes until it is let go, and what it made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.made: list[EmulatedProcessor] = []
        monkeypatch.setattr(loader, "make_processor", self._make)

    def _make(self, *_: Any, **__: Any) -> EmulatedProcessor:
        self.begun.set()
        assert self.go.wait(LIVENESS_S)
        self.made.append(EmulatedProcessor(MODEL))
        return self.made[0]


@pytest.mark.parametrize("how", ["cancel", "close", "timeout"])
async def test_a_processor_that_is_still_loading_is_waited_for_and_closed(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    pipe = Pipeline(MODEL, "EPD")

    async def start() -> None:
        async with asyncio.timeout(0.05 if how == "timeout" else LIVENESS_S):
            await pipe.start()

    starting = asyncio.ensure_future(start())
    await asyncio.to_thread(held.begun.wait, LIVENESS_S)
    closing = [asyncio.ensure_future(pipe.aclose())] if how == "close" else []
    if how == "cancel":
        starting.cancel()
    await asyncio.sleep(0.1)
    assert not any(each.done() for each in (starting, *closing)), "it left a thread behind"
    held.go.set()
    expected = {"cancel": asyncio.CancelledError, "close": ClosedError, "timeout": TimeoutError}[how]
    with pytest.raises(expected):
        await starting
    await asyncio.gather(*closing)
    assert [each._closed for each in held.made] == [True]
    assert_closed(pipe)


async def test_a_start_that_is_given_up_leaves_no_preprocessing_process(llama: Path) -> None:
    pipe = Pipeline(llama, "PD", limits=MediaLimits(processes=1))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await pipe.start()
    made = pipe._frontend.processor
    assert isinstance(made, KillableProcessor)
    assert made.origin.process == 0
    assert [each.process for lane in made._workers.values() for each in lane] == [0, 0]


async def test_an_error_of_a_start_comes_through_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("no weights here")

    monkeypatch.setattr(loader, "load_instances", fail)
    pipe = Pipeline(MODEL, "EPD")
    with pytest.raises(ConfigError, match="no weights here"):
        await pipe.start()
    assert_closed(pipe)
    with pytest.raises(ClosedError, match="starts once"):
        await pipe.start()


async def test_what_runs_to_its_end_gives_its_result_or_its_error() -> None:
    assert await run_to_end(divmod, 7, 4) == (1, 3)
    with pytest.raises(ZeroDivisionError):
        await run_to_end(divmod, 7, 0)
    go = threading.Event()
    running = asyncio.ensure_future(run_to_end(go.wait, timeout=LIVENESS_S))
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.sleep(0.01)
    assert not running.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_gpu_that_is_not_here_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 6aebd56: an AssertionError of torch, which was not compiled with CUDA."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="device 'cuda' is not here: torch sees 0 CUDA devices"):
        await Pipeline(llama, "PD", device="cuda").start()
