"""Batches to learn from, drawn when they are asked for: pictures, the words of each patch, questions with answers."""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tools.demo_model.checkpoint import ASSISTANT, IMAGE_TOKEN, PATCHES, SIZE, USER
from trinity.demo.pictures import COLOURS, COLUMN_WORDS, ROW_WORDS, SHAPES, Scene, draw_scene, random_scene
from trinity.demo.questions import EMPTY, NUMBERS, Question, list_questions

ROW_TOKENS = 128  # of one picture with as many of its questions as fit
FOLLOWS = 0.25  # chance that a question is the next turn of the one before it
DRAWN_SIZE = 128  # pixels; the image processor's own resampling then makes SIZE of them
NO_LABEL = -100
WORDS_OF_A_PATCH = ((*COLOURS, EMPTY), (*SHAPES, EMPTY), ROW_WORDS, COLUMN_WORDS, NUMBERS)
"""A patch has one word of each group: for the shape in its corner, the corner, and how many shapes there are."""


class Pictures(NamedTuple):
    """``scenes``, their ``pixels`` [pictures, 3, SIZE, SIZE], and ``words`` [pictures, PATCHES, groups] by number."""

    scenes: list[Scene]
    pixels: Tensor
    words: Tensor


class Lesson(NamedTuple):
    """Rows of token ids [pictures, ROW_TOKENS], the same for the rest. Chain 0 is the picture; -1 is padding.

    A token sees those before it in the picture and in its own chain, so that many questions share one picture and none
    sees another's answer. ``labels`` has the next token where that is part of an answer; ``question`` the number in
    ``asked`` of the question that a label belongs to.
    """

    ids: Tensor
    chains: Tensor
    positions: Tensor
    labels: Tensor
    question: Tensor
    asked: list[Question]

    @property
    def mask(self) -> Tensor:
        """Say which token sees which: bool [pictures, 1, ROW_TOKENS, ROW_TOKENS]."""
        length = self.ids.shape[1]
        before = torch.ones(length, length, dtype=torch.bool).tril()
        seen, seeing = self.chains[:, None, :], self.chains[:, :, None]
        return (before & ((seen == 0) | (seen == seeing)))[:, None]

    def weigh_kinds(self) -> Tensor:
        """Weigh the labels of each question [asked] so that kinds count alike, however long their answers are."""
        kinds = [each.kind for each in self.asked]
        labels = torch.bincount(self.question[self.question >= 0], minlength=len(kinds)).tolist()
        totals: Counter[str] = Counter()
        for kind, count in zip(kinds, labels, strict=True):
            totals[kind] += count
        return torch.tensor([1 / (len(totals) * totals[kind]) for kind in kinds])


class Teacher:
    """Draws pictures and asks about them, by ``seed``; ``tokenizer`` is the model's."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._rng = Random(seed)
        self._tokens = cache(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
        self._user, self._assistant, self._image = tokenizer.convert_tokens_to_ids([USER, ASSISTANT, IMAGE_TOKEN])
        self._bos, self._eos, self._pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id

    def draw(self, pictures: int) -> Pictures:
        scenes = [random_scene(self._rng) for _ in range(pictures)]
        pixels = np.stack([make_pixels(draw_scene(scene, DRAWN_SIZE)) for scene in scenes])
        return Pictures(scenes, torch.from_numpy(pixels), torch.tensor([number_words(scene) for scene in scenes]))

    def ask(self, scenes: list[Scene]) -> Lesson:
        """Ask, in random order, as many questions about each scene as fit into a row."""
        rows: list[list[list[int]]] = []
        asked: list[Question] = []
        for scene in scenes:
            rows.append(self._write_row(scene, asked))
        ids, chains, positions, labels, question = torch.tensor(rows).unbind(1)
        return Lesson(ids, chains, positions, labels, question, asked)

    def _write_row(self, scene: Scene, asked: list[Question]) -> list[list[int]]:
        questions = list_questions(scene)
        self._rng.shuffle(questions)
        picture = [self._bos, self._user, *[self._image] * PATCHES]
        start = len(picture)
        row = [(token, 0, place, NO_LABEL, -1) for place, token in enumerate(picture)]
        chain, place = 0, start
        for each in questions:
            follows = chain > 0 and self._rng.random() < FOLLOWS
            ahead = [*self._tokens(each.text), self._assistant]
            ahead = [self._user, *ahead] if follows else ahead
            answer = [*self._tokens(each.answer), self._eos]
            if len(row) + len(ahead) + len(answer) > ROW_TOKENS:
                break
            chain, place = (chain, place) if follows else (chain + 1, start)
            labels = [*[NO_LABEL] * (len(ahead) - 1), *answer, NO_LABEL]
            for offset, (token, label) in enumerate(zip([*ahead, *answer], labels, strict=True)):
                row.append((token, chain, place + offset, label, len(asked) if label != NO_LABEL else -1))
            place += len(labels)
            asked.append(each)
        row += [(self._pad, -1, 0, NO_LABEL, -1)] * (ROW_TOKENS - len(row))
        return [list(column) for column in zip(*row, strict=True)]


def make_pixels(image: Any) -> np.ndarray:
    """Scale an image as the checkpoint's image processor does: float32 [3, SIZE, SIZE] from -1 to 1."""
    from PIL import Image

    small = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC), np.float32)
    return np.ascontiguousarray((small / 127.5 - 1).transpose(2, 0, 1))


def number_words(scene: Scene) -> list[list[int]]:
    """List for each patch the number of its word in each group of ``WORDS_OF_A_PATCH``."""
    there = {(each.row, each.column): (each.colour, each.shape) for each in scene.shapes}
    count, edge = NUMBERS[len(scene.shapes) - 1], int(PATCHES**0.5)
    rows = []
    for patch in range(PATCHES):
        row, column = (2 * half // edge for half in divmod(patch, edge))
        colour, shape = there.get((row, column), (EMPTY, EMPTY))
        words = (colour, shape, ROW_WORDS[row], COLUMN_WORDS[column], count)
        rows.append([group.index(word) for group, word in zip(WORDS_OF_A_PATCH, words, strict=True)])
    return rows
