"""A launched step that fails late is undone before it runs again: no token is sampled twice, however late it failed.

The stage is the real one of a text model; its lane's stream fails as a GPU's does, when it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.language_stage import PROMPT, Solo, work
from support.operator_tape import every_operator_is_torchs
from trinity.core.messages import Prefill, Sampled, Step, Stepped
from trinity.runtime.cuda_stream import LaneStream
from trinity.runtime.lane import Lane
from trinity.stages.language import LanguageStage
from trinity.timeline import Timeline

pytestmark = pytest.mark.usefixtures(every_operator_is_torchs.__name__)
WORKS = [work("a", PROMPT, repetition_penalty=1.5), work("b", PROMPT[:9], temperature=1.0, seed=3)]
NAMES = ("a", "b")
STEPS = [Step(0, "joint", prefills=tuple(Prefill(each.request, 0, len(each.prompt), True) for each in WORKS))]
STEPS += [Step(number, "joint", decodes=NAMES) for number in range(1, 6)]


class FailingStream(LaneStream):
    """A stream whose mark of one step fails: when it is made, or when it is waited for."""

    def __init__(self, at: int, late: bool) -> None:
        self.left, self.late = at, late

    def mark(self) -> Callable[[], None]:
        self.left -= 1
        if self.left == 0 and not self.late:
            raise RuntimeError("CUDA error: no event can be made")
        return self.fail if self.left == 0 else super().mark()

    def fail(self) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")


class OnDevice(LanguageStage):
    launch = LanguageStage.launch_on_device


def serve(stream: LaneStream, depth: int, observed: bool) -> list[dict[str, int]]:
    """Tokens of each step, as a lane tells them."""
    solo = Solo()
    stage = solo.stage = OnDevice(solo.model, solo.pool.memory, None, "PD", solo._observe if observed else None)
    for each in WORKS:
        solo.open(each)
    answers: list[Any] = []
    lane = Lane("PD0", "joint", [stage], answers.append, answers.append, Timeline(), stream=stream, depth=depth)
    for step in STEPS:
        lane.post(step)
    lane.stop()
    lane.start()
    lane.join()
    assert [each.failed for each in answers] == [{}] * len(STEPS)
    table = stage._requests
    assert (table.steps_in_flight, table.in_flight.max(), table.suspects) == (0, 0, set())
    return [{name: one.token for name, one in each.sampled.items()} for each in answers]


@pytest.fixture(scope="module")
def wanted() -> list[dict[str, int]]:
    alone = {each.request: Solo().serve(each, len(STEPS)) for each in WORKS}
    return [{name: tokens[at] for name, tokens in alone.items()} for at in range(len(STEPS))]


@pytest.mark.parametrize("late", [True, False], ids=["when it is waited for", "when it is marked"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("observed", [False, True], ids=["launched", "run at once"])
def test_a_step_whose_device_failed_samples_each_token_once(
    wanted: list[dict[str, int]], observed: bool, depth: int, late: bool
) -> None:
    assert serve(FailingStream(3, late), depth, observed) == wanted


def test_steps_that_are_recorded_are_undone_in_turn() -> None:
    solo = Solo()
    for each in WORKS:
        solo.open(each)
        solo.fill(each)
    launched = solo.stage.launch_on_device
    solo.stage.observe = None
    first, second = launched(STEPS[1]), launched(STEPS[2])
    solo.stage.observe = solo._observe
    pending = [first, second, launched(STEPS[3])]
    tokens = [launch.wait() for launch in pending]
    for launch in reversed(pending):
        launch.drop()
        launch.drop()
    assert [solo.step(decodes=NAMES) for _ in pending] == tokens


class Stubborn:
    """A stage of somebody's own whose first step fails, and whose steps cannot be undone."""

    letters = "D"

    def __init__(self) -> None:
        self.ran = 0

    def launch(self, step: Step) -> Any:
        self.ran += 1
        return self

    def ready(self) -> bool:
        return True

    def wait(self) -> dict[str, Sampled]:
        raise ValueError("no luck")

    def drop(self) -> None:
        raise AssertionError("it has gone on already")

    def forward(self, step: Step) -> dict[str, Sampled]:
        self.ran += 1
        return {each: Sampled(1) for each in step.decodes}


def test_what_cannot_be_undone_fails_and_never_runs_again() -> None:
    answers: list[Any] = []
    stage: Any = Stubborn()
    lane = Lane("D0", "joint", [stage], answers.append, answers.append, Timeline(), 0, depth=2)
    for number in (1, 2):
        lane.post(Step(number, "joint", decodes=NAMES))
    lane.stop()
    lane.start()
    lane.join()
    assert [type(each) for each in answers] == [Stepped] * 2, "the lane has not ended"
    assert [(each.sampled, list(each.failed)) for each in answers] == [({}, ["a", "b"])] * 2
    assert "it has gone on already" in answers[0].failed["a"].message
    assert stage.ran == 2
