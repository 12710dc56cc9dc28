"""LanguageStage: runs prefill chunks and decodes of many requests as one ragged batch, the P and D of E-P-D."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import Grow, Open, Sampled, Step
from trinity.errors import StageError
from trinity.memory.block_memory import BlockMemory
from trinity.memory.devices import wait_for_stream
from trinity.stage_kinds import LANGUAGE_STAGES, roles_of
from trinity.stages.async_steps import MOST_SLOTS, DeviceTokens, FinishedStep, HostCopies, LaunchedStep, draw_next
from trinity.stages.attention.backends import AUTO, make_backend
from trinity.stages.attention.fp8 import find_spoilt, storage
from trinity.stages.attention.interface import AttentionBackend
from trinity.stages.attention.layer_progress import LayerProgressAttention, LayersCallback
from trinity.stages.base import FailedSample, PendingStep
from trinity.stages.batch import NO_DECODES, Chunk, Decodes, build_batch
from trinity.stages.block_tables import upload
from trinity.stages.gpu.cuda_graphs import GraphCache
from trinity.stages.gpu.decode_graphs import DecodeGraphs
from trinity.stages.gpu.prefill_graphs import PrefillGraphs
from trinity.stages.host_rules import RuledRows, apply_host_rules
from trinity.stages.models import LoadedModel
from trinity.stages.request_table import OpenRequest, OpenStates, RequestTable
from trinity.stages.sampler import Drawn, sample_greedy, sample_open_rows
from trinity.stages.sampler_rows import HOST, LOOKS_BACK, SamplerBatch
from trinity.stages.token_bans import HostTexts, lift_bans

LogitsObserver = Callable[[str, int, Tensor], None]


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of one step: ``sampled``, of these ``slots``, get a token; ``requests`` are the ids of all.

    ``sampled`` begins with the requests of ``decodes``; ``filled`` are those of ``chunks``.
    """

    decodes: Decodes
    chunks: list[Chunk]
    sampled: list[OpenRequest]
    slots: np.ndarray
    requests: AbstractSet[str]
    filled: Sequence[OpenRequest] = ()

    def open_states(self) -> OpenStates:
        """Begin with the states of all rows. Raises ``StageError`` if those of one are not where its row begins."""
        decoded = self.sampled[: len(self.decodes.ids)]
        ends = [(chunk.start, chunk.start + len(chunk.ids)) for chunk in self.chunks]
        return OpenStates(
            [*((row, end - 1, end) for row, end in zip(decoded, self.decodes.lengths.tolist(), strict=True))]
            + [(row, *span) for row, span in zip(self.filled, ends, strict=True)]
        )


