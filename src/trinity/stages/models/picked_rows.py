"""Calls of a module on rows picked out of a ragged row: those of one request, or one row of each of several."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
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
    return pick(value) if _is_of_rows(value, total) else value


def counts_rows(value: Any, total: int) -> bool:
    """Tell if a value, or one in it, has a row for each token: [1, total, ...]."""
    if isinstance(value, tuple):
        return any(counts_rows(each, total) for each in value)
    return _is_of_rows(value, total)


def _is_of_rows(value: Any, total: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, total)


def cut_rows(output: Any, low: int, high: int) -> Any:
    """Cut [sequences, rows, ...] to rows [low, high)."""
    if isinstance(output, tuple):
        return tuple(cut_rows(each, low, high) for each in output)
    return output[:, low:high] if isinstance(output, Tensor) else output


def join_rows(outputs: Sequence[Any], axis: int) -> Any:
    """Join outputs, which may be tuples, along an axis."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(join_rows(each, axis) for each in zip(*outputs, strict=True))
    return torch.cat(list(outputs), axis) if isinstance(first, Tensor) and len(outputs) > 1 else first


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
