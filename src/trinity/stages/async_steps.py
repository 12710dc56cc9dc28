"""Async scheduling of a language stage: steps launched before the host knows the tokens of earlier ones.

The newest token of every request stays on the device, indexed by slot, and of requests whose samplers look back the
whole text. A request with a row in an unread step takes its next input from there. The host learns the tokens later, by
one copy into pinned memory and one event per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import Sampled
from trinity.errors import StageError
from trinity.stages.request_table import OpenRequest, RequestTable
from trinity.stages.sampler import Drawn, draw, draw_greedy
from trinity.stages.sampler_rows import LOOKS_BACK
from trinity.stages.token_bans import NO_TOKEN, Texts
from trinity.stages.uploads import upload

MOST_SLOTS = 1 << 14  # requests whose tokens can stay on the device; a fixed size, so that CUDA graphs keep the address


class DeviceTokens:
    """Tokens of open requests by slot, on the device.

    - ``newest`` (int64 [MOST_SLOTS]): the last token that a launched step sampled for each.
    - ``texts`` (int32 [slots, width]): prompt and outputs of each whose sampler looks back.
    """

    def __init__(self, device: torch.device) -> None:
        self.newest = torch.zeros(MOST_SLOTS, dtype=torch.long, device=device)
        self.texts = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self._uploaded = np.empty(0, dtype=np.int64), self.newest[:0]

    def upload_slots(self, slots: np.ndarray) -> Tensor:
        """Return slots on the device. The same array, which steps of the same requests share, is uploaded once."""
        if self._uploaded[0] is not slots:
            self._uploaded = slots, upload(slots, self.newest.device)
        return self._uploaded[1]

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """Store tokens [n] by slot, -1 for a row that failed."""
        self.newest.index_copy_(0, slots, tokens)

    def fill_unknown(self, ids: Tensor, slots: Tensor) -> Tensor:
        """Return ``ids`` with the newest token in place of each that the host does not know (-1).

        0 in place of a failed row's, so that the embedding lookup stays in range.
        """
        return torch.where(ids < 0, self.newest[slots].clamp(min=0), ids)

    def write_text(self, slot: int, start: int, ids: np.ndarray) -> None:
        """Write the part of a text that begins at ``start``."""
        self._make_room(slot + 1, start + len(ids) + 1)
        known = np.where(ids < 0, NO_TOKEN, ids)
        self.texts[slot, start : start + len(ids)].copy_(upload(known, self.texts.device))

    def select_texts(self, slots: Tensor, lengths: Tensor, longest: int) -> Texts:
        """Return the texts of these slots ([k, 1]), of these lengths ([k, 1], at most ``longest``)."""
        return Texts(self.texts[:, :longest].index_select(0, slots.flatten()).long(), lengths)

    def extend_texts(self, slots: Tensor, lengths: Tensor, longest: int, tokens: Tensor) -> None:
        """Append a token [k] to each of these texts."""
        self._make_room(0, longest + 1)
        places = (slots * self.texts.shape[1] + lengths).flatten()
        self.texts.view(-1).index_copy_(0, places, tokens.clamp(min=0).int())

    def _make_room(self, slots: int, width: int) -> None:
        held = self.texts.shape
        if slots > held[0] or width > held[1]:
            more = [
                max(old, 1 << (new - 1).bit_length() if new else 0)
                for old, new in zip(held, (slots, width), strict=True)
            ]
            wider = torch.zeros(more, dtype=self.texts.dtype, device=self.texts.device)
            wider[: held[0], : held[1]].copy_(self.texts)
            self.texts = wider


def draw_next(
    logits: Tensor, table: RequestTable, rows: Sequence[OpenRequest], slots: np.ndarray, kept: DeviceTokens
) -> Drawn:
    """Draw the next token of each of ``rows``, which have these slots, without waiting for the device, and keep it."""
    if not table.needs_of(slots):
        drawn = draw_greedy(logits)
        kept.store(kept.upload_slots(slots), drawn.tokens)
        return drawn
    batch = table.batch_samplers(rows, slots, logits.device)
    back = batch.find(LOOKS_BACK)
    if not len(back):
        drawn = draw(logits, batch)
    else:
        _write_texts(table, [rows[at] for at in back.tolist()], kept)
        at, longest = upload(back, logits.device), int(batch.given["length"][back].max())
        chosen = batch.select(back, at)
        places = chosen.column("slot"), chosen.column("length"), longest
        drawn = draw(logits, replace(batch, texts=kept.select_texts(*places)))
        kept.extend_texts(*places, drawn.tokens.index_select(0, at))
        table.stored[slots[back]] += 1
    kept.store(batch.column("slot").flatten(), drawn.tokens)
    return drawn


def _write_texts(table: RequestTable, rows: Sequence[OpenRequest], kept: DeviceTokens) -> None:
    """Write what the device lacks of these texts. It has all tokens of unread steps: they were drawn there."""
    for row in rows:
        stored, length = int(table.stored[row.slot]), int(table.length[row.slot]) + 1
        if stored < length:
            kept.write_text(row.slot, stored, row.ids[stored:length])
            table.stored[row.slot] = length


class LaunchedStep:
    """``PendingStep`` whose tokens have been ``drawn`` on the device.

    From the launch on its rows, which have these ``slots``, are one token longer. ``ran``: requests that are suspect
    until it ends.
    """

    def __init__(
        self, table: RequestTable, rows: Sequence[OpenRequest], slots: np.ndarray, drawn: Drawn, ran: AbstractSet[str]
    ) -> None:
        self._table, self._rows, self._slots, self._ran, self._drawn = table, rows, slots, ran, drawn
        self._copy, self._event = _start_copy(drawn.flatten())
        self._begun = True
        self._sampled: dict[str, Sampled] | None = None
        self._fed = slots[:0]  # once the tokens are recorded: those before them
        table.begin_step(slots)

    @property
    def is_over(self) -> bool:
        """True if the host knows its tokens or it was dropped."""
        return not self._begun

    def ready(self) -> bool:
        """See ``PendingStep.ready``."""
        return self._event is None or bool(self._event.query())

    def settle(self) -> None:
        """Wait for the device and record the tokens; an error is left for ``wait`` to raise."""
        if self._begun:
            with suppress(StageError):
                self._finish()

    def wait(self) -> dict[str, Sampled]:
        """See ``PendingStep.wait``. Raises ``StageError`` if a row of logits has no largest value."""
        return self._finish() if self._sampled is None else self._sampled

    def drop(self) -> None:
        """See ``PendingStep.drop``."""
        if self._begun:
            self._begun = False
            self._table.undo_step(self._slots)
            self._table.suspects -= self._ran  # it runs again
        elif self._sampled is not None:
            self._sampled = None
            self._table.take_back(self._slots, self._fed)
        with suppress(Exception):  # a device that has failed runs nothing any more
            self._synchronize()

    def _finish(self) -> dict[str, Sampled]:
        self._synchronize()
        sampled = self._drawn.read(self._copy)
        self._begun, self._fed = False, self._table.token[self._slots]
        self._table.end_step(self._rows, self._slots, sampled)
        self._table.suspects -= self._ran
        self._sampled = dict(zip([row.request for row in self._rows], sampled, strict=True))
        return self._sampled

    def _synchronize(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class FinishedStep:
    """``PendingStep`` of a step that ran at once. ``undo`` takes back what it has recorded, for it to run again."""

    def __init__(self, sampled: dict[str, Sampled], undo: Callable[[], None]) -> None:
        self._sampled, self._undos = sampled, [undo]

    def ready(self) -> bool:
        return True

    def wait(self) -> dict[str, Sampled]:
        return self._sampled

    def drop(self) -> None:
        while self._undos:
            self._undos.pop()()


def _start_copy(tokens: Tensor) -> tuple[Tensor, Any]:
    """Start a copy to the host; returns it and the event that completes it (None: complete already)."""
    if tokens.device.type == "cpu":
        return tokens.clone(), None
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return host, event
