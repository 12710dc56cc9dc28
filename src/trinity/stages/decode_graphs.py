"""CUDA graphs of decode steps: batches padded to a few sizes, block tables to a few widths.

A padding row has length 0 and block -1: the backend does not write it and gives zeros, and its logits are not used. All
numbers of a step go to the device as one array.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trinity.stages.async_steps import DeviceTokens
from trinity.stages.attention.interface import AttentionBackend, PagedRows
from trinity.stages.attention.varlen import VarlenRows
from trinity.stages.batch import Decodes, RaggedBatch
from trinity.stages.cuda_graphs import GraphCache, Tensors
from trinity.stages.models import LoadedModel

BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LEAST_TABLE_WIDTH = 64  # blocks of a table (1,024 tokens in blocks of 16); wider ones take the next power of two
_COLUMNS = 6  # ids, rope, blocks, offsets, lengths, slots


@dataclass(slots=True)
class DecodeGraphs:
    """Decode steps of one stage over its cache ``kv``; ``backend`` must support padding rows and static tables."""

    model: LoadedModel
    kv: Tensor
    backend: AttentionBackend
    graphs: GraphCache
    tokens: DeviceTokens | None = None

    def run(self, decodes: Decodes) -> Tensor | None:
        """Return logits [n, vocabulary], valid until the next call; None if this batch must run eagerly."""
        size = next((each for each in BATCH_SIZES if each >= len(decodes.ids)), None)
        if size is None:
            return None
        width = max(LEAST_TABLE_WIDTH, 1 << (decodes.tables.shape[1] - 1).bit_length())
        given = torch.from_numpy(pack_decodes(decodes, size, width, self.kv.shape[4]))
        with torch.inference_mode():
            found = self.graphs.call(
                ("decode", size, width), lambda inputs: self._forward(inputs, size, width), [given]
            )
        return None if found is None else found[0][: len(decodes.ids)]

    def warm_up(self) -> None:
        """Record every batch size that the cache has blocks for, the largest first: the others fit into its memory.

        The rows are real, of one block each, so that a replay is compared on more than padding. The blocks that they
        write are not restored.
        """
        height = self.kv.shape[4]
        for size in sorted(each for each in BATCH_SIZES if each <= self.kv.shape[0])[::-1]:
            at = np.arange(size)
            lengths = 1 + at % height
            ids = at % self.model.adapter.text_config.vocab_size
            self.run(Decodes(ids, lengths - 1, lengths, at[:, None]))

    def _forward(self, inputs: Tensors, size: int, width: int) -> Tensors:
        ids, rope, blocks, offsets, lengths, slots = inputs[0][: _COLUMNS * size].view(_COLUMNS, size)
        tables = inputs[0][_COLUMNS * size :].view(size, width)
        axes = self.model.adapter.axes
        position_ids = rope[None] if axes == 1 else rope.expand(axes, 1, size)
        rows = make_static_rows(blocks, offsets, tables, lengths, self.kv.shape[4])
        if self.tokens is not None:
            ids = self.tokens.fill_unknown(ids, slots)
        batch = RaggedBatch(ids, position_ids, rows, None)
        return [self.model.forward(batch, self.kv, None, self.backend)]


def pack_decodes(decodes: Decodes, size: int, width: int, block_rows: int) -> np.ndarray:
    """Pack all numbers of a step for the device: int64 [6 * size + size * width]."""
    n = len(decodes.ids)
    columns = np.zeros((_COLUMNS, size), dtype=np.int64)
    columns[2] = -1
    blocks, offsets = np.divmod(decodes.lengths - 1, block_rows)
    taken = decodes.tables[np.arange(n), blocks]
    slots = decodes.slots if len(decodes.slots) else np.zeros(n, dtype=np.int64)
    columns[:, :n] = decodes.ids, decodes.rope, taken, offsets, decodes.lengths, slots
    tables = np.zeros((size, width), dtype=np.int64)
    tables[:n, : decodes.tables.shape[1]] = decodes.tables
    return np.concatenate((columns.ravel(), tables.ravel()))


def make_static_rows(blocks: Tensor, offsets: Tensor, tables: Tensor, lengths: Tensor, block_rows: int) -> PagedRows:
    """Make decode rows whose places, tables and lengths are read on the device at each replay.

    To the host every row is as long as its table.
    """
    size, width = tables.shape
    begins = torch.arange(size + 1, device=tables.device)
    memo = {"varlen": VarlenRows(tables, begins, lengths)}
    longest = np.full(size, width * block_rows, dtype=np.int64)
    return PagedRows(blocks, offsets, np.zeros((size, 0), dtype=np.int64), longest, memo=memo)
