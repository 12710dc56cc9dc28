"""Streams of two lanes on a GPU, over a stand-in for torch.cuda: what waits for what, and who waits for nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from trinity.core.messages import Encode, MediaSpan, Open, Sampled, Step, Stepped
from trinity.instance import Instance
from trinity.runtime.cuda_stream import CudaLaneStream, LaneStream, make_lane_stream
from trinity.runtime.lane import Lane
from trinity.timeline import Timeline

SPAN = MediaSpan("image", 4, 0, 4, "a cat")


class FakeCuda:
    """A device whose kernels end only when an event behind them is waited for, and a log of what it was asked."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.current = threading.local()
        self.queued: dict[str, list[str]] = {"default": []}
        self.written: list[str] = []

    def Stream(self, device: str, priority: int) -> FakeStream:
        self.log.append(("stream", device, priority))
        return FakeStream(self, f"{device}/{priority}")

    def Event(self, blocking: bool) -> FakeEvent:
        assert blocking
        return FakeEvent(self)

    def default_stream(self, device: str) -> str:
        return f"default of {device}"

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current.name = stream.name
        yield
        self.current.name = "default"

    def launch(self, kernel: str) -> None:
        """A kernel goes into the queue of the stream that is current in this thread."""
        name = getattr(self.current, "name", "default")
        self.queued.setdefault(name, []).append(kernel)
        self.log.append(("launch", name, kernel))


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: str) -> None:
        self.cuda.log.append(("behind", self.name, other))


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self.stream = stream.name

    def synchronize(self) -> None:
        self.cuda.log.append(("waited", self.stream))
        self.cuda.written += self.cuda.queued.pop(self.stream, [])


class Launching:
    """A stage that only launches kernels, and leaves before they have run."""

    def __init__(self, cuda: FakeCuda, letters: str, failing: bool = False) -> None:
        self.cuda, self.letters, self.failing = cuda, letters, failing

    def open(self, request: Open) -> None:
        self.cuda.launch(f"open {request.work.request}")

    def close(self, request: str) -> None:
        self.cuda.launch(f"close {request}")

    def forward(self, step: Step) -> dict[str, Sampled]:
        self.cuda.launch(f"step {step.id}")
        if self.failing:
            raise ValueError("the stage failed")
        return {each: Sampled(1) for each in step.decodes}


def encode(number: int) -> Step:
    return Step(number, "vision", encodes=(Encode("a", 0, SPAN, (0,), None),))


def decode(number: int) -> Step:
    return Step(number, "language", decodes=("a",))


def ran(cuda: FakeCuda, name: str, stage: Launching, *steps: Step) -> list[tuple[Stepped, list[str]]]:
    """What a lane answered, each with the kernels that had run by the time that the core hears of it."""
    answers: SimpleQueue[tuple[Stepped, list[str]]] = SimpleQueue()
    stream = CudaLaneStream("cuda:1", urgent=name == "language", cuda=cuda)

    def post(answer: Any) -> None:
        answers.put((answer, list(cuda.written)))

    lane = Lane("EPD0", name, [stage], post, lambda error: pytest.fail(repr(error)), Timeline(), 0, stream=stream)
    lane.start()
    for step in steps:
        lane.post(step)
    lane.stop()
    lane.join()
    return [answers.get_nowait() for _ in range(answers.qsize())]


def test_the_core_hears_of_a_step_when_its_blocks_are_written() -> None:
    """Then a transfer, the other lane, or who gets the blocks next needs no event of its own."""
    cuda = FakeCuda()
    (first, after_first), (second, after_second) = ran(cuda, "vision", Launching(cuda, "E"), encode(1), encode(2))
    assert (first.id, second.id) == (1, 2)
    assert after_first == ["step 1"], "the stage leaves with its kernels queued; the lane waits for them"
    assert after_second == ["step 1", "step 2"]


def test_a_step_runs_on_the_lanes_stream_behind_what_others_gave_the_device() -> None:
    cuda = FakeCuda()
    ran(cuda, "language", Launching(cuda, "PD"), decode(1))
    assert cuda.log == [
        ("stream", "cuda:1", -1),
        ("behind", "cuda:1/-1", "default of cuda:1"),
        ("launch", "cuda:1/-1", "step 1"),
        ("waited", "cuda:1/-1"),
    ]


def test_the_language_lane_goes_first_where_both_have_kernels() -> None:
    cuda = FakeCuda()
    ran(cuda, "vision", Launching(cuda, "E"), encode(1))
    ran(cuda, "language", Launching(cuda, "PD"), decode(1))
    (vision, language) = (each[2] for each in cuda.log if each[0] == "stream")
    assert language < vision, "of CUDA's priorities the lower goes first"


def test_a_step_that_fails_is_waited_for_too() -> None:
    """Its blocks are freed when the core hears of the failure: nothing may write into them later."""
    cuda = FakeCuda()
    ((answer, written),) = ran(cuda, "vision", Launching(cuda, "E", failing=True), encode(1))
    assert answer.failed["a"].error == "StageError"
    assert written == ["step 1", "step 1"], "as one step, and alone to find whose fault it is"


def test_the_stream_is_left_when_the_lane_ends() -> None:
    cuda = FakeCuda()
    with CudaLaneStream("cuda:0", urgent=False, cuda=cuda):
        cuda.launch("inside")
    cuda.launch("outside")
    assert [each[1] for each in cuda.log if each[0] == "launch"] == ["cuda:0/0", "default"]


@pytest.mark.parametrize(
    ("device", "lane", "own"),
    [
        (None, "vision", False),
        ("cpu", "vision", False),
        ("cpu", "language", False),
        ("cuda", "joint", False),
        ("cuda", "vision", True),
        ("cuda:1", "language", True),
    ],
)
def test_only_two_lanes_of_one_gpu_have_streams_of_their_own(device: str | None, lane: str, own: bool) -> None:
    made = make_lane_stream(device, lane)
    assert isinstance(made, CudaLaneStream) == own
    if own:
        assert isinstance(made, CudaLaneStream)
        assert (made._device, made._priority < 0) == (device, lane == "language")


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    with LaneStream() as stream:
        stream.begin()
        stream.settle()
    assert Instance("EPD", lanes=("vision", "language")).device is None
