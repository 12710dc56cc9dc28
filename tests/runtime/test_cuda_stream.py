"""Streams of lanes on GPUs, over a stand-in for torch.cuda that runs work as late as it may: what waits for what."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from support.lazy_cuda import LazyCuda, replace_cuda
from trinity.core.messages import Encode, LayersWritten, MediaSpan, Open, Prefill, Sampled, Step, Stepped
from trinity.instance import Instance
from trinity.runtime.cuda_stream import CudaLaneStream, LaneStream, make_lane_stream
from trinity.runtime.lane import Lane
from trinity.stages.async_steps import HostCopies
from trinity.timeline import Timeline

SPAN = MediaSpan("image", 4, 0, 4, "a cat")
LANES = [("vision", "EPD"), ("language", "EPD"), ("joint", "E"), ("joint", "P"), ("joint", "D"), ("joint", "EPD")]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LazyCuda:
    return replace_cuda(monkeypatch)


class Launching:
    """A stage that only launches kernels, and leaves before they have run. ``written`` is its cache."""

    def __init__(self, cuda: LazyCuda, letters: str, failing: bool = False) -> None:
        self.cuda, self.letters, self.failing = cuda, letters, failing
        self.written: list[str] = []

    def open(self, request: Open) -> None:
        self.kernel(f"open {request.work.request}")

    def close(self, request: str) -> None:
        self.kernel(f"close {request}")

    def kernel(self, name: str) -> None:
        self.cuda.launch(lambda: self.written.append(name), 1)

    def forward(self, step: Step) -> dict[str, Sampled]:
        self.kernel(f"step {step.id}")
        if self.failing:
            raise ValueError("the stage failed")
        return {each: Sampled(1) for each in step.decodes}


class Launched:
    """A pending step that ends at once for its lane, whatever its kernels do."""

    def __init__(self, sampled: dict[str, Sampled]) -> None:
        self.sampled = sampled

    def ready(self) -> bool:
        return True

    def wait(self) -> dict[str, Sampled]:
        return self.sampled

    def drop(self) -> None:
        raise AssertionError("nothing failed")


class Ahead(Launching):
    """A stage whose steps are launched."""

    def launch(self, step: Step) -> Launched:
        return Launched(self.forward(step))


def encode(number: int, lane: str = "vision") -> Step:
    return Step(number, lane, encodes=(Encode("a", 0, SPAN, (0,), None),))


def decode(number: int, lane: str = "language") -> Step:
    return Step(number, lane, decodes=("a",))


def chunk(number: int, lane: str = "language") -> Step:
    return Step(number, lane, prefills=(Prefill("a", 0, 4, False),))


def step_of(lane: str, roles: str) -> Callable[[int, str], Step]:
    return encode if lane == "vision" or roles == "E" else chunk if roles == "P" else decode


def ran(
    stage: Launching, *steps: Step, lane: str = "vision", roles: str = "EPD", depth: int = 1
) -> list[tuple[Stepped, list[str]]]:
    """What a lane answered, each with the kernels that had run by the time that the core hears of it."""
    answers: SimpleQueue[tuple[Stepped, list[str]]] = SimpleQueue()

    def post(answer: Any) -> None:
        answers.put((answer, list(stage.written)))

    def fail(error: BaseException) -> None:
        raise error

    stream = make_lane_stream("cuda:1", lane, roles)
    made = Lane("EPD0", lane, [stage], post, fail, Timeline(), 0, stream=stream, depth=depth)
    made.start()
    for step in steps:
        made.post(step)
    made.stop()
    made.join()
    return [answers.get_nowait() for _ in range(answers.qsize())]


@pytest.mark.parametrize(("lane", "roles"), LANES)
def test_the_core_hears_of_a_step_when_its_blocks_are_written(cuda: LazyCuda, lane: str, roles: str) -> None:
    """Then a transfer, the other lane, or who gets the blocks next needs no event of its own."""
    make = step_of(lane, roles)
    stage = Launching(cuda, "EPD")
    (first, after_first), (second, after_second) = ran(stage, make(1, lane), make(2, lane), lane=lane, roles=roles)
    assert (first.id, second.id) == (1, 2)
    assert after_first == ["step 1"], "the stage leaves with its kernels queued; the lane waits for them"
    assert after_second == ["step 1", "step 2"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_launched_step_has_run_when_the_core_hears_of_it(cuda: LazyCuda, depth: int) -> None:
    """Even if the stage's own pending step waits for nothing, as that of a step which sampled nothing may."""
    stage = Ahead(cuda, "PD")
    found = ran(stage, chunk(1, "joint"), chunk(2, "joint"), lane="joint", roles="PD", depth=depth)
    assert [(answer.id, f"step {answer.id}" in written) for answer, written in found] == [(1, True), (2, True)]


