"""Async scheduling of a language stage: steps launched before the host knows the tokens of earlier ones.

The newest token of every request stays on the device, indexed by slot, and of requests whose samplers look back the
whole text. A request with a row in an unread step takes its next input from there. The host learns the tokens later, by
one copy into pinned memory and one event per step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import Sampled
from trinity.errors import StageError
from trinity.stages.block_tables import DeviceTables, upload
from trinity.stages.request_table import OpenRequest, RequestTable
from trinity.stages.sampler import Drawn, draw, draw_greedy
from trinity.stages.sampler_rows import LOOKS_BACK
from trinity.stages.token_bans import DeviceTexts

MOST_SLOTS = 1 << 14  # requests whose tokens can stay on the device; a fixed size, so that CUDA graphs keep the address
SPARE_SLOT = MOST_SLOTS  # of padding rows
_LEAST_COPY = 64  # numbers of the smallest buffer that copies to the host go to


class DeviceTokens:
    """Tokens and block tables of open requests by slot, on the device.

    - ``newest`` (int64 [MOST_SLOTS + 1]): the last token that a launched step sampled for each.
    - ``texts``: prompt and outputs of each whose sampler looks back.
    - ``tables``: block tables.
    """

    def __init__(self, device: torch.device) -> None:
        self.newest = torch.zeros(MOST_SLOTS + 1, dtype=torch.long, device=device)
        self.texts = DeviceTexts(device)
        self.tables = DeviceTables(device)
        self._uploaded = np.empty(0, dtype=np.int64), self.newest[:0]

    def upload_slots(self, slots: np.ndarray) -> Tensor:
        """Return slots on the device. The same array, which steps of the same requests share, is uploaded once."""
        if self._uploaded[0] is not slots:
            self._uploaded = slots, upload(slots, self.newest.device)
        return self._uploaded[1]

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """Store tokens [n] by slot, -1 for a row that failed."""
        self.newest.index_copy_(0, slots, tokens)

    def take(self, slots: Tensor) -> Tensor:
        """Return the newest tokens; 0 in place of a failed row's, so that the embedding lookup stays in range."""
        return self.newest.index_select(0, slots).clamp(min=0)

    def fill_unknown(self, ids: Tensor, slots: Tensor) -> Tensor:
        """Return ``ids`` with the newest token in place of each that the host does not know (-1)."""
        return torch.where(ids < 0, self.take(slots), ids)


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
    kept.store(batch.column("slot").flatten(), drawn.tokens)
    return drawn


def _write_texts(table: RequestTable, rows: Sequence[OpenRequest], texts: DeviceTexts) -> None:
    """Write what the device lacks of these texts. It has all tokens of unread steps: they were drawn there."""
    for row in rows:
        stored, length = int(table.stored[row.slot]), int(table.length[row.slot]) + 1
        if stored < length:
            texts.write(row.slot, stored, row.ids[stored:length])
            table.stored[row.slot] = length


class HostCopies:
    """Copies of drawn tokens to the host, into pinned memory that is used again once it was read."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[HostCopy]] = defaultdict(list)
        self._source: Tensor | None = None  # of the last copy: recorded steps draw into the same memory again
        self._size = 0

    def start(self, numbers: Tensor) -> HostCopy:
        """Start to copy ``numbers`` [n], int64 or float64."""
        if numbers is not self._source:
            self._source, self._size = numbers, max(_LEAST_COPY, 1 << (len(numbers) - 1).bit_length())
        idle = self._idle[self._size]
        copy = idle.pop() if idle else HostCopy(self._size, numbers.device, idle)
        copy.start(numbers)
        return copy


class HostCopy:
    """Memory of the host for one copy of at most ``size`` numbers, and the event that completes it."""

    def __init__(self, size: int, device: torch.device, idle: list[HostCopy]) -> None:
        pinned = device.type != "cpu"
        with torch.inference_mode(False):  # a copy into it may start inside of that mode, or outside
            self._whole, self._idle = torch.empty(size, dtype=torch.long, pin_memory=pinned), idle
            self._real = self._whole.view(torch.float64)
        self._source: Tensor | None = None
        self._event: Any = torch.cuda.Event(blocking=True) if pinned else None  # type: ignore[no-untyped-call]

    def start(self, numbers: Tensor) -> None:
        if numbers is not self._source:
            self._source = numbers
            self._here = (self._whole if numbers.dtype == torch.long else self._real)[: len(numbers)]
            self._numbers: np.ndarray = self._here.numpy()
        self._here.copy_(numbers, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def ready(self) -> bool:
        """Tell if ``wait`` would return at once."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> np.ndarray:
        """Wait for the device and return the numbers, which are the caller's until ``release``."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers

    def release(self) -> None:
        """Give the memory back; nothing may copy into it any more."""
        self._idle.append(self)


class LaunchedStep:
    """``PendingStep`` whose tokens have been ``drawn`` on the device, and whose copy to the host is on its way.

    From the launch on its rows, which have these ``slots`` and ``names``, are one token longer.
    """

    def __init__(
        self,
        table: RequestTable,
        rows: Sequence[OpenRequest],
        slots: np.ndarray,
        names: Sequence[str],
        drawn: Drawn,
        copies: HostCopies,
    ) -> None:
        self._table, self._rows, self._slots, self._names, self._drawn = table, rows, slots, names, drawn
        self._copy = copies.start(drawn.flat)
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
        return self._copy.ready()

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
        begun, self._begun = self._begun, False
        if begun:
            self._table.undo_step(self._slots)
        elif self._sampled is not None:
            self._sampled = None
            self._table.take_back(self._slots, self._fed)
        with suppress(Exception):  # a device that has failed runs nothing any more
            self._copy.wait()
            if begun:
                self._copy.release()

    def _finish(self) -> dict[str, Sampled]:
        tokens, sampled = self._drawn.read(self._copy.wait(), len(self._names))
        self._begun = False
        self._copy.release()
        self._fed = self._table.end_step(self._rows, self._slots, tokens)
        self._sampled = dict(zip(self._names, sampled, strict=True))
        return self._sampled


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
