"""Positions of a ragged batch's rows for attention layers that ask a cache how many tokens it holds (Llama 4).

Such a layer adds the numbers of the rows that it is given, 0, 1, 2, ..., to that. A ragged batch has rows of many
requests: what stands in for the cache here answers for each row, so that the sum is the row's own position.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.stages.attention.interface import PagedBatch, PagedRows, find_batch

_CACHE = "past_key_values"


class _RowCounts:
    """Stands in for a layer's cache: tells each row's position less its number, and keeps nothing."""

    def __init__(self, rows: PagedRows) -> None:
        self._rows = rows

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        found = self._rows.memo.get(_CACHE)
        if found is None:
            found = self._rows.memo[_CACHE] = torch.from_numpy(_count_before(self._rows)).to(self._rows.blocks.device)
        counts: Tensor = found
        return counts

    def update(self, key: Tensor, value: Tensor, *further: Any) -> tuple[Tensor, Tensor]:
        return key, value


def _count_before(rows: PagedRows) -> np.ndarray:
    parts = [rows.lengths - 1, *(np.arange(each.start, each.end) for each in rows.chunks)]
    positions = np.concatenate(parts)
    found: np.ndarray = positions - np.arange(len(positions))
    return found


def answer_counts(model: Any) -> bool:
    """Have the layers of ``model`` that count what a cache holds be told of their rows; tells if there are any.

    What runs outside of a forward of trinity's is not changed. May be called again.
    """
    layers: list[Any] = [each for each in model.modules() if hasattr(each, "layer_idx")]
    counting = [each for each in layers if _counts(each.__class__)]
    for layer in counting:
        if _give_counts not in layer._forward_pre_hooks.values():  # torch has no public way to ask for hooks
            layer.register_forward_pre_hook(_give_counts, with_kwargs=True)
    return bool(counting)


@cache
def _counts(kind: Any) -> bool:
    try:
        return f"{_CACHE}.get_seq_length(self.layer_idx)" in inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False


def _give_counts(layer: Any, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    batch = find_batch(named.get("trinity_batch"))
    if not isinstance(batch, PagedBatch) or named.get(_CACHE) is not None:
        return None
    return given, {**named, _CACHE: _RowCounts(batch.rows)}
