"""LibraryAttention: reads the paged cache by a library's kernel, and by trinity's own where that cannot serve a layer.

Triton writes keys and values, since it leaves out the padding rows of CUDA graphs, and reads spans, sinks and images
whose rows see each other, none of which the libraries take. A layer of the block-major cache is a view with strides,
which both libraries read in place: nothing is copied.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from trinity.stages.attention.gpu.flash import FlashRows, Pages, call_flash3, make_flash_rows
from trinity.stages.attention.gpu.triton import LayerKind, TritonAttention
from trinity.stages.attention.gpu.varlen import VarlenRows, make_varlen_rows
from trinity.stages.attention.interface import AttentionParams, PagedRows


class LibraryAttention(TritonAttention):
    """``AttentionBackend`` by a library, for batches that are not recorded; ``processors``: see ``TritonAttention``."""

    supports_graphs = supports_chunk_slots = False

    def __init__(self, processors: int | None = None) -> None:
        super().__init__(processors)
        self._served: dict[LayerKind, AttentionParams] = {}

    @abstractmethod
    def _read_pages(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        """Attend causally, with a window or a softcap if ``params`` has them, to keys and values in the cache."""

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        """See ``SplitAttention.read``; rows of chunks may be among them."""
        grouped = any(chunk.groups is not None for chunk in rows.chunks)
        varlen: VarlenRows | None = rows.memo.get("varlen")
        recorded = varlen is not None and varlen.slots is not None
        if grouped or recorded or params.span is not None or params.sinks is not None:
            return super().read(rows, cache, query, params)
        capped, windowed = params.softcap is not None, params.window is not None
        self._served.setdefault(LayerKind(query.shape[1], query.dtype, capped, windowed, False, None), params)
        return self._read_pages(rows, cache, query if query.stride(2) == 1 else query.contiguous(), params)

    def warm_up(self, cache: Tensor, chunks: bool, groups: bool) -> None:
        """See ``TritonAttention.warm_up``: also of what this library serves, if rows with groups are to come."""
        if groups:
            self._kinds |= self._served
        super().warm_up(cache, chunks, groups)


class FlashAttention3(LibraryAttention):
    """``AttentionBackend`` by flash-attn 3, whose numbers all lie on the device: it can be recorded in CUDA graphs.

    A padding row, of length 0, comes out as zeros, as flash-attn has it for rows that see nothing.
    """

    supports_graphs = supports_chunk_slots = True  # chunks of a recording are read by trinity's own kernels

    def _read_pages(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        batch: FlashRows | None = rows.memo.get("flash")
        if batch is None:
            varlen = rows.memo.get("varlen") or make_varlen_rows(rows, cache.device)
            batch = rows.memo["flash"] = make_flash_rows(varlen, rows)
        return call_flash3(query, view_pages(cache, params.layer), batch, params)


def view_pages(cache: Tensor, layer: int) -> Pages:
    """View a layer's keys and values as pages [pages, page_rows, kv_heads, head_dim]."""
    return cache[:, layer, 0].transpose(1, 2), cache[:, layer, 1].transpose(1, 2)
