"""Attention of a step with room for chunks in plain torch, as a CUDA graph's kernels read it: off the device.

Every row of a chunk attends as a decode row of its own, found by the begins and lengths of sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.operator_tape import StaticTorch
from trinity.stages.attention.gpu.varlen import VarlenRows
from trinity.stages.attention.interface import AttentionParams, PagedRows


class StaticChunks(StaticTorch):
    """``StaticTorch`` with room for chunks, and reads of decode rows by themselves."""

    supports_chunk_slots = True

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        varlen = rows.memo.get("varlen")
        if varlen is None or varlen.slots is None:
            return super().attend(rows, cache, qkv, params)
        return super().attend(_make_single_rows(rows, varlen), cache, qkv, params)

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        if "varlen" not in rows.memo:
            return super().write(rows, cache, key, value, layer)
        blocks = torch.where(rows.blocks >= 0, rows.blocks, cache.shape[0] - 1)  # the last block is spare
        cache[blocks, layer, 0, :, rows.offsets] = key
        cache[blocks, layer, 1, :, rows.offsets] = value

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        if "varlen" not in rows.memo:
            return super().read(rows, cache, query, params)
        held: Any = cache.clone()  # ``attend`` writes as well
        none = query.new_zeros((len(query), cache.shape[3], query.shape[2]))
        nowhere = PagedRows(torch.full_like(rows.blocks, -1), rows.offsets, rows.tables, rows.lengths, memo=rows.memo)
        return super().attend(nowhere, held, (query, none, none), params)


def _make_single_rows(rows: PagedRows, varlen: VarlenRows) -> PagedRows:
    """Make decode rows of all rows; padding rows have length 0."""
    at = torch.arange(len(rows.blocks), device=rows.blocks.device)
    sequence = torch.searchsorted(varlen.begins, at, right=True) - 1
    behind = varlen.begins[sequence + 1] - 1 - at  # rows of the sequence behind this one
    lengths = (varlen.lengths[sequence] - behind).clamp(min=0)
    begins = torch.arange(len(at) + 1, device=at.device)
    memo = {"varlen": VarlenRows(varlen.tables[sequence], begins, lengths)}
    return PagedRows(rows.blocks, rows.offsets, rows.tables, rows.lengths, memo=memo)
