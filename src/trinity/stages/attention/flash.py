"""FlashAttention: attention by flash-attn or by torch's own varlen function, where these take a block table.

Both read pages [pages, page_rows, kv_heads, head_dim] with any strides but the last: a layer of the block-major cache
is such a view of it, and nothing is copied. What they do not do (a span, sinks, rows that see each other in both
directions, with torch also a softcap) plain torch does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trinity.stages.attention.interface import LayerAsk, PagedRows
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.attention.varlen import VarlenRows, varlen_rows

FLASH_PAGE = 256  # flash-attn 2 takes multiples of it as block sizes


@dataclass(frozen=True, slots=True)
class FlashRows:
    """The batch in int32, and the most rows and positions of one of its sequences."""

    tables: Tensor
    begins: Tensor
    lengths: Tensor
    groups: bool
    most_rows: int
    longest: int


Pages = tuple[Tensor, Tensor]
Call = Callable[[Tensor, Pages, FlashRows, LayerAsk], Tensor]


class FlashAttention(TorchAttention):
    """``AttentionBackend`` by ``call``, one of ``flash_attn`` and ``torch_varlen``."""

    def __init__(self, call: Call, softcap: bool) -> None:
        super().__init__()
        self._call, self._softcap = call, softcap

    def attend(self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], ask: LayerAsk) -> Tensor:
        """See ``AttentionBackend.attend``."""
        batch = self._batch(rows, cache, ask)
        if batch is None:
            return super().attend(rows, cache, qkv, ask)
        self.write(rows, cache, *qkv[1:], ask.layer)
        return self._seen(batch, cache, qkv[0], ask)

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, ask: LayerAsk) -> Tensor:
        """See ``Halves``."""
        batch = self._batch(rows, cache, ask)
        return super().read(rows, cache, query, ask) if batch is None else self._seen(batch, cache, query, ask)

    def _batch(self, rows: PagedRows, cache: Tensor, ask: LayerAsk) -> FlashRows | None:
        """None: plain torch does it."""
        batch: FlashRows | None = rows.kept.get("flash")
        if batch is None:
            batch = rows.kept["flash"] = _flash_rows(varlen_rows(rows, cache.device), rows)
        return None if batch.groups or not self._serves(ask) else batch

    def _seen(self, batch: FlashRows, cache: Tensor, query: Tensor, ask: LayerAsk) -> Tensor:
        pages = (cache[:, ask.layer, 0].transpose(1, 2), cache[:, ask.layer, 1].transpose(1, 2))
        return self._call(query.contiguous(), pages, batch, ask)

    def _serves(self, ask: LayerAsk) -> bool:
        return ask.span is None and ask.sinks is None and (ask.softcap is None or self._softcap)


def _flash_rows(batch: VarlenRows, rows: PagedRows) -> FlashRows:
    return FlashRows(
        tables=batch.tables.int(),
        begins=batch.begins.int(),
        lengths=batch.lengths.int(),
        groups=batch.groups is not None,
        most_rows=max([1 if rows.decodes else 0, *(chunk.length for chunk in rows.chunks)]),
        longest=max([int(rows.lengths.max()) if rows.decodes else 0, *(chunk.end for chunk in rows.chunks)]),
    )


def flash_attn(query: Tensor, pages: Pages, rows: FlashRows, ask: LayerAsk) -> Tensor:
    """By ``flash_attn_varlen_func`` of the package flash-attn, version 2."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]

    starts = torch.nn.functional.pad(rows.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    seen: Tensor = flash_attn_varlen_func(
        *(query, *pages, rows.begins, starts, rows.most_rows, rows.longest),
        softmax_scale=ask.scale,
        causal=True,
        window_size=_window(ask),
        softcap=ask.softcap or 0.0,
        block_table=rows.tables,
    )
    return seen


def torch_varlen(query: Tensor, pages: Pages, rows: FlashRows, ask: LayerAsk) -> Tensor:
    """By torch's ``varlen_attn``, whose flash-attn 3 alone takes a block table."""
    from torch.nn.attention import varlen

    call: Any = varlen.varlen_attn
    seen: Tensor = call(
        *(query, *pages, rows.begins, None, rows.most_rows, rows.longest),
        scale=ask.scale,
        window_size=_window(ask),
        enable_gqa=query.shape[1] != pages[0].shape[2],
        seqused_k=rows.lengths,
        block_table=rows.tables,
    )
    return seen


def _window(ask: LayerAsk) -> tuple[int, int]:
    """Positions seen before the row's own, and after it; -1: all before."""
    return (-1 if ask.window is None else ask.window - 1, 0)


def varlen_takes_tables() -> bool:
    """Does this torch have ``varlen_attn`` with a block table? (2.12 and later.)"""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return False
    return "block_table" in inspect.signature(varlen.varlen_attn).parameters
