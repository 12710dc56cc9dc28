"""A prompt prefilled in a step that tells of its layers as they are written."""

from __future__ import annotations

import torch
from torch import Tensor

from support.language_stage import PROMPT, Solo, work
from trinity.core.messages import Prefill, Step


def prefilled_and_told(solo: Solo) -> int:
    """The first token. Every layer was told of once, in order, and its bytes have not changed since."""
    opened, memory = solo.open(work("a", max_tokens=1)), solo.pool.memory
    seen: list[tuple[int, Tensor]] = []

    def look(first: int, end: int) -> None:
        seen.extend((layer, memory.tensor[list(opened.blocks), layer].clone()) for layer in range(first, end))

    solo.stage.on_layers = look
    step = Step(1, "joint", prefills=(Prefill("a", 0, len(PROMPT), True),), group=1)
    token = solo.stage.forward(step)["a"].token
    assert [layer for layer, _ in seen] == list(range(memory.shape.shape[0]))
    for layer, there in seen:
        assert torch.equal(there, memory.tensor[list(opened.blocks), layer])
    return token
