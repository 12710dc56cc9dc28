"""Runs a backend on a small random batch and compares it with torch: finds kernels that are wrong on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trinity.stages.attention.fp8 import FP8, round_to
from trinity.stages.attention.gpu.varlen import ChunkSlots, make_varlen_rows
from trinity.stages.attention.interface import (
    AttentionBackend,
    AttentionParams,
    ChunkRows,
    PagedRows,
    as_split_attention,
)
from trinity.stages.attention.torch_reference import TorchAttention

LAYERS, LAYER = 2, 1
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}  # scores and values are of size 1
_SEED = 20


def find_fault(
    backend: AttentionBackend, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why ``backend`` must not serve blocks of ``shape`` [layers, 2, kv_heads, rows, head_dim]; None if it may.

    It runs decodes and chunks of several lengths, with one and with two query heads per KV head; then its ``write`` and
    ``read``, if it has them; a decode of a text so long that several programs share it; and a padding row, if CUDA
    graphs may hold it.
    """
    try:
        errors = list(_errors(backend, shape, dtype, device))
    except Exception as error:  # a kernel that does not compile, a library that lacks what is asked for
        return f"it fails on this machine: {type(error).__name__}: {str(error)[:300]}"
    worst = max(errors)
    if not worst <= PROBE_TOLERANCE.get(_computed_in(dtype), 0.0):
        return f"its result differs from torch's by {worst:.1e} on this machine"
    return None


@torch.inference_mode()
def _errors(
    backend: AttentionBackend, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Iterator[float]:
    heads, block_rows, width = shape[2:]
    noise = torch.Generator().manual_seed(_SEED)
    computed = _computed_in(dtype)

    def normal(*extents: int) -> Tensor:
        return torch.randn(extents, generator=noise).to(device, computed)

    oracle = TorchAttention()
    for group in (1, 2):
        for params in (
            AttentionParams(LAYER, width**-0.5),
            AttentionParams(LAYER, width**-0.5, window=block_rows + 1, softcap=3.0),
        ):
            rows = _make_rows(block_rows, device)
            total = len(rows.blocks)
            cache = round_to(normal(11, LAYERS, 2, heads, block_rows, width), dtype)
            qkv = (normal(total, heads * group, width), normal(total, heads, width), normal(total, heads, width))
            fresh, wide = cache.clone(), _copy_wide(cache)
            wanted = oracle.attend(_make_rows(block_rows, device), wide, tuple(part.float() for part in qkv), params)  # type: ignore[arg-type]
            found = backend.attend(rows, cache, qkv, params)
            yield _largest_error(found, wanted)
            yield _largest_error(cache, wide)
            if getattr(backend, "supports_chunk_slots", False):
                yield _largest_error(backend.attend(_make_slots(rows), cache, qkv, params), wanted)
            if (half := as_split_attention(backend)) is not None:
                half.write(rows, fresh, *qkv[1:], params.layer)
                yield _largest_error(fresh, wide)
                last, ends = _last_rows(rows)
                yield _largest_error(half.read(ends, cache, qkv[0][last], params), wanted[last])
        row = (normal(1, heads * group, width), normal(1, heads, width), normal(1, heads, width))
        yield _error_of_long_row(backend, cache, row)
        if getattr(backend, "supports_graphs", False):
            yield _error_of_padding(backend, cache, row)


def _error_of_padding(backend: AttentionBackend, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor]) -> float:
    """Return the largest number that a padding row gives, or changes in the cache: a recorded step has some."""
    nowhere = torch.tensor([-1]).to(cache.device)
    rows = PagedRows(nowhere, nowhere + 1, np.array([[7]], dtype=np.int64), np.zeros(1, dtype=np.int64))
    before = cache.clone()
    seen = backend.attend(rows, cache, qkv, AttentionParams(LAYER, 1.0))
    return max(_largest_error(seen, torch.zeros_like(seen).float()), _largest_error(cache, before.float()))


