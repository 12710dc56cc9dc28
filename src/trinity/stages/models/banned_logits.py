"""Logits that a model's own forward bans, as Chameleon does those of an image's tokens: compared apart from others."""

from __future__ import annotations

import torch
from torch import Tensor

BANNED = -65504.0  # the least of float16: no logit that says anything is as low


def set_aside(found: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with banned logits as 0, lest the largest of them hide all errors; infinite where but one is banned.

    Both have any equal shape.
    """
    banned, also = expected <= BANNED, found <= BANNED
    return found.masked_fill(banned & also, 0.0).masked_fill(banned ^ also, torch.inf), expected.masked_fill(
        banned, 0.0
    )
