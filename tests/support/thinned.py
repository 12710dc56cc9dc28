"""Parameters of a large matrix: a part of them in ``make test``, all in ``make test-all``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
FEW = ("llava", "qwen3_vl", "gemma3", "llama")  # of the architectures: a plain one, positions in 3-D, windows, text


def thinned(values: Iterable[T], often: Callable[[T], bool]) -> list[Any]:
    """Mark as slow what is not to run often. A tuple is of several parameters."""
    return [each if often(each) else _slow(each) for each in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
