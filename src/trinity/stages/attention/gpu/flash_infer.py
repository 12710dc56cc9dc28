"""FlashInferAttention: paged attention by FlashInfer's wrappers.

A layer of the cache is their layout HND, [pages, kv_heads, page_rows, head_dim], with strides: they take keys and
values as two tensors that need not be contiguous (``paged_kv_t``), and nothing is copied.

A wrapper plans a batch on the host and runs it for every layer of one kind. The plan is copied from memory of the host
that the next plan writes over, so wrappers take turns, and one plans again only when its last plan has been copied.
Because a plan depends on lengths that the host knows, a replay of a CUDA graph would need another plan before it:
steps in graphs are left to backends whose numbers lie on the device (decision 0058).

Names are those of FlashInfer 0.2.5 to 0.7.2 (``flashinfer.prefill``, ``flashinfer.decode``).
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trinity.stages.attention.gpu.library import LibraryAttention
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.block_tables import upload

WORKSPACE_BYTES = 128 << 20  # as FlashInfer's documentation advises; all wrappers share it
PLAN_TURNS = 3  # wrappers of one kind of layer: two steps in flight, and the one that is planned
TENSOR_CORE_GROUP = 4  # query heads of one KV head from which decodes go by tensor cores, which take any number


class PlanKind(NamedTuple):
    """Layers and batches that one plan serves."""

    decodes: bool  # alone, no chunk
    heads: int
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None


class PageLists(NamedTuple):
    """Pages of a batch's sequences in int32, one list behind the other; all but ``pages`` lie on the host.

    - ``begins`` ([sequences + 1]): first row of each sequence in the batch.
    - ``starts`` ([sequences + 1]): first of each sequence's ``pages``.
    - ``last`` ([sequences]): rows of its last page that are filled.
    """

    begins: Tensor
    starts: Tensor
    pages: Tensor
    last: Tensor


class FlashInferAttention(LibraryAttention):
    """``AttentionBackend`` by FlashInfer's paged wrappers; ``processors``: see ``TritonAttention``."""

    def __init__(self, processors: int | None = None) -> None:
        super().__init__(processors)
        self._workspace: Tensor | None = None
        self._turns: dict[PlanKind, deque[PlannedWrapper]] = {}

    def _read_pages(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        kind = PlanKind(not rows.chunks, query.shape[1], query.dtype, params.scale, params.window, params.softcap)
        planned: PlannedWrapper | None = rows.memo.get(kind)
        if planned is None:
            planned = rows.memo[kind] = self._take_turn(kind, cache)
            planned.plan(_page_lists(rows, cache), kind, cache)
        seen: Tensor = planned.wrapper.run(query, (cache[:, params.layer, 0], cache[:, params.layer, 1]))
        return seen

    def _take_turn(self, kind: PlanKind, cache: Tensor) -> PlannedWrapper:
        """Return the wrapper of this kind that has planned least lately."""
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=cache.device)
        turns = self._turns.setdefault(kind, deque())
        if len(turns) < PLAN_TURNS:
            turns.append(PlannedWrapper(kind, cache.shape[3], self._workspace))
        else:
            turns.rotate(-1)
        return turns[-1]


class PlannedWrapper:
    """One of FlashInfer's wrappers, and an event behind the copy of its last plan."""

    def __init__(self, kind: PlanKind, kv_heads: int, workspace: Tensor) -> None:
        import flashinfer  # type: ignore[import-not-found,unused-ignore]

        self._copied: Any = None
        if kind.decodes:
            cores = kind.heads // kv_heads >= TENSOR_CORE_GROUP
            self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=cores)
        else:
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")

    def plan(self, lists: PageLists, kind: PlanKind, cache: Tensor) -> None:
        """Plan a batch, once the last plan is no longer on its way to the device."""
        if self._copied is not None:
            self._copied.synchronize()
        shape = (kind.heads, cache.shape[3], cache.shape[5], cache.shape[4])
        how: dict[str, Any] = {
            "sm_scale": kind.scale,
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.softcap,
            "q_data_type": kind.dtype,
            "kv_data_type": cache.dtype,
        }
        if kind.decodes:
            self.wrapper.plan(lists.starts, lists.pages, lists.last, *shape, **how)
        else:
            self.wrapper.plan(*lists, *shape, causal=True, **how)
        if cache.is_cuda:
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()


def _page_lists(rows: PagedRows, cache: Tensor) -> PageLists:
    found: PageLists | None = rows.memo.get("page lists")
    if found is None:
        found = rows.memo["page lists"] = make_page_lists(rows, cache.shape[4], cache.device)
    return found


def make_page_lists(rows: PagedRows, page_rows: int, device: torch.device) -> PageLists:
    """List the pages of decode rows, then of chunks; tables that are on ``device`` already are not copied there."""
    counts = np.array([1] * rows.decodes + [chunk.length for chunk in rows.chunks])
    lengths = np.concatenate((rows.lengths, np.array([chunk.end for chunk in rows.chunks], dtype=np.int64)))
    pages = -(-lengths // page_rows)
    starts = _sum_up(pages)
    if rows.there is None:
        found = _join_pages(rows, pages, device)
    else:
        found = _pick_pages(rows.there, upload(starts, device), int(pages.sum()))
    return PageLists(
        begins=_sum_up(counts),
        starts=starts,
        pages=found,
        last=torch.from_numpy((lengths - (pages - 1) * page_rows).astype(np.int32)),
    )


def _join_pages(rows: PagedRows, pages: np.ndarray, device: torch.device) -> Tensor:
    held = [table[:most] for table, most in zip(rows.tables, pages.tolist(), strict=False)]
    parts = [upload(np.concatenate(held, dtype=np.int32), device)] if held else []
    parts += [chunk.table[:most].int() for chunk, most in zip(rows.chunks, pages[rows.decodes :].tolist(), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _pick_pages(tables: Tensor, starts: Tensor, total: int) -> Tensor:
    """Pick the first pages of each of ``tables``, of which the first comes at ``starts`` of ``total``."""
    at = torch.arange(total, dtype=torch.int32, device=tables.device)
    sequence = torch.searchsorted(starts[1:], at, right=True)
    return tables[sequence, at - starts[sequence]]


def _sum_up(counts: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts))).astype(np.int32))
