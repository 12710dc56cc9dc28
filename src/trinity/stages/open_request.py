"""An open request of a language stage, and the requests that a run of decode steps decodes together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from trinity.core.messages import Open, Prefill
from trinity.errors import StageError
from trinity.stage_kinds import DECODE, PREFILL
from trinity.stages.attention.interface import PagedRows
from trinity.stages.batch import Chunk
from trinity.stages.block_tables import BlockTables
from trinity.stages.host_rules import HostRules
from trinity.stages.models import LoadedModel, RotaryPositions
from trinity.stages.models.held_rows import PromptTurn
from trinity.stages.models.states import StateStep
from trinity.stages.sampler_rows import SamplerKind
from trinity.stages.token_bans import TokenBans


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
