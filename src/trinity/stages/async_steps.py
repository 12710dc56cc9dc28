"""Async scheduling of a language stage: steps launched before the host knows the tokens of earlier ones.

The newest token of every request stays on the device, indexed by slot. A request with a row in an unread step takes its
next input from there. The host learns the tokens later, by one copy into pinned memory and one event per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import Sampled
from trinity.errors import StageError
from trinity.stages.request_table import OpenRequest, RequestTable
from trinity.stages.uploads import upload

MOST_SLOTS = 1 << 14  # requests whose tokens can stay on the device; a fixed size, so that CUDA graphs keep the address


class DeviceTokens:
    """``newest`` (int64 [MOST_SLOTS]): the last token that a launched step sampled for each slot."""

    def __init__(self, device: torch.device) -> None:
        self.newest = torch.zeros(MOST_SLOTS, dtype=torch.long, device=device)

    def store(self, slots: np.ndarray, tokens: Tensor) -> None:
        """Store tokens [n] by slot; the -1 of a failed row becomes 0, so that the embedding lookup stays in range."""
        self.newest.index_copy_(0, upload(slots, self.newest.device), tokens.clamp(min=0))

    def fill_unknown(self, ids: Tensor, slots: Tensor) -> Tensor:
        """Return ``ids`` with the newest token in place of each that the host does not know (-1)."""
        return torch.where(ids < 0, self.newest[slots], ids)


class LaunchedStep:
    """``PendingStep`` whose ``tokens`` [rows] are on the device; -1 for logits without a largest value.

    From the launch on its rows are one token longer. ``ran``: requests that are suspect until it ends.
    """

    def __init__(self, table: RequestTable, rows: Sequence[OpenRequest], tokens: Tensor, ran: set[str]) -> None:
        self._table, self._rows, self._ran = table, list(rows), ran
        self._tokens, self._event = _start_copy(tokens)
        self._begun = True
        self._sampled: dict[str, Sampled] | None = None
        table.begin_step(self._rows)

    @property
    def is_over(self) -> bool:
        """True if the host knows its tokens or it was dropped."""
        return not self._begun

    def ready(self) -> bool:
        """See ``PendingStep.ready``."""
        return self._event is None or bool(self._event.query())

    def settle(self) -> None:
        """Wait for the device and record the tokens; an error is left for ``wait`` to raise."""
        if self._begun and -1 not in (tokens := self._read()):
            self._begun = False
            self._table.end_step(self._rows, tokens)
            self._table.suspects -= self._ran
            self._sampled = {row.request: Sampled(token) for row, token in zip(self._rows, tokens, strict=True)}

    def wait(self) -> dict[str, Sampled]:
        """See ``PendingStep.wait``. Raises ``StageError`` if a row of logits has no largest value."""
        self.settle()
        if self._sampled is None:
            at = self._read().index(-1)
            raise StageError(f"row {at} of the logits holds NaN or no finite value; check the model's weights")
        return self._sampled

    def drop(self) -> None:
        """See ``PendingStep.drop``."""
        self._read()
        if self._begun:
            self._begun = False
            self._table.undo_step(self._rows)

    def _read(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._tokens.tolist()
        return found


class FinishedStep:
    """``PendingStep`` of a step that ran at once."""

    def __init__(self, sampled: dict[str, Sampled]) -> None:
        self._sampled = sampled

    def ready(self) -> bool:
        return True

    def wait(self) -> dict[str, Sampled]:
        return self._sampled

    def drop(self) -> None:
        raise AssertionError("a step that was run at once cannot fail later")


def _start_copy(tokens: Tensor) -> tuple[Tensor, Any]:
    """Start a copy to the host; returns it and the event that completes it (None: complete already)."""
    if not tokens.is_cuda:
        return tokens.clone(), None
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return host, event