def test_a_lane_runs_on_its_own_device_whatever_the_threads_before_were_on(cuda: LazyCuda) -> None:
    """The stand-in raises, as a GPU would, if a kernel for device 1 is launched on device 0."""
    stage = Launching(cuda, "EPD")
    ((answer, _),) = ran(stage, decode(1, "joint"), lane="joint", roles="PD")
    assert answer.failed == {}
    assert cuda.touched == [("trinity-EPD0-joint", 1)]
    assert cuda.current_device() == 0, "and no other thread's device has changed"


def test_a_step_runs_on_the_lanes_stream_behind_what_was_loaded(cuda: LazyCuda) -> None:
    order: list[str] = []
    with cuda.device(1):
        cuda.launch(lambda: order.append("weights"))
    stage = Launching(cuda, "PD")
    stage.written = order
    ran(stage, decode(1), lane="language")
    assert order == ["weights", "step 1"]
    assert cuda.notes == [("trinity-EPD0-language", "behind", "default of 1")]


class Leaving(Launching):
    """A stage that leaves another stream and device as the current ones, as a capture that fails does."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        sampled = super().forward(step)
        self.cuda.set_stream(self.cuda.Stream(0))
        return sampled


def test_a_step_that_leaves_another_stream_spoils_none_behind_it(cuda: LazyCuda) -> None:
    found = ran(Leaving(cuda, "E"), encode(1), encode(2))
    assert [(answer.failed, written[-1]) for answer, written in found] == [({}, "step 1"), ({}, "step 2")]


def test_lanes_of_two_instances_on_one_gpu_wait_for_none_of_each_other(cuda: LazyCuda) -> None:
    """An encode that is queued by E does not hold up a decode of D in the same process."""
    encoder, decoder = Launching(cuda, "E"), Launching(cuda, "D")
    with make_lane_stream("cuda:1", "joint", "E"):
        encoder.forward(encode(1))
        ((_, written),) = ran(decoder, decode(1, "joint"), lane="joint", roles="D")
        assert (written, encoder.written) == (["step 1"], [])


def test_lanes_that_decode_go_first_where_others_have_kernels_too() -> None:
    urgent = {pair: make_lane_stream("cuda", *pair).urgent for pair in LANES}  # type: ignore[attr-defined]
    assert [pair for pair, first in urgent.items() if first] == [
        ("language", "EPD"),
        ("joint", "D"),
        ("joint", "EPD"),
    ]


def test_of_cudas_priorities_the_lower_goes_first(cuda: LazyCuda) -> None:
    with make_lane_stream("cuda:1", "language"):
        language = cuda.current_stream().priority
    with make_lane_stream("cuda:1", "vision"):
        assert language < cuda.current_stream().priority


def test_a_step_that_fails_is_waited_for_too(cuda: LazyCuda) -> None:
    """Its blocks are freed when the core hears of the failure: nothing may write into them later."""
    ((answer, written),) = ran(Launching(cuda, "E", failing=True), encode(1))
    assert answer.failed["a"].error == "StageError"
    assert written == ["step 1", "step 1"], "as one step, and alone to find whose fault it is"


class Slow(Launching):
    """A stage whose kernel takes its time; ``took`` has its seconds."""

    def kernel(self, name: str) -> None:
        self.cuda.launch(self._run)

    def _run(self) -> None:
        started = time.perf_counter()
        time.sleep(0.01)
        self.took = time.perf_counter() - started


def test_the_seconds_of_a_step_are_the_devices(cuda: LazyCuda) -> None:
    """They set budgets and rates: those of the launch alone would be microseconds."""
    stage = Slow(cuda, "E")
    ((answer, _),) = ran(stage, encode(1, "joint"), lane="joint", roles="E")
    assert answer.seconds >= stage.took


def test_the_stream_is_left_when_the_lane_ends(cuda: LazyCuda) -> None:
    with CudaLaneStream("cuda:1", urgent=False):
        assert (cuda.current_device(), cuda.current_stream()) != (1, cuda.defaults[1])
    assert (cuda.current_device(), cuda.current_stream(1)) == (0, cuda.defaults[1])


@pytest.mark.parametrize(
    ("device", "lane", "number"),
    [
        (None, "vision", None),
        ("cpu", "vision", None),
        ("cpu", "joint", None),
        ("cuda", "joint", 0),
        ("cuda", "vision", 0),
        ("cuda:1", "language", 1),
    ],
)
def test_every_lane_of_a_gpu_has_a_stream(device: str | None, lane: str, number: int | None) -> None:
    made = make_lane_stream(device, lane)
    assert isinstance(made, CudaLaneStream) == (number is not None)
    assert getattr(made, "number", None) == number


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    with LaneStream() as stream:
        stream.begin()
        stream.settle()
        assert stream.run(lambda: 3) == 3
    assert Instance("EPD", lanes=("vision", "language")).device is None


# ---------------------------------------------------------------- layers that are reported from within a step


class Streaming(Launching):
    """A stage that reports its layers through ``LayerProgressAttention``, over tensors that say they are on a GPU."""

    def __init__(self, cuda: LazyCuda) -> None:
        super().__init__(cuda, "P")
        self.on_layers: Callable[[int, int], None] | None = None

    def forward(self, step: Step) -> dict[str, Sampled]:
        from trinity.stages.attention.layer_progress import LayerProgressAttention

        assert self.on_layers is not None
        inner: Any = Cache(self)
        backend: Any = LayerProgressAttention(inner, 1, 2, self.on_layers)
        for layer in range(2):
            backend.write(None, None, OnGpu(torch.ones(2)), OnGpu(torch.ones(2)), layer)
        backend.finish()
        return {}


class Cache:
    """A backend that queues the write of a layer's KV."""

    def __init__(self, stage: Launching) -> None:
        self.stage = stage

    def write(self, rows: Any, cache: Any, key: Any, value: Any, layer: int) -> None:
        self.stage.kernel(f"layer {layer}")


