"""States of the requests of one step: which block has them, and how many positions they cover before and after it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from trinity.errors import StageError
from trinity.stages.attention.interface import PagedRows
from trinity.stages.models import LoadedModel
from trinity.stages.models.held_rows import PromptTurn
from trinity.stages.models.states import StateStep
from trinity.stages.open_request import OpenRequest


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
