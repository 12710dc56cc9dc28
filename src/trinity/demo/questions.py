"""Questions about a scene, each with its only right answer, and the words that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from trinity.demo.pictures import COLOURS, COLUMN_WORDS, CORNERS, ROW_WORDS, SHAPES, DrawnShape, Scene, with_article

NUMBERS = ("one", "two", "three", "four")
RELATIONS = ("left of", "right of", "above", "below")
EMPTY = "nothing"


class Question(NamedTuple):
    """A question of one of ``QUESTION_KINDS``, and its answer."""

    kind: str
    text: str
    answer: str


def list_questions(scene: Scene) -> list[Question]:
    """List every question that can be asked about a scene."""
    return [Question(kind, text, answer) for kind, ask in _ASKED.items() for text, answer in ask(scene)]


def pick_question(scene: Scene, rng: Random) -> Question:
    """Pick one question: first the kind, of those that the scene allows, then one of its kind."""
    possible = list_questions(scene)
    kind = rng.choice(sorted({each.kind for each in possible}))
    return rng.choice([each for each in possible if each.kind == kind])


def _ask_count(scene: Scene) -> Iterator[tuple[str, str]]:
    yield "How many shapes are there?", NUMBERS[len(scene.shapes) - 1]


def _ask_colour(scene: Scene) -> Iterator[tuple[str, str]]:
    shapes = [each.shape for each in scene.shapes]
    for each in scene.shapes:
        if shapes.count(each.shape) == 1:
            yield f"What colour is the {each.shape}?", each.colour


def _ask_shape(scene: Scene) -> Iterator[tuple[str, str]]:
    colours = [each.colour for each in scene.shapes]
    for each in scene.shapes:
        if colours.count(each.colour) == 1:
            yield f"Which shape is {each.colour}?", each.shape


def _ask_corner(scene: Scene) -> Iterator[tuple[str, str]]:
    names = {each.corner: with_article(each.name) for each in scene.shapes}
    for corner in CORNERS:
        yield f"What is at the {corner}?", names.get(corner, EMPTY)


def _ask_where(scene: Scene) -> Iterator[tuple[str, str]]:
    if len(scene.shapes) == 2:
        for each, other in (scene.shapes, scene.shapes[::-1]):
            yield f"Where is the {each.name}?", f"{relate(each, other)} the {other.name}"


def _ask_describe(scene: Scene) -> Iterator[tuple[str, str]]:
    text, (first, *others) = "What is in this picture?", sorted(scene.shapes, key=lambda each: (each.column, each.row))
    if not others:
        yield text, with_article(first.name)
    elif len(others) == 1:
        yield text, f"{with_article(first.name)} {relate(first, others[0])} {with_article(others[0].name)}"


def relate(one: DrawnShape, other: DrawnShape) -> str:
    """Say where ``one`` is, seen from ``other``: left or right of it; above or below it where they share a column."""
    if one.column != other.column:
        return RELATIONS[0] if one.column < other.column else RELATIONS[1]
    return RELATIONS[2] if one.row < other.row else RELATIONS[3]


_ASKED: dict[str, Callable[[Scene], Iterator[tuple[str, str]]]] = {
    "count": _ask_count,
    "colour": _ask_colour,
    "shape": _ask_shape,
    "corner": _ask_corner,
    "where": _ask_where,
    "describe": _ask_describe,
}
QUESTION_KINDS = tuple(_ASKED)
_FRAMES = (
    "how many shapes are there ?",
    "what colour is the",
    "which shape is",
    "where is",
    "what is at",
    "in this picture",
    "a an",
)


def list_words() -> list[str]:
    """List the words, in small letters, and the signs of all questions and answers, sorted."""
    said = " ".join((*_FRAMES, *RELATIONS, EMPTY)).split()
    return sorted({*said, *COLOURS, *SHAPES, *ROW_WORDS, *COLUMN_WORDS, *NUMBERS})
