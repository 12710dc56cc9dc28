"""What may stand around an image that a processor puts in front of a prompt by itself."""

from __future__ import annotations

import pytest

from trinity.preprocess.text.prompt import PromptText, check_in_front
from trinity.preprocess.text.prompt_problem import PromptProblem


@pytest.mark.parametrize("text", ["", " a boat", "line\nline"])
def test_text_behind_an_image_is_taken_as_it_is(text: str) -> None:
    check_in_front(PromptText(("", text), ("image",)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PromptText(("See ", ""), ("image",)), "write <image> first"),
        (PromptText((" ", "a boat"), ("image",)), "write <image> first"),
        (PromptText(("", "a boat"), ("image",), rendered=True), "not a chat"),
    ],
)
def test_anything_else_is_refused(text: PromptText, said: str) -> None:
    with pytest.raises(PromptProblem, match=said):
        check_in_front(text)
