"""LanguageStage: prefill chunks and decodes of many requests as one ragged batch (the P and D of E-P-D)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import Grow, Open, Sampled, Step
from trinity.errors import StageError
from trinity.memory.block_memory import BlockMemory
from trinity.stages.attention.backends import AUTO, make_backend
from trinity.stages.attention.interface import AttentionBackend
from trinity.stages.attention.layer_progress import LayerProgressAttention, LayersCallback
from trinity.stages.base import Pending
from trinity.stages.batch import NO_DECODES, Chunk, Decodes, build_batch
from trinity.stages.decode_graphs import DecodeGraphs
from trinity.stages.graphs import Graphs
from trinity.stages.launches import MOST_SLOTS, DeviceTokens, Done, Launch
from trinity.stages.models import LoadedModel
from trinity.stages.rows import Row, RowTable
from trinity.stages.sampling import draw, drawn_on_device, greedy, sample
from trinity.stages.uploads import upload

Observe = Callable[[str, int, Tensor], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """A step's rows: ``wanted`` get a token, ``ran`` are the requests of all."""

    decodes: Decodes
    chunks: list[Chunk]
    wanted: list[Row]
    ran: set[str]


class LanguageStage:
    """Runs the language part over paged KV blocks; implements ``stages.base.Stage``.

    ``letters``: "P" runs prefill chunks, "D" decodes, "PD" both in one batch. ``kv`` holds blocks
    [layers, 2, kv_heads, rows, head_dim]; ``image`` (None where nothing is prefilled or the model is text only)
    [rows, width]. ``observe`` is called with (request, output index, logits [vocabulary]) of every sampled token.
    ``graphs``: recorded calls, for steps of decodes alone, where the backend can run in them.
    What is kept of a request changes only when a step succeeds, so that ``forward`` can be repeated after a failure.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: BlockMemory,
        image: BlockMemory | None,
        letters: str = "PD",
        observe: Observe | None = None,
        backend: AttentionBackend | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.model, self.kv, self.image, self.letters, self.observe = model, kv, image, letters, observe
        self._backend = backend or make_backend(AUTO, kv.shape.shape, kv.shape.dtype, kv.tensor.device)
        self._tokens, self._flight = DeviceTokens(kv.tensor.device), deque[Launch]()
        if kv.tensor.is_cuda:
            self.launch = self.launch_on_device
        self._graphs: DecodeGraphs | None = None
        if graphs is not None and getattr(self._backend, "graphs", False):
            self._graphs = DecodeGraphs(model, kv.tensor, self._backend, graphs, self._tokens)
        self.on_layers: LayersCallback | None = None
        self._block_rows = kv.shape.shape[3]
        self._rows = RowTable(model, self._block_rows, 1 if image is None else image.shape.shape[0])

    @torch.inference_mode()
    def warm(self) -> None:
        """Compile and record what the first requests would wait for. No request may be open."""
        if "P" in self.letters:
            ids = np.arange(self._block_rows)
            rope = ids if self.model.adapter.axes == 1 else np.tile(ids, (self.model.adapter.axes, 1))
            self._eager(NO_DECODES, [Chunk(ids, rope, 0, np.zeros(1, dtype=np.int64))], 0)
        if self._graphs is not None and "D" in self.letters:
            self._graphs.warm()
        self.kv.tensor.zero_()
        if self.kv.tensor.is_cuda:
            torch.cuda.synchronize(self.kv.tensor.device)  # the lane has a stream of its own

    def open(self, request: Open) -> None:
        """Take a request in. Raises ``StageError`` where it is open already or its media do not fit its prompt."""
        self._rows.open(request)

    def grow(self, more: Grow) -> None:
        """Append blocks to the tables of open requests."""
        for request, blocks in more.blocks.items():
            self._rows.grow(request, blocks)

    @torch.inference_mode()
    def close(self, request: str) -> None:
        """Drop a request. Blocks that a failed step left with NaN are zeroed: a mask does not stop NaN."""
        row = self._rows.close(request)
        if row is not None and row.suspect:
            table = torch.from_numpy(row.table).to(self.kv.tensor.device)
            spoilt = ~self.kv.tensor[table].flatten(1).isfinite().all(1)
            self.kv.tensor[table[spoilt]] = 0

    def forward(self, step: Step) -> dict[str, Sampled]:
        """Run this stage's rows of ``step``; returns the sampled token of each decode and of each last chunk.

        Raises ``StageError`` where a row cannot be run as asked or its logits hold NaN.
        """
        asked = self._asked(step)
        if not asked.ran:
            return {}
        ran = asked.ran - self._rows.suspects  # they stay so: a later chunk may go well behind one that left NaN
        self._rows.suspects |= ran
        sampled = self._finish(asked.wanted, self._logits(asked, step.group))
        self._rows.suspects -= ran
        return sampled

    @torch.inference_mode()
    def launch_on_device(self, step: Step) -> Pending:
        """``stages.base.Launching.launch``, offered as such on a GPU alone.

        Where the host must know tokens to sample the next, or logits are observed, the step is run at once.
        """
        while self._flight and self._flight[0].over:
            self._flight.popleft()
        asked = self._asked(step)
        near = all(row.slot < MOST_SLOTS and drawn_on_device(row.opened.work.sampling) for row in asked.wanted)
        if not near or self.observe is not None or not asked.ran:
            for each in self._flight:
                each.settle()
            if not all(each.over for each in self._flight):
                raise StageError("a step before it has failed")
            return Done(self.forward(step))
        ran = asked.ran - self._rows.suspects
        self._rows.suspects |= ran
        logits = self._logits(asked, 0)
        tokens = draw(logits, [row.sampler() for row in asked.wanted])
        self._tokens.keep(np.array([row.slot for row in asked.wanted], dtype=np.int64), tokens)
        launch = Launch(self._rows, asked.wanted, tokens, ran)
        self._flight.append(launch)
        return launch

    def _asked(self, step: Step) -> Asked:
        """This stage's rows of the step. Raises ``StageError`` where one cannot be run as asked."""
        decoded, decodes = list[Row](), NO_DECODES
        if step.decodes and "D" in self.letters:
            decoded, decodes = self._rows.decodes(step.decodes)
        prefills = step.prefills if "P" in self.letters else ()
        filled = [self._rows.row(prefill.request) for prefill in prefills]
        chunks = [row.chunk(prefill) for row, prefill in zip(filled, prefills, strict=True)]
        wanted = decoded
        if filled:
            wanted = decoded + [row for row, chunk in zip(filled, chunks, strict=True) if chunk.wanted]
        ran = {*step.decodes, *(row.request for row in filled)} if decoded else {row.request for row in filled}
        return Asked(decodes, chunks, wanted, ran)

    def _logits(self, asked: Asked, group: int) -> Tensor:
        logits = None if self._graphs is None or asked.chunks else self._graphs.run(asked.decodes)
        if logits is None:
            return self._eager(asked.decodes, asked.chunks, group)
        return logits if self.observe is None else logits.clone()  # the next step writes into the same memory

    def _eager(self, decodes: Decodes, chunks: Sequence[Chunk], group: int) -> Tensor:
        batch = build_batch(decodes, chunks, self._block_rows, self.model.adapter.axes, self.kv.tensor.device)
        if self._rows.flying and len(decodes.ids):
            own, slots = len(decodes.ids), upload(decodes.slots, batch.ids.device)
            fed = torch.cat((self._tokens.fed(batch.ids[:own], slots), batch.ids[own:]))
            batch = replace(batch, ids=fed)
        image = None if self.image is None else self.image.tensor
        backend = self._backend
        if chunks and group and self.on_layers is not None:
            backend = LayerProgressAttention(self._backend, group, self.kv.shape.shape[0], self.on_layers)
        logits = self.model.forward(batch, self.kv.tensor, image, backend)
        if isinstance(backend, LayerProgressAttention):
            backend.finish()
        return logits

    @torch.inference_mode()
    def _finish(self, wanted: Sequence[Row], logits: Tensor) -> dict[str, Sampled]:
        if not wanted:
            return {}
        if all(row.fixed_sampler is not None for row in wanted):
            sampled = greedy(logits)
        else:
            sampled = sample(logits, [row.sampler() for row in wanted])
        if self.observe is not None:
            for row, scores in zip(wanted, logits, strict=True):
                self.observe(row.request, row.index, scores)
        self._rows.commit(wanted, sampled)
        return {row.request: one for row, one in zip(wanted, sampled, strict=True)}
