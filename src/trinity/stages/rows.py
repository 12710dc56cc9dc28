"""Open requests of a language stage: their rows in persistent arrays, so that a decode batch is built by indexing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trinity.core.messages import Open, Prefill, Sampled
from trinity.errors import StageError
from trinity.stages.batch import Chunk, Decodes
from trinity.stages.models import LoadedModel, Positions
from trinity.stages.models.base import MEDIA
from trinity.stages.sampling import SamplerRow

_NO_IDS = np.empty(0, dtype=np.int64)
_NO_TOKEN = -1


@dataclass(slots=True)
class Row:
    """One open request. ``ids`` holds prompt and outputs, ``held`` of them, where its sampler asks for them (else the
    prompt alone); ``fed`` has 0 in place of placeholders. ``suspect``, once closed: its last step failed."""

    opened: Open
    request: str
    slot: int
    ids: np.ndarray
    held: int
    fed: np.ndarray
    rope: Positions
    table: np.ndarray
    feature_at: np.ndarray
    feature_rows: np.ndarray
    groups: np.ndarray | None
    fixed_sampler: SamplerRow | None
    suspect: bool = False

    @property
    def index(self) -> int:
        """Index of the next output."""
        return self.held - len(self.opened.work.prompt)

    def sampler(self) -> SamplerRow:
        if self.fixed_sampler is not None:
            return self.fixed_sampler
        return SamplerRow(self.opened.work.sampling, self.index, self.ids[: self.held])

    def append(self, token: int) -> None:
        self.put(token, self.held)
        self.held += 1

    def put(self, token: int, place: int) -> None:
        """Keep the token at this place of the text, where the sampler asks for what is there."""
        if self.fixed_sampler is None:
            if place == len(self.ids):
                self.ids = np.concatenate((self.ids, np.zeros_like(self.ids)))
            self.ids[place] = token

    def chunk(self, asked: Prefill) -> Chunk:
        """The chunk's host arrays. Raises ``StageError`` where it leaves the text, lacks features or cuts an image."""
        start, end = asked.start, asked.start + asked.length
        if not 0 <= start < end <= len(self.fed):
            raise StageError(f"prefill of [{start}, {end}) in a text of {len(self.fed)} tokens", self.request, "P")
        low, high = np.searchsorted(self.feature_at, (start, end))
        if low < high and self.feature_rows[low:high].min() < 0:
            raise StageError(f"prefill of [{start}, {end}) needs features that were not given", self.request, "P")
        return Chunk(
            ids=self.fed[start:end],
            rope=self._rope(start, end),
            start=start,
            table=self.table,
            feature_rows=self.feature_rows[low:high],
            feature_at=self.feature_at[low:high] - start,
            groups=self._groups(start, end),
            wanted=asked.last,
        )

    def _rope(self, start: int, end: int) -> np.ndarray:
        if self.rope.prompt is None:
            return np.arange(start, end) + self.rope.delta
        length = self.rope.prompt.shape[1]
        after = np.arange(max(start, length), max(end, length)) + self.rope.delta
        return np.concatenate((self.rope.prompt[:, start:end], np.broadcast_to(after, (3, len(after)))), axis=1)

    def _groups(self, start: int, end: int) -> np.ndarray | None:
        if self.groups is None or (self.groups[start:end] < 0).all():
            return None
        for cut in (start, end):
            if 0 < cut < len(self.groups) and self.groups[cut] == self.groups[cut - 1] >= 0:
                raise StageError(f"a prefill chunk cuts the media item around position {cut}", self.request, "P")
        return self.groups[start:end]


@dataclass(frozen=True, slots=True)
class Picked:
    """The decode rows of a step: as they were ``asked`` for, and in the order of the batch."""

    asked: Sequence[str]
    rows: list[Row]
    slots: np.ndarray


