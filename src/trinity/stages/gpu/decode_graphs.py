"""CUDA graphs of decode steps: batches padded to a few sizes, over rows and block tables that lie on the device.

A padding row has length 0 and block -1: the backend does not write it and gives zeros, and its logits are not used. The
static tables are as wide as any text of this cache can need: a text may grow without another recording. What a row of
them held before is beyond the row's length, where no backend reads. A recorded step moves its rows on (``DecodeState``)
and takes the largest logit of each. Other sampling is a recording of its own behind it, one for each kind of batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.stages.async_steps import MOST_SLOTS, DeviceTokens, draw_next
from trinity.stages.attention.interface import AttentionBackend
from trinity.stages.batch import Decodes, RaggedBatch
from trinity.stages.block_tables import BlockTables
from trinity.stages.gpu.cuda_graphs import GraphCache, Tensors
from trinity.stages.gpu.decode_state import DecodeState
from trinity.stages.models import LoadedModel
from trinity.stages.request_table import DecodeSelection, RequestTable
from trinity.stages.sampler import Drawn, draw, draw_greedy
from trinity.stages.sampler_rows import BANS, LOOKS_BACK, SamplerKind

BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_TABLE_BYTES = 64 << 20  # of the static tables; rows of longer texts run eagerly


@dataclass(slots=True)
class DecodeGraphs:
    """Decode steps of one stage over its cache ``kv``; ``backend`` must support padding rows and static tables.

    - ``sizes``: batch sizes with a graph, or, before ``warm_up``, that may get one; ascending.
    - ``state``: the rows of the newest step.
    """

    model: LoadedModel
    kv: Tensor
    backend: AttentionBackend
    graphs: GraphCache
    tokens: DeviceTokens | None = None
    sizes: tuple[int, ...] = field(init=False)
    state: DecodeState = field(init=False)
    _rows: DecodeSelection | None = None  # whose next step ``state`` is ready for
    _size: int = 0  # of their graph
    _room: int = 0  # steps until one of them needs a further block
    _seen: set[Hashable] = field(default_factory=set)  # kinds of sampling that have come
    _drawn: Drawn | None = None

    def __post_init__(self) -> None:
        blocks, block_rows = self.kv.shape[0], self.kv.shape[4]
        self.sizes = tuple(each for each in BATCH_SIZES if each <= blocks)
        width = min(blocks, MOST_TABLE_BYTES // (4 * self.sizes[-1]))
        context = getattr(self.model.adapter.text_config, "max_position_embeddings", None)
        if context is not None:
            width = min(width, -(-context // block_rows))
        tokens = self.tokens or DeviceTokens(self.kv.device)
        self.state = DecodeState(self.sizes[-1], width, block_rows, tokens, self.kv.device)

    def run(self, decodes: Decodes) -> Tensor | None:
        """Return logits [n, vocabulary], valid until the next call; None if this batch must run eagerly."""
        with torch.inference_mode():
            found = self._replay() if self._write(decodes) else None
        return None if found is None else found[0][: len(decodes.lengths)]

    def launch(self, table: RequestTable, selection: DecodeSelection) -> Drawn | None:
        """Run the next step of these rows and draw their tokens; None if it must run eagerly.

        Nothing is uploaded for rows whose last step was the last one here, but what they have grown.
        """
        if self._rows is selection and selection.grown:
            self._grow(table, selection)
        if self._rows is not selection or not self._room:
            self.leave()
            with torch.inference_mode():
                if not self._enter(table, selection):
                    return None
        found = self._replay()
        if found is None:
            self.leave()
            return None
        self._room -= 1
        logits, tokens = found
        if not selection.needs:
            return self._hold((tokens, tokens), ())
        drawn = self._sample(logits, selection.kind)
        if drawn is not None:
            return self._hold(drawn, selection.asked)
        with torch.inference_mode():
            logits = logits[: len(selection.rows)]
            return draw_next(logits, table, selection.rows, selection.slots, self.state.tokens)

    def _hold(self, found: Tensors, asked: Sequence[tuple[int, int]]) -> Drawn:
        """Return what a recording has drawn: flat, tokens and, if asked for, log-probabilities."""
        held = self._drawn  # of the last step, mostly the same
        if held is None or held.flat is not found[0] or held.asked is not asked:
            held = self._drawn = Drawn(found[0], found[1], found[2] if asked else None, asked)
        return held

    def leave(self) -> None:
        """Have the next launch write all of its rows: a step runs otherwise, or has failed."""
        self._rows = None

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

    def _sample(self, logits: Tensor, kind: SamplerKind) -> Tensors | None:
        """Draw tokens of the last replay; None if that is not recorded: it is with the second step of its kind."""
        if kind.some & (BANS | LOOKS_BACK):
            return None  # texts grow, and the host lists bans
        key = ("sample", self._size, kind)
        if key not in self._seen:
            self._seen.add(key)
            return None
        return self._call(key, partial(self._draw, logits, kind), (self.state.tokens.newest,))

    def _draw(self, logits: Tensor, kind: SamplerKind) -> Tensors:
        batch = self.state.batch_samplers(len(logits), kind)
        drawn = draw(logits, batch)
        self.state.store(drawn.tokens)
        both = (drawn.flat, drawn.tokens)
        return both if drawn.logprobs is None else (*both, drawn.logprobs)

    def _enter(self, table: RequestTable, selection: DecodeSelection) -> bool:
        """Write the next step of a selection. Returns False if no graph can run it."""
        decodes = table.read_decodes(selection)
        self._room = self._count_room(table, selection)
        samplers = table.samplers[selection.slots] if selection.needs else None
        prompts = table.prompt[selection.slots]
        if not self._room or not self._write(decodes, prompts, samplers):
            return False
        selection.grown.clear()
        self._rows = selection
        return True

    def _write(self, decodes: Decodes, prompts: np.ndarray | None = None, samplers: np.ndarray | None = None) -> bool:
        size = next((each for each in self.sizes if each >= len(decodes.lengths)), None)
        room = self.state.tables.shape[1] * self.state.block_rows
        if size is None or decodes.lengths.max() > room or (decodes.slots >= MOST_SLOTS).any():
            return False
        self._size = size
        self.state.write(decodes, size, prompts, samplers)
        return True

    def _grow(self, table: RequestTable, selection: DecodeSelection) -> None:
        """Write the tables of rows that have got blocks."""
        rows = np.flatnonzero(np.isin(selection.slots, selection.grown))
        selection.grown.clear()
        tables = BlockTables.join([selection.rows[at].table for at in rows.tolist()])
        self.state.grow_tables(rows, selection.slots[rows], tables)
        self._room = self._count_room(table, selection)

    def _count_room(self, table: RequestTable, selection: DecodeSelection) -> int:
        """Count the steps that the tables of ``state`` have room for."""
        lengths = table.length[selection.slots]
        held = np.minimum(table.capacity[selection.slots], self.state.tables.shape[1] * table.block_rows)
        return max(0, int((held - lengths).min()))

    def _replay(self) -> Tensors | None:
        size, state = self._size, self.state
        moved = (state.columns, state.tokens.newest)
        return self._call(("decode", size), partial(self._forward, size), moved)

    def _call(self, key: tuple[Any, ...], run: Callable[[], Tensors], moved: Tensors) -> Tensors | None:
        recording = nullcontext() if self.graphs.has(key) else torch.inference_mode()
        with recording:
            return self.graphs.call(key, lambda _: run(), (), key[0], moved)

    def _forward(self, size: int) -> Tensors:
        ids, rope, rows = self.state.move(size)
        axes = self.model.adapter.axes
        position_ids = rope[None] if axes == 1 else rope.expand(axes, 1, size)
        logits = self.model.forward(RaggedBatch(ids, position_ids, rows, None), self.kv, None, self.backend)
        drawn = draw_greedy(logits)
        self.state.store(drawn.tokens)
        return [logits, drawn.tokens]
