"""Questions about scenes: each has one right answer, which a reader of the picture would give."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from trinity.demo.pictures import CORNERS, DrawnShape, Scene, random_scene
from trinity.demo.questions import QUESTION_KINDS, list_questions, list_words, pick_question


def scene(**placed: str) -> Scene:
    """The scene with the shapes named, such as ``top_left="red star"``."""
    shapes = []
    for corner, name in placed.items():
        row, column = divmod(CORNERS.index(corner.replace("_", " ")), 2)
        colour, shape = name.split()
        shapes.append(DrawnShape(colour, shape, row, column, 0.0, 0.0, 0.1))
    return Scene(tuple(shapes), (0, 0, 0))


def answers(asked: Scene) -> dict[str, str]:
    return {each.text: each.answer for each in list_questions(asked)}


def test_of_one_shape() -> None:
    assert answers(scene(bottom_left="orange circle")) == {
        "How many shapes are there?": "one",
        "What colour is the circle?": "orange",
        "Which shape is orange?": "circle",
        "What is at the top left?": "nothing",
        "What is at the top right?": "nothing",
        "What is at the bottom left?": "an orange circle",
        "What is at the bottom right?": "nothing",
        "What is in this picture?": "an orange circle",
    }


def test_of_two_shapes() -> None:
    found = answers(scene(top_left="red star", bottom_right="blue square"))
    assert found["Where is the red star?"] == "left of the blue square"
    assert found["Where is the blue square?"] == "right of the red star"
    assert found["What is in this picture?"] == "a red star left of a blue square"
    assert len(found) == 1 + 2 + 2 + 4 + 2 + 1


@pytest.mark.parametrize(
    ("first", "second", "relation", "back"),
    [
        ("top_left", "top_right", "left of", "right of"),
        ("top_left", "bottom_left", "above", "below"),
        ("top_right", "bottom_right", "above", "below"),
        ("bottom_left", "top_right", "left of", "right of"),
        ("bottom_left", "bottom_right", "left of", "right of"),
    ],
)
def test_relations_of_two_shapes(first: str, second: str, relation: str, back: str) -> None:
    found = answers(scene(**{first: "red star", second: "blue star"}))
    assert found["Where is the red star?"] == f"{relation} the blue star"
    assert found["Where is the blue star?"] == f"{back} the red star"


def test_the_description_begins_with_what_is_left_then_with_what_is_above() -> None:
    assert answers(scene(top_right="red star", bottom_left="blue star"))["What is in this picture?"] == (
        "a blue star left of a red star"
    )
    assert answers(scene(top_right="red star", bottom_right="blue star"))["What is in this picture?"] == (
        "a red star above a blue star"
    )


def test_no_question_has_two_answers() -> None:
    found = answers(scene(top_left="red star", top_right="red circle", bottom_left="blue star"))
    assert "What colour is the star?" not in found
    assert "Which shape is red?" not in found
    assert found["What colour is the circle?"] == "red"
    assert found["Which shape is blue?"] == "star"
    rng = Random(7)
    for _ in range(200):
        asked = list_questions(random_scene(rng))
        assert len({each.text for each in asked}) == len(asked)


def test_every_word_is_in_the_vocabulary_and_no_other() -> None:
    rng, used = Random(9), set()
    for _ in range(400):
        for each in list_questions(random_scene(rng)):
            used |= {*each.text.lower().replace("?", " ?").split(), *each.answer.split()}
    assert used == set(list_words())
    assert list_words() == sorted(set(list_words()))


def test_kinds_are_picked_alike() -> None:
    rng = Random(11)
    picked = Counter(pick_question(random_scene(rng), rng).kind for _ in range(600))
    assert set(picked) == set(QUESTION_KINDS)
    assert min(picked.values()) > 30
