"""Checks of a row's numbers, which every reader of a trace relies on. Each raises ``TraceError``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trinity.errors import TraceError

MOST_TOKENS = 1 << 40  # beyond what any model takes, and far from what an array holds


def check_time(name: str, value: object) -> None:
    """Raise unless ``value`` is a finite number of at least 0."""
    if not (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf):
        raise TraceError(f"a row's {name} is a finite number of at least 0, got {value!r:.80}")


def check_times(name: str, values: object) -> None:
    """Raise unless ``values`` is a list of finite numbers of at least 0."""
    for each in _items(name, values):
        check_time(name, each)


def check_count(name: str, value: object) -> None:
    """Raise unless ``value`` is a whole number of at least 0 and at most ``MOST_TOKENS``."""
    if type(value) is not int or not 0 <= value <= MOST_TOKENS:
        raise TraceError(f"a row's {name} is a whole number of at least 0 and at most 2**40, got {value!r:.80}")


def check_counts(name: str, values: object) -> None:
    """Raise unless ``values`` is a list of whole numbers of at least 0."""
    for each in _items(name, values):
        if type(each) is not int or each < 0:
            raise TraceError(f"a row's {name} are whole numbers of at least 0, got {each!r:.80}")


def _items(name: str, values: object) -> Sequence[object]:
    if not isinstance(values, (list, tuple)):
        raise TraceError(f"a row's {name} is a list, got {values!r:.80}")
    return values
