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
from trinity.stages.device_texts import DeviceTexts
from trinity.stages.request_table import OpenRequest, RequestTable
from trinity.stages.sampler import Drawn, draw, draw_greedy
from trinity.stages.sampler_rows import LOOKS_BACK
from trinity.stages.uploads import upload

MOST_SLOTS = 1 << 14  # requests whose tokens can stay on the device; a fixed size, so that CUDA graphs keep the address


class DeviceTokens:
    """Tokens of open requests by slot, on the device.

    - ``newest`` (int64 [MOST_SLOTS]): the last token that a launched step sampled for each.
    - ``texts``: prompt and outputs of each whose sampler looks back.
    """

    def __init__(self, device: torch.device) -> None:
        self.newest = torch.zeros(MOST_SLOTS, dtype=torch.long, device=device)
        self.texts = DeviceTexts(device)
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
        looking, sizes, texts = slots[back], batch.given["length"][back], kept.texts
        if not texts.reserve(looking, sizes + 1):
            raise StageError("the texts of open requests have no room on the device")
        _write_texts(table, [rows[at] for at in back.tolist()], texts)
        drawn = draw(logits, replace(batch, texts=texts.select(looking, sizes)))
        texts.append(looking, sizes, drawn.tokens.index_select(0, upload(back, logits.device)))
        table.stored[slots[back]] += 1
    kept.store(batch.column("slot").flatten(), drawn.tokens)
    return drawn


def _write_texts(table: RequestTable, rows: Sequence[OpenRequest], texts: DeviceTexts) -> None:
    """Write what the device lacks of these texts. It has all tokens of unread steps: they were drawn there."""
    for row in rows:
        stored, length = int(table.stored[row.slot]), int(table.length[row.slot]) + 1
        if stored < length:
            texts.write(row.slot, stored, row.ids[stored:length])
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