class LanguageStage:
    """Runs the language part over paged KV blocks; implements ``stages.base.Stage``.

    - ``model``: the loaded language part.
    - ``kv``: KV cache, blocks [layers, 2, kv_heads, rows, head_dim].
    - ``image``: image cache, blocks [rows, width]; None if nothing is prefilled or the model is text only.
    - ``letters`` ("PD"): "P" runs prefill chunks, "D" decodes, "PD" both in one batch.
    - ``observe`` (None): called with (request, output index, logits [vocabulary]) of every sampled token.
    - ``backend`` (None): attention backend; None takes the best one for ``kv``.
    - ``graphs`` (None): CUDA graphs, for decodes and for steps with few prefill rows, if the backend can run in them
      and no layer counts rows.
    - ``states`` (None): blocks of states, for a model whose layers keep some: without CUDA graphs and launches ahead.

    State of a request changes only when a step succeeds, so that ``forward`` can be repeated after a failure.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: BlockMemory,
        image: BlockMemory | None,
        letters: str = LANGUAGE_STAGES,
        observe: LogitsObserver | None = None,
        backend: AttentionBackend | None = None,
        graphs: GraphCache | None = None,
        states: BlockMemory | None = None,
    ) -> None:
        self.model, self.kv, self.image, self.letters, self.observe = model, kv, image, letters, observe
        self._does = roles_of(letters)
        self.states, graphs = states, graphs if states is None and not model.counts_rows else None
        self._backend = backend or make_backend(AUTO, kv.shape.shape, kv.shape.dtype, kv.tensor.device)
        self._tokens, self._flight, self._copies = DeviceTokens(kv.tensor.device), deque[LaunchedStep](), HostCopies()
        if kv.tensor.is_cuda and states is None:
            self.launch = self.launch_on_device
        self._graphs: DecodeGraphs | None = None
        if graphs is not None and self._does.decodes and getattr(self._backend, "supports_graphs", False):
            self._graphs = DecodeGraphs(model, kv.tensor, self._backend, graphs, self._tokens)
        self._prefill_graphs: PrefillGraphs | None = None
        if graphs is not None and self._does.prefills and getattr(self._backend, "supports_chunk_slots", False):
            features = None if image is None else image.tensor
            self._prefill_graphs = PrefillGraphs(
                *(model, kv.tensor, self._backend, graphs, self._tokens, features, letters)
            )
        self.on_layers: LayersCallback | None = None
        self._block_rows = kv.shape.shape[3]
        self._requests = RequestTable(model, self._block_rows, 1 if image is None else image.shape.shape[0])

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile kernels and record CUDA graphs, so that the first requests do not wait. No request may be open."""
        ids, one = np.arange(self._block_rows), np.zeros(1, dtype=np.int64)
        if self._does.prefills:
            rope = ids if self.model.adapter.axes == 1 else np.tile(ids, (self.model.adapter.axes, 1))
            self._eager(NO_DECODES, [Chunk(ids, rope, 0, one)], 0)
        if self._does.decodes:  # perhaps by another backend
            self._eager(Decodes(one, one, one + 1, one[None], one), [], 0)
        if (warm_up := getattr(self._backend, "warm_up", None)) is not None:
            warm_up(self.kv.tensor, chunks=self._does.prefills, groups=self.model.adapter.whole_media)
        if self._graphs is not None and self._does.decodes:
            self._graphs.warm_up()
        if self._prefill_graphs is not None:
            self._prefill_graphs.warm_up()
        self.kv.tensor.zero_()
        if self.kv.tensor.is_cuda:
            # The lane runs on another stream. A wait for the whole device would break what another lane records.
            wait_for_stream(torch.cuda.current_stream(self.kv.tensor.device))

    def open(self, request: Open) -> None:
        """Take in a request. Raises ``StageError`` if it is open already or its media do not fit its prompt."""
        self._requests.open(request)

    def grow(self, more: Grow) -> None:
        """Append blocks to the block tables of open requests."""
        for request, blocks in more.blocks.items():
            self._requests.grow(request, blocks)

    def clean(self, failed: Collection[str]) -> None:
        """See ``CleanableStage.clean``."""
        try:
            for row in filter(None, map(self._requests.rows.get, failed)):
                self._zero_spoilt(row)
        finally:
            self._requests.suspects.clear()

    def close(self, request: str) -> None:
        """Drop a request. One whose step failed and was not cleaned up is cleaned up here."""
        row = self._requests.close(request)
        if row is not None:
            self._tokens.texts.release(row.slot)
            self._tokens.tables.release([row.slot])
        if row is not None and row.suspect:
            self._zero_spoilt(row)

    @torch.inference_mode()
    def _zero_spoilt(self, row: OpenRequest) -> None:
        """Zero the request's blocks that hold NaN, because a mask does not stop NaN."""
        table = torch.from_numpy(row.table).to(self.kv.tensor.device)
        storage(self.kv.tensor)[table[find_spoilt(self.kv.tensor, table)]] = 0

    def forward(self, step: Step) -> dict[str, Sampled]:
        """Run this stage's rows of ``step``; returns the sampled token of each decode and of each last chunk.

        Raises ``StageError`` if a row cannot run or its logits hold NaN.
        """
        rows = self._collect_rows(step)
        if not rows.requests:
            return {}
        # Earlier suspects stay: a chunk may succeed after one that left NaN.
        suspects = rows.requests - self._requests.suspects
        self._requests.suspects |= suspects
        states = None if self.states is None else rows.open_states()
        sampled = self._sample_rows(rows, self._logits(rows, step.group, states))
        if states is not None:
            states.commit()
        self._requests.suspects -= suspects
        return sampled

    def launch_on_device(self, step: Step) -> PendingStep:
        """Launch a step (``LaunchableStage.launch``, which this stage has only on a GPU).

        The step runs at once if logits are observed, if the host has rules for a row, or for requests whose tokens or
        texts the device cannot keep.
        """
        while self._flight and self._flight[0].is_over:
            self._flight.popleft()
        if self._graphs is not None and self.observe is None and step.decodes and not step.prefills:
            launch = self._launch_recorded(self._graphs, step.decodes)
            if launch is not None:
                return launch
        return self._launch_eagerly(step)

    @torch.inference_mode()
    def _launch_eagerly(self, step: Step) -> PendingStep:
        rows = self._collect_rows(step)
        near = len(self._requests.token) <= MOST_SLOTS or not (rows.slots >= MOST_SLOTS).any()
        near = near and not self._requests.needs_of(rows.slots) & HOST
        near = near and self._requests.make_room(rows.slots, self._tokens.texts)
        if not near or self.observe is not None or not rows.requests:
            for each in self._flight:
                each.settle()
            if not all(each.is_over for each in self._flight):
                raise StageError("an earlier step has failed, and this one needs its tokens")
            fed = self._requests.token[rows.slots]
            return FinishedStep(self.forward(step), partial(self._requests.take_back, rows.slots, fed))
        drawn = draw_next(self._logits(rows, 0), self._requests, rows.sampled, rows.slots, self._tokens)
        return self._begin(rows.sampled, rows.slots, [row.request for row in rows.sampled], drawn)

    def _launch_recorded(self, graphs: DecodeGraphs, requests: Sequence[str]) -> PendingStep | None:
        """Launch a step of decodes by a CUDA graph; None if none can run it."""
        selection = self._requests.select(requests)
        if selection.needs & HOST or not self._requests.make_room(selection.slots, self._tokens.texts):
            return None
        try:
            drawn = graphs.launch(self._requests, selection)
            if drawn is None:
                return None
            return self._begin(selection.rows, selection.slots, selection.names, drawn)
        except BaseException:
            graphs.leave()
            raise

    def _begin(self, rows: list[OpenRequest], slots: np.ndarray, names: Sequence[str], drawn: Drawn) -> LaunchedStep:
        """Begin a step that is queued. It makes nobody suspect: if it fails it is dropped and runs again at once."""
        launch = LaunchedStep(self._requests, rows, slots, names, drawn, self._copies)
        self._flight.append(launch)
        return launch

    def _collect_rows(self, step: Step) -> StepRows:
        """Collect this stage's rows of the step. Raises ``StageError`` if one cannot run."""
        table = self._requests
        decoded, decodes, slots = list[OpenRequest](), NO_DECODES, NO_DECODES.slots
        requests: AbstractSet[str] = frozenset()
        if step.decodes and self._does.decodes:
            selection = table.select(step.decodes)
            decoded, decodes = selection.rows, table.read_decodes(selection)
            slots, requests = selection.slots, selection.members
        if not step.prefills or not self._does.prefills:  # most steps
            return StepRows(decodes, [], decoded, slots, requests)
        filled = [table.find(prefill.request) for prefill in step.prefills]
        chunks = [row.chunk(prefill) for row, prefill in zip(filled, step.prefills, strict=True)]
        ended = [row for row, chunk in zip(filled, chunks, strict=True) if chunk.needs_logits]
        slots = np.concatenate((slots, table.slots_of(ended)))
        return StepRows(decodes, chunks, decoded + ended, slots, requests | {row.request for row in filled}, filled)

    def _logits(self, rows: StepRows, group: int, states: OpenStates | None = None) -> Tensor:
        logits = None
        if self._graphs is not None and len(rows.decodes.ids):
            self._graphs.leave()
        if not rows.chunks:
            logits = None if self._graphs is None else self._graphs.run(rows.decodes)
        elif self._prefill_graphs is not None and not (group and self.on_layers is not None):
            logits = self._prefill_graphs.run(rows.decodes, rows.chunks)
        if logits is None:
            return self._eager(rows.decodes, rows.chunks, group, states)
        return logits if self.observe is None else logits.clone()  # the next step writes into the same memory

    def _eager(self, decodes: Decodes, chunks: Sequence[Chunk], group: int, states: OpenStates | None = None) -> Tensor:
        kept = None if self.kv.tensor.device.type == "cpu" else self._tokens.tables
        batch = build_batch(decodes, chunks, self._block_rows, self.model.adapter.axes, self.kv.tensor.device, kept)
        if self._requests.steps_in_flight and len(decodes.ids):
            own, slots = len(decodes.ids), upload(decodes.slots, batch.ids.device)
            fed = torch.cat((self._tokens.fill_unknown(batch.ids[:own], slots), batch.ids[own:]))
            batch = replace(batch, ids=fed)
        image = None if self.image is None else self.image.tensor
        backend = self._backend
        if chunks and group and self.on_layers is not None:
            backend = LayerProgressAttention(self._backend, group, self.kv.shape.shape[0], self.on_layers)
        held = None
        if states is not None and self.states is not None:
            held = states.begin(self.model, self.states.tensor, batch.rows)
        logits = self.model.forward(batch, self.kv.tensor, image, backend, held)
        if isinstance(backend, LayerProgressAttention):
            backend.finish()
        return logits

    @torch.inference_mode()
    def _sample_rows(self, rows: StepRows, logits: Tensor) -> dict[str, Sampled]:
        if not rows.sampled:
            return {}
        table = self._requests
        failed: dict[int, FailedSample] = {}
        if table.needs_of(rows.slots):
            batch = table.batch_samplers(rows.sampled, rows.slots, logits.device)
            texts = [table.text(rows.sampled[at]) for at in batch.find(LOOKS_BACK).tolist()]
            ruled = self._rule(rows, logits, batch)
            texts_there = HostTexts(texts, logits.device) if texts else None
            batch = replace(batch, bans=lift_bans(batch.bans, ruled.complete), texts=texts_there)
            sampled, barred = sample_open_rows(ruled.logits, batch, ruled.forms)
            failed = {at: FailedSample(-1, why=why, refused=True) for at, why in barred.items()} | ruled.failed
        else:
            sampled = sample_greedy(logits)
        if self.observe is not None:
            indexes = table.indexes(rows.slots).tolist()
            for row, index, scores in zip(rows.sampled, indexes, logits, strict=True):
                self.observe(row.request, index, scores)
        table.commit(rows.sampled, sampled)
        for at, one in failed.items():
            sampled[at] = one
        return {row.request: one for row, one in zip(rows.sampled, sampled, strict=True)}

    def _rule(self, rows: StepRows, logits: Tensor, batch: SamplerBatch) -> RuledRows:
        """Apply the host's rules, to a copy if the logits are observed."""
        if not batch.some & HOST:
            return RuledRows(logits)
        asked = []
        for at in batch.find(HOST).tolist():
            row = rows.sampled[at]
            if row.rules is not None:
                outputs = self._requests.text(row)[len(row.rules.prompt) :].tolist()
                asked.append((at, row.rules, outputs))
        return apply_host_rules(logits if self.observe is None else logits.clone(), asked)
