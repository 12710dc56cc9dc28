"""Prompt rows that are never run alone, for models whose code runs one row by other arithmetic than several.

Nemotron-H bounds its time steps in a scan of several rows, and not in the step of a single one behind others:
``generate()`` prefills by the one and decodes by the other. Where chunks end is chosen for other reasons, so the last
rows of a prompt that goes on are held back beside its states, which do not cover them, and lead the next chunk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trinity.errors import UnsupportedModel
from trinity.stages.models.picked_rows import RowPick, counts_rows, cut_rows, join_rows

MOST_HELD = 2  # rows at most: one, unless the one before it would be left alone
RowsCall = Callable[[RowPick, Any], Any]  # runs a module on picked rows, with a cache


def bounds_steps(model: nn.Module) -> bool:
    """Tell if layers bound their time steps, by transformers' name for it: (0, infinity) bounds none.

    Asked of the code and not of logits: a check meets few tokens, and whether one's step is beyond a bound is its own.
    """
    limits: list[Any] = [module.time_step_limit for module in model.modules() if hasattr(module, "time_step_limit")]
    return any(float(least) > 0.0 or float(most) < float("inf") for least, most in limits)


@contextmanager
def without_bounds(model: nn.Module) -> Iterator[None]:
    """Have layers bound no time steps: one row then runs by the arithmetic of several."""
    bounding: list[Any] = [module for module in model.modules() if hasattr(module, "time_step_limit")]
    limits = [module.time_step_limit for module in bounding]
    try:
        for module in bounding:
            module.time_step_limit = (0.0, float("inf"))
        yield
    finally:
        for module, limit in zip(bounding, limits, strict=True):
            module.time_step_limit = limit


class PromptTurn(NamedTuple):
    """Facts of a chunk's request that its states go by.

    ``prompt``: its prompt's length; the tokens behind it were generated, and run one by one as they did then.
    ``held``: rows before the chunk that its states do not cover.
    """

    prompt: int
    held: int = 0

    def prompt_rows(self, start: int, length: int) -> int:
        """Count the chunk's rows that are of the prompt."""
        return min(length, max(0, self.prompt - start))

    def hold(self, start: int, length: int) -> int:
        """Count the rows that are held back behind the chunk: none where the prompt has ended."""
        if start + length >= self.prompt:
            return 0
        rows = self.held + length
        return rows if rows <= MOST_HELD else 1


def run_prompt(call: RowsCall, cache: Any, rows: Tensor, *, held: int, ended: bool) -> tuple[Any, Tensor | None]:
    """Run a prompt's rows [rows, width], of which the first ``held`` have run before, from the states in ``cache``.

    Returns the output [1, rows - held, ...] of the others, and the rows [2, width] to hold back, the last perhaps
    twice: None where the prompt has ``ended``. ``cache`` then has the states before these.
    """
    if ended:
        return cut_rows(call(lambda _: rows[None], cache), held, len(rows)), None
    lead = len(rows) - 1 if len(rows) > MOST_HELD else 0
    outputs = [call(lambda _: rows[None, :lead], cache)] if lead else []
    tail = rows[lead:]
    pair = torch.cat((tail, tail))[:MOST_HELD]  # a row sees nothing of those behind it
    outputs.append(cut_rows(call(lambda _: pair[None], copy.deepcopy(cache)), 0, len(tail)))
    return cut_rows(join_rows(outputs, 1), held, len(rows)), pair


def check_inputs(arguments: dict[str, Any], rows: str, total: int) -> None:
    """Raise ``UnsupportedModel`` where more than the ``rows`` themselves would have to be held back."""
    further = [name for name, value in arguments.items() if name != rows and counts_rows(value, total)]
    if further:
        raise UnsupportedModel(f"one row runs by other arithmetic than several, and has {', '.join(further)} besides")
