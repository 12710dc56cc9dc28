"""Every text type that serves gives what ``generate()`` gives, beyond each threshold of its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.known_classes import packs
from support.text_models import SERVED, build, generate, make_prompt, serve
from trinity.stages.kernels import linear

SOON = ("cohere2", "gemma3_text", "gpt_oss", "llama", "ministral3", "mistral", "phi3", "qwen3")


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers as decode instances have them, whether or not packing is faster here."""
    monkeypatch.setattr(linear, "_is_packing_faster", packs)


def check_exact(directory: Path, prompt: list[int], **how: Any) -> None:
    wanted, found = generate(directory, prompt), serve(directory, prompt, **how)
    assert len(set(wanted.tokens)) > 1, "tokens that do not vary show little"
    assert found.tokens == wanted.tokens
    largest = float(wanted.logits.abs().max())
    assert float((found.logits - wanted.logits).abs().max()) < 1e-4 * max(1.0, largest)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in SERVED]
)
def test_tokens_and_logits_beyond_tiny_thresholds(model_type: str, tmp_path: Path) -> None:
    check_exact(build(tmp_path, model_type), make_prompt())
