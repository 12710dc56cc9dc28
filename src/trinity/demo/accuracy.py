"""Examines a trained model by questions about new pictures, put to transformers' own ``generate()`` or to anyone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from trinity.demo.pictures import SEEN_PAIRS, Scene, draw_scene, random_scene
from trinity.demo.questions import QUESTION_KINDS, Question, pick_question

EXAM_SEED = 20_261  # no training has it
PICTURE_SIZE = 256  # pixels
ANSWER_TOKENS = 16  # of an answer


class ExamQuestion(NamedTuple):
    """A question about a new scene."""

    scene: Scene
    question: Question

    def picture(self) -> Any:
        """Draw the scene, as an image of PIL."""
        return draw_scene(self.scene, PICTURE_SIZE)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The question as a chat, whose picture is given beside it."""
        content = [{"type": "image"}, {"type": "text", "text": self.question.text}]
        return [{"role": "user", "content": content}]

    def is_right(self, answer: str) -> bool:
        return answer.strip() == self.question.answer


def make_exam(
    questions: int, seed: int = EXAM_SEED, pairs: Sequence[tuple[str, str]] = SEEN_PAIRS
) -> list[ExamQuestion]:
    """Draw scenes of ``pairs`` of colour and shape by ``seed``, and pick one question about each."""
    rng = Random(seed)
    scenes = (random_scene(rng, pairs) for _ in range(questions))
    return [ExamQuestion(scene, pick_question(scene, rng)) for scene in scenes]


class Marks(NamedTuple):
    """Numbers of right answers and of questions, by kind of question."""

    right: Counter[str]
    asked: Counter[str]

    @classmethod
    def of(cls, exam: Iterable[ExamQuestion], answers: Iterable[str]) -> Marks:
        """Mark the answers to an exam, in its order."""
        marked = [(each.question.kind, each.is_right(answer)) for each, answer in zip(exam, answers, strict=True)]
        return cls(Counter(kind for kind, right in marked if right), Counter(kind for kind, _ in marked))

    @property
    def share(self) -> float:
        """The share of right answers to all questions."""
        return self.right.total() / self.asked.total()

    def __str__(self) -> str:
        kinds = [kind for kind in QUESTION_KINDS if self.asked[kind]]
        each = [f"{kind} {self.right[kind]}/{self.asked[kind]}" for kind in kinds]
        return f"{self.share:.1%} ({', '.join(each)})"


def generate_answers(directory: Path, exam: Sequence[ExamQuestion]) -> list[str]:
    """Answer an exam by transformers alone: the checkpoint's processor and chat template, ``generate()`` in float32."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    read: Any = AutoProcessor.from_pretrained
    processor: Any = read(directory, backend="pil", local_files_only=True, trust_remote_code=False)
    whole: Any = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    texts = [processor.apply_chat_template(each.messages, add_generation_prompt=True) for each in exam]
    lengths = [len(processor.tokenizer(text)["input_ids"]) for text in texts]
    answers = [""] * len(exam)
    for length in sorted(set(lengths)):  # of one length, so that nothing is padded
        members = [number for number, each in enumerate(lengths) if each == length]
        pictures = [[exam[number].picture()] for number in members]
        inputs = processor(text=[texts[number] for number in members], images=pictures, return_tensors="pt")
        with torch.inference_mode():
            found = whole.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        tails = processor.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for number, tail in zip(members, tails, strict=True):
            answers[number] = tail
    return answers
