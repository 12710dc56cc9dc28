"""PacedStage: waits for the time that a cost model gives, in place of computing. What it shows is emulation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trinity.core.messages import IMAGE, KV, Encode, Grow, Open, Prefill, Sampled, Step
from trinity.core.transfers import FEED_FORWARD
from trinity.costs.step_cost import CostModel
from trinity.emulation.content import (
    Words,
    features,
    folded,
    identities,
    mixed,
    prefix_words,
    probes,
    salts,
    terms,
    tokens_of,
)
from trinity.emulation.paced_model import Paced
from trinity.emulation.sleep import Pace
from trinity.errors import StageError
from trinity.memory.block_memory import BlockMemory

CHECKED_WORDS = 4  # of a row in a layer; more would take longer than the step


@dataclass(slots=True)
class PacedRow:
    """An open request: ``sums`` and ``words`` of every position held (paced_content), and its output so far."""

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
class PacedBatch:
    """The rows of one step."""

    encodes: Sequence[Encode]
    chunks: Sequence[tuple[Prefill, PacedRow]]
    decoded: Sequence[PacedRow]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Decodes, prefill tokens, visual tokens: what a cost model is asked for."""
        prefill = sum(asked.length for asked, _ in self.chunks)
        return len(self.decoded), prefill, sum(item.span.tokens for item in self.encodes)

    def seconds(self, cost: CostModel) -> float:
        """Of this step, whose decodes look back on their prompts and outputs, and chunks on what is before them."""
        context = _mean([row.length for row in self.decoded])
        prefilled = _mean([asked.start for asked, _ in self.chunks])
        return cost.at(*self.counts, context=context, prefilled=prefilled, prefills=len(self.chunks))


