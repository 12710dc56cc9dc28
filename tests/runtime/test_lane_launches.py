"""Steps launched behind each other: a stage that begins a step without waiting for it, driven by its lane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from trinity.core.messages import Close, Encode, MediaSpan, Open, Sampled, Step, Stepped, Value, Work
from trinity.errors import StageError
from trinity.runtime.lane import Lane
from trinity.stages.base import LaunchableStage, Stage
from trinity.timeline import Timeline

SOON_S = 120.0


class Job:
    """A step on the device; ends when it is let go."""

    def __init__(self, device: Device, step: Step) -> None:
        self.device, self.step = device, step

    def ready(self) -> bool:
        return self.device.ended.is_set()

    def wait(self) -> dict[str, Sampled]:
        assert self.device.ended.wait(SOON_S)
        self.device.did.append(f"wait {self.step.id}")
        if self.step.id in self.device.broken:
            raise StageError("the device failed", self.step.decodes[0], "D")
        return self.device.tokens(self.step)

    def drop(self) -> None:
        self.device.did.append(f"drop {self.step.id}")
        for request in self.step.decodes:
            self.device.fed[request] -= 1


class Device:
    """A stage whose decode rows feed what the step before samples: token n of a request is n. It writes down what it
    did; ``waited`` says whether it was waited for at all."""

    letters = "D"

    def __init__(self, broken: tuple[int, ...] = (), refuses: tuple[int, ...] = (), fails: str = "") -> None:
        self.broken, self.refuses, self.fails = broken, refuses, fails
        self.did: list[str] = []
        self.fed: dict[str, int] = {}
        self.ended = threading.Event()

    def open(self, request: Open) -> None:
        self.did.append(f"open {request.work.request}")
        self.fed[request.work.request] = 0

    def close(self, request: str) -> None:
        self.did.append(f"close {request}")

    def tokens(self, step: Step) -> dict[str, Sampled]:
        return {request: Sampled(self.counts[step.id, request]) for request in step.decodes}

    @property
    def counts(self) -> dict[tuple[int, str], int]:
        return self.__dict__.setdefault("_counts", {})

    def _feed(self, step: Step) -> None:
        for request in step.decodes:
            self.fed[request] += 1
            self.counts[step.id, request] = self.fed[request]

    def launch(self, step: Step) -> Job:
        if step.id in self.refuses:
            raise StageError("not now", step.decodes[0], "D")
        self.did.append(f"launch {step.id}")
        self._feed(step)
        return Job(self, step)

    def forward(self, step: Step) -> dict[str, Sampled]:
        self.did.append(f"forward {step.id} {' '.join(step.decodes)}")
        if self.fails in step.decodes:
            raise StageError("its row is at fault", self.fails, "D")
        self._feed(step)
        return self.tokens(step)


class Encoder:
    """A second stage of the lane, which launches nothing."""

    letters = "E"

    def __init__(self, did: list[str]) -> None:
        self.did = did

    def open(self, request: Open) -> None:
        """Nothing is kept."""

    def close(self, request: str) -> None:
        """Nothing is kept."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        self.did.append(f"encode {step.id}")
        return {}


@contextmanager
def running(device: Device, *others: Any, depth: int = 2) -> Iterator[tuple[Lane, SimpleQueue[Value]]]:
    answers: SimpleQueue[Value] = SimpleQueue()
    failures: list[BaseException] = []
    lane = Lane("D0", "joint", [device, *others], answers.put, failures.append, Timeline(), threads=0, depth=depth)
    lane.start()
    for name in "ab":
        lane.post(Open(work=Work(request=name, prompt=(1,)), blocks=(0,)))
    try:
        yield lane, answers
    finally:
        device.ended.set()
        lane.stop()
        lane.join()
    assert not failures


def step(number: int, *names: str, encodes: tuple[Encode, ...] = ()) -> Step:
    return Step(number, "joint", encodes, (), names or ("a", "b"))


def answer(answers: SimpleQueue[Value]) -> Stepped:
    found = answers.get(timeout=SOON_S)
    assert isinstance(found, Stepped)
    return found


def tokens(found: Stepped) -> dict[str, int]:
    return {request: one.token for request, one in found.sampled.items()}