@dataclass(slots=True)
class RowTable:
    """Rows of all open requests. Arrays are indexed by slot; ``tables`` is padded with each row's own last block.

    ``suspects``: whose step has not succeeded yet. ``picked``: of the last step; the next one mostly decodes the same.
    """

    model: LoadedModel
    block_rows: int
    image_rows: int
    rows: dict[str, Row] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    token: np.ndarray = field(default_factory=lambda: _NO_IDS)  # last token, not yet fed
    length: np.ndarray = field(default_factory=lambda: _NO_IDS)  # KV positions held
    delta: np.ndarray = field(default_factory=lambda: _NO_IDS)
    flown: np.ndarray = field(default_factory=lambda: _NO_IDS)  # steps that it is in and nobody has read
    flying: int = 0  # such steps
    limit: np.ndarray = field(default_factory=lambda: _NO_IDS)  # KV positions that the blocks can hold
    tables: np.ndarray = field(default_factory=lambda: np.empty((0, 1), dtype=np.int64))
    suspects: set[str] = field(default_factory=set)
    picked: Picked | None = None

    def open(self, opened: Open) -> None:
        """Give the request a slot. Raises ``StageError`` where it is open already or its media do not add up."""
        work = opened.work
        if work.request in self.rows:
            raise StageError("opened twice without a close", work.request)
        table = np.array(opened.blocks, dtype=np.int64)
        row = self._row(opened, table)
        if not self.free:
            self._grow()
        slot = row.slot = self.free.pop()
        self._widen(len(table))
        self.tables[slot] = table[-1] if len(table) else 0
        self.tables[slot, : len(table)] = table
        self.limit[slot] = len(table) * self.block_rows
        self.delta[slot] = row.rope.delta
        self.length[slot] = row.held - 1
        self.token[slot] = opened.tokens[-1] if opened.tokens and not opened.again else _NO_TOKEN
        self.rows[work.request] = row

    def grow(self, request: str, blocks: Sequence[int]) -> None:
        """Append blocks to the table of a request, if it is open."""
        row = self.rows.get(request)
        if row is None:
            return
        held = len(row.table)
        row.table = np.concatenate((row.table, np.array(blocks, dtype=np.int64)))
        self._widen(len(row.table))
        self.tables[row.slot, held:] = row.table[-1]
        self.tables[row.slot, held : len(row.table)] = row.table[held:]
        self.limit[row.slot] = len(row.table) * self.block_rows

    def close(self, request: str) -> Row | None:
        row = self.rows.pop(request, None)
        if row is not None:
            self.free.append(row.slot)
            row.suspect = request in self.suspects
            self.suspects.discard(request)
            self.picked = None
        return row

    def row(self, request: str) -> Row:
        if request not in self.rows:
            raise StageError("not open on this stage", request)
        return self.rows[request]

    def decodes(self, requests: Sequence[str]) -> tuple[list[Row], Decodes]:
        """Their rows in the order of the batch, and the host arrays of these."""
        picked = self.picked
        if picked is None or picked.asked != requests:
            picked = self.picked = self._pick(requests)
        slots = picked.slots
        lengths = self.length[slots] + 1  # still ascending: each row of a step that succeeded is one longer
        ids = self.token[slots]
        if self.flying:
            ids = np.where(self.flown[slots] > 0, _NO_TOKEN, ids)
        unknown = (ids == _NO_TOKEN) & (self.flown[slots] == 0)
        if (unknown | (lengths > self.limit[slots])).any():
            raise _bad_decode(picked.rows, unknown, lengths, self.limit[slots])
        blocks = -(-int(lengths[-1]) // self.block_rows)
        rope = lengths - 1 + self.delta[slots]
        return picked.rows, Decodes(ids, rope, lengths, self.tables[slots, :blocks], slots)

    def _pick(self, requests: Sequence[str]) -> Picked:
        rows = [self.row(request) for request in requests]
        slots = _slots(rows)
        order = np.argsort(self.length[slots], kind="stable")
        return Picked(requests, [rows[i] for i in order.tolist()], slots[order])

    def commit(self, rows: Sequence[Row], sampled: Sequence[Sampled]) -> None:
        """Take over one sampled token for each of ``rows``."""
        picked = self.picked
        slots = picked.slots if picked is not None and picked.rows is rows else _slots(rows)
        tokens = [one.token for one in sampled]
        self.token[slots] = tokens
        self.length[slots] += 1
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)

    def begin(self, rows: Sequence[Row]) -> None:
        """The next token of ``rows`` is on its way: they are longer by it, and nobody here knows it yet."""
        slots = _slots(rows)
        self.flown[slots] += 1
        self.length[slots] += 1
        self.flying += 1
        for row in rows:
            row.held += 1

    def end(self, rows: Sequence[Row], tokens: Sequence[int]) -> None:
        """It is known. Of several steps that were begun the oldest ends first."""
        slots = _slots(rows)
        self.token[slots] = tokens
        places = [row.held - int(flown) for row, flown in zip(rows, self.flown[slots], strict=True)]
        for row, token, place in zip(rows, tokens, places, strict=True):
            row.put(token, place)
        self.flown[slots] -= 1
        self.flying -= 1

    def undo(self, rows: Sequence[Row]) -> None:
        """It was never begun. Of several steps the youngest is undone first."""
        slots = _slots(rows)
        self.flown[slots] -= 1
        self.length[slots] -= 1
        self.flying -= 1
        for row in rows:
            row.held -= 1

    def _row(self, opened: Open, table: np.ndarray) -> Row:
        work = opened.work
        given = np.array(work.prompt + opened.tokens, dtype=np.int64)
        at, item, kinds = self._placeholders(opened, given)
        fed = given.copy()
        fed[at] = 0
        prompt = given[: len(work.prompt)]
        groups = _runs(at, len(given)) if self.model.adapter.whole_media and len(at) else None
        positions = self.model.adapter.positions(self.model.language, prompt, work.media, kinds[: len(prompt)])
        plain = work.sampling.greedy and work.sampling.repetition_penalty == 1.0 and work.sampling.logprobs is None
        return Row(
            opened=opened,
            request=work.request,
            slot=-1,
            ids=np.concatenate((given, np.zeros(work.max_tokens, dtype=np.int64))),
            held=len(given),
            fed=fed,
            rope=positions,
            table=table,
            feature_at=at,
            feature_rows=self._feature_rows(opened, item),
            groups=groups,
            fixed_sampler=SamplerRow(work.sampling, 0, _NO_IDS) if plain else None,
        )

    def _placeholders(self, opened: Open, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions that take a feature row, the media item of each, and the kind of every position."""
        wanted = np.isin(ids, list(self.model.media_token_ids))
        items, kinds = np.full(len(ids), -1), np.zeros(len(ids), dtype=np.int64)
        for number, span in enumerate(opened.work.media):
            inside = np.flatnonzero(wanted[span.offset : span.end]) + span.offset
            if len(inside) != span.tokens:
                problem = f"media item {number} has {span.tokens} feature rows for {len(inside)} placeholders"
                raise StageError(problem, opened.work.request, "P")
            items[inside], kinds[inside] = number, 1 + MEDIA.index(span.kind)
        at = np.flatnonzero(items >= 0)
        return at, items[at], kinds

    def _feature_rows(self, opened: Open, items: np.ndarray) -> np.ndarray:
        """The image-cache row of each placeholder; -1 where the item's blocks are not here."""
        found = np.full(len(items), -1)
        for number, blocks in enumerate(opened.images):
            mine = np.flatnonzero(items == number)
            if blocks:
                place = np.arange(len(mine))
                found[mine] = np.array(blocks)[place // self.image_rows] * self.image_rows + place % self.image_rows
        return found

    def _grow(self) -> None:
        old = len(self.token)
        more = max(8, old)
        for name in ("token", "length", "delta", "limit", "flown"):
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(more, dtype=np.int64))))
        self.tables = np.concatenate((self.tables, np.zeros((more, self.tables.shape[1]), dtype=np.int64)))
        self.free.extend(range(old + more - 1, old - 1, -1))

    def _widen(self, blocks: int) -> None:
        lacking = blocks - self.tables.shape[1]
        if lacking > 0:
            self.tables = np.pad(self.tables, ((0, 0), (0, max(lacking, self.tables.shape[1]))), "edge")


def _slots(rows: Sequence[Row]) -> np.ndarray:
    return np.fromiter((row.slot for row in rows), dtype=np.int64, count=len(rows))


def _bad_decode(rows: Sequence[Row], unknown: np.ndarray, lengths: np.ndarray, limits: np.ndarray) -> StageError:
    for row, lacks, length, limit in zip(rows, unknown.tolist(), lengths.tolist(), limits.tolist(), strict=True):
        if lacks:
            return StageError("decoded before its prefill ended", row.request, "D")
        if length > limit:
            return StageError(f"position {length - 1} lies beyond its blocks ({limit} positions)", row.request, "D")
    raise AssertionError("no row is at fault")


def _runs(at: np.ndarray, length: int) -> np.ndarray:
    """-1 for text, else the number of the unbroken run of placeholders."""
    groups = np.full(length, -1)
    groups[at] = np.cumsum(np.diff(at, prepend=-2) != 1) - 1
    return groups
