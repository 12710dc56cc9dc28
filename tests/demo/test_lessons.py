"""What is learned from is what is asked later: the same tokens, the same pixels, and no answer of another question."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tools.demo_model.checkpoint import PATCHES, DemoParts, make_parts, save_checkpoint
from tools.demo_model.lessons import NO_LABEL, WORDS_OF_A_PATCH, Lesson, Teacher, make_pixels, number_words
from tools.demo_model.train import Learner
from trinity.demo.pictures import draw_scene, random_scene
from trinity.testing.oracle import own_processor


@pytest.fixture(scope="module")
def parts() -> DemoParts:
    torch.manual_seed(0)
    made = make_parts()
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(3)  # as they are drawn, logits differ too little to compare
    return made


@pytest.fixture(scope="module")
def processor(parts: DemoParts, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("shapes")
    save_checkpoint(parts, folder)
    return own_processor(folder)


@pytest.fixture(scope="module")
def drawn(parts: DemoParts) -> tuple[Any, Lesson]:
    teacher = Teacher(parts.tokenizer, seed=1)
    pictures = teacher.draw(6)
    return pictures, teacher.ask(pictures.scenes)


def chains_of(lesson: Lesson, row: int) -> list[list[int]]:
    """Places of the picture's tokens and of each chain's, chain by chain."""
    chains = lesson.chains[row].tolist()
    return [
        [place for place, chain in enumerate(chains) if chain in (0, wanted)] for wanted in range(1, max(chains) + 1)
    ]


def chat_of(lesson: Lesson, row: int, places: list[int], tokenizer: Any) -> list[dict[str, Any]]:
    """The chat that a chain should be, made of the questions that its labels belong to."""
    numbers = dict.fromkeys(number for number in lesson.question[row, places].tolist() if number >= 0)
    chat: list[dict[str, Any]] = []
    for number in numbers:
        asked = lesson.asked[number]
        parts = [{"type": "image"}] * (not chat) + [{"type": "text", "text": asked.text}]
        chat.append({"role": "user", "content": parts})
        chat.append({"role": "assistant", "content": [{"type": "text", "text": asked.answer}]})
    return chat


def test_each_chain_is_what_the_chat_template_makes_of_its_questions(
    parts: DemoParts, processor: Any, drawn: tuple[Any, Lesson]
) -> None:
    pictures, lesson = drawn
    turns = []
    for row, scene in enumerate(pictures.scenes):
        image = draw_scene(scene, 256)
        for places in chains_of(lesson, row):
            chat = chat_of(lesson, row, places, parts.tokenizer)
            turns.append(len(chat) // 2)
            text = processor.apply_chat_template(chat)
            wanted = processor(text=text, images=image)["input_ids"]
            assert lesson.ids[row, places].tolist() == list(np.ravel(wanted))
            assert lesson.positions[row, places].tolist() == list(range(len(places)))
    assert max(turns) > 1, "a chat of several turns is among them"
    assert turns.count(1) > len(turns) / 3


def test_labels_are_the_next_tokens_of_answers_and_nothing_else(parts: DemoParts, drawn: tuple[Any, Lesson]) -> None:
    _, lesson = drawn
    said: dict[int, list[int]] = {}
    for row, place in (lesson.labels != NO_LABEL).nonzero().tolist():
        assert lesson.labels[row, place] == lesson.ids[row, place + 1]
        assert lesson.chains[row, place] == lesson.chains[row, place + 1]
        said.setdefault(int(lesson.question[row, place]), []).append(int(lesson.labels[row, place]))
    assert sorted(said) == list(range(len(lesson.asked)))
    for number, tokens in said.items():
        assert tokens[-1] == parts.tokenizer.eos_token_id
        assert parts.tokenizer.decode(tokens[:-1]) == lesson.asked[number].answer


def test_a_question_sees_the_picture_and_its_own_chat_alone(parts: DemoParts, drawn: tuple[Any, Lesson]) -> None:
    """Logits of a packed row are those of the model's own forward over each chat by itself."""
    pictures, lesson = drawn
    learner, whole = Learner(parts), parts.model
    wanted = lesson.labels != NO_LABEL
    with torch.no_grad():
        logits = learner.answer(lesson, learner.look(pictures.pixels), wanted)
        for row in (0, 3):
            for places in chains_of(lesson, row):
                ids = lesson.ids[row : row + 1, places]
                own = whole(input_ids=ids, pixel_values=pictures.pixels[row : row + 1]).logits[0]
                labelled = [place for place in range(len(places)) if lesson.labels[row, places[place]] != NO_LABEL]
                first = int(wanted.flatten()[: row * wanted.shape[1]].sum())
                rank = [first + int(wanted[row, : places[place]].sum()) for place in labelled]
                assert torch.allclose(logits[rank], own[labelled], atol=2e-4)
                assert own[labelled].std() > 0.1, "logits that say nothing would agree too"


def test_pixels_are_those_of_the_image_processor(parts: DemoParts) -> None:
    image = draw_scene(random_scene(Random(8)), 128)
    theirs = parts.images(image, return_tensors="np")["pixel_values"][0]
    assert np.abs(make_pixels(image) - theirs).max() < 1e-5


def test_each_patch_has_the_words_of_its_corner() -> None:
    scene = random_scene(Random(2))
    corners = {each.corner: each for each in scene.shapes}
    rows = number_words(scene)
    assert len(rows) == PATCHES
    for patch, numbers in enumerate(rows):
        words = [group[number] for group, number in zip(WORDS_OF_A_PATCH, numbers, strict=True)]
        assert words[2:4] == ["top" if patch < 8 else "bottom", "left" if patch % 4 < 2 else "right"]
        there = corners.get(" ".join(words[2:4]))
        assert words[:2] == ([there.colour, there.shape] if there else ["nothing", "nothing"])
        assert words[4] == ("one", "two", "three", "four")[len(scene.shapes) - 1]


def test_a_seed_gives_the_same_lessons(parts: DemoParts) -> None:
    one, again, other = (Teacher(parts.tokenizer, seed) for seed in (1, 1, 2))
    first, second, third = (teacher.draw(2) for teacher in (one, again, other))
    assert torch.equal(first.pixels, second.pixels)
    assert not torch.equal(first.pixels, third.pixels)
    assert torch.equal(one.ask(first.scenes).ids, again.ask(second.scenes).ids)
