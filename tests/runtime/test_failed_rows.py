"""What a failed step leaves in blocks is cleared before the core hears of it: they are somebody else's from then on."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest
import torch

from support.language_stage import Solo, work
from support.lazy_cuda import LazyCuda, replace_cuda
from trinity.core.messages import Close, Open, Prefill, Sampled, Step, Stepped
from trinity.runtime.cuda_stream import make_lane_stream
from trinity.runtime.lane import Lane
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
