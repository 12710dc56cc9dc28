"""Progress of a running step, from attention to lane: layers are reported once they are written, and bytes stay so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.language_stage import Solo, work
from support.layer_progress import prefilled_and_told
from trinity.core.messages import LayersWritten, Open, Prefill, Sampled, Step, Stepped, Value
from trinity.errors import StageError
from trinity.runtime.lane import Lane
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.attention.layer_progress import LayerProgressAttention
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.base import LayerReporter, Stage
from trinity.timeline import Timeline

ROWS = PagedRows(torch.zeros(1), torch.zeros(1), torch.zeros(0, 0).numpy(), torch.zeros(0).numpy())
LAYERS = 2  # of the tiny llama


class Nothing:
    """Attention that computes nothing."""

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        return qkv[0]


def reports_of(group: int, layers: int, order: list[int], spoilt: int = -1) -> list[tuple[int, int]]:
    reports: list[tuple[int, int]] = []
    backend = LayerProgressAttention(Nothing(), group, layers, lambda first, end: reports.append((first, end)))
    for layer in order:
        qkv = [torch.ones(3, 2, 4) for _ in range(3)]
        if layer == spoilt:
            qkv[2][1, 1, 1] = float("nan")
        backend.attend(ROWS, torch.zeros(0), (qkv[0], qkv[1], qkv[2]), AttentionParams(layer, 1.0))
    backend.finish()
    return reports


@pytest.mark.parametrize(
    ("group", "reports"),
    [(1, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]), (2, [(0, 2), (2, 4), (4, 5)]), (5, [(0, 5)]), (9, [(0, 5)])],
)
def test_every_group_is_reported_once_and_the_last_may_be_smaller(group: int, reports: list[tuple[int, int]]) -> None:
    assert reports_of(group, 5, [0, 1, 2, 3, 4]) == reports


def test_layers_out_of_order_are_left_for_the_end_of_the_step() -> None:
    assert reports_of(1, 4, [0, 2, 3]) == [(0, 1)]
    assert reports_of(1, 4, [1, 0, 2]) == [(0, 1)]


def test_what_is_not_finite_is_never_reported() -> None:
    with pytest.raises(StageError, match="layers 2 to 3 are not finite"):
        reports_of(2, 5, [0, 1, 2, 3, 4], spoilt=2)


class Event:
    """Stands for an event of an accelerator: reached after so many questions, or when it is waited for."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None:
        self.left = 0


def test_on_an_accelerator_a_group_is_reported_when_its_event_is_reached_and_in_order() -> None:
    reports: list[tuple[int, int]] = []
    backend = LayerProgressAttention(Nothing(), 1, 3, lambda first, end: reports.append((first, end)))
    events = [Event(1), Event(0), Event(9)]
    for layer, event in enumerate(events):
        backend._waiting.append((layer, layer + 1, torch.zeros(()), event))
    backend._report_groups(wait=False)
    assert reports == [], "the first event is not reached, and nothing overtakes it"
    backend._report_groups(wait=False)
    assert reports == [(0, 1), (1, 2)]
    backend.finish()
    assert reports == [(0, 1), (1, 2), (2, 3)]


# ---------------------------------------------------------------- the language stage


def test_a_language_stage_tells_of_layers_whose_bytes_do_not_change_any_more() -> None:
    solo = Solo("llama", letters="P")
    assert isinstance(solo.stage, LayerReporter)
    assert prefilled_and_told(solo) == Solo("llama", letters="P").serve(work("a", max_tokens=1), 1)[0]


def test_a_step_that_nobody_asked_about_tells_nothing() -> None:
    solo = Solo("llama", letters="PD")
    reports: list[tuple[int, int]] = []
    solo.stage.on_layers = lambda first, end: reports.append((first, end))
    solo.serve(work("a"), 3)
    assert reports == []


# ---------------------------------------------------------------- the lane


class Writer:
    """A stage that tells of three layers and may fail behind the second, whenever rows of two requests meet."""

    letters = "P"

    def __init__(self, fails: bool) -> None:
        self.on_layers: Any = None
        self.fails = fails

    def open(self, request: Open) -> None: ...

    def close(self, request: str) -> None: ...

    def forward(self, step: Step) -> dict[str, Sampled]:
        for layer in range(3 if step.group else 0):
            self.on_layers(layer, layer + 1)
            if self.fails and layer == 1 and len(step.prefills) > 1:
                raise RuntimeError("too many at once")
        return {row.request: Sampled(1) for row in step.prefills if row.last}


class Silent:
    """A stage of other people, which tells of nothing."""

    letters = "P"

    def open(self, request: Open) -> None: ...

    def close(self, request: str) -> None: ...

    def forward(self, step: Step) -> dict[str, Sampled]:
        return {row.request: Sampled(1) for row in step.prefills if row.last}


def run(stage: Stage, step: Step) -> list[Value]:
    said: list[Value] = []
    lane = Lane("P0", "joint", [stage], said.append, lambda error: pytest.fail(repr(error)), Timeline())
    said.append(lane._run_step(step))
    return said


BOTH = (Prefill("a", 0, 4, True), Prefill("b", 0, 4, True))


def test_a_lane_says_which_layers_of_the_running_step_are_written() -> None:
    said = run(Writer(fails=False), Step(7, "joint", prefills=BOTH, group=1))
    assert said[:-1] == [LayersWritten(7, "joint", (layer, layer + 1)) for layer in range(3)]
    assert isinstance(said[-1], Stepped)


def test_a_step_that_fails_in_its_middle_takes_back_what_it_said_and_says_no_more() -> None:
    said = run(Writer(fails=True), Step(7, "joint", prefills=BOTH, group=1))
    assert said[:-1] == [
        LayersWritten(7, "joint", (0, 1)),
        LayersWritten(7, "joint", (1, 2)),
        LayersWritten(7, "joint", None),
    ]
    assert isinstance(said[-1], Stepped)
    assert not said[-1].failed
    assert sorted(said[-1].sampled) == ["a", "b"]


def test_a_stage_without_the_hook_serves_all_the_same() -> None:
    assert not isinstance(Silent(), LayerReporter)
    (stepped,) = run(Silent(), Step(7, "joint", prefills=BOTH, group=1))
    assert isinstance(stepped, Stepped)


def test_nan_in_a_layer_fails_the_row_that_has_it_even_in_a_chunk_that_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Spoilt(TorchAttention):
        def attend(
            self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
        ) -> Tensor:
            if params.layer == 1:
                qkv[2][0] = float("nan")
            return super().attend(rows, cache, qkv, params)

    solo = Solo("llama", letters="P", backend=Spoilt())
    solo.open(work("a", max_tokens=1))
    said = run(solo.stage, Step(1, "joint", prefills=(Prefill("a", 0, 20, False),), group=1))
    assert said[0] == LayersWritten(1, "joint", (0, 1))
    assert said[1] == LayersWritten(1, "joint", None)
    stepped = said[-1]
    assert isinstance(stepped, Stepped)
    assert stepped.failed["a"].error == "StageError"
