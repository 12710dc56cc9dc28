"""NativeAttention: paged attention on CPUs by the kernels of the extension.

Decode rows and chunks read their blocks in place, with the query heads of one KV head as rows of one matrix. Each row
sees a range of positions: causal, windows, spans, and images that see each other in both directions. Chunks go through
a kernel of many rows, but in bfloat16 on processors with AVX-512 and without AMX tiles: torch computes long chunks
there, since it is faster, and everywhere chunks whose groups are no ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.memory import native
from trinity.stages.attention.interface import AttentionParams, ChunkRows, Int64Array, PagedRows
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.block_tables import BlockTables

LONG_CHUNK = 32  # rows of a bfloat16 chunk from which torch is faster than kernels of few rows
MANY_ROW_KERNELS = ("best", "many")  # kernels that use that of many rows if there is one


@dataclass(frozen=True, slots=True)
class _BatchPlan:
    """Plan of one batch: the extension's ``rows``, the end ``ahead`` of what each row sees, and torch's chunks."""

    rows: Any
    positions: Int64Array
    ahead: Int64Array
    torch: tuple[ChunkRows, ...]


class NativeAttention(TorchAttention):
    """``AttentionBackend`` by the extension.

    ``kernel``: "best" for this processor; "many", its kernel of many rows for every row, not only where that pays;
    at most "avx512", without that kernel and without bf16 dot products; at most "avx2"; "portable"; or "loads", which
    reads what the others read and computes nothing (the limit that benchmarks show).
    """

    def __init__(self, kernel: str = "best") -> None:
        super().__init__()
        self._kernel = kernel

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        """See ``AttentionBackend.attend``."""
        query, key, value = (_make_contiguous(part) for part in qkv)
        if not query.dtype == key.dtype == value.dtype == cache.dtype:
            return super().attend(rows, cache, qkv, params)
        plan = self._plan(rows, cache)
        plan.rows.write(cache.data_ptr(), params.layer, _address(key), _address(value))
        out = torch.empty(query.shape, dtype=query.dtype)
        self._run(plan, rows, cache, query, out, params)
        for chunk in plan.torch:
            out[chunk.first : chunk.first + chunk.length] = self._chunk(rows, chunk, cache, qkv, params)
        return out

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        """See ``SplitAttention.write``."""
        if not key.dtype == value.dtype == cache.dtype:
            return super().write(rows, cache, key, value, layer)
        self._plan(rows, cache).rows.write(
            cache.data_ptr(), layer, _address(_make_contiguous(key)), _address(_make_contiguous(value))
        )

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        """See ``SplitAttention.read``."""
        if query.dtype != cache.dtype:
            return super().read(rows, cache, query, params)
        query = _make_contiguous(query)
        out = torch.empty(query.shape, dtype=query.dtype)
        self._run(self._plan(rows, cache), rows, cache, query, out, params)
        return out

    def _run(
        self, plan: _BatchPlan, rows: PagedRows, cache: Tensor, query: Tensor, out: Tensor, params: AttentionParams
    ) -> None:
        seen = rows.memo.get(("seen", params.window, params.span))
        if seen is None:
            seen = rows.memo["seen", params.window, params.span] = _visible_ranges(plan, params)
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        plan.rows.attend(
            cache.data_ptr(),
            params.layer,
            _address(query),
            _address(out),
            query.shape[1],
            *seen,
            params.scale,
            params.softcap or 0.0,
            0 if sinks is None else sinks.data_ptr(),
            torch.get_num_threads(),
            self._kernel,
        )

    def _plan(self, rows: PagedRows, cache: Tensor) -> _BatchPlan:
        plan: _BatchPlan | None = rows.memo.get("native")
        if plan is None:
            bf16 = cache.dtype == torch.bfloat16
            slow = bf16 and not (self._kernel in MANY_ROW_KERNELS and has_many_rows(cache.shape[-1]))
            plan = rows.memo["native"] = _make_plan(rows, cache, LONG_CHUNK if slow else None)
        return plan


def has_many_rows(width: int) -> bool:
    """Tell if there is a kernel of many rows for bfloat16 heads of ``width`` here."""
    asked = getattr(native.extension, "attention_many", None)
    return asked is not None and bool(asked(True, width))


def uses_amx_tiles(width: int) -> bool:
    """Tell if bfloat16 heads of ``width`` go through AMX tiles here."""
    asked = getattr(native.extension, "attention_instructions", None)
    return asked is not None and asked(True, width) == "amx"


def _make_contiguous(rows: Tensor) -> Tensor:
    """Return ``rows`` with the elements of each head beside each other."""
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _address(rows: Tensor) -> tuple[int, int, int]:
    return rows.data_ptr(), rows.stride(0), rows.stride(1)


def _make_plan(rows: PagedRows, cache: Tensor, longest: int | None) -> _BatchPlan:
    """Plan a batch; chunks of ``longest`` rows or more are left to torch."""
    blocks, layers, _, heads, height, width = cache.shape
    decodes, own = rows.decodes, BlockTables.join(rows.tables)
    tables, positions, ahead = [own.blocks], [rows.lengths - 1], [rows.lengths]
    requests = np.empty((decodes, 4), np.int64)
    requests[:, 0], requests[:, 1], requests[:, 3] = np.arange(decodes), 1, own.counts
    requests[:, 2] = own.ends - own.counts
    ours, torches, start = [requests], [], len(own.blocks)
    for chunk in rows.chunks:
        table, at = chunk.table.numpy(), np.arange(chunk.start, chunk.end)
        ends = None if longest is not None and chunk.length >= longest else _visible_ends(chunk)
        positions.append(at)
        if ends is None:
            ahead.append(at + 1)
            torches.append(chunk)
        else:
            ahead.append(ends)
            ours.append(np.array([[chunk.first, chunk.length, start, len(table)]], np.int64))
            tables.append(table)
            start += len(table)
    shape = np.array([blocks, layers, heads, height, width], np.int64)
    given = (np.concatenate(tables, dtype=np.int64), np.concatenate(ours))
    made = native.extension.PagedAttention(
        shape, cache.dtype == torch.bfloat16, rows.blocks.numpy(), rows.offsets.numpy(), *given
    )
    return _BatchPlan(made, np.concatenate(positions), np.concatenate(ahead), tuple(torches))


def _visible_ends(chunk: ChunkRows) -> Int64Array | None:
    """Return the end of what each row of a chunk sees, windows aside; None if its groups are no runs of rows."""
    ends = np.arange(chunk.start + 1, chunk.end + 1)
    if chunk.groups is None:
        return ends
    groups = chunk.groups.numpy()
    last = np.append(groups[1:] != groups[:-1], True)
    named = groups[last & (groups >= 0)]
    if len(np.unique(named)) != len(named):
        return None
    runs = np.flatnonzero(last)
    return np.where(groups >= 0, ends[runs[np.searchsorted(runs, np.arange(len(groups)))]], ends)


def _visible_ranges(plan: _BatchPlan, params: AttentionParams) -> tuple[Int64Array, Int64Array]:
    """Return the positions [first, end) that each row of the batch sees in a layer."""
    end = plan.ahead
    if params.span is not None:
        end = np.minimum(end, (plan.positions // params.span + 1) * params.span)
    return params.first_seen(plan.positions), end
