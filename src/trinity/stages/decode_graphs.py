"""CUDA graphs of decode steps: batches padded to a few sizes, over block tables that lie on the device.

A padding row has length 0 and block -1: the backend does not write it and gives zeros, and its logits are not used. All
numbers of a step go to the device as one array. Its tables are copied into static ones, as wide as any text of this
cache can need, outside of the graph: a text may grow without another recording. What a row of them held before is
beyond the row's length, where no backend reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trinity.stages.async_steps import DeviceTokens
from trinity.stages.attention.interface import AttentionBackend, PagedRows
from trinity.stages.attention.varlen import VarlenRows
from trinity.stages.batch import Decodes, RaggedBatch
from trinity.stages.cuda_graphs import GraphCache, Tensors
from trinity.stages.models import LoadedModel
from trinity.stages.uploads import upload

BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_TABLE_BYTES = 64 << 20  # of the static tables; rows of longer texts run eagerly
_COLUMNS = 6  # ids, rope, blocks, offsets, lengths, slots


@dataclass(slots=True)
class DecodeGraphs:
    """Decode steps of one stage over its cache ``kv``; ``backend`` must support padding rows and static tables.

    - ``sizes``: batch sizes with a graph, or, before ``warm_up``, that may get one; ascending.
    - ``tables`` (int64 [largest size, width]): block tables of the rows of a step.
    """

    model: LoadedModel
    kv: Tensor
    backend: AttentionBackend
    graphs: GraphCache
    tokens: DeviceTokens | None = None
    sizes: tuple[int, ...] = field(init=False)
    tables: Tensor = field(init=False)

    def __post_init__(self) -> None:
        blocks, block_rows = self.kv.shape[0], self.kv.shape[4]
        self.sizes = tuple(each for each in BATCH_SIZES if each <= blocks)
        width = min(blocks, MOST_TABLE_BYTES // (8 * self.sizes[-1]))
        context = getattr(self.model.adapter.text_config, "max_position_embeddings", None)
        if context is not None:
            width = min(width, -(-context // block_rows))
        self.tables = torch.zeros((self.sizes[-1], width), dtype=torch.long, device=self.kv.device)

    def run(self, decodes: Decodes) -> Tensor | None:
        """Return logits [n, vocabulary], valid until the next call; None if this batch must run eagerly."""
        rows, width = decodes.tables.shape
        size = next((each for each in self.sizes if each >= rows), None)
        if size is None or width > self.tables.shape[1]:
            return None
        columns = _COLUMNS * size
        with torch.inference_mode():
            given = upload(pack_decodes(decodes, size, self.kv.shape[4]), self.kv.device)
            self.tables[:rows, :width].copy_(given[columns:].view(rows, width))
            found = self.graphs.call(
                ("decode", size), lambda inputs: self._forward(inputs, size), [given[:columns]], "decode"
            )
        return None if found is None else found[0][:rows]

    def warm_up(self) -> None:
        """Record every batch size that the cache has blocks for, the largest first: the others fit into its memory.

        The rows are real, of one block each, so that a replay is compared on more than padding. The blocks that they
        write are not restored. A size that could not be recorded is not tried again while requests wait.
        """
        height = self.kv.shape[4]
        for size in reversed(self.sizes):
            at = np.arange(size)
            lengths = 1 + at % height
            ids = at % self.model.adapter.text_config.vocab_size
            self.run(Decodes(ids, lengths - 1, lengths, at[:, None]))
        self.sizes = tuple(size for size in self.sizes if self.graphs.has(("decode", size)))

    def _forward(self, inputs: Tensors, size: int) -> Tensors:
        ids, rope, blocks, offsets, lengths, slots = inputs[0].view(_COLUMNS, size)
        axes = self.model.adapter.axes
        position_ids = rope[None] if axes == 1 else rope.expand(axes, 1, size)
        rows = make_static_rows(blocks, offsets, self.tables[:size], lengths, self.kv.shape[4])
        if self.tokens is not None:
            ids = self.tokens.fill_unknown(ids, slots)
        batch = RaggedBatch(ids, position_ids, rows, None)
        return [self.model.forward(batch, self.kv, None, self.backend)]


def pack_decodes(decodes: Decodes, size: int, block_rows: int) -> np.ndarray:
    """Pack all numbers of a step for the device: its columns, int64 [6 * size], then its rows' tables [n * width]."""
    n, width = decodes.tables.shape
    packed = np.zeros(_COLUMNS * size + n * width, dtype=np.int64)
    ids, rope, blocks, offsets, lengths, slots = packed[: _COLUMNS * size].reshape(_COLUMNS, size)
    blocks[n:] = -1
    ids[:n], rope[:n], lengths[:n] = decodes.ids, decodes.rope, decodes.lengths
    if len(decodes.slots):
        slots[:n] = decodes.slots
    np.divmod(decodes.lengths - 1, block_rows, out=(blocks[:n], offsets[:n]))
    blocks[:n] = decodes.tables[np.arange(n), blocks[:n]]
    packed[_COLUMNS * size :].reshape(n, width)[:] = decodes.tables
    return packed


def make_static_rows(blocks: Tensor, offsets: Tensor, tables: Tensor, lengths: Tensor, block_rows: int) -> PagedRows:
    """Make decode rows whose places, tables and lengths are read on the device at each replay.

    To the host every row is as long as its table.
    """
    size, width = tables.shape
    begins = torch.arange(size + 1, device=tables.device)
    memo = {"varlen": VarlenRows(tables, begins, lengths)}
    longest = np.full(size, width * block_rows, dtype=np.int64)
    return PagedRows(blocks, offsets, np.zeros((size, 0), dtype=np.int64), longest, memo=memo)
