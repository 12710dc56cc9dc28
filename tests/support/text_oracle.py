"""Compares one stage of trinity with ``generate()`` of transformers, tokens and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.text_models import generate, serve


def check_text(directory: Path, prompt: list[int], *, varied: bool = True, **how: Any) -> None:
    """Serve a prompt in chunks and compare; ``varied``: the tokens must differ among each other, too."""
    wanted, found = generate(directory, prompt), serve(directory, prompt, **how)
    assert not varied or len(set(wanted.tokens)) > 1, "tokens that do not vary show little"
    assert found.tokens == wanted.tokens
    largest = float(wanted.logits.abs().max())
    assert float((found.logits - wanted.logits).abs().max()) < 1e-4 * max(1.0, largest)
