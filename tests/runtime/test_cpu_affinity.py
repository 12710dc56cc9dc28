"""Cores that lanes are kept on: shared out, refused where they are not there, and nobody else's threads touched."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from support.checkpoint_files import checkpoint
from support.pipeline_driver import all_tokens, good_ones, serving, threads_of
from support.running_instances import by_hand, pipeline, request, tcp
from trinity.core.messages import Open, Sampled, Step, Stepped
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.errors import ConfigError
from trinity.instance import Instance, check_core_numbers, split_cores
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.runtime import cpu_affinity
from trinity.runtime.cpu_affinity import check_cores, pin_process
from trinity.runtime.lane import Lane
from trinity.testing.oracle import Oracle
from trinity.timeline import Timeline

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this platform has no thread affinity")
DUAL = ("vision", "language")
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else [0]
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="this process may use one core only")
FAR = 1 << 20  # no machine has so many


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    """What the model's own generate() answers takes seconds, which is not for an event loop."""
    all_tokens()
    wanted()


@cache
def wanted() -> list[int]:
    return Oracle(checkpoint("llava")).generate(request())


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """The thread that runs the test may go where it could go before."""
    yield
    assert os.sched_getaffinity(0) == set(CORES)


def affinities(process: int | str = "self") -> dict[int, set[int]]:
    """Cores of each thread of a process, by thread."""
    threads = [int(each.name) for each in Path(f"/proc/{process}/task").iterdir()]
    return {thread: os.sched_getaffinity(thread) for thread in threads}


# ---------------------------------------------------------------- what may be asked for


def test_lanes_share_one_core_or_have_as_many_each() -> None:
    assert split_cores((), 2) == [(), ()]
    assert split_cores((3,), 2) == [(3,), (3,)]
    assert split_cores((3, 1), 2) == [(3,), (1,)]
    assert split_cores((4, 5, 6, 7), 2) == [(4, 5), (6, 7)]
    assert split_cores((4, 5, 6), 1) == [(4, 5, 6)]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"cores": (0, 0)}, "each named once"),
        ({"cores": (-1,)}, "numbers of processors"),
        ({"cores": (True,)}, "cores is a tuple of a whole number"),
        ({"cores": ("0",)}, "cores is a tuple of a whole number"),
        ({"cores": (0, 1, 2), "lanes": DUAL}, "2 lanes cannot share 3 cores"),
        ({"cores": (0,), "threads": 2}, "2 intra-op threads of a lane do not fit on 1 core"),
        ({"cores": (0, 1), "threads": 2, "lanes": DUAL}, "do not fit on 1 core"),
    ],
)
def test_what_cannot_be_pinned_is_refused_when_it_is_said(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Instance("EPD", **asked)


def test_an_instance_with_one_lane_has_all_its_cores() -> None:
    assert Instance("D", cores=(0, 1, 2), lanes=DUAL).lanes == ("joint",), "nothing to run beside it"
    assert Instance("EPD", cores=(0, 1), threads=2).cores == (0, 1)
    assert check_core_numbers([2, 0], 2, 1) == (2, 0), "a list is as good, and its order stays"


def test_cores_that_are_not_there_are_named() -> None:
    check_cores((), "E0")
    check_cores(CORES, "E0")
    with pytest.raises(ConfigError, match=f"E0 asks for core\\(s\\) {FAR}, but this process may only use {CORES[0]}"):
        check_cores((CORES[0], FAR), "E0")


def test_a_platform_without_affinity_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_affinity, "os", object())
    check_cores((), "E0")
    with pytest.raises(ConfigError, match="this platform cannot pin threads to cores; leave out cores="):
        check_cores((0,), "E0")


# ---------------------------------------------------------------- a whole process


@two_cores
def test_every_thread_of_a_process_is_pinned_within_the_block_only() -> None:
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    before = affinities()
    try:
        with pin_process((CORES[1],)):
            assert set(map(tuple, affinities().values())) == {(CORES[1],)}
            inside: list[set[int]] = []
            child = threading.Thread(target=lambda: inside.append(os.sched_getaffinity(0)))
            child.start()
            child.join()
            assert inside == [{CORES[1]}]
        assert {thread: cores for thread, cores in affinities().items() if thread in before} == before
    finally:
        stop.set()
        other.join()


def test_no_cores_touch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *given: pytest.fail("pinned"))
    with pin_process(()):
        cpu_affinity.pin_thread(())


# ---------------------------------------------------------------- pipelines


