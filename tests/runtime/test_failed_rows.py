"""What a failed step leaves in blocks is cleared before the core hears of it: they are somebody else's from then on."""

from __future__ import annotations

import os
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from support.language_stage import Solo, work
from support.lazy_cuda import LazyCuda, replace_cuda
from trinity.core.messages import UNFIT, Close, Encode, MediaSpan, Open, Prefill, Sampled, Step, Stepped
from trinity.errors import StageError
from trinity.runtime.cuda_stream import make_lane_stream
from trinity.runtime.lane import Lane, check_sampled, is_of_values
from trinity.stages.base import CleanableStage
from trinity.timeline import Timeline

BAD, GOOD = work("bad", tuple(range(60, 100))), work("good")


def run(stage: Any, post: Any, *commands: Any, stream: Any = None) -> None:
    lane = Lane("PD0", "joint", [stage], post, lambda error: None, Timeline(), stream=stream)
    lane.start()
    for command in commands:
        lane.post(command)
    lane.stop()
    lane.join()


def test_no_close_writes_to_a_block_that_has_another_owner() -> None:
    """Between the failure and the close, which waits behind other steps, a transfer may have half filled it."""
    solo = Solo()
    tensor = solo.pool.memory.tensor
    bad, _ = solo.open(BAD), solo.open(GOOD)
    for each in (BAD, GOOD):
        solo.fill(each)
    tensor[bad.blocks[2], 0, 1] = torch.nan
    answers: SimpleQueue[Stepped] = SimpleQueue()

    def post(answer: Stepped) -> None:
        assert tensor.isfinite().all(), "NaN is there when the core hears of the failure"
        tensor[bad.blocks[2]] = torch.nan  # the next owner's content, whatever it is
        tensor[bad.blocks[0]] = torch.nan
        answers.put(answer)

    run(solo.stage, post, Step(1, "joint", decodes=("good", "bad")), Close("bad"), Close("good"))
    answer = answers.get_nowait()
    assert list(answer.failed) == ["bad"]
    assert list(answer.sampled) == ["good"]
    assert tensor[[bad.blocks[0], bad.blocks[2]]].isnan().all(), "a close has written to them"


def test_the_row_of_a_failed_request_behind_it_brings_no_nan_back() -> None:
    solo = Solo()
    bad = solo.open(BAD)
    solo.fill(BAD)
    solo.pool.memory.tensor[bad.blocks[2], 0, 1] = torch.nan
    step, seen = Step(1, "joint", decodes=("bad",)), list[bool]()
    run(solo.stage, lambda _: seen.append(bool(solo.pool.memory.tensor.isfinite().all())), step, step, Close("bad"))
    assert seen == [True, True]


def test_a_request_that_is_not_open_needs_no_cleaning() -> None:
    solo = Solo()
    answers: SimpleQueue[Stepped] = SimpleQueue()
    run(solo.stage, answers.put, Step(1, "joint", prefills=(Prefill("nobody", 0, 4, True),)))
    assert list(answers.get_nowait().failed) == ["nobody"]


class Spoiling:
    """A stage whose step fails, and whose cleaning only launches a kernel."""

    letters = "D"

    def __init__(self, cuda: LazyCuda, broken: bool = False) -> None:
        self.cuda, self.broken = cuda, broken
        self.blocks: list[str] = []

    def open(self, request: Open) -> None: ...

    def close(self, request: str) -> None: ...

    def forward(self, step: Step) -> dict[str, Sampled]:
        raise ValueError("no luck")

    def clean(self, failed: Any) -> None:
        if self.broken:
            raise ValueError("cannot")
        self.cuda.launch(lambda: self.blocks.extend(failed), 1)


