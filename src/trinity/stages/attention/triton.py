"""TritonAttention: paged attention by kernels of our own, for GPUs; tested on a CPU by Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.stages.attention import triton_kernels as kernels
from trinity.stages.attention.interface import LayerAsk, PagedRows
from trinity.stages.attention.varlen import VarlenRows, varlen_rows
from trinity.stages.uploads import upload

KEYS = 64  # that a program looks at at once
DECODE_ROWS, CHUNK_ROWS = 16, 128  # packed rows of a tile: 16 is the least that tensor cores take
MOST_SPLITS = 16
HEADS_WRITTEN = 8  # by one program
WAVES = 2  # programs for each multiprocessor, below which long texts are split


@dataclass(frozen=True, slots=True)
class Wave:
    """Sequences that run with one size of tile: rows [first, first + rows) of the batch.

    ``tiles`` [2, n], int64: see ``triton_kernels.attend``. ``longest``: positions of the longest of them.
    """

    tiles: Tensor
    first: int
    rows: int
    packed: int
    longest: int


@dataclass(frozen=True, slots=True)
class TritonRows:
    """A batch as the kernels take it; kept in ``PagedRows.kept``, or made once over static tensors for a CUDA graph."""

    varlen: VarlenRows
    waves: tuple[Wave, ...]


class TritonAttention:
    """``AttentionBackend`` in Triton. ``processors``: multiprocessors to keep busy; None asks the device.

    Rows whose block is negative are written nowhere, and sequences of length 0 come out as zeros: the padding of CUDA
    graphs (``graphs``).
    """

    graphs = True

    def __init__(self, processors: int | None = None) -> None:
        self._processors = processors

    def attend(self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], ask: LayerAsk) -> Tensor:
        """See ``AttentionBackend.attend``."""
        self.write(rows, cache, *qkv[1:], ask.layer)
        return self.read(rows, cache, qkv[0], ask)

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, ask: LayerAsk) -> Tensor:
        """See ``Halves``."""
        query = _close(query)
        plan = rows.kept.get("triton")
        if plan is None:
            group = query.shape[1] // cache.shape[3]
            varlen = rows.kept.get("varlen") or varlen_rows(rows, cache.device)
            plan = rows.kept["triton"] = triton_rows(varlen, rows, group)
        out = query.new_empty(query.shape)
        for wave in plan.waves:
            self._attend(plan.varlen, wave, cache, query, ask, out)
        return out

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        """See ``Halves``."""
        key, value = _close(key), _close(value)
        _, layers, _, heads, block_rows, width = cache.shape
        kernels.write[(len(rows.blocks), -(-heads // HEADS_WRITTEN))](
            *(key, value, rows.blocks, rows.offsets, cache, layer, layers, block_rows),
            *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
            *(heads, width, HEADS_WRITTEN, power_of_two(width)),
        )

    def _attend(self, batch: VarlenRows, wave: Wave, cache: Tensor, query: Tensor, ask: LayerAsk, out: Tensor) -> None:
        heads, width = query.shape[1:]
        splits = self._splits(wave, cache)
        found, sums = out, out
        if splits > 1:
            found = torch.empty((splits, wave.rows, heads, width), dtype=torch.float32, device=out.device)
            sums = torch.empty((2, splits, wave.rows, heads), dtype=torch.float32, device=out.device)
        sinks = None if ask.sinks is None else ask.sinks.contiguous()
        grid = (wave.tiles.shape[1], cache.shape[3], splits)
        kernels.attend[grid](
            *(query, cache, batch.tables, batch.begins, batch.lengths, wave.tiles),
            *(query if batch.groups is None else batch.groups, query if sinks is None else sinks, found, sums),
            *(ask.layer, cache.shape[1], cache.shape[4], batch.tables.shape[1], wave.tiles.shape[1]),
            *(wave.first, wave.rows, query.stride(0), query.stride(1)),
            *(ask.scale, ask.softcap or 0.0, ask.window or 0, ask.span or 1),
            **self._shape(wave, cache, query, ask, batch.groups is not None),
            SPLITS=splits,
        )
        if splits > 1:
            kernels.combine[(wave.rows, heads)](
                *(found, sums, query if sinks is None else sinks, out, wave.first, wave.rows),
                *(heads, width, power_of_two(width), splits, sinks is not None),
            )

    def _shape(self, wave: Wave, cache: Tensor, query: Tensor, ask: LayerAsk, groups: bool) -> dict[str, Any]:
        """What a kernel is compiled for."""
        heads, width = cache.shape[3], cache.shape[5]
        wide = max(16, power_of_two(width))
        return {
            "HEADS": heads,
            "GROUP": query.shape[1] // heads,
            "WIDTH": width,
            "WIDTH_2": wide,
            "M": wave.packed,
            "N": KEYS if wide * query.element_size() <= 256 else KEYS // 2,  # what shared memory has room for
            "SOFTCAP": ask.softcap is not None,
            "WINDOW": ask.window is not None,
            "SPAN": ask.span is not None,
            "SINKS": ask.sinks is not None,
            "GROUPS": groups,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
            "num_warps": 8 if wave.packed >= CHUNK_ROWS else 4,
            "num_stages": 2,
        }

    def _splits(self, wave: Wave, cache: Tensor) -> int:
        """Programs that share one tile's keys: a power of two, 1 where there are tiles enough."""
        if self._processors is None:
            self._processors = torch.cuda.get_device_properties(cache.device).multi_processor_count
        wanted = WAVES * self._processors // (wave.tiles.shape[1] * cache.shape[3])
        most = min(wanted, -(-wave.longest // KEYS), MOST_SPLITS)
        return 1 << max(0, most.bit_length() - 1)


def _close(part: Tensor) -> Tensor:
    """With the elements of a head beside each other, as the kernels take it."""
    return part if part.stride(-1) == 1 else part.contiguous()


def power_of_two(number: int) -> int:
    """The least that is not smaller."""
    return 1 << (number - 1).bit_length()


def triton_rows(varlen: VarlenRows, rows: PagedRows, group: int) -> TritonRows:
    """Tiles for the sequences of a batch whose KV heads have ``group`` query heads each."""
    waves = []
    if rows.decodes:
        numbers = torch.arange(rows.decodes, device=varlen.tables.device)  # nothing from the host, for CUDA graphs
        packed = max(DECODE_ROWS, power_of_two(group))
        longest = int(rows.lengths.max())
        waves.append(Wave(torch.stack((numbers, torch.zeros_like(numbers))), 0, rows.decodes, packed, longest))
    if rows.chunks:
        packed = max(CHUNK_ROWS, power_of_two(group))
        each = packed // group
        pairs = [(i, at) for i, chunk in enumerate(rows.chunks) for at in range(0, chunk.length, each)]
        found = np.array(pairs, dtype=np.int64).T + np.array([[rows.decodes], [0]])
        longest = max(chunk.end for chunk in rows.chunks)
        total = sum(chunk.length for chunk in rows.chunks)
        tiles = upload(np.ascontiguousarray(found), varlen.tables.device)
        waves.append(Wave(tiles, rows.decodes, total, packed, longest))
    return TritonRows(varlen, tuple(waves))
