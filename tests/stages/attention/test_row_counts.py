"""Attention layers that count rows, as Llama 4's do, are told each row's own position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trinity.stages.attention.interface import ChunkRows, PagedBatch, PagedRows, attending
from trinity.stages.attention.row_counts import answer_counts

ROWS = 7


class Counting(nn.Module):
    """Returns the positions that Llama 4's layers would scale their queries by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx = 0

    def forward(self, hidden: Tensor, past_key_values: Any = None, **further: Any) -> Tensor:
        seen = past_key_values.get_seq_length(self.layer_idx) if past_key_values is not None else 0
        if past_key_values is not None:
            hidden, _ = past_key_values.update(hidden, hidden, self.layer_idx)
        return torch.arange(hidden.shape[1]) + seen


class Plain(nn.Module):
    """Counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx = 0

    def forward(self, hidden: Tensor, past_key_values: Any = None) -> Any:
        return past_key_values


def batch() -> PagedBatch:
    """Two decodes at positions 4 and 19, and chunks of three and two rows from positions 8 and 0."""
    table = torch.zeros(1, dtype=torch.int64)
    chunks = (ChunkRows(2, 3, 8, table), ChunkRows(5, 2, 0, table))
    none = torch.zeros(ROWS, dtype=torch.int64)
    rows = PagedRows(none, none, np.zeros((2, 1), np.int64), np.array([5, 20]), chunks)
    backend: Any = None
    return PagedBatch(rows, torch.empty(0), backend)


@pytest.mark.parametrize("by_keyword", [True, False])
def test_each_row_has_its_own_position(by_keyword: bool) -> None:
    layer, ragged = Counting(), batch()
    assert answer_counts(layer)
    if by_keyword:
        found = layer(torch.zeros(1, ROWS, 2), trinity_batch=ragged)
    else:
        with attending(ragged):
            found = layer(torch.zeros(1, ROWS, 2))
    assert found.tolist() == [4, 19, 8, 9, 10, 0, 1]


def test_a_forward_of_the_model_s_own_is_left_alone() -> None:
    layer = Counting()
    answer_counts(layer)
    assert layer(torch.zeros(1, 4, 2)).tolist() == [0, 1, 2, 3]


def test_it_may_be_asked_for_again_and_touches_no_other_layer() -> None:
    layers = nn.ModuleList([Counting(), Plain()])
    assert answer_counts(layers)
    assert answer_counts(layers)
    assert len(layers[0]._forward_pre_hooks) == 1
    assert not layers[1]._forward_pre_hooks
    assert not answer_counts(Plain())
