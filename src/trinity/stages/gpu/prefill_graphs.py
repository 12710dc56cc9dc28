"""CUDA graphs of steps with prefill chunks, alone or beside decodes: whole steps, padded to a few sizes.

A step of a few hundred tokens takes the device less time than the host needs to launch it. Its recording has a fixed
number of decode rows, then of chunk rows; which of them are a request's, and how many rows each chunk has, is read on
the device. Padding comes before the decodes and behind the chunks: rows without a place in the cache, of sequences of
length 0, for which the backend gives zeros. So the logits that are wanted lie beside each other.

All sizes are recorded as the instance starts (decision 0060).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trinity.stage_kinds import LANGUAGE_STAGES, roles_of
from trinity.stages.async_steps import DeviceTokens
from trinity.stages.attention.gpu.varlen import ChunkSlots, VarlenRows
from trinity.stages.attention.interface import AttentionBackend, PagedRows
from trinity.stages.batch import Chunk, Decodes, RaggedBatch, select_tables
from trinity.stages.block_tables import upload
from trinity.stages.gpu.cuda_graphs import GraphCache, Tensors
from trinity.stages.gpu.decode_graphs import MOST_TABLE_BYTES
from trinity.stages.models import LoadedModel

logger = logging.getLogger("trinity")
DECODE_COUNTS: tuple[int, ...] = (0, 8, 32, 64, 128)
CHUNK_ROW_COUNTS: tuple[int, ...] = (32, 64, 128, 192, 256, 320, 384, 512)  # of all chunks of a step
MOST_ROWS = 520  # of both: beyond them the device takes longer than the host
MOST_CHUNKS = 4
FREE_ROWS = 192  # so many rows cost a GPU what one does: the products wait for weights
MOST_PADDING = 1.25  # rows of a recording by real ones, beyond those
MOST_WARM_UP_S = 30.0
_COLUMNS = 5  # ids, slots, blocks, offsets, features; then rope
_NO_TABLES = np.empty((0, 0), dtype=np.int64)


class StepSize(NamedTuple):
    """Rows of one recording."""

    decodes: int
    chunk_rows: int

    @property
    def rows(self) -> int:
        return self.decodes + self.chunk_rows

    @property
    def sequences(self) -> int:
        """Decodes and chunks; behind them comes one of padding."""
        return self.decodes + MOST_CHUNKS

    def split_numbers(self, axes: int) -> list[int]:
        """Return the sizes of a step's numbers: columns of rows, begins, lengths and last rows of sequences."""
        return [(_COLUMNS + axes) * self.rows, self.sequences + 2, self.sequences + 1, self.sequences]


