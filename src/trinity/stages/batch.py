"""Ragged batches: decode rows and prefill chunks of many requests joined into one row of T tokens.

Arrays are joined in numpy and passed to torch in one piece each: a decode batch of 64 rows costs some tens of µs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trinity.stages.attention.interface import ChunkRows, Int64Array, PagedRows
from trinity.stages.block_tables import AnyTables, BlockTables, DeviceTables, upload

LEAST_UNSAMPLED_ROWS = 32  # unsampled rows of a batch from which the last layer skips them


def _empty() -> Int64Array:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prefill chunk on the host: positions [start, start + len(ids)) of one request (chunked prefill).

    - ``ids``: input token ids.
    - ``rope``: rotary positions, [length] or [3, length].
    - ``table``: block table, of any integers.
    - ``feature_rows``: rows of the image cache seen as [blocks * rows, width].
    - ``feature_at``: indices of the chunk's tokens that they replace.
    - ``groups`` (None): see ``ChunkRows``.
    - ``needs_logits`` (True): the last token is sampled.
    - ``written`` (0): how many of the last tokens the model wrote itself.
    - ``slot`` (-1): its request's; -1 for none.
    """

    ids: Int64Array
    rope: Int64Array
    start: int
    table: Int64Array
    feature_rows: Int64Array = field(default_factory=_empty)
    feature_at: Int64Array = field(default_factory=_empty)
    groups: Int64Array | None = None
    needs_logits: bool = True
    written: int = 0
    slot: int = -1

    @property
    def positions(self) -> Int64Array:
        return np.arange(self.start, self.start + len(self.ids))