def until(reached: Callable[[], bool]) -> None:
    for _ in range(int(SOON_S * 1000)):
        if reached():
            return
        threading.Event().wait(0.001)
    pytest.fail("not reached")


def test_the_protocol_is_seen() -> None:
    assert isinstance(Device(), Stage)
    assert isinstance(Device(), LaunchableStage)
    assert not isinstance(Encoder([]), LaunchableStage)


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read() -> None:
    device = Device()
    with running(device) as (lane, answers):
        lane.post(step(1))
        until(lambda: "launch 1" in device.did)
        lane.post(step(2))
        until(lambda: "launch 2" in device.did)
        assert answers.empty()
        device.ended.set()
        first, second = answer(answers), answer(answers)
    assert (first.id, tokens(first), first.failed) == (1, {"a": 1, "b": 1}, {})
    assert (second.id, tokens(second)) == (2, {"a": 2, "b": 2})
    assert [each for each in device.did if each[0] in "lw"] == ["launch 1", "launch 2", "wait 1", "wait 2"]
    assert first.seconds >= 0 <= second.seconds


def test_with_depth_1_each_is_waited_for() -> None:
    device = Device()
    device.ended.set()
    with running(device, depth=1) as (lane, answers):
        lane.post(step(1))
        lane.post(step(2))
        assert [answer(answers).id, answer(answers).id] == [1, 2]
    assert [each for each in device.did if each[0] in "lw"] == ["launch 1", "wait 1", "launch 2", "wait 2"]


def test_requests_come_and_go_while_a_step_is_in_flight() -> None:
    device = Device()
    with running(device) as (lane, answers):
        lane.post(step(1, "a"))
        lane.post(Close("b"))
        lane.post(Open(work=Work(request="c", prompt=(1,)), blocks=(1,)))
        lane.post(step(2, "a", "c"))
        until(lambda: "launch 2" in device.did)
        device.ended.set()
        assert [tokens(answer(answers)), tokens(answer(answers))] == [{"a": 1}, {"a": 2, "c": 1}]
    assert device.did[2:6] == ["launch 1", "close b", "open c", "launch 2"]


def test_what_failed_after_its_launch_runs_again_and_all_behind_it() -> None:
    device = Device(broken=(1,), fails="b")
    with running(device) as (lane, answers):
        lane.post(step(1))
        lane.post(step(2))
        until(lambda: "launch 2" in device.did)
        device.ended.set()
        first, second = answer(answers), answer(answers)
    assert (first.id, tokens(first), list(first.failed)) == (1, {"a": 1}, ["b"])
    assert (second.id, tokens(second), list(second.failed)) == (2, {"a": 2}, ["b"])
    assert first.failed["b"].error == "StageError"
    assert device.did[device.did.index("wait 1") :][:4] == ["wait 1", "drop 2", "drop 1", "forward 1 a b"]


def test_a_launch_that_is_refused_runs_as_any_other_step() -> None:
    device = Device(refuses=(2,))
    device.ended.set()
    with running(device) as (lane, answers):
        for number in (1, 2, 3):
            lane.post(step(number))
        assert [tokens(answer(answers))["a"] for _ in range(3)] == [1, 2, 3]
    assert device.did.index("wait 1") < device.did.index("forward 2 a b") < device.did.index("launch 3")


def test_a_step_of_two_stages_waits_for_what_is_in_flight() -> None:
    device = Device()
    encoder = Encoder(device.did)
    encode = Encode("c", 0, MediaSpan("image", 1, 0, 1, "cat"), (0,), None)
    with running(device, encoder) as (lane, answers):
        lane.post(step(1))
        lane.post(step(2, "a", "b", encodes=(encode,)))
        device.ended.set()
        assert [tokens(answer(answers))["a"] for _ in range(2)] == [1, 2]
    assert device.did.index("wait 1") < device.did.index("forward 2 a b") < device.did.index("encode 2")


def test_the_end_comes_after_what_is_in_flight() -> None:
    device = Device()
    with running(device) as (lane, answers):
        lane.post(step(1))
        until(lambda: "launch 1" in device.did)
    assert answer(answers).id == 1