@dataclass(slots=True)
class PrefillGraphs:
    """Steps of one stage with chunks over its cache ``kv``; ``backend`` must support ``ChunkSlots``.

    - ``image`` (None): the image cache, [blocks, rows, width].
    - ``letters`` ("PD"): without "D" no recording has decode rows.
    - ``sizes``: sizes with a recording, or, before ``warm_up``, that may get one; fewest rows first.
    - ``tables`` (int32 [most sequences, width]): block tables of the sequences of a step.
    - ``logits`` ([most sequences, vocabulary]): what every recording writes into.
    """

    model: LoadedModel
    kv: Tensor
    backend: AttentionBackend
    graphs: GraphCache
    tokens: DeviceTokens
    image: Tensor | None = None
    letters: str = LANGUAGE_STAGES
    sizes: tuple[StepSize, ...] = field(init=False)
    tables: Tensor = field(init=False)
    logits: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        blocks, block_rows = self.kv.shape[0], self.kv.shape[4]
        counts = DECODE_COUNTS if roles_of(self.letters).decodes else (0,)
        held = [StepSize(decodes, rows) for decodes in counts for rows in CHUNK_ROW_COUNTS]
        fitting = (each for each in held if each.rows <= MOST_ROWS and self._warm_up_blocks(each) <= blocks)
        self.sizes = tuple(sorted(fitting, key=_order))
        most = max((each.sequences for each in self.sizes), default=0) + 1
        width = min(blocks, MOST_TABLE_BYTES // (4 * most))
        context = getattr(self.model.adapter.text_config, "max_position_embeddings", None)
        if context is not None:
            width = min(width, -(-context // block_rows))
        self.tables = torch.zeros((most, width), dtype=torch.int32, device=self.kv.device)

    def run(self, decodes: Decodes, chunks: Sequence[Chunk]) -> Tensor | None:
        """Return logits of the decodes and of the chunks that need them, valid until the next call.

        None if this step must run eagerly.
        """
        size = self._find_size(len(decodes.ids), chunks)
        longest = max([decodes.lengths.max(initial=0), *(chunk.start + len(chunk.ids) for chunk in chunks)])
        if size is None or longest > self._longest:
            return None
        ordered = sorted(chunks, key=lambda chunk: not chunk.needs_logits)
        first = size.decodes - len(decodes.ids)
        held = slice(first, size.decodes + len(chunks))
        with torch.inference_mode():
            given = upload(pack_step(decodes, ordered, size, self.kv.shape[4], self.model.adapter.axes), self.kv.device)
            tables = select_tables(self.tokens.tables, decodes, ordered)[:, : self.tables.shape[1]]
            self.tables[held, : tables.shape[1]].copy_(tables)
            found = self.graphs.call(("prefill", size), lambda inputs: self._forward(inputs, size), [given], "prefill")
        if found is None:
            return None
        return found[0][first : size.decodes + sum(chunk.needs_logits for chunk in chunks)]

    def warm_up(self) -> None:
        """Record every size, most rows first: the others fit into its memory. Ends after ``MOST_WARM_UP_S``.

        The rows are real, so that a replay is compared on more than padding; the blocks that they write are not
        restored. A size that was not recorded is not tried again while requests wait.
        """
        until = time.monotonic() + MOST_WARM_UP_S
        for size in reversed(self.sizes):
            if time.monotonic() < until:
                self.run(*self._make_rows(size))
        recorded = tuple(size for size in self.sizes if self.graphs.has(("prefill", size)))
        if len(recorded) < len(self.sizes):
            logger.info("%d of %d sizes of prefill steps have a CUDA graph", len(recorded), len(self.sizes))
        self.sizes = recorded

    def _find_size(self, decodes: int, chunks: Sequence[Chunk]) -> StepSize | None:
        """Return the recording with the fewest rows for a step; None if it has none, or too much padding."""
        deep = self.model.adapter.deepstack and any(len(chunk.feature_at) for chunk in chunks)
        if len(chunks) > MOST_CHUNKS or deep or any(chunk.groups is not None for chunk in chunks):
            return None
        rows = sum(len(chunk.ids) for chunk in chunks)
        fitting = (each for each in self.sizes if each.decodes >= decodes and each.chunk_rows >= rows)
        found = next(fitting, None)
        allowed = max(FREE_ROWS, MOST_PADDING * (decodes + rows))
        return None if found is None or found.rows > allowed else found

    def _forward(self, inputs: Tensors, size: StepSize) -> Tensors:
        axes = self.model.adapter.axes
        columns, begins, lengths, last = torch.split(inputs[0], size.split_numbers(axes))
        ids, slots, blocks, offsets, features, *turned = columns.view(-1, size.rows)
        rope = torch.stack(turned)
        rows = self._make_paged_rows(size, blocks, offsets, begins, lengths)
        batch = RaggedBatch(
            ids=self.tokens.fill_unknown(ids, slots),
            position_ids=rope if axes == 1 else rope[:, None],
            rows=rows,
            last=last,
            feature_rows=None if self.image is None or self.model.adapter.deepstack else features,
            sampled=self._make_sampled_rows(size, rows, lengths, last),
        )
        logits = self.model.forward(batch, self.kv, self.image, self.backend)
        if self.logits is None:
            self.logits = logits.new_zeros((self.tables.shape[0], logits.shape[1]))
        return [self.logits[: size.sequences].copy_(logits)]

    def _make_paged_rows(
        self, size: StepSize, blocks: Tensor, offsets: Tensor, begins: Tensor, lengths: Tensor
    ) -> PagedRows:
        """Make rows whose places, tables and lengths are read on the device at each replay."""
        slots = ChunkSlots(MOST_CHUNKS + 1, size.chunk_rows, self._longest)
        varlen = VarlenRows(self.tables[: size.sequences + 1], begins, lengths, slots=slots)
        longest = np.full(size.decodes, self._longest)
        return PagedRows(blocks, offsets, _NO_TABLES, longest, memo={"varlen": varlen})

    def _make_sampled_rows(self, size: StepSize, rows: PagedRows, lengths: Tensor, last: Tensor) -> PagedRows:
        """Make decode rows of the last row of every sequence."""
        count = size.sequences
        begins = torch.arange(count + 1, device=last.device)
        varlen = VarlenRows(self.tables[:count], begins, lengths[:count])
        places = rows.blocks[last], rows.offsets[last]
        return PagedRows(*places, _NO_TABLES, np.full(count, self._longest), memo={"varlen": varlen})

    @property
    def _longest(self) -> int:
        """KV positions of a table: to the host every sequence is as long."""
        return self.tables.shape[1] * self.kv.shape[4]

    def _warm_up_blocks(self, size: StepSize) -> int:
        return size.decodes + 2 * -(-size.chunk_rows // (2 * self.kv.shape[4]))

    def _make_rows(self, size: StepSize) -> tuple[Decodes, list[Chunk]]:
        """Make a step of this size: decodes of one block each, and two chunks."""
        height, axes = self.kv.shape[4], self.model.adapter.axes
        at, half = np.arange(size.decodes), size.chunk_rows // 2
        lengths = 1 + np.sort(at % height)
        ids = np.arange(max(size.decodes, half)) % self.model.adapter.text_config.vocab_size
        decodes = Decodes(ids[: size.decodes], lengths - 1, lengths, at[:, None])
        rope = np.arange(half) if axes == 1 else np.tile(np.arange(half), (axes, 1))
        blocks = np.arange(2 * -(-half // height)).reshape(2, -1) + size.decodes
        return decodes, [Chunk(ids[:half], rope, 0, table, needs_logits=bool(n)) for n, table in enumerate(blocks)]


def _order(size: StepSize) -> tuple[int, int]:
    return size.rows, size.decodes


def pack_step(decodes: Decodes, chunks: Sequence[Chunk], size: StepSize, block_rows: int, axes: int) -> np.ndarray:
    """Pack the numbers of a step for the device: those of ``split_numbers``.

    Rows: padding, decodes, chunks, padding. ``chunks`` that need logits come first.
    """
    own, firsts = len(decodes.ids), np.cumsum([size.decodes, *(len(chunk.ids) for chunk in chunks)])
    parts = size.split_numbers(axes)
    packed = np.zeros(sum(parts), dtype=np.int64)
    numbers = np.split(packed, np.cumsum(parts[:-1]))
    columns, (begins, lengths, last) = numbers[0].reshape(-1, size.rows), numbers[1:]
    columns[[2, 4]] = -1
    begins[: size.decodes] = last[: size.decodes] = np.arange(size.decodes)
    begins[size.decodes :], begins[-1], last[size.decodes :] = firsts[-1], size.rows, size.rows - 1
    _pack_decodes(decodes, columns[:, size.decodes - own : size.decodes], block_rows)
    lengths[size.decodes - own : size.decodes] = decodes.lengths
    for number, (chunk, first) in enumerate(zip(chunks, firsts.tolist(), strict=False)):
        _pack_chunk(chunk, columns[:, first : first + len(chunk.ids)], block_rows)
        place = size.decodes + number
        begins[place], lengths[place], last[place] = first, chunk.start + len(chunk.ids), first + len(chunk.ids) - 1
    return packed


def _pack_decodes(decodes: Decodes, columns: np.ndarray, block_rows: int) -> None:
    columns[0], columns[_COLUMNS:] = decodes.ids, decodes.rope
    if len(decodes.slots):
        columns[1] = decodes.slots
    columns[2], columns[3] = decodes.find_blocks(block_rows), (decodes.lengths - 1) % block_rows


def _pack_chunk(chunk: Chunk, columns: np.ndarray, block_rows: int) -> None:
    columns[0], columns[_COLUMNS:] = chunk.ids, chunk.rope
    blocks, columns[3] = np.divmod(chunk.positions, block_rows)
    columns[2] = chunk.table[blocks]
    columns[4, chunk.feature_at] = chunk.feature_rows