class PacedStage:
    """Serves ``letters``; implements ``stages.base.Stage``.

    Image blocks are [rows, words], KV blocks [layers, rows, words], uint64 (``Paced.image_shape``, ``kv_shape``).
    What a step needs is read and checked at its begin, what it makes is written at its end (``Reporting``: layer group
    by layer group). Raises ``StageError`` where a block does not hold what it should; a block that goes wrong later
    shows as a wrong token.
    """

    emulated = True

    def __init__(self, paced: Paced, letters: str, memory: Mapping[str, BlockMemory], pace: Pace) -> None:
        self.paced, self.letters, self.pace = paced, letters, pace
        self.remarks: dict[str, float] = {}
        self.on_layers: Callable[[int, int], None] | None = None
        self._spare_s = 0.0  # for writing one row
        self._rows: dict[str, PacedRow] = {}
        self._image = _words_of(memory[IMAGE]) if IMAGE in memory else None
        self._image_salts = salts(paced.words(IMAGE))
        if KV in memory:
            self._kv = _words_of(memory[KV])
            self._height = self._kv.shape[2]
        self._kv_salts = salts(paced.shape.layers, paced.words(KV))

    def open(self, request: Open) -> None:
        """Take a request in. Raises ``StageError`` where it is open already."""
        work = request.work
        if work.request in self._rows:
            raise StageError("opened twice without a close", work.request)
        ids = np.concatenate((identities(work), np.array(request.tokens, dtype=np.uint64)))
        sums, words = prefix_words(ids)
        room = np.zeros(work.max_tokens, dtype=np.uint64)  # for what comes out
        table = np.array(request.blocks, dtype=np.int64)
        row = PacedRow(request, table, np.concatenate((sums, room)), np.concatenate((words, room)))
        row.tokens.extend(request.tokens)
        self._rows[work.request] = row

    def grow(self, more: Grow) -> None:
        for request, blocks in more.blocks.items():
            if request in self._rows:
                row = self._rows[request]
                row.table = np.concatenate((row.table, np.array(blocks, dtype=np.int64)))

    def close(self, request: str) -> None:
        self._rows.pop(request, None)

    def forward(self, step: Step) -> dict[str, Sampled]:
        """Wait as long as the cost model says; read, check and write blocks. The requests' next tokens.

        Layers take equal shares of the step. Where progress is wanted, each group of them is written and told when the
        attention of its last layer has run, as in a real stage; else all at the end.
        """
        batch = PacedBatch(
            step.encodes,
            [(asked, self._row(asked.request, "P")) for asked in step.prefills],
            [self._row(name, "D") for name in step.decodes],
        )
        told = self.on_layers if step.group and batch.chunks else None
        seconds, layers = batch.seconds(self.paced.cost), self.paced.shape.layers
        sampled: dict[str, Sampled] = {}
        with self.pace.work(seconds) as work:
            self._check(batch)
            for first, end in groups(layers, step.group if told else layers):
                written = end - FEED_FORWARD if told else end
                rows, left = sum(batch.counts) * (end - first) / layers, seconds * (1 - written / layers)
                work.reach(left + rows * self._spare_s)
                begun = time.perf_counter()
                self._write_chunks(batch, slice(first, end))
                if end == layers:
                    sampled = self._write_rest(batch)
                self._spare_s = (self._spare_s + (time.perf_counter() - begun) / rows) / 2
                work.reach(left)
                if told is not None:
                    told(first, end)
            self.remarks = {"late us": round(work.reach() * 1e6, 1)}
        return sampled

    def _row(self, request: str, letter: str) -> PacedRow:
        if request not in self._rows:
            raise StageError("its rows were not opened", request, letter)
        return self._rows[request]

    # ------------------------------------------------------------ what a step makes

    def _encode(self, item: Encode) -> None:
        assert self._image is not None
        height = self._image.shape[1]
        rows = features(item.span.content, item.span.tokens)
        if len(rows) > height * len(item.blocks):
            raise StageError(f"{len(rows)} rows do not fit {len(item.blocks)} blocks of {height}", item.request, "E")
        block, inside = _places(np.array(item.blocks), np.arange(len(rows)), height)
        self._image[block, inside] = rows[:, None] ^ self._image_salts

    def _write_chunks(self, batch: PacedBatch, layers: slice) -> None:
        """These layers of the chunks' keys and values."""
        for asked, row in batch.chunks:
            start, end = asked.start, asked.start + asked.length
            block, inside = _places(row.table, np.arange(start, end), self._height)
            self._kv[block, layers, inside] = row.words[start:end, None, None] ^ self._kv_salts[layers]

    def _write_rest(self, batch: PacedBatch) -> dict[str, Sampled]:
        for item in batch.encodes:
            self._encode(item)
        self._feed(batch.decoded)
        return self._sample([*batch.decoded, *(row for asked, row in batch.chunks if asked.last)])

    def _feed(self, rows: Sequence[PacedRow]) -> None:
        """The last token of each row gets its keys and values."""
        if not rows:
            return
        at = np.array([row.length - 1 for row in rows])
        ids = np.array([row.tokens[-1] for row in rows], dtype=np.uint64)
        before = np.array([row.sums[row.length - 2] for row in rows], dtype=np.uint64)
        sums = before + terms(ids, at.astype(np.uint64))
        words = mixed(sums)
        for row, position, total, word in zip(rows, at, sums, words, strict=True):
            row.sums[position], row.words[position] = total, word
        block = np.array([row.table[position // self._height] for row, position in zip(rows, at, strict=True)])
        self._kv[block, :, at % self._height] = words[:, None, None] ^ self._kv_salts

    def _sample(self, rows: Sequence[PacedRow]) -> dict[str, Sampled]:
        """A token for each row, from what is in its blocks."""
        if not rows:
            return {}
        indices = np.array([len(row.tokens) for row in rows], dtype=np.uint64)
        looked = [probes(len(row.tokens), row.length, self._height) for row in rows]
        counts = [len(positions) for positions in looked]
        block = np.concatenate([row.table[at // self._height] for row, at in zip(rows, looked, strict=True)])
        layer = np.repeat(indices % np.uint64(len(self._kv_salts)), counts).astype(np.int64)
        inside = np.concatenate(looked) % self._height
        read = self._kv[block, layer, inside, 0] ^ self._kv_salts[layer, 0]
        tokens = tokens_of(folded(read, counts), indices, self.paced.shape.vocabulary).tolist()
        for row, token in zip(rows, tokens, strict=True):
            row.tokens.append(token)
        return {row.opened.work.request: Sampled(token) for row, token in zip(rows, tokens, strict=True)}

    # ------------------------------------------------------------ what a step needs

    def _check(self, batch: PacedBatch) -> None:
        for row in batch.decoded:
            if not row.checked:
                self._check_context(row, row.length - 1, "D")
            row.checked = True
        for asked, row in batch.chunks:
            self._check_media(row, asked.start, asked.start + asked.length)
            if asked.start == row.opened.cached > 0:
                self._check_context(row, asked.start, "P")

    def _check_context(self, row: PacedRow, length: int, letter: str) -> None:
        """The positions before ``length``, in every layer: all words, or four of each row where there are more."""
        block, inside = _places(row.table, np.arange(length), self._height)
        some = slice(0, None, -(-self._kv_salts.shape[1] // CHECKED_WORDS))
        wrong = self._kv[block, :, inside, some] != row.words[:length, None, None] ^ self._kv_salts[:, some]
        if wrong.any():
            at, layer = (int(each[0]) for each in wrong.any(axis=2).nonzero())
            raise StageError(f"{_where(KV, block[at], at)}, layer {layer}", row.opened.work.request, letter)

    def _check_media(self, row: PacedRow, start: int, end: int) -> None:
        for span, blocks in zip(row.opened.work.media, row.opened.images, strict=False):
            rows = np.arange(span.tokens)[max(0, start - span.offset) : max(0, end - span.offset)]
            if len(rows) == 0:
                continue
            if self._image is None or not blocks:
                raise StageError("its image features were not given", row.opened.work.request, "P")
            block, inside = _places(np.array(blocks), rows, self._image.shape[1])
            wanted = features(span.content, span.tokens)[rows, None] ^ self._image_salts
            wrong = (self._image[block, inside] != wanted).any(axis=1).nonzero()[0]
            if len(wrong):
                text = _where(IMAGE, block[wrong[0]], int(rows[wrong[0]]))
                raise StageError(text, row.opened.work.request, "P")


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def groups(layers: int, size: int) -> Iterator[tuple[int, int]]:
    """[first, end) of each group of so many layers; the last may be smaller."""
    for first in range(0, layers, size):
        yield first, min(first + size, layers)


def _words_of(memory: BlockMemory) -> Words:
    """A pool's memory as [blocks, *shape] words."""
    assert memory.raw is not None
    return memory.raw.view(np.uint64).reshape(memory.blocks, *memory.shape.shape)


def _places(table: np.ndarray, positions: np.ndarray, height: int) -> tuple[np.ndarray, np.ndarray]:
    """(block, row inside it) of each position."""
    return table[positions // height], positions % height


def _where(kind: str, block: int, position: int) -> str:
    return f"{kind} block {block} does not hold position {position} of this request (stale, misplaced or altered)"


def paced_stages(paced: Paced, roles: str, lanes: Sequence[str], memory: Mapping[str, BlockMemory]) -> list[PacedStage]:
    """One stage for each lane: what runs in one step is waited for together."""
    pace = Pace(paced.interference)
    split = ["E", roles.replace("E", "")] if len(lanes) > 1 else [roles]
    return [PacedStage(paced, letters, memory, pace) for letters in split]
