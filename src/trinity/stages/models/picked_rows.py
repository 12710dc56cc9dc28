"""Calls of a module on rows picked out of a ragged row: those of one request, or one row of each of several."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from trinity.errors import UnsupportedModel

CACHE_NAMES = ("cache_params", "past_key_values", "past_key_value")  # parameters that take a cache
RowPick = Callable[[Tensor], Tensor]  # picks rows out of [1, T, ...]


def flatten_rows(output: Any) -> Any:
    """Put the rows of [sequences, length, ...] one behind the other: [1, rows, ...]."""
    if isinstance(output, tuple):
        return tuple(flatten_rows(each) for each in output)
    return output.reshape(1, -1, *output.shape[2:]) if isinstance(output, Tensor) else output


def pick_rows(value: Any, pick: RowPick, total: int) -> Any:
    """Pick rows of what has a row for each token; all else is for all of them."""
    if isinstance(value, tuple):
        return tuple(pick_rows(each, pick, total) for each in value)
    counts_rows = isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, total)
    return pick(value) if counts_rows else value


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a forward: names of its first parameter, which has the rows, and of the one that takes a cache."""

    signature: inspect.Signature
    rows: str
    cache: str

    def bind(self, module: Any, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Name every argument, without trinity's own."""
        bound = self.signature.bind(module, *given, **named).arguments
        spread = next((one.name for one in self.signature.parameters.values() if one.kind is one.VAR_KEYWORD), "")
        arguments = {**bound, **bound.get(spread, {})}
        for name in (next(iter(self.signature.parameters)), spread, "trinity_batch"):
            arguments.pop(name, None)
        return arguments


@cache
def read_call(kind: type) -> Call:
    """Read how a class's forward is called. Raises ``UnsupportedModel`` if it takes no cache."""
    signature = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    names = list(signature.parameters)
    taken = [name for name in CACHE_NAMES if name in names]
    if not taken:
        raise UnsupportedModel(f"{kind.__name__} uses a cache, and its forward takes none of {', '.join(CACHE_NAMES)}")
    return Call(signature, names[1], taken[0])
