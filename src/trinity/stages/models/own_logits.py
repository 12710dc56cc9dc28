"""Logits of a model's own that no comparison must take as they are: those that are no numbers, and banned ones.

Some models ban tokens in their own forward, as Chameleon does those of an image: they are compared apart from others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

BANNED = -65504.0  # the least of float16: no logit that says anything is as low
_MOST_NAMES = 3


def set_aside(found: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with banned logits as 0, lest the largest of them hide all errors; infinite where but one is banned.

    Both have any equal shape.
    """
    banned, also = expected <= BANNED, found <= BANNED
    return found.masked_fill(banned & also, 0.0).masked_fill(banned ^ also, torch.inf), expected.masked_fill(
        banned, 0.0
    )


def explain_no_numbers(logits: Tensor, model: Any) -> str:
    """Say that a model's own ``logits`` hold NaN or infinity, and which of its weights do; "" if they do not.

    -inf is a token that the model bans, unless it bans all.
    """
    if not bool((logits.isnan() | (logits == torch.inf)).any() or (logits == -torch.inf).all(-1).any()):
        return ""
    names = list(islice(_list_spoilt(model), _MOST_NAMES + 1))
    if not names:
        return "they are not finite, though all weights are: it computes numbers that are too large"
    more = " and others" if len(names) > _MOST_NAMES else ""
    return (
        f"they are not finite: its weights hold NaN or infinity ({', '.join(names[:_MOST_NAMES])}{more}); load or "
        "convert the checkpoint again"
    )


def _list_spoilt(model: Any) -> Iterator[str]:
    for name, held in (*model.named_parameters(), *model.named_buffers()):
        if held.is_floating_point() and held.dtype.itemsize > 1 and not held.is_meta and not held.isfinite().all():
            yield name
