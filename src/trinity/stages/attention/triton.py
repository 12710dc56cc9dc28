"""TritonAttention: paged attention on GPUs by trinity's own kernels; tested on a CPU by Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.stages.attention import triton_kernels as kernels
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.attention.varlen import VarlenRows, make_varlen_rows
from trinity.stages.uploads import upload

KEYS_PER_STEP = 64  # keys that a program loads at once
DECODE_ROWS, CHUNK_ROWS = 16, 128  # packed rows of a tile; tensor cores take at least 16
MOST_SPLITS = 16
HEADS_PER_WRITE = 8  # KV heads that one program writes
PROGRAMS_PER_PROCESSOR = 2  # per multiprocessor; with fewer, long texts are split


@dataclass(frozen=True, slots=True)
class Wave:
    """Sequences that run with one tile size: rows [first, first + rows) of the batch.

    - ``tiles`` (int64 [2, n]): see ``triton_kernels.attend_tile``.
    - ``packed``: packed rows of a tile.
    - ``longest``: KV positions of the longest sequence.
    """

    tiles: Tensor
    first: int
    rows: int
    packed: int
    longest: int


@dataclass(frozen=True, slots=True)
class TritonRows:
    """One batch for the kernels; kept in ``PagedRows.memo``, or made once over static tensors for a CUDA graph."""

    varlen: VarlenRows
    waves: tuple[Wave, ...]


class TritonAttention:
    """``AttentionBackend`` in Triton; ``processors``: multiprocessors to keep busy (None: all of the device).

    Rows whose block is negative are not written, and sequences of length 0 give zeros. CUDA graphs
    (``supports_graphs``) pad their batches with both.
    """

    supports_graphs = True
    reads_chunks = True  # by ``read``, whoever has written their keys and values

    def __init__(self, processors: int | None = None) -> None:
        self._processors = processors

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        """See ``AttentionBackend.attend``."""
        self.write(rows, cache, *qkv[1:], params.layer)
        return self.read(rows, cache, qkv[0], params)

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        """See ``SplitAttention.read``."""
        query = _make_contiguous(query)
        plan = rows.memo.get("triton")
        if plan is None:
            group = query.shape[1] // cache.shape[3]
            varlen = rows.memo.get("varlen") or make_varlen_rows(rows, cache.device)
            plan = rows.memo["triton"] = make_triton_rows(varlen, rows, group)
        out = query.new_empty(query.shape)
        for wave in plan.waves:
            self._attend(plan.varlen, wave, cache, query, params, out)
        return out

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        """See ``SplitAttention.write``."""
        key, value = _make_contiguous(key), _make_contiguous(value)
        _, layers, _, heads, block_rows, width = cache.shape
        kernels.write_kv[(len(rows.blocks), -(-heads // HEADS_PER_WRITE))](
            *(key, value, rows.blocks, rows.offsets, cache, layer, layers, block_rows),
            *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
            *(heads, width, HEADS_PER_WRITE, next_power_of_two(width)),
        )

    def _attend(
        self, batch: VarlenRows, wave: Wave, cache: Tensor, query: Tensor, params: AttentionParams, out: Tensor
    ) -> None:
        heads, width = query.shape[1:]
        splits = self._splits(wave, cache)
        found, sums = out, out
        if splits > 1:
            found = torch.empty((splits, wave.rows, heads, width), dtype=torch.float32, device=out.device)
            sums = torch.empty((2, splits, wave.rows, heads), dtype=torch.float32, device=out.device)
        sinks = None if params.sinks is None else params.sinks.contiguous()
        grid = (wave.tiles.shape[1], cache.shape[3], splits)
        kernels.attend_tile[grid](
            *(query, cache, batch.tables, batch.begins, batch.lengths, wave.tiles),
            *(query if batch.groups is None else batch.groups, query if sinks is None else sinks, found, sums),
            *(params.layer, cache.shape[1], cache.shape[4], batch.tables.shape[1], wave.tiles.shape[1]),
            *(wave.first, wave.rows, query.stride(0), query.stride(1)),
            *(params.scale, params.softcap or 0.0, params.window or 0, params.span or 1),
            **self._shape(wave, cache, query, params, batch.groups is not None),
            SPLITS=splits,
        )
        if splits > 1:
            kernels.combine_splits[(wave.rows, heads)](
                *(found, sums, query if sinks is None else sinks, out, wave.first, wave.rows),
                *(heads, width, next_power_of_two(width), splits, sinks is not None),
            )

    def _shape(self, wave: Wave, cache: Tensor, query: Tensor, params: AttentionParams, groups: bool) -> dict[str, Any]:
        """Return the constants that a kernel is compiled for."""
        heads, width = cache.shape[3], cache.shape[5]
        wide = max(16, next_power_of_two(width))
        return {
            "HEADS": heads,
            "GROUP": query.shape[1] // heads,
            "WIDTH": width,
            "WIDTH_2": wide,
            "M": wave.packed,
            "N": KEYS_PER_STEP
            if wide * query.element_size() <= 256
            else KEYS_PER_STEP // 2,  # more do not fit into shared memory
            "SOFTCAP": params.softcap is not None,
            "WINDOW": params.window is not None,
            "SPAN": params.span is not None,
            "SINKS": params.sinks is not None,
            "GROUPS": groups,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
            "num_warps": 8 if wave.packed >= CHUNK_ROWS else 4,
            "num_stages": 2,
        }

    def _splits(self, wave: Wave, cache: Tensor) -> int:
        """Return the number of programs that share one tile's keys: a power of two, 1 if there are enough tiles."""
        if self._processors is None:
            self._processors = torch.cuda.get_device_properties(cache.device).multi_processor_count
        wanted = PROGRAMS_PER_PROCESSOR * self._processors // (wave.tiles.shape[1] * cache.shape[3])
        most = min(wanted, -(-wave.longest // KEYS_PER_STEP), MOST_SPLITS)
        return 1 << max(0, most.bit_length() - 1)


def _make_contiguous(part: Tensor) -> Tensor:
    """Return ``part`` with the elements of each head beside each other, as the kernels need it."""
    return part if part.stride(-1) == 1 else part.contiguous()


def next_power_of_two(number: int) -> int:
    """Return the least power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def make_triton_rows(varlen: VarlenRows, rows: PagedRows, group: int) -> TritonRows:
    """Make tiles for the sequences of a batch whose KV heads have ``group`` query heads each."""
    waves = []
    if rows.decodes:
        numbers = torch.arange(
            rows.decodes, device=varlen.tables.device
        )  # made on the device: a CUDA graph may not copy from the host
        packed = max(DECODE_ROWS, next_power_of_two(group))
        longest = int(rows.lengths.max())
        waves.append(Wave(torch.stack((numbers, torch.zeros_like(numbers))), 0, rows.decodes, packed, longest))
    if rows.chunks:
        packed = max(CHUNK_ROWS, next_power_of_two(group))
        each = packed // group
        pairs = [(i, at) for i, chunk in enumerate(rows.chunks) for at in range(0, chunk.length, each)]
        found = np.array(pairs, dtype=np.int64).T + np.array([[rows.decodes], [0]])
        longest = max(chunk.end for chunk in rows.chunks)
        total = sum(chunk.length for chunk in rows.chunks)
        tiles = upload(np.ascontiguousarray(found), varlen.tables.device)
        waves.append(Wave(tiles, rows.decodes, total, packed, longest))
    return TritonRows(varlen, tuple(waves))