def _error_of_long_row(backend: AttentionBackend, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor]) -> float:
    block_rows, width = cache.shape[4:]
    params, wide = AttentionParams(LAYER, width**-0.5), _copy_wide(cache)
    rows = [_make_long_row(block_rows, cache.device) for _ in range(2)]
    wanted = TorchAttention().attend(rows[0], wide, tuple(part.float() for part in qkv), params)  # type: ignore[arg-type]
    return _largest_error(backend.attend(rows[1], cache, qkv, params), wanted)


def _largest_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).abs().max().nan_to_num(torch.inf))


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of queries, keys and values beside a cache of ``dtype``: its own, or what models in FP8 have."""
    return torch.bfloat16 if dtype == FP8 else dtype


def _copy_wide(cache: Tensor) -> Tensor:
    """Copy a cache for the oracle, in float32; one in FP8 stays, since the oracle too attends to what it rounds."""
    return cache.clone() if cache.dtype == FP8 else cache.to(torch.float32, copy=True)


def _last_rows(rows: PagedRows) -> tuple[Tensor, PagedRows]:
    """Pick the last row of every sequence: its index, and the rows as decode rows."""
    last = torch.tensor([*range(rows.decodes), *(chunk.first + chunk.length - 1 for chunk in rows.chunks)])
    tables = [*rows.tables, *(chunk.table.cpu().numpy() for chunk in rows.chunks)]
    lengths = np.append(rows.lengths, [chunk.end for chunk in rows.chunks])
    last = last.to(rows.blocks.device)
    return last, PagedRows(rows.blocks[last], rows.offsets[last], tables, lengths)


def _make_slots(rows: PagedRows) -> PagedRows:
    """Make the same rows with chunks whose lengths only the device knows."""
    longest, total = max(chunk.end for chunk in rows.chunks), sum(chunk.length for chunk in rows.chunks)
    slots = ChunkSlots(len(rows.chunks), total, longest)
    varlen = replace(make_varlen_rows(rows, rows.blocks.device), slots=slots)
    return PagedRows(rows.blocks, rows.offsets, rows.tables, rows.lengths, memo={"varlen": varlen})


def _make_long_row(block_rows: int, device: torch.device) -> PagedRows:
    """Make one decode over all blocks but half of the last."""
    length = 10 * block_rows + block_rows // 2 + 1
    tables, lengths = np.array([[7, 2, 9, 4, 0, 8, 3, 10, 1, 6, 5]], dtype=np.int64), np.array([length], dtype=np.int64)
    places = torch.tensor([[5], [(length - 1) % block_rows]]).to(device)
    return PagedRows(places[0], places[1], tables, lengths)


def _make_rows(block_rows: int, device: torch.device) -> PagedRows:
    """Make decodes of 1 and 3.5 blocks, a chunk of 1.5 blocks, and one that begins in the middle of a block."""
    order = torch.tensor([7, 2, 9, 4, 0, 8, 3, 10, 1, 6, 5])
    lengths = np.array([block_rows, 3 * block_rows + block_rows // 2 + 1], dtype=np.int64)
    tables = np.array([[7, 7, 7, 7], [2, 9, 4, 0]], dtype=np.int64)
    first, second = order[5:7].to(device), order[7:11].to(device)
    fresh = block_rows + block_rows // 2
    start, further = block_rows // 2 + block_rows, block_rows + 1
    chunks = (ChunkRows(2, fresh, 0, first), ChunkRows(2 + fresh, further, start, second))
    places = [(tables[i, (length - 1) // block_rows], (length - 1) % block_rows) for i, length in enumerate(lengths)]
    for chunk in chunks:
        places += [(int(chunk.table[at // block_rows]), at % block_rows) for at in range(chunk.start, chunk.end)]
    blocks, offsets = torch.tensor(np.array(places, dtype=np.int64)).T.contiguous().to(device)
    return PagedRows(blocks, offsets, tables, lengths, chunks)
