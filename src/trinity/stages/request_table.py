"""Open requests of a language stage, in persistent arrays, so that a decode batch is built by indexing slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trinity.core.messages import Open, Prefill, Sampled
from trinity.errors import StageError
from trinity.stages.batch import Chunk, Decodes
from trinity.stages.device_texts import DeviceTexts
from trinity.stages.models import LoadedModel, RotaryPositions
from trinity.stages.models.base import MEDIA_KINDS
from trinity.stages.sampler_rows import BANS, LOOKS_BACK, SAMPLER, SamplerBatch, describe_sampler, make_batch
from trinity.stages.token_bans import TokenBans, make_bans

_NO_IDS = np.empty(0, dtype=np.int64)
_NO_TOKEN = -1


@dataclass(slots=True)
class OpenRequest:
    """One open request (vLLM's cached request state).

    - ``opening``: the message that opened it.
    - ``slot``: its index in the arrays of ``RequestTable``.
    - ``ids``: prompt and, if its sampler looks back, the outputs that the host knows.
    - ``input_ids``: the prompt's ids with 0 in place of placeholders.
    - ``rope``: rotary positions.
    - ``table``: block table.
    - ``feature_at``, ``feature_rows``: positions of placeholders and the image-cache row of each.
    - ``groups``: see ``ChunkRows``; None if all rows are causal.
    - ``bans``: tokens that it may not take; None for no such rule.
    - ``suspect``: set on closing if its last step failed.
    """

    opening: Open
    request: str
    slot: int
    ids: np.ndarray
    input_ids: np.ndarray
    rope: RotaryPositions
    table: np.ndarray
    feature_at: np.ndarray
    feature_rows: np.ndarray
    groups: np.ndarray | None
    bans: TokenBans | None = None
    suspect: bool = False

    def set_token(self, token: int, place: int) -> None:
        """Store the token at this position of the text."""
        if place == len(self.ids):
            self.ids = np.concatenate((self.ids, np.zeros_like(self.ids)))
        self.ids[place] = token

    def chunk(self, asked: Prefill) -> Chunk:
        """Build the chunk's host arrays.

        Raises ``StageError`` if the chunk leaves the text, lacks features or cuts an image.
        """
        start, end = asked.start, asked.start + asked.length
        if not 0 <= start < end <= len(self.input_ids):
            raise StageError(
                f"prefill of [{start}, {end}) in a text of {len(self.input_ids)} tokens", self.request, "P"
            )
        low, high = np.searchsorted(self.feature_at, (start, end))
        if low < high and self.feature_rows[low:high].min() < 0:
            raise StageError(f"prefill of [{start}, {end}) needs features that were not given", self.request, "P")
        return Chunk(
            ids=self.input_ids[start:end],
            rope=self._rope(start, end),
            start=start,
            table=self.table,
            feature_rows=self.feature_rows[low:high],
            feature_at=self.feature_at[low:high] - start,
            groups=self._groups(start, end),
            needs_logits=asked.last,
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
class DecodeSelection:
    """Decode rows of one step: ``requests`` as the step names them, ``rows`` and ``slots`` in the batch's order.

    ``needs``: what any of them needs of the sampler.
    """

    requests: Sequence[str]
    members: frozenset[str]
    needs: int
    rows: list[OpenRequest]
    slots: np.ndarray


@dataclass(slots=True)
class RequestTable:
    """All open requests (vLLM's input batch). Arrays are indexed by slot.

    - ``block_rows``, ``image_rows``: rows of a KV block and of an image block.
    - ``rows``: open requests by id; ``free``: free slots.
    - ``tables``: block tables, each padded with its own last block.
    - ``samplers``: ``SAMPLER`` rows; ``prompt``: tokens of prompts; ``stored``: tokens of a text on the device.
    - ``suspects``: requests whose step has not succeeded yet.
    - ``selection``: decode rows of the last step, since the next one mostly decodes the same.
    """

    model: LoadedModel
    block_rows: int
    image_rows: int
    rows: dict[str, OpenRequest] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    decoded: np.ndarray = field(default_factory=lambda: np.empty((5, 0), dtype=np.int64))  # the five below, in rows
    token: np.ndarray = field(init=False)  # last token, the next input
    length: np.ndarray = field(init=False)  # KV positions written
    delta: np.ndarray = field(init=False)  # rotary position minus KV position
    capacity: np.ndarray = field(init=False)  # KV positions that its blocks can hold
    in_flight: np.ndarray = field(init=False)  # unread steps that a request has a row in
    steps_in_flight: int = 0  # unread steps
    tables: np.ndarray = field(default_factory=lambda: np.empty((0, 1), dtype=np.int64))
    samplers: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=SAMPLER))
    prompt: np.ndarray = field(default_factory=lambda: _NO_IDS)
    stored: np.ndarray = field(default_factory=lambda: _NO_IDS)
    suspects: set[str] = field(default_factory=set)
    selection: DecodeSelection | None = None

    def __post_init__(self) -> None:
        self.token, self.length, self.delta, self.capacity, self.in_flight = self.decoded

    def open(self, opening: Open) -> None:
        """Give the request a slot. Raises ``StageError`` if it is open already or its media do not fit its prompt."""
        work = opening.work
        if work.request in self.rows:
            raise StageError("opened twice: close the request first", work.request)
        table = np.array(opening.blocks, dtype=np.int64)
        row = self._row(opening, table)
        sampler = describe_sampler(work.sampling, row.bans)
        if not self.free:
            self._grow()
        slot = row.slot = self.free.pop()
        self._widen(len(table))
        self.tables[slot] = table[-1] if len(table) else 0
        self.tables[slot, : len(table)] = table
        self.capacity[slot] = len(table) * self.block_rows
        self.delta[slot] = row.rope.delta
        self.length[slot] = len(work.prompt) + len(opening.tokens) - 1
        self.prompt[slot], self.stored[slot] = len(work.prompt), 0
        self.samplers[slot] = sampler
        self.samplers["slot"][slot] = slot
        self.token[slot] = opening.tokens[-1] if opening.tokens and not opening.again else _NO_TOKEN
        self.rows[work.request] = row

    def grow(self, request: str, blocks: Sequence[int]) -> None:
        """Append blocks to the block table of a request, if it is open."""
        row = self.rows.get(request)
        if row is None:
            return
        held = len(row.table)
        row.table = np.concatenate((row.table, np.array(blocks, dtype=np.int64)))
        self._widen(len(row.table))
        self.tables[row.slot, held:] = row.table[-1]
        self.tables[row.slot, held : len(row.table)] = row.table[held:]
        self.capacity[row.slot] = len(row.table) * self.block_rows

    def close(self, request: str) -> OpenRequest | None:
        """Free the request's slot and return it; None if it is not open."""
        row = self.rows.pop(request, None)
        if row is not None:
            self.free.append(row.slot)
            row.suspect = request in self.suspects
            self.suspects.discard(request)
            self.selection = None
        return row

    def find(self, request: str) -> OpenRequest:
        """Return an open request. Raises ``StageError`` if it is not open."""
        if request not in self.rows:
            raise StageError("the request is not open on this stage", request)
        return self.rows[request]

    def select_decodes(self, requests: Sequence[str]) -> tuple[list[OpenRequest], Decodes]:
        """Return the requests in the batch's order (ascending length) and the host arrays of their decode rows.

        Raises ``StageError`` if one has no token yet or no room in its blocks.
        """
        selection = self.selection
        if selection is None or selection.requests != requests:
            selection = self.selection = self._select(requests)
        slots = selection.slots
        ids, lengths, delta, capacity, flown = self.decoded.take(slots, axis=1)  # one look-up in place of five
        lengths += 1  # still ascending: a step that succeeds makes each one longer
        unknown = ids == _NO_TOKEN
        if self.steps_in_flight:
            unread = flown > 0
            unknown &= ~unread
            ids[unread] = _NO_TOKEN
        if np.count_nonzero(unknown) or np.count_nonzero(lengths > capacity):
            raise _find_bad_decode(selection.rows, unknown, lengths, capacity)
        blocks = -(-int(lengths[-1]) // self.block_rows)
        delta += lengths
        delta -= 1
        return selection.rows, Decodes(ids, delta, lengths, self.tables[slots, :blocks], slots)

    def members(self) -> frozenset[str]:
        """Return the requests that were selected last."""
        return frozenset() if self.selection is None else self.selection.members

    def _select(self, requests: Sequence[str]) -> DecodeSelection:
        rows = [self.find(request) for request in requests]
        slots = _slots(rows)
        order = np.argsort(self.length[slots], kind="stable")
        needs = int(np.bitwise_or.reduce(self.samplers["needs"][slots]))
        return DecodeSelection(requests, frozenset(requests), needs, [rows[i] for i in order.tolist()], slots[order])

    def text(self, row: OpenRequest) -> np.ndarray:
        """Return the prompt and outputs of a request whose sampler looks back and that is in no unread step."""
        return row.ids[: self.length[row.slot] + 1]

    def indexes(self, slots: np.ndarray) -> np.ndarray:
        """Return the index of the next output token of each slot's request."""
        found: np.ndarray = self.length[slots] + 1 - self.prompt[slots]
        return found

    def batch_samplers(self, rows: Sequence[OpenRequest], slots: np.ndarray, device: torch.device) -> SamplerBatch:
        """Make the sampler batch of the next token of each of ``rows``, without texts."""
        given = self.samplers[slots]
        given["length"] = self.length[slots] + 1
        indexes = self.indexes(slots)
        banned = np.flatnonzero(given["needs"] & BANS).tolist()
        bans = [(at, found, int(indexes[at])) for at in banned if (found := rows[at].bans) is not None]
        return make_batch(given, indexes, bans, device)

    def commit(self, rows: Sequence[OpenRequest], sampled: Sequence[Sampled]) -> None:
        """Record one sampled token for each of ``rows``."""
        slots = self.slots_of(rows)
        self.length[slots] += 1
        self._set_tokens(rows, slots, self.length[slots], [one.token for one in sampled])

    def begin_step(self, slots: np.ndarray) -> None:
        """Count a launched step: each of its rows is longer by one token that the host does not know yet."""
        self.in_flight[slots] += 1
        self.length[slots] += 1
        self.steps_in_flight += 1

    def end_step(self, rows: Sequence[OpenRequest], slots: np.ndarray, sampled: Sequence[Sampled]) -> None:
        """Record the tokens of the oldest launched step of ``rows``."""
        flown = self.in_flight[slots] - 1
        self._set_tokens(rows, slots, self.length[slots] - flown, [one.token for one in sampled])
        self.in_flight[slots] = flown
        self.steps_in_flight -= 1

    def undo_step(self, slots: np.ndarray) -> None:
        """Forget the youngest launched step of these rows."""
        self.in_flight[slots] -= 1
        self.length[slots] -= 1
        self.stored[slots] = np.minimum(self.stored[slots], self.length[slots] + 1)
        self.steps_in_flight -= 1

    def take_back(self, slots: np.ndarray, fed: np.ndarray) -> None:
        """Forget the youngest tokens of these rows, which are recorded; ``fed``: the tokens before them."""
        self.length[slots] -= 1
        self.token[slots] = fed
        self.stored[slots] = np.minimum(self.stored[slots], self.length[slots] + 1)

    def needs_of(self, slots: np.ndarray) -> int:
        """Return what the sampler must do for any of these rows; 0 if their logits say all."""
        selection = self.selection
        if selection is not None and selection.slots is slots:
            return selection.needs
        return int(np.bitwise_or.reduce(self.samplers["needs"][slots]))

    def make_room(self, slots: np.ndarray, texts: DeviceTexts) -> bool:
        """Make room for the texts that the samplers of these rows look at; False if there is none."""
        if not self.needs_of(slots) & LOOKS_BACK:
            return True
        back = slots[self.samplers["needs"][slots] & LOOKS_BACK != 0]
        return texts.reserve(back, self.length[back] + 2)

    def slots_of(self, rows: Sequence[OpenRequest]) -> np.ndarray:
        """Return the slots of these rows."""
        selection = self.selection
        return selection.slots if selection is not None and selection.rows is rows else _slots(rows)

    def _set_tokens(
        self, rows: Sequence[OpenRequest], slots: np.ndarray, places: np.ndarray, tokens: Sequence[int]
    ) -> None:
        self.token[slots] = tokens
        if not self.needs_of(slots) & LOOKS_BACK:
            return
        for at in np.flatnonzero(self.samplers["needs"][slots] & LOOKS_BACK).tolist():
            rows[at].set_token(tokens[at], int(places[at]))

    def _row(self, opening: Open, table: np.ndarray) -> OpenRequest:
        work = opening.work
        given = np.array(work.prompt + opening.tokens, dtype=np.int64)
        at, item, kinds = self._placeholders(opening, given)
        fed = given.copy()
        fed[at] = 0
        prompt = given[: len(work.prompt)]
        groups = _number_runs(at, len(given)) if self.model.adapter.whole_media and len(at) else None
        positions = self.model.adapter.positions(self.model.language, prompt, work.media, kinds[: len(prompt)])
        return OpenRequest(
            opening=opening,
            request=work.request,
            slot=-1,
            ids=np.concatenate((given, np.zeros(work.max_tokens, dtype=np.int64))),
            input_ids=fed,
            rope=positions,
            table=table,
            feature_at=at,
            feature_rows=self._feature_rows(opening, item),
            groups=groups,
            bans=make_bans(work),
        )

    def _placeholders(self, opening: Open, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the positions that take a feature row, the media item of each, and the kind of every position."""
        wanted = np.isin(ids, list(self.model.media_token_ids))
        items, kinds = np.full(len(ids), -1), np.zeros(len(ids), dtype=np.int64)
        for number, span in enumerate(opening.work.media):
            inside = np.flatnonzero(wanted[span.offset : span.end]) + span.offset
            if len(inside) != span.tokens:
                problem = f"media item {number} has {span.tokens} feature rows for {len(inside)} placeholders"
                raise StageError(problem, opening.work.request, "P")
            items[inside], kinds[inside] = number, 1 + MEDIA_KINDS.index(span.kind)
        at = np.flatnonzero(items >= 0)
        return at, items[at], kinds

    def _feature_rows(self, opening: Open, items: np.ndarray) -> np.ndarray:
        """Return the image-cache row of each placeholder; -1 if the item's blocks are not here."""
        found = np.full(len(items), -1)
        for number, blocks in enumerate(opening.images):
            mine = np.flatnonzero(items == number)
            if blocks:
                place = np.arange(len(mine))
                found[mine] = np.array(blocks)[place // self.image_rows] * self.image_rows + place % self.image_rows
        return found

    def _grow(self) -> None:
        old = len(self.token)
        more = max(8, old)
        for name in ("decoded", "samplers", "prompt", "stored"):
            held = getattr(self, name)
            new = np.zeros((*held.shape[:-1], more), dtype=held.dtype)
            setattr(self, name, np.concatenate((held, new), axis=-1))
        self.__post_init__()
        self.tables = np.concatenate((self.tables, np.zeros((more, self.tables.shape[1]), dtype=np.int64)))
        self.free.extend(range(old + more - 1, old - 1, -1))

    def _widen(self, blocks: int) -> None:
        lacking = blocks - self.tables.shape[1]
        if lacking > 0:
            self.tables = np.pad(self.tables, ((0, 0), (0, max(lacking, self.tables.shape[1]))), "edge")


def _slots(rows: Sequence[OpenRequest]) -> np.ndarray:
    return np.fromiter((row.slot for row in rows), dtype=np.int64, count=len(rows))


def _find_bad_decode(
    rows: Sequence[OpenRequest], unknown: np.ndarray, lengths: np.ndarray, limits: np.ndarray
) -> StageError:
    for row, has_no_token, length, limit in zip(rows, unknown.tolist(), lengths.tolist(), limits.tolist(), strict=True):
        if has_no_token:
            return StageError("decoded before its prefill ended", row.request, "D")
        if length > limit:
            return StageError(f"position {length - 1} lies beyond its blocks ({limit} positions)", row.request, "D")
    raise AssertionError("no row is at fault")


def _number_runs(at: np.ndarray, length: int) -> np.ndarray:
    """Number the unbroken runs of placeholders; -1 for text."""
    groups = np.full(length, -1)
    groups[at] = np.cumsum(np.diff(at, prepend=-2) != 1) - 1
    return groups
