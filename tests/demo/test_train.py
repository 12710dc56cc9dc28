"""The training: what it writes, and that it learns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tools.demo_model import __main__ as command
from tools.demo_model.checkpoint import make_parts
from tools.demo_model.lessons import Teacher
from tools.demo_model.train import Learner, Schedule, train
from trinity.demo.accuracy import Marks, generate_answers, make_exam

SHORT = ["--eye-steps", "2", "--answer-steps", "2", "--questions", "6"]


def test_the_command_writes_a_checkpoint_and_examines_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path / "shapes"), *SHORT]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert re.search(r"^unseen pictures: \d+\.\d% \(", said.out, re.MULTILINE)
    assert re.search(r"^pairs of colour and shape never seen together: ", said.out, re.MULTILINE)
    config = json.loads((tmp_path / "shapes" / "config.json").read_text())
    assert config["dtype"] == "float32", "it is computed with in float32"
    tensors = load_file(tmp_path / "shapes" / "model.safetensors").values()
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert 1_000_000 < sum(tensor.numel() for tensor in tensors) < 1_500_000
    assert (tmp_path / "shapes" / "model.safetensors").stat().st_size < 3_000_000


def test_a_seed_gives_the_same_weights(tmp_path: Path) -> None:
    schedule = Schedule(eye_steps=1, answer_steps=1, eye_batch=4, answer_batch=2)
    for name in ("one", "again"):
        train(tmp_path / name, schedule, lambda line: None)
    one, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "again"))
    assert one == again


def test_eyes_learn_to_name_what_they_see() -> None:
    torch.manual_seed(0)
    parts = make_parts()
    learner, teacher = Learner(parts), Teacher(parts.tokenizer, 0)
    optimiser, losses = learner.eyes(2e-3), []
    pictures = teacher.draw(8)
    for _ in range(12):
        loss = learner.eye_loss(pictures)
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < 0.8 * losses[0]


def test_all_weights_learn_in_the_second_part() -> None:
    torch.manual_seed(0)
    parts = make_parts()
    learner = Learner(parts)
    learner.answer_loss(Teacher(parts.tokenizer, 0), 2).backward()
    unused = {"post_layernorm"}  # CLIP's, of the token that LLaVA leaves out
    idle = [name for name, each in parts.model.named_parameters() if each.grad is None or not each.grad.abs().max()]
    assert [name for name in idle if not any(part in name for part in unused)] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_short_training_learns_far_more_than_guessing(tmp_path: Path) -> None:
    """A tenth of the shipped model's training."""
    train(tmp_path, Schedule(eye_steps=150, answer_steps=200), print)
    exam = make_exam(240)
    marks = Marks.of(exam, generate_answers(tmp_path, exam))
    assert marks.share > 0.4, str(marks)
