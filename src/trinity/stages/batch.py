"""The ragged batch: decode rows and prefill chunks of many requests as one row of T tokens.

Everything is put together in numpy and handed to torch in one piece per array: a decode batch of 64 rows costs some
tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trinity.stages.attention.interface import ChunkRows, PagedRows
from trinity.stages.uploads import upload

Ints = np.ndarray  # int64 throughout
UNSEEN = 32  # rows of a batch without a token to sample, from which the last layer does without them


def _none() -> Ints:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill chunk on the host: prompt positions [start, start + len(ids)).

    ``rope`` is [length] or [3, length]. ``feature_rows`` are rows of the image cache seen as [blocks * rows, width];
    ``feature_at`` says which of the chunk's tokens they replace. ``groups``: see ``ChunkRows``. ``wanted``: the last
    token's logits are asked for.
    """

    ids: Ints
    rope: Ints
    start: int
    table: Ints
    feature_rows: Ints = field(default_factory=_none)
    feature_at: Ints = field(default_factory=_none)
    groups: Ints | None = None
    wanted: bool = True

    @property
    def positions(self) -> Ints:
        return np.arange(self.start, self.start + len(self.ids))


@dataclass(frozen=True, slots=True)
class Decodes:
    """Decode rows on the host, by ascending ``lengths`` (KV positions, the row's own included).

    ``ids``, ``rope`` [n]: the token fed (-1: it is on the device alone) and its rotary position; ``tables`` [n, width]:
    see ``PagedRows``; ``slots`` [n]: where a row's newest token lies on the device.
    """

    ids: Ints
    rope: Ints
    lengths: Ints
    tables: Ints
    slots: Ints = field(default_factory=_none)


NO_DECODES = Decodes(_none(), _none(), _none(), np.empty((0, 0), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """What a model's forward takes. ``last``: the rows whose logits are wanted (None: all, in order).

    ``sampled``: these rows as decode rows, where ``UNSEEN`` more are in the batch.
    """

    ids: Tensor
    position_ids: Tensor
    rows: PagedRows
    last: Tensor | None
    feature_rows: Tensor | None = None
    feature_at: Tensor | None = None
    sampled: PagedRows | None = None


def build_batch(
    decodes: Decodes, chunks: Sequence[Chunk], block_rows: int, axes: int, device: torch.device
) -> RaggedBatch:
    """Join ``decodes`` and ``chunks``. ``axes`` is 3 where the model's rotary positions have three axes, else 1.

    Logits come first for the decodes, then for the chunks that want them, in order.
    """

    def put(array: Ints) -> Tensor:
        return upload(array, device)

    blocks, offsets = np.divmod(decodes.lengths - 1, block_rows)
    if len(blocks):
        blocks = decodes.tables[np.arange(len(blocks)), blocks]
    if not chunks:  # most steps: no time for what only chunks need
        rope = decodes.rope[None] if axes == 1 else np.tile(decodes.rope, (axes, 1, 1))
        rows = PagedRows(put(blocks), put(offsets), decodes.tables, decodes.lengths)
        return RaggedBatch(put(decodes.ids), put(rope), rows, None)
    firsts = np.cumsum([len(blocks), *(len(chunk.ids) for chunk in chunks)]).tolist()
    rows = PagedRows(
        blocks=put(np.concatenate([blocks, *(chunk.table[chunk.positions // block_rows] for chunk in chunks)])),
        offsets=put(np.concatenate([offsets, *(chunk.positions % block_rows for chunk in chunks)])),
        tables=decodes.tables,
        lengths=decodes.lengths,
        chunks=tuple(_chunk_rows(chunk, first, put) for chunk, first in zip(chunks, firsts, strict=False)),
    )
    ids = put(np.concatenate([decodes.ids, *(chunk.ids for chunk in chunks)]))
    last = [*range(firsts[0]), *(end - 1 for chunk, end in zip(chunks, firsts[1:], strict=True) if chunk.wanted)]
    feature_rows, feature_at = _features(chunks, firsts, put)
    return RaggedBatch(
        ids,
        put(_join_rope(decodes, chunks, axes)),
        rows,
        put(np.array(last, dtype=np.int64)),
        feature_rows,
        feature_at,
        _sampled(rows, chunks, last) if firsts[-1] - len(last) >= UNSEEN else None,
    )


def _sampled(rows: PagedRows, chunks: Sequence[Chunk], last: Sequence[int]) -> PagedRows:
    """The decode rows, and the last row of every chunk that wants its logits as one more."""
    ends = [chunk for chunk in chunks if chunk.wanted]
    width = max([rows.tables.shape[1], *(len(chunk.table) for chunk in ends)])
    parts = [rows.tables, *(chunk.table[None] for chunk in ends)]
    return PagedRows(
        rows.blocks[last],
        rows.offsets[last],
        np.concatenate([_widened(part, width) for part in parts if len(part)] or [rows.tables]),
        np.append(rows.lengths, [chunk.start + len(chunk.ids) for chunk in ends]).astype(np.int64),
    )


def _widened(tables: Ints, width: int) -> Ints:
    """Each padded with its own last block."""
    return np.pad(tables, ((0, 0), (0, width - tables.shape[1])), mode="edge")


def _chunk_rows(chunk: Chunk, first: int, put: Callable[[Ints], Tensor]) -> ChunkRows:
    groups = None if chunk.groups is None else put(chunk.groups)
    return ChunkRows(first, len(chunk.ids), chunk.start, put(chunk.table), groups)


def _join_rope(decodes: Decodes, chunks: Sequence[Chunk], axes: int) -> Ints:
    """[1, T], or [3, 1, T] with three axes."""
    if axes == 1:
        return np.concatenate([decodes.rope, *(chunk.rope for chunk in chunks)])[None]
    parts = [decodes.rope, *(chunk.rope for chunk in chunks)]
    return np.concatenate([np.broadcast_to(part, (axes, part.shape[-1])) for part in parts], axis=1)[:, None]


def _features(
    chunks: Sequence[Chunk], firsts: Sequence[int], put: Callable[[Ints], Tensor]
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if not any(len(chunk.feature_at) for chunk in chunks):
        return None, None
    places = [chunk.feature_at + first for chunk, first in zip(chunks, firsts, strict=False)]
    return put(np.concatenate([chunk.feature_rows for chunk in chunks])), put(np.concatenate(places))
