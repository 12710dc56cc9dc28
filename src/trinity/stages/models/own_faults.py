"""Logits of a model's own that are no numbers, and the weights that may be why: no comparison says anything of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

_MOST_NAMES = 3


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
