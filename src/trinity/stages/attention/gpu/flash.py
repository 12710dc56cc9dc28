"""FlashAttention: paged attention by flash-attn 2 or torch's varlen function, if these take a block table.

These and flash-attn 3 read pages [pages, page_rows, kv_heads, head_dim] with any strides except the last, so that a
layer of the block-major cache is a view and nothing is copied. Plain torch does the rest: spans, sinks, rows that see
each other in both directions and, with torch's function, softcaps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trinity.stages.attention.gpu.varlen import VarlenRows, make_varlen_rows
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.attention.torch_reference import TorchAttention

FLASH_PAGE = 256  # tokens; flash-attn 2 takes multiples of it as block sizes


@dataclass(frozen=True, slots=True)
class FlashRows:
    """One batch in int32; ``most_rows`` and ``longest`` are the most rows and KV positions of any sequence."""

    tables: Tensor
    begins: Tensor
    lengths: Tensor
    groups: bool
    most_rows: int
    longest: int


Pages = tuple[Tensor, Tensor]
VarlenCall = Callable[[Tensor, Pages, FlashRows, AttentionParams], Tensor]


class FlashAttention(TorchAttention):
    """``AttentionBackend`` by ``call_flash_attn`` or ``call_torch_varlen``; ``softcap``: it can cap scores."""

    def __init__(self, call: VarlenCall, softcap: bool) -> None:
        super().__init__()
        self._call, self._softcap = call, softcap

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        """See ``AttentionBackend.attend``."""
        batch = self._flash_rows(rows, cache, params)
        if batch is None:
            return super().attend(rows, cache, qkv, params)
        self.write(rows, cache, *qkv[1:], params.layer)
        return self._attend_pages(batch, cache, qkv[0], params)

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        """See ``SplitAttention.read``."""
        batch = self._flash_rows(rows, cache, params)
        if batch is None:
            return super().read(rows, cache, query, params)
        return self._attend_pages(batch, cache, query, params)

    def _flash_rows(self, rows: PagedRows, cache: Tensor, params: AttentionParams) -> FlashRows | None:
        """Return the batch for ``call``; None if plain torch must serve it."""
        batch: FlashRows | None = rows.memo.get("flash")
        if batch is None:
            batch = rows.memo["flash"] = make_flash_rows(make_varlen_rows(rows, cache.device), rows)
        return None if batch.groups or not self._can_serve(params) else batch

    def _attend_pages(self, batch: FlashRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        pages = (cache[:, params.layer, 0].transpose(1, 2), cache[:, params.layer, 1].transpose(1, 2))
        return self._call(query.contiguous(), pages, batch, params)

    def _can_serve(self, params: AttentionParams) -> bool:
        return params.span is None and params.sinks is None and (params.softcap is None or self._softcap)


def make_flash_rows(batch: VarlenRows, rows: PagedRows) -> FlashRows:
    """Make the numbers that flash-attn takes of a batch."""
    return FlashRows(
        tables=batch.tables.int(),
        begins=batch.begins.int(),
        lengths=batch.lengths.int(),
        groups=batch.groups is not None,
        most_rows=max([1 if rows.decodes else 0, *(chunk.length for chunk in rows.chunks)]),
        longest=max([int(rows.lengths.max()) if rows.decodes else 0, *(chunk.end for chunk in rows.chunks)]),
    )


def call_flash_attn(query: Tensor, pages: Pages, rows: FlashRows, params: AttentionParams) -> Tensor:
    """Attend with ``flash_attn_varlen_func`` of the package flash-attn, version 2."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]

    starts = torch.nn.functional.pad(rows.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    seen: Tensor = flash_attn_varlen_func(
        *(query, *pages, rows.begins, starts, rows.most_rows, rows.longest),
        softmax_scale=params.scale,
        causal=True,
        window_size=_window(params),
        softcap=params.softcap or 0.0,
        block_table=rows.tables,
    )
    return seen


def call_flash3(query: Tensor, pages: Pages, rows: FlashRows, params: AttentionParams) -> Tensor:
    """Attend with ``flash_attn_with_kvcache`` of flash-attn 3, the module ``flash_attn_interface``.

    Its pages may have any number of rows (flash-attn 2.7.4 to 2.8.3, folder hopper: its interface and ``mha_fwd``).
    """
    from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found,unused-ignore]

    seen: Tensor = flash_attn_with_kvcache(
        *(query, *pages),
        cache_seqlens=rows.lengths,
        page_table=rows.tables,
        cu_seqlens_q=rows.begins,
        max_seqlen_q=rows.most_rows,
        softmax_scale=params.scale,
        causal=True,
        window_size=_window(params),
        softcap=params.softcap or 0.0,
    )
    return seen


def call_torch_varlen(query: Tensor, pages: Pages, rows: FlashRows, params: AttentionParams) -> Tensor:
    """Attend with torch's ``varlen_attn``; only its flash-attn 3 takes a block table."""
    from torch.nn.attention import varlen

    call: Any = varlen.varlen_attn
    seen: Tensor = call(
        *(query, *pages, rows.begins, None, rows.most_rows, rows.longest),
        scale=params.scale,
        window_size=_window(params),
        enable_gqa=query.shape[1] != pages[0].shape[2],
        seqused_k=rows.lengths,
        block_table=rows.tables,
    )
    return seen


def _window(params: AttentionParams) -> tuple[int, int]:
    """Return the numbers of positions seen before a row's own and after it; -1: all."""
    return (-1 if params.window is None else params.window - 1, 0)


def varlen_supports_block_tables() -> bool:
    """Tell if this torch has ``varlen_attn`` with a block table (2.12 and later)."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return False
    return "block_table" in inspect.signature(varlen.varlen_attn).parameters
