"""Checks of a row's numbers, which every reader of a trace relies on. Each raises ``TraceError``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import force_setattr

from trinity.errors import TraceError
from trinity.errors.arguments import plain_int, show

MOST_TOKENS = 1 << 40  # beyond what any model takes, and far from what an array holds


def check_fields(row: Any, check: Callable[[str, Any], Any], *names: str, optional: bool = False) -> None:
    """Replace fields of ``row`` by what ``check`` returns; those that are None stay it where they are ``optional``."""
    for name in names:
        given = getattr(row, name)
        if given is None and optional:
            continue
        value = check(name, given)
        if value is not given:
            force_setattr(row, name, value)


def check_time(name: str, value: Any) -> float:
    """Return a finite number of at least 0, numpy's as Python's own. Raises for anything else."""
    try:
        number = value if type(value) is float else _plain_number(value)
        if 0 <= number < math.inf:
            return number
    except (TypeError, ValueError, OverflowError):  # no number; or a whole one beyond any float
        pass
    raise TraceError(f"a row's {name} is a finite number of at least 0, got {show(value)[:80]}")


def check_times(name: str, values: object) -> Sequence[float]:
    """Return a list of finite numbers of at least 0. Raises for anything else."""
    given = _items(name, values)
    if all(type(each) is float and 0 <= each < math.inf for each in given):
        return given
    return [check_time(name, each) for each in given]


def check_count(name: str, value: Any) -> int:
    """Return a whole number of at least 0 and at most ``MOST_TOKENS``, numpy's as Python's own. Raises for others."""
    number = _plain_whole(value)
    if number is None or not 0 <= number <= MOST_TOKENS:
        raise TraceError(f"a row's {name} is a whole number of at least 0 and at most 2**40, got {show(value)[:80]}")
    return number


def check_counts(name: str, values: object) -> Sequence[int]:
    """Return a list of whole numbers of at least 0. Raises for anything else."""
    given = _items(name, values)
    if all(type(each) is int and each >= 0 for each in given):
        return given
    plain = []
    for each in given:
        number = _plain_whole(each)
        if number is None or number < 0:
            raise TraceError(f"a row's {name} are whole numbers of at least 0, got {show(each)[:80]}")
        plain.append(number)
    return plain


def _plain_whole(value: Any) -> int | None:
    if type(value) is int:
        return value
    try:
        return plain_int(value)
    except TypeError:
        return None


def _plain_number(value: Any) -> float:
    """Return an int or a float. Raises ``TypeError``, ``ValueError`` or ``OverflowError``."""
    if isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
        raise TypeError
    number = float(value)
    return int(value) if isinstance(value, int) else number


def _items(name: str, values: object) -> Sequence[Any]:
    if not isinstance(values, (list, tuple)):
        raise TraceError(f"a row's {name} is a list, got {show(values)[:80]}")
    return values
