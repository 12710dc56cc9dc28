"""What is wrong with a checkpoint itself is said as such, and nothing is asked twice of it."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.any_model.text_checkpoint import build_any_text
from support.checkpoint_files import checkpoint
from support.text_models import build
from trinity import commands
from trinity.errors import UnsupportedModel
from trinity.preprocess.checkpoint.verdicts import require_facts
from trinity.preprocess.processor import RequestProcessor
from trinity.stages.models import checks, load_model
from trinity.stages.models.own_logits import explain_no_numbers
from trinity.stages.proof import prove

NOT_NUMBERS = [float("nan"), float("inf")]


def spoil(directory: Path, part: str, value: float) -> str:
    """Put one such value into the first matrix whose name has ``part`` in it; returns the name."""
    tensors = load_file(directory / "model.safetensors")
    name = next(each for each, held in tensors.items() if part in each and held.ndim > 1)
    tensors[name].view(-1)[0] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("value", NOT_NUMBERS)
@pytest.mark.parametrize("part", ["vision_tower", "self_attn"])
def test_a_weight_that_is_no_number_is_named_and_no_part_of_ours(
    part: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(checkpoint("any-mistral3"), tmp_path / "spoilt"))
    spoil(directory, part, value)
    assert commands.main(["check", str(directory)]) == 1
    shown = capsys.readouterr().out
    assert "mistral3 is refused: its model's own logits cannot be followed" in shown
    assert "its weights hold NaN or infinity" in shown
    assert part in shown
    with pytest.raises(UnsupportedModel, match=r"model's own logits cannot be followed: they are not finite"):
        require_facts(directory, "mistral3")


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_so_it_is_said_of_a_text_model(value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = Path(shutil.copytree(checkpoint("llama"), tmp_path / "listed"))
    spoil(listed, "self_attn", value)
    assert commands.main(["check", str(listed)]) == 1
    assert "logits of its own that nothing can be compared with" in capsys.readouterr().out
    other = build(tmp_path / "other", "olmo2")
    name = spoil(other, "self_attn", value)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(UnsupportedModel, match=r"hold NaN or infinity .*; load or convert") as refused:
            load_model(other, "PD", dtype=dtype)
        assert name in str(refused.value)
        assert "paged cache" not in str(refused.value)


def test_no_numbers_are_told_from_banned_ones() -> None:
    model, logits = torch.nn.Linear(2, 3), torch.zeros(2, 3)
    assert explain_no_numbers(logits, model) == ""
    logits[0, :2] = -torch.inf
    assert explain_no_numbers(logits, model) == ""
    logits[0] = -torch.inf
    assert "too large" in explain_no_numbers(logits, model)
    for value in NOT_NUMBERS:
        spoilt = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5)))
        for name, held in spoilt.named_parameters():
            if name.endswith("weight") and name != "0.weight":
                torch.nn.init.constant_(held, value)
        assert "(1.weight, 2.weight, 3.weight and others)" in explain_no_numbers(torch.full((1, 2), value), spoilt)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls = Counter[str]()

    def count(owner: Any, name: str) -> Callable[..., Any]:
        own = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            calls[name] += 1
            return own(*given, **named)

        return call

    own_module = sys.modules[prove.__module__]
    for owner, name in (
        (RequestProcessor, "__init__"),
        (own_module, "_has_causal_encoder"),
        (checks, "_compare_plain"),
    ):
        monkeypatch.setattr(owner, name, count(owner, name))
    return calls


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_a_text_model_is_checked_once_with_one_processor(name: str, counted: Counter[str], tmp_path: Path) -> None:
    """Of a type that somebody listed, and of one that is checked as it loads."""
    directory = build_any_text(name, tmp_path / "new")
    assert commands.main(["check", str(directory)]) == 0
    assert counted == {"__init__": 1, "_compare_plain": 1}


def test_a_proof_asks_once_whether_an_encoder_is_causal(counted: Counter[str]) -> None:
    assert prove(checkpoint("any-mistral3")).failed is None
    assert counted["_has_causal_encoder"] == 1
