"""Trains the demo's model on drawn pictures alone, on a processor, in two parts.

First its eyes: each patch, as the language model sees it, has to name the words of its corner. That teaches the vision
tower and the projector in few steps, and words mean the same in pictures as in sentences. Then its answers: about each
picture all questions at once, none of which sees another's answer, while the eyes learn on. Every picture is new.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tools.demo_model.checkpoint import PATCHES, DemoParts, load_weights, make_parts, save_checkpoint
from tools.demo_model.lessons import NO_LABEL, WORDS_OF_A_PATCH, Lesson, Pictures, Teacher
from trinity.demo.questions import QUESTION_KINDS

WARM_UP = 50  # steps
EYES_LEARN_ON = 0.2  # of the language model's learning rate, and share of their loss, in the second part
HELD_OUT_SEED = 1 << 20  # of the pictures that progress is measured on
_LOGGED, _MEASURED = 50, 250  # steps


@dataclass(frozen=True)
class Schedule:
    """Lengths of a training.

    - ``eye_steps``, ``answer_steps`` (steps): of the first and the second part.
    - ``eye_batch``, ``answer_batch`` (pictures): of a step.
    - ``rate``: the highest learning rate.
    - ``seed``: of weights and pictures.
    """

    eye_steps: int = 500
    answer_steps: int = 2000
    eye_batch: int = 64
    answer_batch: int = 16
    rate: float = 2e-3
    seed: int = 0


def train(directory: Path, schedule: Schedule, log: Callable[[str], None] = print, start: Path | None = None) -> None:
    """Train a model and write it into ``directory``, on the way too; ``start``: a checkpoint to go on from."""
    torch.manual_seed(schedule.seed)
    parts = make_parts()
    if start is not None:
        load_weights(parts, start)
    learner, teacher = Learner(parts), Teacher(parts.tokenizer, schedule.seed)
    log(f"{sum(each.numel() for each in parts.model.parameters()):,} parameters")

    def show() -> None:
        log(f"  right: {learner.measure()}")
        save_checkpoint(parts, directory)

    def eye_loss() -> Tensor:
        return learner.eye_loss(teacher.draw(schedule.eye_batch))

    def answer_loss() -> Tensor:
        return learner.answer_loss(teacher, schedule.answer_batch)

    _fit("eyes", learner.eyes(schedule.rate), schedule.eye_steps, eye_loss, log)
    _fit("answers", learner.all_of_it(schedule.rate), schedule.answer_steps, answer_loss, log, show)
    show()


def _fit(
    name: str,
    optimiser: torch.optim.Optimizer,
    steps: int,
    loss_of: Callable[[], Tensor],
    log: Callable[[str], None],
    show: Callable[[], None] | None = None,
) -> None:
    """Take ``steps`` along the loss of one new batch each."""
    rates = [group["lr"] for group in optimiser.param_groups]
    parameters = [each for group in optimiser.param_groups for each in group["params"]]
    began = time.perf_counter()
    for number in range(steps):
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * _share_of_rate(number, steps)
        optimiser.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        if number % _LOGGED == 0:
            log(f"{name} {number:5d} of {steps}: loss {loss.item():.4f}, {time.perf_counter() - began:.0f} s")
        if show is not None and number % _MEASURED == _MEASURED - 1:
            show()


def _share_of_rate(step: int, steps: int) -> float:
    """Rise for ``WARM_UP`` steps, then fall along a cosine to nearly nothing."""
    return min(1.0, (step + 1) / WARM_UP) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))


class Learner:
    """Losses of a model, and which of its weights learn by them."""

    def __init__(self, parts: DemoParts) -> None:
        self._parts, self._whole = parts, parts.model.train()
        self._tower, self._projector = parts.model.model.vision_tower, parts.model.model.multi_modal_projector
        self._language, self._words = parts.model.model.language_model, parts.model.get_input_embeddings()
        self._groups = [torch.tensor(parts.tokenizer.convert_tokens_to_ids([*each])) for each in WORDS_OF_A_PATCH]

    def eyes(self, rate: float) -> torch.optim.Optimizer:
        parameters = [*self._tower.parameters(), *self._projector.parameters(), *self._words.parameters()]
        return self._make_optimiser([{"params": parameters, "lr": rate}])

    def all_of_it(self, rate: float) -> torch.optim.Optimizer:
        eyes = [*self._tower.parameters(), *self._projector.parameters()]
        slow = {id(each) for each in eyes}
        rest = [each for each in self._whole.parameters() if id(each) not in slow]
        return self._make_optimiser([{"params": rest, "lr": rate}, {"params": eyes, "lr": rate * EYES_LEARN_ON}])

    @staticmethod
    def _make_optimiser(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.05, fused=True)

    def eye_loss(self, pictures: Pictures) -> Tensor:
        return self._name_words(self.look(pictures.pixels), pictures.words)

    def answer_loss(self, teacher: Teacher, pictures: int) -> Tensor:
        drawn = teacher.draw(pictures)
        lesson, features = teacher.ask(drawn.scenes), self.look(drawn.pixels)
        wanted = lesson.labels != NO_LABEL
        losses = cross_entropy(self.answer(lesson, features, wanted), lesson.labels[wanted], reduction="none")
        answers = (losses * lesson.weigh_kinds()[lesson.question[wanted]]).sum()
        return answers + EYES_LEARN_ON * self._name_words(features, drawn.words)

    def look(self, pixels: Tensor) -> Tensor:
        """Compute the features [pictures, PATCHES, width] that the language model gets."""
        features: Tensor = self._projector(self._tower(pixel_values=pixels).last_hidden_state[:, 1:])
        return features

    def _name_words(self, features: Tensor, words: Tensor) -> Tensor:
        """Compare the words of each patch with its features: the nearest of each group should be the right one."""
        losses = [
            cross_entropy((features @ self._words(group).T).flatten(0, 1), words[..., number].flatten())
            for number, group in enumerate(self._groups)
        ]
        return torch.stack(losses).sum()

    def answer(self, lesson: Lesson, features: Tensor, wanted: Tensor) -> Tensor:
        """Compute the logits [labels, vocabulary] where the lesson has labels."""
        words = self._words(lesson.ids)
        embedded = torch.cat([words[:, :2], features, words[:, 2 + PATCHES :]], dim=1)
        hidden = self._language(
            inputs_embeds=embedded, attention_mask=lesson.mask, position_ids=lesson.positions, use_cache=False
        ).last_hidden_state
        logits: Tensor = self._whole.lm_head(hidden[wanted])
        return logits

    @torch.no_grad()
    def measure(self, pictures: int = 64) -> str:
        """Say the share of right answers by kind, about pictures that it does not learn from.

        An answer is greedy decoding's exactly where each of its tokens is the likeliest after the right ones.
        """
        teacher = Teacher(self._parts.tokenizer, HELD_OUT_SEED)
        drawn = teacher.draw(pictures)
        lesson = teacher.ask(drawn.scenes)
        wanted = lesson.labels != NO_LABEL
        said = self.answer(lesson, self.look(drawn.pixels), wanted).argmax(-1)
        wrong = set(lesson.question[wanted][said != lesson.labels[wanted]].tolist())
        asked = Counter(each.kind for each in lesson.asked)
        failed = Counter(lesson.asked[number].kind for number in wrong)
        shares = [f"{kind} {1 - failed[kind] / asked[kind]:.0%}" for kind in QUESTION_KINDS]
        return ", ".join([*shares, f"all {1 - len(wrong) / len(lesson.asked):.1%}"])
