"""A stage that returned has gone on with every row: a wrong answer for one fails that one, and nothing runs twice."""

from __future__ import annotations

from typing import Any

import pytest

from trinity.core.messages import Sampled, Step, Stepped
from trinity.runtime.lane import Lane
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


@pytest.mark.parametrize("kind", [Counting, Launching])
@pytest.mark.parametrize("wrong", [without_bad, beyond, no_sample])
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


def test_what_is_no_answer_at_all_fails_every_row() -> None:
    answers: list[Any] = []
    stage: Any = Counting(lambda found: [1, 2])
    lane = Lane("D0", "joint", [stage], answers.append, answers.append, Timeline(), 0)
    lane.start()
    lane.post(STEP)
    lane.stop()
    lane.join()
    assert set(answers[0].failed) == {"good", "bad"}
    assert stage.steps == 1