@dataclass(frozen=True, slots=True)
class Decodes:
    """Decode rows on the host, ordered by length.

    - ``ids`` ([n]): input tokens; -1 if only the device knows it.
    - ``rope`` ([n]): rotary positions.
    - ``lengths`` ([n]): KV positions, the row's own included; ascending.
    - ``tables`` ([n]): see ``PagedRows``.
    - ``slots`` ([n]): places of the rows' newest tokens and tables on the device; empty for none.
    """

    ids: Int64Array
    rope: Int64Array
    lengths: Int64Array
    tables: AnyTables
    slots: Int64Array = field(default_factory=_empty)

    def find_blocks(self, block_rows: int) -> Int64Array:
        """Return the block of each row's own position."""
        tables = BlockTables.join(self.tables)
        found: np.ndarray = tables.blocks[tables.ends - tables.counts + (self.lengths - 1) // block_rows]
        return found.astype(np.int64)


NO_DECODES = Decodes(_empty(), _empty(), _empty(), ())


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Arguments of a model's forward over T tokens.

    - ``ids``, ``position_ids``: [T] and [1, T], or [axes, 1, T] with several rotary axes.
    - ``rows``: cache places of the rows.
    - ``last``: indices of the rows whose logits are needed; None: all, in order.
    - ``feature_rows``, ``feature_at``: image-cache rows and the tokens that they replace; without ``feature_at`` one
      image-cache row for each token, -1 for none.
    - ``sampled``: the rows of ``last`` as decode rows, if the batch has at least ``LEAST_UNSAMPLED_ROWS`` others.
    """

    ids: Tensor
    position_ids: Tensor
    rows: PagedRows
    last: Tensor | None
    feature_rows: Tensor | None = None
    feature_at: Tensor | None = None
    sampled: PagedRows | None = None

    @property
    def media(self) -> Tensor:
        """Mask of the rows that are placeholders: bool [T]."""
        if self.feature_rows is not None and self.feature_at is None:
            return self.feature_rows >= 0
        found = torch.zeros(len(self.ids), dtype=torch.bool, device=self.ids.device)
        return found if self.feature_at is None else found.index_fill_(0, self.feature_at, True)

    @property
    def written(self) -> Tensor:
        """Mask of the rows whose tokens the model wrote itself, decoded now or before: bool [T]."""
        found = torch.zeros(len(self.ids), dtype=torch.bool, device=self.ids.device)
        found[: self.rows.decodes] = True
        for chunk in self.rows.chunks:
            found[chunk.first + chunk.length - chunk.written : chunk.first + chunk.length] = True
        return found


def build_batch(
    decodes: Decodes,
    chunks: Sequence[Chunk],
    block_rows: int,
    axes: int,
    device: torch.device,
    kept: DeviceTables | None = None,
) -> RaggedBatch:
    """Join ``decodes`` and ``chunks``; ``axes``: of the model's rotary positions, 1 for most.

    ``kept`` (None): the block tables that ``device`` has; None on a CPU.

    Logits come first for the decodes, then for the chunks that need them, in order.
    """

    def put(array: Int64Array) -> Tensor:
        return upload(array, device)

    there = None if kept is None else select_tables(kept, decodes, chunks)
    blocks, offsets = decodes.find_blocks(block_rows), (decodes.lengths - 1) % block_rows
    if not chunks:  # most steps; skip what only chunks need
        rope = decodes.rope[None] if axes == 1 else np.tile(decodes.rope, (axes, 1, 1))
        rows = PagedRows(put(blocks), put(offsets), decodes.tables, decodes.lengths, there=there)
        return RaggedBatch(put(decodes.ids), put(rope), rows, None)
    firsts = np.cumsum([len(blocks), *(len(chunk.ids) for chunk in chunks)]).tolist()
    rows = PagedRows(
        blocks=put(np.concatenate([blocks, *(chunk.table[chunk.positions // block_rows] for chunk in chunks)])),
        offsets=put(np.concatenate([offsets, *(chunk.positions % block_rows for chunk in chunks)])),
        tables=decodes.tables,
        lengths=decodes.lengths,
        chunks=_make_chunk_rows(chunks, firsts, there, put),
        there=there,
    )
    ids = put(np.concatenate([decodes.ids, *(chunk.ids for chunk in chunks)]))
    last = [*range(firsts[0]), *(end - 1 for chunk, end in zip(chunks, firsts[1:], strict=True) if chunk.needs_logits)]
    feature_rows, feature_at = _join_features(chunks, firsts, put)
    at = put(np.array(last, dtype=np.int64))
    return RaggedBatch(
        ids,
        put(_join_rope(decodes, chunks, axes)),
        rows,
        at,
        feature_rows,
        feature_at,
        _sampled_rows(rows, chunks, at) if firsts[-1] - len(last) >= LEAST_UNSAMPLED_ROWS else None,
    )


def select_tables(kept: DeviceTables, decodes: Decodes, chunks: Sequence[Chunk]) -> Tensor:
    """Return the block tables of ``decodes``, then of ``chunks``, on the device; see ``DeviceTables.select``."""
    tables, slots = BlockTables.join(decodes.tables), decodes.slots
    if chunks:
        tables = BlockTables.join([*tables, *(chunk.table for chunk in chunks)])
        slots = np.append(slots, [chunk.slot for chunk in chunks]).astype(np.int64)
    return kept.select(slots if len(slots) == len(tables) and slots.min(initial=0) >= 0 else None, tables)


def _sampled_rows(rows: PagedRows, chunks: Sequence[Chunk], last: Tensor) -> PagedRows:
    """Return the decode rows and, as further decode rows, the last row of every chunk that needs logits.

    ``last``: indices of both on the device; a list would be copied there while the host waits.
    """
    ends, there = [chunk for chunk in chunks if chunk.needs_logits], rows.there
    if there is not None and len(ends) < len(chunks):
        sequences = [*range(rows.decodes), *(rows.decodes + at for at, one in enumerate(chunks) if one.needs_logits)]
        there = there.index_select(0, upload(np.array(sequences, dtype=np.int64), last.device))
    return PagedRows(
        rows.blocks.index_select(0, last),
        rows.offsets.index_select(0, last),
        BlockTables.join([*rows.tables, *(chunk.table for chunk in ends)]),
        np.append(rows.lengths, [chunk.start + len(chunk.ids) for chunk in ends]).astype(np.int64),
        there=there,
    )


def _make_chunk_rows(
    chunks: Sequence[Chunk], firsts: Sequence[int], there: Tensor | None, put: Callable[[Int64Array], Tensor]
) -> tuple[ChunkRows, ...]:
    found = []
    for at, (chunk, first) in enumerate(zip(chunks, firsts, strict=False), -len(chunks)):
        table = put(chunk.table) if there is None else there[at, : len(chunk.table)]
        groups = None if chunk.groups is None else put(chunk.groups)
        found.append(ChunkRows(first, len(chunk.ids), chunk.start, table, groups, chunk.written))
    return tuple(found)


def _join_rope(decodes: Decodes, chunks: Sequence[Chunk], axes: int) -> Int64Array:
    """Join rotary positions to [1, T], or [axes, 1, T] with several axes."""
    if axes == 1:
        return np.concatenate([decodes.rope, *(chunk.rope for chunk in chunks)])[None]
    parts = [decodes.rope, *(chunk.rope for chunk in chunks)]
    return np.concatenate([np.broadcast_to(part, (axes, part.shape[-1])) for part in parts], axis=1)[:, None]


def _join_features(
    chunks: Sequence[Chunk], firsts: Sequence[int], put: Callable[[Int64Array], Tensor]
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if not any(len(chunk.feature_at) for chunk in chunks):
        return None, None
    places = [chunk.feature_at + first for chunk, first in zip(chunks, firsts, strict=False)]
    return put(np.concatenate([chunk.feature_rows for chunk in chunks])), put(np.concatenate(places))
