"""Emulated stages: wait for the time that a cost model predicts instead of computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trinity.core.messages import IMAGE, KV, Encode, Grow, Open, Prefill, Sampled, Step
from trinity.core.transfers import FEED_FORWARD
from trinity.costs.media_tokens import MediaRules
from trinity.costs.step_cost import CostModel
from trinity.emulation.content import (
    Words,
    choose_tokens,
    feature_words,
    fold_words,
    identity_words,
    mix_words,
    prefix_terms,
    prefix_words,
    probe_positions,
    salt_words,
)
from trinity.emulation.model import EmulatedModel
from trinity.emulation.sleep import EmulatedDevice
from trinity.errors import StageError
from trinity.memory.block_memory import BlockMemory
from trinity.stage_kinds import DECODE, ENCODE, PREFILL, stage_of

CHECKED_WORDS = 4  # of a row in a layer; checking more would take longer than the step


@dataclass(slots=True)
class EmulatedRow:
    """Open request of a stage: ``sums`` and ``words`` of every position (``content.prefix_words``), and its output."""

    opened: Open
    table: np.ndarray
    sums: Words
    words: Words
    tokens: list[int] = field(default_factory=list)
    checked: bool = False  # its whole context was read once

    @property
    def length(self) -> int:
        """Positions that hold keys and values once the last token is fed."""
        return len(self.opened.work.prompt) + len(self.tokens)


@dataclass(frozen=True, slots=True)
class EmulatedBatch:
    """Rows of one step."""

    encodes: Sequence[Encode]
    chunks: Sequence[tuple[Prefill, EmulatedRow]]
    decoded: Sequence[EmulatedRow]
    media: MediaRules

    @property
    def counts(self) -> tuple[int, int, int]:
        """(decodes, prefill tokens, visual tokens by what they cost), as a cost model takes them."""
        prefill_tokens = sum(prefill.length for prefill, _ in self.chunks)
        weigh = self.media.encode_work
        return len(self.decoded), prefill_tokens, sum(weigh(each.span.kind, each.span.tokens) for each in self.encodes)

    def seconds(self, cost: CostModel) -> float:
        """Predict the seconds of this step; decodes attend to prompt and output, chunks to what precedes them."""
        context = _mean([row.length for row in self.decoded])
        prefilled = _mean([asked.start for asked, _ in self.chunks])
        return cost.at(*self.counts, context=context, prefilled=prefilled, prefills=len(self.chunks))


class EmulatedStage:
    """Emulated stage of ``letters``; implements ``stages.base.Stage``.

    Image blocks are [rows, words], KV blocks [layers, rows, words], uint64 (``EmulatedModel.image_shape``,
    ``kv_shape``). A step's inputs are read and checked at its start, its results written at its end, or one group of
    layers after the other (``stages.base.LayerReporter``). Raises ``StageError`` where a block does not hold what it
    should; a block that goes wrong later shows as a wrong token.
    """

    emulated = True

    def __init__(
        self, model: EmulatedModel, letters: str, memory: Mapping[str, BlockMemory], device: EmulatedDevice
    ) -> None:
        self.model, self.letters, self.device = model, letters, device
        self.remarks: dict[str, float] = {}
        self.on_layers: Callable[[int, int], None] | None = None
        self._write_s = 0.0  # of one row, as measured
        self._rows: dict[str, EmulatedRow] = {}
        self._image = _words_of(memory[IMAGE]) if IMAGE in memory else None
        self._image_salts = salt_words(model.words(IMAGE))
        if KV in memory:
            self._kv = _words_of(memory[KV])
            self._height = self._kv.shape[2]
        self._kv_salts = salt_words(model.shape.layers, model.words(KV))

    def open(self, request: Open) -> None:
        """Open a request. Raises ``StageError`` where it is open already."""
        work = request.work
        if work.request in self._rows:
            raise StageError("opened twice without a close", work.request)
        ids = np.concatenate((identity_words(work), np.array(request.tokens, dtype=np.uint64)))
        sums, words = prefix_words(ids)
        room = np.zeros(work.max_tokens, dtype=np.uint64)  # for what comes out
        table = np.array(request.blocks, dtype=np.int64)
        row = EmulatedRow(request, table, np.concatenate((sums, room)), np.concatenate((words, room)))
        row.tokens.extend(request.tokens)
        self._rows[work.request] = row

    def grow(self, more: Grow) -> None:
        """Append blocks to requests' block tables."""
        for request, blocks in more.blocks.items():
            if request in self._rows:
                row = self._rows[request]
                row.table = np.concatenate((row.table, np.array(blocks, dtype=np.int64)))

    def close(self, request: str) -> None:
        """Forget a request."""
        self._rows.pop(request, None)

    def forward(self, step: Step) -> dict[str, Sampled]:
        """Wait as long as the cost model says; read, check and write blocks. Returns the requests' next tokens.

        Layers take equal shares of the step. Where progress is reported, each group of layers is written and reported
        when the attention of its last layer would have run, as in a real stage; otherwise all at the end.
        """
        batch = EmulatedBatch(
            step.encodes,
            [(asked, self._row(asked.request, PREFILL.letter)) for asked in step.prefills],
            [self._row(name, DECODE.letter) for name in step.decodes],
            self.model.shape.media,
        )
        report = self.on_layers if step.group and batch.chunks else None
        seconds, layers = batch.seconds(self.model.cost), self.model.shape.layers
        sampled: dict[str, Sampled] = {}
        with self.device.work(seconds) as work:
            self._check(batch)
            for first, end in iter_layer_groups(layers, step.group if report else layers):
                written = end - FEED_FORWARD if report else end
                rows, left = sum(batch.counts) * (end - first) / layers, seconds * (1 - written / layers)
                work.reach(left + rows * self._write_s)
                begun = time.perf_counter()
                self._write_chunks(batch, slice(first, end))
                if end == layers:
                    sampled = self._write_rest(batch)
                self._write_s = (self._write_s + (time.perf_counter() - begun) / rows) / 2
                work.reach(left)
                if report is not None:
                    report(first, end)
            self.remarks = {"late us": round(work.reach() * 1e6, 1)}
        return sampled

    def _row(self, request: str, letter: str) -> EmulatedRow:
        if request not in self._rows:
            raise StageError("its rows were not opened", request, letter)
        return self._rows[request]

    # ------------------------------------------------------------ results of a step

    def _encode(self, item: Encode) -> None:
        assert self._image is not None
        height = self._image.shape[1]
        rows = feature_words(item.span.content, item.span.tokens)
        if len(rows) > height * len(item.blocks):
            raise StageError(
                f"{len(rows)} rows do not fit {len(item.blocks)} blocks of {height}", item.request, ENCODE.letter
            )
        block, inside = _places(np.array(item.blocks), np.arange(len(rows)), height)
        self._image[block, inside] = rows[:, None] ^ self._image_salts

    def _write_chunks(self, batch: EmulatedBatch, layers: slice) -> None:
        """Write these layers of the chunks' keys and values."""
        for asked, row in batch.chunks:
            start, end = asked.start, asked.start + asked.length
            block, inside = _places(row.table, np.arange(start, end), self._height)
            self._kv[block, layers, inside] = row.words[start:end, None, None] ^ self._kv_salts[layers]

    def _write_rest(self, batch: EmulatedBatch) -> dict[str, Sampled]:
        for item in batch.encodes:
            self._encode(item)
        self._write_last_tokens(batch.decoded)
        return self._sample([*batch.decoded, *(row for asked, row in batch.chunks if asked.last)])

    def _write_last_tokens(self, rows: Sequence[EmulatedRow]) -> None:
        """Write the keys and values of each row's last token."""
        if not rows:
            return
        at = np.array([row.length - 1 for row in rows])
        ids = np.array([row.tokens[-1] for row in rows], dtype=np.uint64)
        before = np.array([row.sums[row.length - 2] for row in rows], dtype=np.uint64)
        sums = before + prefix_terms(ids, at.astype(np.uint64))
        words = mix_words(sums)
        for row, position, total, word in zip(rows, at, sums, words, strict=True):
            row.sums[position], row.words[position] = total, word
        block = np.array([row.table[position // self._height] for row, position in zip(rows, at, strict=True)])
        self._kv[block, :, at % self._height] = words[:, None, None] ^ self._kv_salts

    def _sample(self, rows: Sequence[EmulatedRow]) -> dict[str, Sampled]:
        """Sample a token for each row from the contents of its blocks."""
        if not rows:
            return {}
        indices = np.array([len(row.tokens) for row in rows], dtype=np.uint64)
        looked = [probe_positions(len(row.tokens), row.length, self._height) for row in rows]
        counts = [len(positions) for positions in looked]
        block = np.concatenate([row.table[at // self._height] for row, at in zip(rows, looked, strict=True)])
        layer = np.repeat(indices % np.uint64(len(self._kv_salts)), counts).astype(np.int64)
        inside = np.concatenate(looked) % self._height
        read = self._kv[block, layer, inside, 0] ^ self._kv_salts[layer, 0]
        tokens = choose_tokens(fold_words(read, counts), indices, self.model.shape.vocabulary).tolist()
        for row, token in zip(rows, tokens, strict=True):
            row.tokens.append(token)
        return {row.opened.work.request: Sampled(token) for row, token in zip(rows, tokens, strict=True)}

    # ------------------------------------------------------------ inputs of a step

    def _check(self, batch: EmulatedBatch) -> None:
        for row in batch.decoded:
            if not row.checked:
                self._check_context(row, row.length - 1, DECODE.letter)
            row.checked = True
        for asked, row in batch.chunks:
            self._check_media(row, asked.start, asked.start + asked.length)
            if asked.start == row.opened.cached > 0:
                self._check_context(row, asked.start, PREFILL.letter)

    def _check_context(self, row: EmulatedRow, length: int, letter: str) -> None:
        """Check the positions before ``length`` in every layer: all words, or about four of each row."""
        block, inside = _places(row.table, np.arange(length), self._height)
        some = slice(0, None, -(-self._kv_salts.shape[1] // CHECKED_WORDS))
        wrong = self._kv[block, :, inside, some] != row.words[:length, None, None] ^ self._kv_salts[:, some]
        if wrong.any():
            at, layer = (int(each[0]) for each in wrong.any(axis=2).nonzero())
            raise StageError(f"{_misplaced(KV, block[at], at)}, layer {layer}", row.opened.work.request, letter)

    def _check_media(self, row: EmulatedRow, start: int, end: int) -> None:
        for span, blocks in zip(row.opened.work.media, row.opened.images, strict=False):
            rows = np.arange(span.tokens)[max(0, start - span.offset) : max(0, end - span.offset)]
            if len(rows) == 0:
                continue
            if self._image is None or not blocks:
                raise StageError("its image features were not given", row.opened.work.request, PREFILL.letter)
            block, inside = _places(np.array(blocks), rows, self._image.shape[1])
            wanted = feature_words(span.content, span.tokens)[rows, None] ^ self._image_salts
            wrong = (self._image[block, inside] != wanted).any(axis=1).nonzero()[0]
            if len(wrong):
                text = _misplaced(IMAGE, block[wrong[0]], int(rows[wrong[0]]))
                raise StageError(text, row.opened.work.request, PREFILL.letter)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def iter_layer_groups(layers: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield [first, end) of each group of ``size`` layers; the last may be smaller."""
    for first in range(0, layers, size):
        yield first, min(first + size, layers)


def _words_of(memory: BlockMemory) -> Words:
    """View a pool's memory as [blocks, *shape] words."""
    assert memory.raw is not None
    return memory.raw.view(np.uint64).reshape(memory.blocks, *memory.shape.shape)


def _places(table: np.ndarray, positions: np.ndarray, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Map positions to (block, row inside it)."""
    return table[positions // height], positions % height


def _misplaced(kind: str, block: int, position: int) -> str:
    return f"{kind} block {block} does not hold position {position} of this request (stale, misplaced or altered)"


def build_emulated_stages(
    model: EmulatedModel, roles: str, lanes: Sequence[str], memory: Mapping[str, BlockMemory]
) -> list[EmulatedStage]:
    """Build one stage for each lane; the stages of an instance share an ``EmulatedDevice``."""
    device = EmulatedDevice(model.interference)
    parts = ("vision", "language") if len(lanes) > 1 else ()
    split = ["".join(each for each in roles if stage_of(each).part == part) for part in parts] or [roles]
    return [EmulatedStage(model, letters, memory, device) for letters in split]
