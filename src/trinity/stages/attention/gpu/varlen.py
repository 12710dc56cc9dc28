"""Ragged batches for kernels of the flash family: sequences with a block table, a length and some rows each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trinity.stages.attention.interface import PagedRows
from trinity.stages.block_tables import BlockTables, upload


@dataclass(frozen=True, slots=True)
class ChunkSlots:
    """Room for chunks in a CUDA graph: their lengths are read on the device.

    - ``sequences``: how many, behind the decode rows; the last one is padding, as are those of length 0.
    - ``rows``: rows of all of them, which are the batch's last.
    - ``longest``: KV positions that any of them may have.
    """

    sequences: int
    rows: int
    longest: int


@dataclass(frozen=True, slots=True)
class VarlenRows:
    """Sequences of one batch: decode rows, one sequence each, then chunks. Numbers are int64, but those of tables.

    - ``tables`` (int32 [sequences, width]): block tables.
    - ``begins`` ([sequences + 1]): first row of each sequence in the batch (flash-attn's cu_seqlens_q).
    - ``lengths`` ([sequences]): KV positions, those of the sequence's own rows included.
    - ``groups`` ([rows], None): see ``ChunkRows``; None if no row has a group.
    - ``slots`` (None): chunks of a CUDA graph; ``PagedRows`` then names none.
    """

    tables: Tensor
    begins: Tensor
    lengths: Tensor
    groups: Tensor | None = None
    slots: ChunkSlots | None = None


def make_varlen_rows(rows: PagedRows, device: torch.device) -> VarlenRows:
    """Make the batch's sequences on ``device``. Tables that are on it already are not copied from the host."""
    decodes, chunks = rows.decodes, rows.chunks
    counts = np.array([1] * decodes + [chunk.length for chunk in chunks], dtype=np.int64)
    begins = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
    lengths = np.concatenate((rows.lengths, np.array([chunk.end for chunk in chunks], dtype=np.int64)))
    parts = torch.split(upload(np.concatenate((begins, lengths)), device), [len(begins), len(lengths)])
    tables = _lay_out(rows, device) if rows.there is None else rows.there
    return VarlenRows(tables, parts[0], parts[1], _groups(rows, int(begins[-1]), device))


def _lay_out(rows: PagedRows, device: torch.device) -> Tensor:
    own = BlockTables.join(rows.tables)
    width = max([int(own.counts.max(initial=0)), *(len(chunk.table) for chunk in rows.chunks)])
    tables = torch.zeros((rows.decodes + len(rows.chunks), width), dtype=torch.int32, device=device)
    if rows.decodes:
        tables[: rows.decodes] = upload(own.take(np.arange(width)), device)
    for i, chunk in enumerate(rows.chunks, rows.decodes):
        tables[i, : len(chunk.table)] = chunk.table
    return tables


def _groups(rows: PagedRows, total: int, device: torch.device) -> Tensor | None:
    if all(chunk.groups is None for chunk in rows.chunks):
        return None
    groups = torch.full((total,), -1, dtype=torch.long, device=device)
    for chunk in rows.chunks:
        if chunk.groups is not None:
            groups[chunk.first : chunk.first + chunk.length] = chunk.groups
    return groups
