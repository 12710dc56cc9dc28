"""Parameters of a large matrix: a part of them in ``make test``, all in ``make test-all``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
U = TypeVar("U")
FEW = ("llava", "qwen3_vl", "gemma3", "llama")  # of the architectures: a plain one, positions in 3-D, windows, text


def thinned(values: Iterable[T], often: Callable[[T], bool]) -> list[Any]:
    """Mark as slow what is not to run often. A tuple is of several parameters."""
    return [each if often(each) else _slow(each) for each in values]


def in_turns(rows: Sequence[T], columns: Sequence[U], of: int) -> list[tuple[T, U, bool]]:
    """Pair each row with each column; the third tells of each ``of``-th whether it runs often: none is left out."""
    return [(row, column, (i + j) % of == 0) for i, row in enumerate(rows) for j, column in enumerate(columns)]


def rarely(often: bool) -> list[pytest.MarkDecorator]:
    """Marks of a case that runs often, or not."""
    return [] if often else [pytest.mark.slow]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
