"""A stage that returned has gone on with every row: a wrong answer for one fails that one, and nothing runs twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trinity.core.messages import Failure, Prefill, Sampled, Step, Stepped
from trinity.errors import RequestError
from trinity.runtime.lane import Lane
from trinity.stages.base import FailedSample
from trinity.timeline import Timeline

STEP = Step(1, "joint", decodes=("good", "bad"))


class Counting:
    """Samples the number of its step for each request; ``wrong`` is what it returns of "bad", or of all."""

    letters = "D"

    def __init__(self, wrong: Any) -> None:
        self.steps, self.wrong = 0, wrong

    def forward(self, step: Step) -> Any:
        self.steps += 1
        found: dict[str, Any] = {each: Sampled(self.steps) for each in step.decodes}
        return self.wrong(found)


class Launching(Counting):
    """The same, by launched steps."""

    def launch(self, step: Step) -> Any:
        found = self.forward(step)

        class Pending:
            def ready(self) -> bool:
                return True

            def wait(self) -> Any:
                return found

            def drop(self) -> None:
                raise AssertionError("it has gone on already")

        return Pending()


def without_bad(found: dict[str, Any]) -> Any:
    return {"good": found["good"]}


def beyond(found: dict[str, Any]) -> Any:
    return found | {"bad": Sampled(1000)}


def no_sample(found: dict[str, Any]) -> Any:
    return found | {"bad": 7}


def failed(found: dict[str, Any]) -> Any:
    return found | {"bad": FailedSample(-1, why="its own fault")}


@pytest.mark.parametrize("kind", [Counting, Launching])
def test_a_stage_may_say_that_a_row_has_failed(kind: type[Counting]) -> None:
    stage = kind(failed)
    answer = run(STEP, stage)
    assert answer.sampled == {"good": Sampled(1)}
    assert answer.failed["bad"].error == "StageError"
    assert "its own fault" in answer.failed["bad"].message
    assert stage.steps == 1


@pytest.mark.parametrize("kind", [Counting, Launching])
def test_a_row_that_its_own_rules_left_no_token_is_refused(
    kind: type[Counting], caplog: pytest.LogCaptureFixture
) -> None:
    """By a ``RequestError``, and no stage's; a client may ask for it often, and logs no error."""
    stage = kind(lambda found: found | {"bad": FailedSample(-1, why="banned", refused=True)})
    answer = run(STEP, stage)
    assert answer.sampled == {"good": Sampled(1)}
    assert answer.failed == {"bad": Failure("RequestError", "banned")}
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


def test_a_stage_that_raises_a_request_error_has_failed() -> None:
    class Raising(Counting):
        def forward(self, step: Step) -> Any:
            raise RequestError("its own idea")

    assert {each.error for each in run(STEP, Raising(None)).failed.values()} == {"StageError"}


@pytest.mark.parametrize("kind", [Counting, Launching])
@pytest.mark.parametrize("wrong", [without_bad, beyond, no_sample, failed])
def test_the_others_keep_the_tokens_that_were_sampled_with_it(kind: type[Counting], wrong: Any) -> None:
    answers: list[Any] = []
    errors: list[BaseException] = []
    stage: Any = kind(wrong)
    lane = Lane("D0", "joint", [stage], answers.append, errors.append, Timeline(), 0, vocabulary=100)
    lane.start()
    lane.post(STEP)
    lane.stop()
    lane.join()
    assert not errors
    (answer,) = answers
    assert isinstance(answer, Stepped)
    assert answer.sampled == {"good": Sampled(1)}
    assert list(answer.failed) == ["bad"]
    assert stage.steps == 1


def run(step: Step, *stages: Any) -> Stepped:
    answers: list[Any] = []
    lane = Lane("D0", "joint", stages, answers.append, answers.append, Timeline(), 0, vocabulary=100)
    lane.start()
    lane.post(step)
    lane.stop()
    lane.join()
    (answer,) = answers
    assert isinstance(answer, Stepped)
    return answer


class Strange:
    """What no question can be asked of."""

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")

    __repr__ = __iter__ = __len__ = __bool__  # type: ignore[assignment]


NO_ANSWERS = [lambda found: [1, 2], lambda found: np.ones(2), lambda found: Strange()]


@pytest.mark.parametrize("kind", [Counting, Launching])
@pytest.mark.parametrize("wrong", NO_ANSWERS)
def test_what_is_no_answer_at_all_fails_every_row(kind: type[Counting], wrong: Any) -> None:
    stage = kind(wrong)
    assert set(run(STEP, stage).failed) == {"good", "bad"}
    assert stage.steps == 1


class Prefilling(Counting):
    letters = "P"

    def forward(self, step: Step) -> Any:
        self.steps += 1
        return self.wrong({each.request: Sampled(self.steps) for each in step.prefills})


def right(found: dict[str, Any]) -> Any:
    return found


def fails(found: dict[str, Any]) -> Any:
    raise ValueError("no luck")


BOTH = Step(1, "joint", prefills=(Prefill("new", 0, 4, True),), decodes=("good", "bad"))


@pytest.mark.parametrize("wrong", [*NO_ANSWERS, lambda found: None, fails])
def test_of_two_stages_the_one_that_went_on_keeps_its_tokens(wrong: Any) -> None:
    """Whichever of them comes first."""
    for turned in (False, True):
        stages = [Prefilling(right), Counting(wrong)]
        answer = run(BOTH, *(reversed(stages) if turned else stages))
        assert answer.sampled == {"new": Sampled(1)}
        assert set(answer.failed) == {"good", "bad"}
        assert {each.error for each in answer.failed.values()} == {"StageError"}
        assert stages[0].steps == 1
        stages = [Prefilling(wrong), Counting(right)]
        answer = run(BOTH, *(reversed(stages) if turned else stages))
        assert answer.sampled == {"good": Sampled(1), "bad": Sampled(1)}
        assert list(answer.failed) == ["new"]
        assert stages[1].steps == 1


def test_a_row_that_failed_in_one_stage_is_not_in_the_next() -> None:
    again = Step(1, "joint", prefills=(Prefill("bad", 0, 4, True), Prefill("new", 0, 4, True)), decodes=("good", "bad"))
    answer = run(again, Counting(without_bad), first := Prefilling(right))
    assert (answer.sampled, list(answer.failed)) == ({"good": Sampled(1), "new": Sampled(1)}, ["bad"])
    assert first.steps == 1


def test_a_row_for_which_there_is_no_stage_fails() -> None:
    answer = run(BOTH, Counting(right))
    assert (set(answer.sampled), list(answer.failed)) == ({"good", "bad"}, ["new"])
    assert list(run(Step(1, "joint", prefills=BOTH.prefills), Counting(right)).failed) == ["new"]
