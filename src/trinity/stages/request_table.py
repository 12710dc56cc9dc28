"""Open requests of a language stage, in persistent arrays, so that a decode batch is built by indexing slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import Open, Prefill, Sampled
from trinity.errors import StageError
from trinity.preprocess.media.media_kinds import kind_names
from trinity.stage_kinds import DECODE, PREFILL
from trinity.stages.attention.interface import PagedRows
from trinity.stages.batch import Chunk, Decodes
from trinity.stages.block_tables import BlockTables
from trinity.stages.host_rules import HostRules, make_host_rules
from trinity.stages.models import LoadedModel, ModelAdapter, RotaryPositions
from trinity.stages.models.held_rows import PromptTurn
from trinity.stages.models.states import StateStep
from trinity.stages.sampler_rows import (
    BANS,
    HOST,
    LOOKS_BACK,
    SAMPLER,
    SamplerBatch,
    SamplerKind,
    describe_sampler,
    list_asked,
    make_batch,
)
from trinity.stages.token_bans import DeviceTexts, TokenBans, make_bans

_NO_IDS = np.empty(0, dtype=np.int64)
_NO_TOKEN = -1
_TOKEN, _LENGTH, _DELTA, _CAPACITY, _IN_FLIGHT, _STORED = range(6)
_MOST_TOLD = 64  # steps whose tokens a selection keeps before requests that look back get them


@dataclass(slots=True)
class OpenRequest:
    """One open request (vLLM's cached request state).

    - ``opening``: the message that opened it.
    - ``slot``: its index in the arrays of ``RequestTable``.
    - ``ids``: prompt and, if its sampler looks back or the host has rules for it, the outputs that the host knows.
    - ``input_ids``: the prompt's ids with 0 in place of placeholders.
    - ``rope``: rotary positions.
    - ``table``: block table, int32.
    - ``feature_at``, ``feature_rows``: positions of placeholders and the image-cache row of each.
    - ``groups``: see ``ChunkRows``; None if all rows are causal.
    - ``bans``: tokens that it may not take; None for no such rule.
    - ``rules``: what the host does to its logits; None for nothing.
    - ``state``: block of its states; -1 where the model's layers keep none. ``state_at``: positions that they cover,
      but for the last ``state_held``, whose rows are in the block (``held_rows.py``).
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
    rules: HostRules | None = None
    state: int = -1
    state_at: int = 0
    state_held: int = 0
    suspect: bool = False

    def set_tokens(self, tokens: Sequence[int], place: int) -> None:
        """Store tokens from this position of the text on."""
        end = place + len(tokens)
        while end > len(self.ids):
            self.ids = np.concatenate((self.ids, np.zeros_like(self.ids)))
        self.ids[place:end] = tokens

    def chunk(self, asked: Prefill) -> Chunk:
        """Build the chunk's host arrays.

        Raises ``StageError`` if the chunk leaves the text, lacks features or cuts an image.
        """
        start, end = asked.start, asked.start + asked.length
        if not 0 <= start < end <= len(self.input_ids):
            raise StageError(
                f"prefill of [{start}, {end}) in a text of {len(self.input_ids)} tokens", self.request, PREFILL.letter
            )
        low, high = np.searchsorted(self.feature_at, (start, end))
        if low < high and self.feature_rows[low:high].min() < 0:
            raise StageError(
                f"prefill of [{start}, {end}) needs features that were not given", self.request, PREFILL.letter
            )
        return Chunk(
            ids=self.input_ids[start:end],
            rope=self._rope(start, end),
            start=start,
            table=self.table,
            feature_rows=self.feature_rows[low:high],
            feature_at=self.feature_at[low:high] - start,
            groups=self._groups(start, end),
            needs_logits=asked.last,
            written=min(asked.length, max(0, end - len(self.opening.work.prompt))),
            slot=self.slot,
        )

    def _rope(self, start: int, end: int) -> np.ndarray:
        if self.rope.prompt is None:
            return np.arange(start, end) + self.rope.delta
        axes, length = self.rope.prompt.shape
        after = np.arange(max(start, length), max(end, length)) + self.rope.delta
        found = np.concatenate((self.rope.prompt[:, start:end], np.broadcast_to(after, (axes, len(after)))), axis=1)
        return found[0] if axes == 1 else found

    def _groups(self, start: int, end: int) -> np.ndarray | None:
        if self.groups is None or (self.groups[start:end] < 0).all():
            return None
        for cut in (start, end):
            if 0 < cut < len(self.groups) and self.groups[cut] == self.groups[cut - 1] >= 0:
                raise StageError(
                    f"a prefill chunk cuts the media item around position {cut}", self.request, PREFILL.letter
                )
        return self.groups[start:end]


@dataclass(slots=True)
class DecodeSelection:
    """Decode rows of one step, and of those behind it that decode the same requests.

    - ``requests``: as the step names them. ``names``, ``rows``, ``slots``: in the batch's order (ascending length).
    - ``needs``, ``kind``: what they need of the sampler. ``back``: numbers of the rows that look back. ``asked``: of
      those that ask for log-probabilities, and how many each asks for.
    - ``begun``, ``told``: steps that were launched, and tokens [n] of steps that were read, which the table's arrays do
      not hold yet (``RequestTable.decoded``).
    - ``ended``: steps that were read, likewise.
    - ``grown``: slots that have got blocks since a recorded step heard of their tables.
    - ``tables``: block tables of its rows; None if they must be joined again.
    """

    requests: Sequence[str]
    members: frozenset[str]
    names: tuple[str, ...]
    rows: list[OpenRequest]
    slots: np.ndarray
    needs: int
    kind: SamplerKind
    back: np.ndarray
    asked: Sequence[tuple[int, int]]
    begun: int = 0
    ended: int = 0
    told: list[np.ndarray] = field(default_factory=list)
    grown: list[int] = field(default_factory=list)
    tables: BlockTables | None = None


def slots_in(rows: Sequence[OpenRequest]) -> np.ndarray:
    """Return the slots of rows."""
    return np.fromiter((row.slot for row in rows), dtype=np.int64, count=len(rows))


def find_bad_decode(
    rows: Sequence[OpenRequest], unknown: np.ndarray, lengths: np.ndarray, limits: np.ndarray
) -> StageError:
    """Return the error of the first row that cannot decode: it has no token yet, or is longer than its blocks."""
    for row, has_no_token, length, limit in zip(rows, unknown.tolist(), lengths.tolist(), limits.tolist(), strict=True):
        if has_no_token:
            return StageError("decoded before its prefill ended", row.request, DECODE.letter)
        if length > limit:
            return StageError(
                f"position {length - 1} lies beyond its blocks ({limit} positions)", row.request, DECODE.letter
            )
    raise AssertionError("no row is at fault")


class OpenStates:
    """States of the rows of one step: request, first position and end of each, decode rows first, then chunks.

    Raises ``StageError`` if the states of one are not those of the positions before its row: keys and values may be
    written twice, but a state that took in a token twice, or missed one, would give wrong tokens.
    """

    def __init__(self, rows: Sequence[tuple[OpenRequest, int, int]]) -> None:
        self._rows = rows
        self._step: StateStep | None = None
        for row, start, _ in rows:
            if row.state < 0:
                raise StageError("the request was opened without a block for its states", row.request)
            if start and start != row.state_at:
                problem = f"its states cover {row.state_at} positions, and its next row begins at {start}"
                raise StageError(problem, row.request)

    def begin(self, model: LoadedModel, memory: Tensor, rows: PagedRows) -> StateStep:
        """Begin to run a batch of these rows."""
        assert model.states is not None
        blocks = np.array([row.state for row, _, _ in self._rows], dtype=np.int64)
        turns = [_turn_of(row, start) for row, start, _ in self._rows[rows.decodes :]]
        self._step = StateStep(model.states, memory, blocks, rows, turns)
        return self._step

    def commit(self) -> None:
        """Write the new states into their blocks: the step has succeeded."""
        assert self._step is not None
        self._step.commit()
        for row, start, end in self._rows:
            row.state_held = _turn_of(row, start).hold(start, end - start)
            row.state_at = end


def _turn_of(row: OpenRequest, start: int) -> PromptTurn:
    return PromptTurn(len(row.opening.work.prompt), row.state_held if start else 0)


@dataclass(slots=True)
class RequestTable:
    """All open requests (vLLM's input batch). Arrays are indexed by slot.

    - ``block_rows``, ``image_rows``: rows of a KV block and of an image block.
    - ``rows``: open requests by id; ``free``: free slots.
    - ``samplers``: ``SAMPLER`` rows; ``prompt``: tokens of prompts.
    - ``suspects``: requests whose step has not succeeded yet.
    - ``selection``: decode rows of the last step, since the next one mostly decodes the same.
    """

    model: LoadedModel
    block_rows: int
    image_rows: int
    rows: dict[str, OpenRequest] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    steps_in_flight: int = 0  # unread steps
    samplers: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=SAMPLER))
    prompt: np.ndarray = field(default_factory=lambda: _NO_IDS)
    suspects: set[str] = field(default_factory=set)
    selection: DecodeSelection | None = None
    _decoded: np.ndarray = field(default_factory=lambda: np.zeros((6, 0), dtype=np.int64))

    @property
    def decoded(self) -> np.ndarray:
        """The six arrays below, in rows, with all that steps of the selection did, which are counted until asked."""
        one, arrays = self.selection, self._decoded
        if one is not None and (one.begun or one.ended):
            arrays[_LENGTH, one.slots] += one.begun
            arrays[_IN_FLIGHT, one.slots] += one.begun - one.ended
            arrays[_STORED, one.slots[one.back]] += one.begun
            told, one.told, one.begun, one.ended = one.told, [], 0, 0
            if told:
                self._record(one.rows, one.slots, told)
        return arrays

    @property
    def token(self) -> np.ndarray:
        """Last token of each, the next input."""
        found: np.ndarray = self.decoded[_TOKEN]
        return found

    @property
    def length(self) -> np.ndarray:
        """KV positions written."""
        found: np.ndarray = self.decoded[_LENGTH]
        return found

    @property
    def delta(self) -> np.ndarray:
        """Rotary position minus KV position."""
        found: np.ndarray = self.decoded[_DELTA]
        return found

    @property
    def capacity(self) -> np.ndarray:
        """KV positions that its blocks can hold."""
        found: np.ndarray = self.decoded[_CAPACITY]
        return found

    @property
    def in_flight(self) -> np.ndarray:
        """Unread steps that a request has a row in."""
        found: np.ndarray = self.decoded[_IN_FLIGHT]
        return found

    @property
    def stored(self) -> np.ndarray:
        """Tokens of its text on the device."""
        found: np.ndarray = self.decoded[_STORED]
        return found

    def open(self, opening: Open) -> None:
        """Give the request a slot. Raises ``StageError`` if it is open already or its media do not fit its prompt."""
        work = opening.work
        if work.request in self.rows:
            raise StageError("opened twice: close the request first", work.request)
        table = np.array(opening.blocks, dtype=np.int32)
        row = self._row(opening, table)
        sampler = describe_sampler(work.sampling, row.bans)
        if not self.free:
            self._grow()
        slot = row.slot = self.free.pop()
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
        row.table = np.concatenate((row.table, np.array(blocks, dtype=np.int32)))
        self.capacity[row.slot] = len(row.table) * self.block_rows
        if self.selection is not None:
            self.selection.grown.append(row.slot)
            self.selection.tables = None

    def close(self, request: str) -> OpenRequest | None:
        """Free the request's slot and return it; None if it is not open."""
        row = self.rows.pop(request, None)
        if row is not None:
            self.free.append(row.slot)
            row.suspect = request in self.suspects
            self.suspects.discard(request)
            self._deselect()
        return row

    def find(self, request: str) -> OpenRequest:
        """Return an open request. Raises ``StageError`` if it is not open."""
        if request not in self.rows:
            raise StageError("the request is not open on this stage", request)
        return self.rows[request]

    def select(self, requests: Sequence[str]) -> DecodeSelection:
        """Select requests to decode; the selection of the last step if they are the same.

        Raises ``StageError`` if one is not open.
        """
        selection = self.selection
        if selection is None or selection.requests != requests:
            selection = self._select(requests)
            self._deselect()
            self.selection = selection
        return selection

    def read_decodes(self, selection: DecodeSelection) -> Decodes:
        """Return the host arrays of the selection's next step.

        Raises ``StageError`` if a request has no token yet or no room in its blocks.
        """
        slots = selection.slots
        ids, lengths, delta, capacity, flown, _ = self.decoded.take(slots, axis=1)  # one look-up in place of five
        lengths += 1  # still ascending: a step that succeeds makes each one longer
        unknown = ids == _NO_TOKEN
        if self.steps_in_flight:
            unread = flown > 0
            unknown &= ~unread
            ids[unread] = _NO_TOKEN
        if np.count_nonzero(unknown) or np.count_nonzero(lengths > capacity):
            raise find_bad_decode(selection.rows, unknown, lengths, capacity)
        if selection.tables is None:
            selection.tables = BlockTables.join([row.table for row in selection.rows])
        delta += lengths
        delta -= 1
        return Decodes(ids, delta, lengths, selection.tables, slots)

    def _deselect(self) -> None:
        """Forget the selection, whose steps the arrays then hold."""
        _ = self.decoded
        self.selection = None

    def _select(self, requests: Sequence[str]) -> DecodeSelection:
        rows = [self.find(request) for request in requests]
        slots = slots_in(rows)
        order = np.argsort(self.length[slots], kind="stable")
        rows, slots = [rows[i] for i in order.tolist()], slots[order]
        given = self.samplers[slots]
        kind = SamplerKind.of(given)
        return DecodeSelection(
            requests,
            frozenset(requests),
            tuple([row.request for row in rows]),
            rows,
            slots,
            kind.some,
            kind.rounded(),
            np.flatnonzero(given["needs"] & LOOKS_BACK) if kind.some else _NO_IDS,
            list_asked(given) if kind.some else (),
        )

    def text(self, row: OpenRequest) -> np.ndarray:
        """Return the prompt and outputs of a request whose ``ids`` have them, and that is in no unread step."""
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
        self._record(rows, slots, [np.fromiter((one.token for one in sampled), np.int64, len(sampled))])

    def begin_step(self, slots: np.ndarray) -> None:
        """Count a launched step: each of its rows is longer by one token that the host does not know yet.

        The texts of those that look back have that token on the device.
        """
        self.steps_in_flight += 1
        if self.selection is not None and slots is self.selection.slots:
            self.selection.begun += 1  # most steps
            return
        arrays = self.decoded
        arrays[_IN_FLIGHT, slots] += 1
        arrays[_LENGTH, slots] += 1
        arrays[_STORED, slots] += (self.samplers["needs"][slots] & LOOKS_BACK) != 0

    def end_step(self, rows: Sequence[OpenRequest], slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Record the tokens [n] of the oldest launched step of ``rows``; returns those before them."""
        self.steps_in_flight -= 1
        selection = self.selection
        if selection is not None and slots is selection.slots:  # most steps
            fed: np.ndarray = selection.told[-1] if selection.told else self._decoded[_TOKEN, slots]
            selection.ended += 1
            selection.told = [*selection.told, tokens] if len(selection.back) else [tokens]
            if len(selection.told) >= _MOST_TOLD:
                _ = self.decoded
            return fed
        fed = self.token[slots]
        self.in_flight[slots] -= 1
        self._record(rows, slots, [tokens])
        return fed

    def undo_step(self, slots: np.ndarray) -> None:
        """Forget the youngest launched step of these rows."""
        self._deselect()
        arrays = self.decoded
        arrays[_IN_FLIGHT, slots] -= 1
        arrays[_LENGTH, slots] -= 1
        arrays[_STORED, slots] = np.minimum(arrays[_STORED, slots], arrays[_LENGTH, slots] + 1)
        self.steps_in_flight -= 1

    def take_back(self, slots: np.ndarray, fed: np.ndarray) -> None:
        """Forget the youngest tokens of these rows, which are recorded; ``fed``: the tokens before them."""
        self._deselect()
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
        return selection.slots if selection is not None and selection.rows is rows else slots_in(rows)

    def _record(self, rows: Sequence[OpenRequest], slots: np.ndarray, told: Sequence[np.ndarray]) -> None:
        """Record the newest tokens of ``rows`` that the host knows, those of one step behind those of another."""
        arrays = self._decoded
        arrays[_TOKEN, slots] = told[-1]
        if not self.needs_of(slots) & (LOOKS_BACK | HOST):
            return
        places = arrays[_LENGTH, slots] - arrays[_IN_FLIGHT, slots] - len(told) + 1
        for at in np.flatnonzero(self.samplers["needs"][slots] & (LOOKS_BACK | HOST)).tolist():
            rows[at].set_tokens([int(tokens[at]) for tokens in told], int(places[at]))

    def _row(self, opening: Open, table: np.ndarray) -> OpenRequest:
        work = opening.work
        given = np.array(work.prompt + opening.tokens, dtype=np.int64)
        at, item, kinds = self._placeholders(opening, given)
        fed = np.where(kinds, 0, given)
        prompt = given[: len(work.prompt)]
        seen = at[kinds[at] != 1 + kind_names().index("audio")]  # clips are causal beside images and videos, too
        groups = _number_groups(self.model.adapter, seen, prompt, len(given)) if len(at) else None
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
            rules=make_host_rules(work, self.model.directory) if work.sampling.needs_host else None,
            state=opening.state[0] if opening.state else -1,
            state_at=opening.cached if opening.again or not opening.tokens else len(given) - 1,
        )

    def _placeholders(self, opening: Open, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the positions that take a feature row, the media item of each, and the kind of every position."""
        wanted = np.isin(ids, list(self.model.media_token_ids))
        items, kinds = np.full(len(ids), -1), np.zeros(len(ids), dtype=np.int64)
        for number, span in enumerate(opening.work.media):
            here = wanted[span.offset : span.end] | (span.length == span.tokens)  # whatever ids stand there
            inside = np.flatnonzero(here) + span.offset
            if len(inside) != span.tokens:
                problem = f"media item {number} has {span.tokens} feature rows for {len(inside)} placeholders"
                raise StageError(problem, opening.work.request, PREFILL.letter)
            items[inside], kinds[inside] = number, 1 + kind_names().index(span.kind)
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
        old = len(self.prompt)
        more = max(8, old)
        for name in ("_decoded", "samplers", "prompt"):
            held = getattr(self, name)
            new = np.zeros((*held.shape[:-1], more), dtype=held.dtype)
            setattr(self, name, np.concatenate((held, new), axis=-1))
        self.free.extend(range(old + more - 1, old - 1, -1))


def _number_groups(adapter: ModelAdapter, at: np.ndarray, prompt: np.ndarray, length: int) -> np.ndarray | None:
    """Number the groups of rows that see each other in both directions (``ChunkRows.groups``); None if none do."""
    if adapter.whole_prompt:
        return np.where(np.arange(length) < len(prompt), 0, -1)
    if adapter.together:
        return np.pad(np.isin(prompt, adapter.together) - 1, (0, length - len(prompt)), constant_values=-1)
    return _number_runs(at, length) if adapter.whole_media else None


def _number_runs(at: np.ndarray, length: int) -> np.ndarray:
    """Number the unbroken runs of placeholders; -1 for text."""
    groups = np.full(length, -1)
    groups[at] = np.cumsum(np.diff(at, prepend=-2) != 1) - 1
    return groups
