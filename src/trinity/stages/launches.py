"""Steps of a language stage begun before the host knows the tokens of those before: these stay on the device.

The newest token of every row lies there by slot. A row that is in a step which nobody has read is fed from there; the
host learns the token later, by one copy into pinned memory and one event for each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import Sampled
from trinity.errors import StageError
from trinity.stages.rows import Row, RowTable
from trinity.stages.uploads import upload

MOST_SLOTS = 1 << 14  # rows whose tokens can stay on the device; the memory's address must stay, for CUDA graphs


class DeviceTokens:
    """``newest`` int64 [MOST_SLOTS]: the token that each row sampled last, where a launched step wrote it."""

    def __init__(self, device: torch.device) -> None:
        self.newest = torch.zeros(MOST_SLOTS, dtype=torch.long, device=device)

    def keep(self, slots: np.ndarray, tokens: Tensor) -> None:
        """Tokens [n] of rows; -1, of a row that failed, as 0: it must not be looked up."""
        self.newest.index_copy_(0, upload(slots, self.newest.device), tokens.clamp(min=0))

    def fed(self, ids: Tensor, slots: Tensor) -> Tensor:
        """``ids`` with the newest token in place of what the host does not know (-1)."""
        return torch.where(ids < 0, self.newest[slots], ids)


class Launch:
    """``stages.base.Pending``: a step whose ``tokens`` [rows], -1 for logits without a largest, are on the device.

    Its rows are one token longer from the launch on. ``ran``: requests that are suspect until it ends.
    """

    def __init__(self, table: RowTable, rows: Sequence[Row], tokens: Tensor, ran: set[str]) -> None:
        self._table, self._rows, self._ran = table, list(rows), ran
        self._tokens, self._event = _to_host(tokens)
        self._begun = True
        self._sampled: dict[str, Sampled] | None = None
        table.begin(self._rows)

    @property
    def over(self) -> bool:
        """Whether the host knows its tokens, or it was dropped."""
        return not self._begun

    def ready(self) -> bool:
        """See ``Pending``."""
        return self._event is None or bool(self._event.query())

    def settle(self) -> None:
        """Wait for the device, and have the host know the tokens; an error is kept for ``wait``."""
        if self._begun and -1 not in (tokens := self._read()):
            self._begun = False
            self._table.end(self._rows, tokens)
            self._table.suspects -= self._ran
            self._sampled = {row.request: Sampled(token) for row, token in zip(self._rows, tokens, strict=True)}

    def wait(self) -> dict[str, Sampled]:
        """See ``Pending``. Raises ``StageError`` where a row of logits has no largest value."""
        self.settle()
        if self._sampled is None:
            at = self._read().index(-1)
            raise StageError(f"row {at} of the logits holds NaN or no finite value; check the model's weights")
        return self._sampled

    def drop(self) -> None:
        """See ``Pending``."""
        self._read()
        if self._begun:
            self._begun = False
            self._table.undo(self._rows)

    def _read(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._tokens.tolist()
        return found


class Done:
    """``stages.base.Pending`` of a step that was run at once."""

    def __init__(self, sampled: dict[str, Sampled]) -> None:
        self._sampled = sampled

    def ready(self) -> bool:
        return True

    def wait(self) -> dict[str, Sampled]:
        return self._sampled

    def drop(self) -> None:
        raise AssertionError("a step that was run at once cannot fail later")


def _to_host(tokens: Tensor) -> tuple[Tensor, Any]:
    """A copy on the host, and the event at whose end it is there; None where it is there already."""
    if not tokens.is_cuda:
        return tokens.clone(), None
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return host, event