class OnGpu(torch.Tensor):
    """A tensor of the host that says it is on a GPU."""

    is_cuda, device = True, torch.device("cuda", 1)

    def __new__(cls, values: torch.Tensor) -> OnGpu:
        return values.as_subclass(cls)


def test_layers_are_written_when_they_are_reported(cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event behind a layer is recorded on the lane's own stream, of its device: a reader may begin."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **named: empty(*size, **named))
    found = ran(Streaming(cuda), Step(1, "joint", prefills=(Prefill("a", 0, 4, False),), group=1), lane="joint")
    layers: list[Any] = [(answer.layers, written) for answer, written in found if isinstance(answer, LayersWritten)]
    assert [each for each, _ in layers] == [(0, 1), (1, 2)]
    assert all(f"layer {first}" in written for (first, _), written in layers)


def test_tokens_are_read_behind_the_kernels_of_their_launch(cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their event is the lane's: one of device 0 would be over at once, and the host would read old tokens."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **named: empty(*size, **named))
    did: list[str] = []
    with make_lane_stream("cuda:1", "joint", "D"):
        cuda.launch(lambda: did.append("step"), 1)
        copy = HostCopies().start(OnGpu(torch.ones(3, dtype=torch.long)))
        assert copy.wait().tolist() == [1, 1, 1]
    assert did == ["step"]