@pytest.mark.parametrize("broken", [False, True])
def test_cleaning_has_run_on_the_device_too(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    stage = Spoiling(cuda := replace_cuda(monkeypatch), broken)
    assert isinstance(stage, CleanableStage)
    seen: list[list[str]] = []

    def post(answer: Stepped) -> None:
        assert list(answer.failed) == ["a"], "and if it fails the core hears of the step all the same"
        seen.append(list(stage.blocks))

    run(stage, post, Step(1, "joint", decodes=("a",)), stream=make_lane_stream("cuda:1", "joint", "D"))
    assert seen == [[] if broken else ["a"]]
    assert {device for _, device in cuda.touched} <= {1}


def error_of(raise_it: Callable[[], Any]) -> BaseException:
    try:
        raise_it()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


OF_VALUES: dict[str, Callable[[], Any]] = {
    "reshape": lambda: torch.zeros(6).reshape(1, 4, -1),
    "product": lambda: torch.zeros(2, 3) @ torch.zeros(2, 3),
    "sum": lambda: torch.zeros(2) + torch.zeros(3),
    "kernel": lambda: torch.nn.functional.conv2d(torch.zeros(1, 1, 1, 5), torch.zeros(1, 1, 2, 2)),
    "stack": lambda: torch.stack([torch.zeros(1), torch.zeros(2)]),
    "split": lambda: torch.zeros(5).split([2, 2]),
    "index": lambda: torch.zeros(3)[5],
    "division": lambda: 1 // len([]),
    "value": lambda: int("x"),
}
OF_OTHERS: dict[str, Callable[[], Any]] = {
    "memory": lambda: torch.empty(1 << 60),
    "devices": lambda: torch.zeros(2, device="meta") + torch.zeros(3, device="meta").cpu(),
    "out of memory": lambda: _raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a size")),
    "device": lambda: _raise(torch.AcceleratorError("an index is out of bounds")),
    "cuda": lambda: _raise(RuntimeError("CUDA error: an index was out of bounds")),
    "unknown": lambda: _raise(RuntimeError("something else")),
    "recursion": lambda: _raise(RecursionError("of a large size")),
    "file": lambda: os.stat("/no/such/file"),
    "exhausted": lambda: _raise(MemoryError("shape")),
    "own error": lambda: _raise(StageError("shape")),
    "own code": lambda: check_sampled(None),  # type: ignore[arg-type]
    "exit": lambda: _raise(SystemExit("shape")),
}


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("name", OF_VALUES)
def test_errors_of_shapes_and_values_may_be_of_the_inputs(name: str) -> None:
    assert is_of_values(error_of(OF_VALUES[name]))


@pytest.mark.parametrize("name", OF_OTHERS)
def test_other_errors_say_nothing_of_the_inputs(name: str) -> None:
    assert not is_of_values(error_of(OF_OTHERS[name]))


class Picky:
    """An encoder that fails on items of a width, and notes what it has run."""

    letters = "E"

    def __init__(self, error: BaseException) -> None:
        self.error, self.ran = error, list[list[int]]()

    def open(self, request: Open) -> None: ...

    def close(self, request: str) -> None: ...

    def forward(self, step: Step) -> dict[str, Sampled]:
        self.ran.append([encode.item for encode in step.encodes])
        if any(encode.span.width == 6 for encode in step.encodes):
            raise self.error
        return {}


@pytest.mark.parametrize(("error", "unfit"), [(ValueError("0 rows" + "!" * 900), True), (OSError("gone"), False)])
def test_the_item_at_fault_is_found_and_named(error: BaseException, unfit: bool) -> None:
    def encode(request: str, item: int, width: int) -> Encode:
        return Encode(request, item, MediaSpan("image", 4, 0, 4, f"c{item}", width=width, height=9), (item,), None)

    answers: SimpleQueue[Stepped] = SimpleQueue()
    stage = Picky(error)
    rows = (encode("good", 0, 20), encode("bad", 1, 20), encode("bad", 2, 6), encode("bad", 3, 20))
    run(stage, answers.put, Step(1, "joint", encodes=rows))
    (name, why), *others = answers.get_nowait().failed.items()
    assert (name, why.error, others) == ("bad", "StageError", [])
    assert stage.ran == [[0, 1, 2, 3], [0], [1], [2]]
    assert (UNFIT in why.fields) is unfit
    if unfit:
        assert why.fields[UNFIT].startswith("the model's encoder cannot take the image of 6 x 9 pixels (ValueError:")
        assert len(why.fields[UNFIT]) < 320
