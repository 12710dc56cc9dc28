"""TritonAttention: paged attention on GPUs by trinity's own kernels; tested on a CPU by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trinity.stages.attention.gpu import triton_kernels as kernels
from trinity.stages.attention.gpu.varlen import ChunkSlots, VarlenRows, make_varlen_rows
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.block_tables import upload

KEYS_PER_STEP = 64  # keys that a program loads at once
DECODE_ROWS, CHUNK_ROWS = 16, 128  # packed rows of a tile; tensor cores take at least 16
MOST_SPLITS = 16
HEADS_PER_WRITE = 8  # KV heads that one program writes
PROGRAMS_PER_PROCESSOR = 2  # per multiprocessor; with fewer, long texts are split
H100_SHARED_BYTES = 227 << 10  # assumed where there is no GPU
SCRATCH_BYTES = 3 << 10  # of a program, besides query, keys and values
MOST_GRAIN = 16  # elements: rows and heads that lie a multiple of them apart are loaded 16 bytes at a time


@dataclass(frozen=True, slots=True)
class Wave:
    """Sequences that run with one tile size: rows [first, first + rows) of the batch.

    - ``tiles`` (int64 [2, n]): see ``triton_kernels.attend_tile``.
    - ``packed``: packed rows of a tile.
    - ``longest``: KV positions of the longest sequence.
    - ``groups`` (None): see ``VarlenRows``; decode rows have none.
    - ``spare`` (False): about half of the tiles are padding (``ChunkSlots``).
    """

    tiles: Tensor
    first: int
    rows: int
    packed: int
    longest: int
    groups: Tensor | None = None
    spare: bool = False


@dataclass(frozen=True, slots=True)
class TritonRows:
    """One batch for the kernels; kept in ``PagedRows.memo``, or made once over static tensors for a CUDA graph."""

    varlen: VarlenRows
    waves: tuple[Wave, ...]


class LayerKind(NamedTuple):
    """Query heads and parts of attention that a set of kernels is compiled for; ``sinks``: their type, None if none."""

    heads: int
    dtype: torch.dtype
    softcap: bool
    window: bool
    span: bool
    sinks: torch.dtype | None


class TritonAttention:
    """``AttentionBackend`` in Triton for one cache.

    - ``processors`` (None): multiprocessors to keep busy; None: all of the device.
    - ``shared_bytes`` (None): shared memory of a multiprocessor that programs may have; None: the device's.

    Rows whose block is negative are not written, and sequences of length 0 give zeros. CUDA graphs
    (``supports_graphs``) pad their batches with both, and have room for chunks (``supports_chunk_slots``).
    """

    supports_graphs = supports_chunk_slots = True
    reads_chunks = True  # by ``read``, whoever has written their keys and values

    def __init__(self, processors: int | None = None, shared_bytes: int | None = None) -> None:
        self._processors, self._shared_bytes = processors, shared_bytes
        self._kinds: dict[LayerKind, AttentionParams] = {}  # that have run, with the arguments of one such layer

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        """See ``AttentionBackend.attend``."""
        self.write(rows, cache, *qkv[1:], params.layer)
        return self.read(rows, cache, qkv[0], params)

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        """See ``SplitAttention.read``."""
        query = _lay_out(query)
        plan = rows.memo.get("triton")
        if plan is None:
            group = query.shape[1] // cache.shape[3]
            varlen = rows.memo.get("varlen") or make_varlen_rows(rows, cache.device)
            plan = rows.memo["triton"] = make_triton_rows(varlen, rows, group)
        out = query.new_empty(query.shape)
        for wave in plan.waves:
            self._attend(plan.varlen, wave, cache, query, params, out, self._splits(wave, cache))
        return out

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        """See ``SplitAttention.write``."""
        key, value = _lay_out(key), _lay_out(value)
        _, layers, _, heads, block_rows, width = cache.shape
        grain = find_grain(width)
        strides = (part.stride(axis) // grain for part in (key, value) for axis in (0, 1))
        kernels.write_kv[(len(rows.blocks), -(-heads // HEADS_PER_WRITE))](
            *(key, value, rows.blocks, rows.offsets, cache, layer, layers, *strides),
            *(heads, block_rows, width, next_power_of_two(width), grain, HEADS_PER_WRITE),
        )

    def warm_up(self, cache: Tensor, chunks: bool, groups: bool) -> None:
        """Compile what serving may ask for of the kinds of layers that have run; call it after a first batch.

        Launches every kernel once over a padding row, which reads nothing of the cache. ``chunks``: prefill chunks are
        to come; ``groups``: some of them with groups.
        """
        zeros = torch.zeros(2, dtype=torch.long, device=cache.device)
        varlen = VarlenRows(tables=zeros[None].int(), begins=torch.arange(2, device=cache.device), lengths=zeros)
        for kind, params in self._kinds.items():
            query = torch.zeros((1, kind.heads, cache.shape[5]), dtype=kind.dtype, device=cache.device)
            for wave in _empty_waves(kind.heads // cache.shape[3], chunks, groups, cache.device):
                for splits in (1, 2):
                    self._attend(varlen, wave, cache, query, params, torch.empty_like(query), splits)

    def _attend(
        self,
        batch: VarlenRows,
        wave: Wave,
        cache: Tensor,
        query: Tensor,
        params: AttentionParams,
        out: Tensor,
        splits: int,
    ) -> None:
        heads, width = query.shape[1:]
        found, sums = out, out
        if splits > 1:
            found = torch.empty((splits, wave.rows, heads, width), dtype=torch.float32, device=out.device)
            sums = torch.empty((2, splits, wave.rows, heads), dtype=torch.float32, device=out.device)
        sinks = query if params.sinks is None else params.sinks.contiguous()
        constants = self._constants(wave, cache, query, params)
        kernels.attend_tile[(wave.tiles.shape[1], cache.shape[3], splits)](
            *(query, cache, batch.tables, batch.begins, batch.lengths, wave.tiles),
            *(query if wave.groups is None else wave.groups, sinks, found, sums),
            *(params.layer, cache.shape[1], batch.tables.shape[1], wave.tiles.shape[1], wave.first, wave.rows, splits),
            *(query.stride(0) // constants["GRAIN"], query.stride(1) // constants["GRAIN"]),
            *(params.scale, params.softcap or 0.0, params.window or 0, params.span or 1),
            **constants,
            SPLIT=splits > 1,
        )
        if splits > 1:
            kernels.combine_splits[(wave.rows, heads)](
                *(found, sums, sinks, out, wave.first, wave.rows, splits),
                *(heads, width, next_power_of_two(width), MOST_SPLITS, params.sinks is not None),
            )

    def _constants(self, wave: Wave, cache: Tensor, query: Tensor, params: AttentionParams) -> dict[str, Any]:
        """Return the constants that a kernel is compiled for."""
        heads, block_rows, width = cache.shape[3:]
        wide = max(16, next_power_of_two(width))
        row_bytes = wide * query.element_size()
        keys = KEYS_PER_STEP if row_bytes <= 256 else KEYS_PER_STEP // 2  # more do not fit into shared memory
        sinks = None if params.sinks is None else params.sinks.dtype
        limits = (params.softcap is not None, params.window is not None, params.span is not None)
        self._kinds.setdefault(LayerKind(query.shape[1], query.dtype, *limits, sinks), params)
        return {
            "HEADS": heads,
            "GROUP": query.shape[1] // heads,
            "BLOCK_ROWS": block_rows,
            "WIDTH": width,
            "WIDTH_2": wide,
            "GRAIN": find_grain(width),
            "M": wave.packed,
            "N": keys,
            **dict(zip(("SOFTCAP", "WINDOW", "SPAN"), limits, strict=True)),
            "SINKS": sinks is not None,
            "GROUPS": wave.groups is not None,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
            "num_warps": 8 if wave.packed >= CHUNK_ROWS else 4,
            "num_stages": count_stages(wave.packed, keys, row_bytes, self._find_shared_bytes(cache.device)),
        }

    def _find_shared_bytes(self, device: torch.device) -> int:
        if self._shared_bytes is None:
            properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
            self._shared_bytes = properties.shared_memory_per_block_optin if properties else H100_SHARED_BYTES
        return self._shared_bytes

    def _splits(self, wave: Wave, cache: Tensor) -> int:
        """Return the number of programs that share one tile's keys; 1 if there are enough tiles."""
        if self._processors is None:
            self._processors = torch.cuda.get_device_properties(cache.device).multi_processor_count
        wanted = PROGRAMS_PER_PROCESSOR * self._processors * (2 if wave.spare else 1)
        wanted //= wave.tiles.shape[1] * cache.shape[3]
        return max(1, min(wanted, -(-wave.longest // KEYS_PER_STEP), MOST_SPLITS))


def count_stages(packed: int, keys: int, row_bytes: int, shared_bytes: int) -> int:
    """Return 3 stages, by which a tile of keys is in flight while one is computed, if shared memory has room, else 2.

    A decode keeps two tiles of keys and values, and two programs must fit; a chunk, which by its registers has a
    multiprocessor to itself, keeps three.
    """
    programs, tiles = (1, 3) if packed >= CHUNK_ROWS else (PROGRAMS_PER_PROCESSOR, 2)
    needed = programs * ((packed + tiles * 2 * keys) * row_bytes + SCRATCH_BYTES)
    return 3 if needed <= shared_bytes else 2


def _empty_waves(group: int, chunks: bool, groups: bool, device: torch.device) -> Iterator[Wave]:
    """Yield a wave of each kind that batches may have, of one padding row."""
    tiles = torch.zeros((2, 1), dtype=torch.long, device=device)
    yield Wave(tiles, 0, 1, _packed_rows(DECODE_ROWS, group), 0)
    if chunks:
        yield Wave(tiles, 0, 1, _packed_rows(CHUNK_ROWS, group), 0)
    if chunks and groups:
        yield Wave(tiles, 0, 1, _packed_rows(CHUNK_ROWS, group), 0, torch.full_like(tiles[0], -1))


def _packed_rows(least: int, group: int) -> int:
    return max(least, next_power_of_two(group))


def find_grain(width: int) -> int:
    """Return the largest power of two, at most ``MOST_GRAIN``, that divides a head's ``width``."""
    return min(MOST_GRAIN, width & -width)


def _lay_out(part: Tensor) -> Tensor:
    """Return ``part`` [rows, heads, width] with the elements of a head beside each other and heads in whole grains.

    All that models make is so already; another layout would be another kernel to compile.
    """
    row, head, each = part.stride()
    apart = row | head | int(part.storage_offset())
    return part if each == 1 and apart % find_grain(part.shape[2]) == 0 else part.contiguous()


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
        tiles = torch.stack((numbers, torch.zeros_like(numbers)))
        waves.append(Wave(tiles, 0, rows.decodes, _packed_rows(DECODE_ROWS, group), int(rows.lengths.max())))
    if rows.chunks:
        packed = _packed_rows(CHUNK_ROWS, group)
        each = packed // group
        pairs = [(i, at) for i, chunk in enumerate(rows.chunks) for at in range(0, chunk.length, each)]
        found = np.array(pairs, dtype=np.int64).T + np.array([[rows.decodes], [0]])
        longest = max(chunk.end for chunk in rows.chunks)
        total = sum(chunk.length for chunk in rows.chunks)
        tiles = upload(np.ascontiguousarray(found), varlen.tables.device)
        waves.append(Wave(tiles, rows.decodes, total, packed, longest, varlen.groups))
    if varlen.slots is not None:
        waves.append(make_slots_wave(varlen, varlen.slots, rows.decodes, group))
    return TritonRows(varlen, tuple(waves))


def make_slots_wave(varlen: VarlenRows, slots: ChunkSlots, decodes: int, group: int) -> Wave:
    """Make a wave for chunks whose lengths only the device knows: as many tiles as they may need.

    Tiles behind the last one that is needed begin behind the padding's rows, and so have none.
    """
    packed = _packed_rows(CHUNK_ROWS, group)
    each = packed // group
    counts = varlen.begins[decodes:].diff()
    needed = (counts + each - 1) // each
    ends = needed.cumsum(0)
    most = (slots.rows + slots.sequences * (each - 1)) // each
    numbers = torch.arange(most, device=ends.device)
    sequence = torch.searchsorted(ends, numbers, right=True).clamp(max=slots.sequences - 1)
    firsts = (numbers - (ends - needed)[sequence]) * each
    return Wave(torch.stack((decodes + sequence, firsts)), decodes, slots.rows, packed, slots.longest, spare=True)
