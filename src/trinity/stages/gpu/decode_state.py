"""DecodeState: the rows of a decode batch on the device, which each recorded step moves on by itself.

The host writes them when a batch has other rows than the one before. While the rows are the same, every step is one
position behind the last, its input tokens are those that the last one sampled, and its noise is that of the next
output: nothing has to be uploaded.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trinity.stages.async_steps import SPARE_SLOT, DeviceTokens
from trinity.stages.attention.gpu.varlen import VarlenRows
from trinity.stages.attention.interface import PagedRows
from trinity.stages.batch import Decodes, select_tables
from trinity.stages.block_tables import BlockTables, upload
from trinity.stages.sampler_rows import SAMPLER, SamplerBatch, SamplerKind, as_columns, make_keys_there

SLOT, PROMPT, PLACE, ROPE, LENGTH, ADVANCE = COLUMNS = range(6)
_MOVED = slice(PLACE, ADVANCE)  # by one a step
_WIDTH = len(SAMPLER.names or ())


class DecodeState:
    """Rows of the newest recorded step. Padding rows have ``SPARE_SLOT``, length 0, a first block of -1, and stay so.

    - ``columns`` (int64 [6, most]): slot, length of the prompt, KV position, rotary position, KV positions with the
      row's own, and by how much the last three grow with each step.
    - ``tables`` (int32 [most, width]): block tables. What lies beyond a row's length is not read.
    - ``samplers`` (int64 [most, 13]): ``SAMPLER`` rows, with keys of seeds; lengths are in ``columns``.
    - ``tokens``: input tokens, by slot.
    """

    def __init__(self, most: int, width: int, block_rows: int, tokens: DeviceTokens, device: torch.device) -> None:
        self.tokens, self.block_rows = tokens, block_rows
        self.columns = torch.zeros((len(COLUMNS), most), dtype=torch.long, device=device)
        self.tables = torch.zeros((most, width), dtype=torch.int32, device=device)
        self.samplers = torch.zeros((most, _WIDTH), dtype=torch.long, device=device)

    def write(self, decodes: Decodes, size: int, prompts: np.ndarray | None, samplers: np.ndarray | None) -> None:
        """Write the rows of the next step, padded to ``size``, and the tokens that the host knows.

        ``prompts`` and ``samplers``, the lengths of prompts and ``SAMPLER`` rows: None if all are greedy.
        """
        parts = pack_decodes(decodes, size, prompts), pad_samplers(samplers, size)
        given = upload(np.concatenate(parts), self.columns.device)
        ids, columns, settings = torch.split(given, [size, len(COLUMNS) * size, len(parts[1])])
        self.columns[:, :size].copy_(columns.view(-1, size))
        tables = select_tables(self.tokens.tables, decodes, ())[:, : self.tables.shape[1]]
        self.tables[: len(tables), : tables.shape[1]].copy_(tables)
        self.tables[len(tables) : size, 0].fill_(-1)
        if samplers is not None:
            self.samplers[:size].copy_(settings.view(size, _WIDTH))
        slots = self.columns[SLOT, :size]
        self.tokens.store(slots, self.tokens.fill_unknown(ids, slots))

    def grow_tables(self, rows: np.ndarray, slots: np.ndarray, tables: BlockTables) -> None:
        """Write the tables of these rows [k], which have these slots and have grown."""
        grown = self.tokens.tables.select(slots, tables)[:, : self.tables.shape[1]]
        self.tables[:, : grown.shape[1]].index_copy_(0, upload(rows, self.columns.device), grown)

    def move(self, size: int) -> tuple[Tensor, Tensor, PagedRows]:
        """Move the first ``size`` rows on by a step; returns input ids, rotary positions and cache places."""
        columns, tables = self.columns[:, :size], self.tables[:size]
        columns[_MOVED].add_(columns[ADVANCE])
        place = columns[PLACE]
        blocks = tables.gather(1, (place // self.block_rows)[:, None])[:, 0].long()
        rows = make_static_rows(blocks, place % self.block_rows, tables, columns[LENGTH], self.block_rows)
        return self.tokens.take(columns[SLOT]), columns[ROPE], rows

    def batch_samplers(self, size: int, kind: SamplerKind) -> SamplerBatch:
        """Make the sampler batch of the step's first ``size`` rows, of a kind without texts or bans."""
        columns, settings = self.columns[:, :size], self.samplers[:size].clone()
        batch = SamplerBatch(np.zeros(size, dtype=SAMPLER), settings, kind=kind)
        key, length = batch.column("key")[:, 0], columns[LENGTH]
        key.copy_(make_keys_there(key, length - columns[PROMPT]))
        return batch

    def store(self, tokens: Tensor) -> None:
        """Store the tokens that the step has sampled, as inputs of the next one."""
        self.tokens.store(self.columns[SLOT, : tokens.shape[0]], tokens)


def pack_decodes(decodes: Decodes, size: int, prompts: np.ndarray | None) -> np.ndarray:
    """Pack the numbers of a step for the device: ids [size], columns [6, size] a step before."""
    n = len(decodes.lengths)
    packed = np.zeros(size * (1 + len(COLUMNS)), dtype=np.int64)
    packed[:n] = decodes.ids
    columns = packed[size:].reshape(-1, size)
    columns[SLOT, :n] = decodes.slots if len(decodes.slots) else np.arange(n)
    columns[SLOT, n:] = SPARE_SLOT
    columns[PROMPT, :n] = 0 if prompts is None else prompts
    columns[PLACE, :n], columns[ROPE, :n] = decodes.lengths - 2, decodes.rope - 1
    columns[LENGTH, :n], columns[ADVANCE, :n] = decodes.lengths - 1, 1
    return packed


def pad_samplers(samplers: np.ndarray | None, size: int) -> np.ndarray:
    """Pad ``SAMPLER`` rows with greedy ones, as int64 [size * 13]; nothing for None."""
    if samplers is None:
        return np.empty(0, dtype=np.int64)
    padded = np.zeros(size, dtype=SAMPLER)
    padded["divisor"] = padded["penalty"] = 1.0
    padded[: len(samplers)] = samplers
    return as_columns(padded).ravel()


def make_static_rows(blocks: Tensor, offsets: Tensor, tables: Tensor, lengths: Tensor, block_rows: int) -> PagedRows:
    """Make decode rows whose places, tables and lengths are read on the device at each replay.

    To the host every row is as long as its table.
    """
    size, width = tables.shape
    begins = torch.arange(size + 1, device=tables.device)
    memo = {"varlen": VarlenRows(tables, begins, lengths)}
    longest = np.full(size, width * block_rows, dtype=np.int64)
    return PagedRows(blocks, offsets, np.zeros((size, 0), dtype=np.int64), longest, memo=memo)