class Seeing:
    """A stage that counts the cores it runs on, around a built-in one."""

    def __init__(self, inner: Any, seen: list[tuple[str, frozenset[int]]]) -> None:
        self.inner, self.letters, self.seen = inner, inner.letters, seen
        self.open, self.close = inner.open, inner.close

    def forward(self, step: Step) -> dict[str, Sampled]:
        self.seen.append((self.letters, frozenset(os.sched_getaffinity(0))))
        found: dict[str, Sampled] = self.inner.forward(step)
        return found


@two_cores
async def test_stages_run_on_the_cores_of_their_lane() -> None:
    seen: list[tuple[str, frozenset[int]]] = []
    both = Instance("EPD", cores=tuple(CORES[:2]), lanes=DUAL)
    async with serving([both], pools={"image": 16, "kv": 64}) as pipe:
        (host,) = pipe.hosts.values()
        for lane in host._lanes.values():
            lane.stages = [Seeing(stage, seen) for stage in lane.stages]
        await good_ones(pipe)
        where = {thread.name: os.sched_getaffinity(thread.native_id or 0) for thread in threads_of(host)}
    assert set(seen) == {("E", frozenset({CORES[0]})), ("PD", frozenset({CORES[1]}))}
    assert where == {
        "trinity-EPD0-core": set(CORES[:2]),
        "trinity-EPD0-vision": {CORES[0]},
        "trinity-EPD0-language": {CORES[1]},
    }


class Multiplying:
    """A stage whose operator is shared by two OpenMP threads."""

    letters = "PD"

    def __init__(self) -> None:
        self.seen: dict[int, set[int]] = {}

    def open(self, request: Open) -> None:
        """Nothing is kept of a request."""

    def close(self, request: str) -> None:
        """Nothing is kept of a request."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        known = affinities()
        torch.ones(512, 512) @ torch.ones(512, 512)
        self.seen = {thread: cores for thread, cores in affinities().items() if thread not in known}
        return {each: Sampled(1) for each in step.decodes}


@two_cores
def test_threads_of_operators_follow_their_lane() -> None:
    """OpenMP makes a lane's threads when its first operator runs: they must be where the lane is."""
    stage, answers = Multiplying(), SimpleQueue[Any]()
    lane = Lane("PD0", "joint", [stage], answers.put, answers.put, Timeline(), threads=2, cores=(CORES[1],))
    lane.start()
    try:
        lane.post(Step(1, "joint", decodes=("a",)))
        assert isinstance(answers.get(timeout=60), Stepped)
    finally:
        lane.stop()
        lane.join()
        torch.set_num_threads(1)
    assert list(stage.seen.values()) == [{CORES[1]}]


async def test_a_core_that_is_not_there_ends_the_start() -> None:
    with pytest.raises(ConfigError, match=f"EPD0 asks for core\\(s\\) {FAR}"):
        async with Pipeline(checkpoint("llava"), [Instance("EPD", cores=(FAR,))]):
            pytest.fail("started")
    assert all(cores == set(CORES) for cores in affinities().values())


@two_cores
async def test_processes_are_pinned_whole() -> None:
    paced = EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(), scale=64)
    placed = [Instance("EP", cores=(CORES[0],)), Instance("D", cores=(CORES[1],))]
    async with Pipeline(paced, placed, hosting="process", cache=CacheConfig(pools={"image": 4, "kv": 256})) as pipe:
        await pipe.complete(EmulatedRequest(text_tokens=8, max_tokens=4))
        found = {name: affinities(member.process).values() for name, member in pipe.processes.items()}
    assert {name: set(map(frozenset, each)) for name, each in found.items()} == {
        "EP0": {frozenset({CORES[0]})},
        "D0": {frozenset({CORES[1]})},
    }


@two_cores
async def test_one_started_by_hand_is_pinned_while_it_serves_and_free_afterwards(torch_launcher: Launcher) -> None:
    async with by_hand(torch_launcher, tcp()) as (one,):
        async with pipeline(one.instance("EPD", cores=(CORES[1],))) as pipe:
            assert (await pipe.complete(request())).token_ids == wanted()
            assert set(map(frozenset, affinities(one.process).values())) == {frozenset({CORES[1]})}
        async with pipeline(one.instance("EPD")) as pipe:
            assert (await pipe.complete(request())).token_ids == wanted()
            assert all(cores == set(CORES) for cores in affinities(one.process).values())
        with pytest.raises(ConfigError, match=f"asks for core\\(s\\) {FAR}"):
            async with pipeline(one.instance("EPD", cores=(FAR,))):
                pytest.fail("started")
