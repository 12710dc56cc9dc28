"""NativeAttention: paged attention by the kernel of csrc/attention.cpp, on CPUs.

Decode rows and chunks read their blocks in place, with the query heads of one key-value head as rows of one matrix.
What a row sees is a range of positions: causal, windows, runs and images that see each other in both directions.
Chunks go through a kernel of many rows where the processor has what it takes: AMX tiles for bfloat16, AVX-512 for
float32. Long ones in bfloat16 without tiles are left to torch, which is faster, and so are chunks whose groups are no
ranges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.memory import native
from trinity.stages.attention.interface import ChunkRows, LayerAsk, PagedRows
from trinity.stages.attention.torch_reference import TorchAttention

Ints = np.ndarray
LONG = 32  # rows of a chunk in bfloat16 from which torch, whose products use oneDNN, is faster than all but AMX tiles
TILED = ("best", "many")  # kernels that take tiles where there are some


@dataclass(frozen=True, slots=True)
class _Plan:
    """``rows``: the extension's plan of a batch. ``groups``: per row, the end of what it sees ahead of itself."""

    rows: Any
    positions: Ints
    ahead: Ints
    torch: tuple[ChunkRows, ...]


class NativeAttention(TorchAttention):
    """``AttentionBackend`` by the extension.

    ``kernel``: "best" for this processor, "many" (its kernel of many rows for every row, not only where that pays),
    "avx512" (without that and without bf16 dot products), "portable", or "loads", which reads what the others read and
    computes nothing: the limit that benchmarks show.
    """

    def __init__(self, kernel: str = "best") -> None:
        super().__init__()
        self._kernel = kernel

    def attend(self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], ask: LayerAsk) -> Tensor:
        """See ``AttentionBackend.attend``."""
        query, key, value = (_close(part) for part in qkv)
        if not query.dtype == key.dtype == value.dtype == cache.dtype:
            return super().attend(rows, cache, qkv, ask)
        plan = self._plan(rows, cache)
        plan.rows.write(cache.data_ptr(), ask.layer, _rows(key), _rows(value))
        out = torch.empty(query.shape, dtype=query.dtype)
        self._run(plan, rows, cache, query, out, ask)
        for chunk in plan.torch:
            out[chunk.first : chunk.first + chunk.length] = self._chunk(rows, chunk, cache, qkv, ask)
        return out

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        """See ``Halves.write``."""
        if not key.dtype == value.dtype == cache.dtype:
            return super().write(rows, cache, key, value, layer)
        self._plan(rows, cache).rows.write(cache.data_ptr(), layer, _rows(_close(key)), _rows(_close(value)))

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, ask: LayerAsk) -> Tensor:
        """See ``Halves.read``."""
        if query.dtype != cache.dtype:
            return super().read(rows, cache, query, ask)
        query = _close(query)
        out = torch.empty(query.shape, dtype=query.dtype)
        self._run(self._plan(rows, cache), rows, cache, query, out, ask)
        return out

    def _run(self, plan: _Plan, rows: PagedRows, cache: Tensor, query: Tensor, out: Tensor, ask: LayerAsk) -> None:
        seen = rows.kept.get(("seen", ask.window, ask.span))
        if seen is None:
            seen = rows.kept["seen", ask.window, ask.span] = _seen(plan, ask)
        sinks = None if ask.sinks is None else ask.sinks.float().contiguous()
        plan.rows.attend(
            cache.data_ptr(),
            ask.layer,
            _rows(query),
            _rows(out),
            query.shape[1],
            *seen,
            ask.scale,
            ask.softcap or 0.0,
            0 if sinks is None else sinks.data_ptr(),
            torch.get_num_threads(),
            self._kernel,
        )

    def _plan(self, rows: PagedRows, cache: Tensor) -> _Plan:
        plan: _Plan | None = rows.kept.get("native")
        if plan is None:
            bf16 = cache.dtype == torch.bfloat16
            slow = bf16 and not (self._kernel in TILED and tiles(cache.shape[-1]))
            plan = rows.kept["native"] = _planned(rows, cache, LONG if slow else None)
        return plan


def tiles(width: int) -> bool:
    """Whether heads of ``width`` in bfloat16 go through AMX tiles here."""
    asked = getattr(native.extension, "attention_instructions", None)
    return asked is not None and asked(True, width) == "amx"


def _close(rows: Tensor) -> Tensor:
    """Rows whose heads lie together."""
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _rows(rows: Tensor) -> tuple[int, int, int]:
    return rows.data_ptr(), rows.stride(0), rows.stride(1)


def _planned(rows: PagedRows, cache: Tensor, longest: int | None) -> _Plan:
    """Chunks of ``longest`` rows and more are torch's."""
    blocks, layers, _, heads, height, width = cache.shape
    decodes = rows.decodes
    tables, positions, ahead = [rows.tables.reshape(-1)], [rows.lengths - 1], [rows.lengths]
    requests = np.empty((decodes, 4), np.int64)
    across = rows.tables.shape[1] if decodes else 0
    requests[:, 0], requests[:, 1], requests[:, 3] = np.arange(decodes), 1, across
    requests[:, 2] = np.arange(decodes) * across
    ours, torches, start = [requests], [], decodes * across
    for chunk in rows.chunks:
        table, at = chunk.table.numpy(), np.arange(chunk.start, chunk.end)
        ends = None if longest is not None and chunk.length >= longest else _ahead(chunk)
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
    given = (np.concatenate(tables), np.concatenate(ours))
    made = native.extension.PagedAttention(
        shape, cache.dtype == torch.bfloat16, rows.blocks.numpy(), rows.offsets.numpy(), *given
    )
    return _Plan(made, np.concatenate(positions), np.concatenate(ahead), tuple(torches))


def _ahead(chunk: ChunkRows) -> Ints | None:
    """The end of what each row of a chunk sees, windows aside; None where its groups are no runs of rows."""
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


def _seen(plan: _Plan, ask: LayerAsk) -> tuple[Ints, Ints]:
    """The positions [first, end) that each row of the batch sees in a layer."""
    end = plan.ahead
    if ask.span is not None:
        end = np.minimum(end, (plan.positions // ask.span + 1) * ask.span)
    return ask.first_seen(plan.positions), end
