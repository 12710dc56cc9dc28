"""Checks of a row's numbers, which every reader of a trace relies on. Each raises ``TraceError``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import force_setattr

from trinity.errors import TraceError
from trinity.errors.arguments import plain_bool, plain_int, plain_real, plain_str, show

T = TypeVar("T")
MOST_TOKENS = 1 << 40  # beyond what any model takes, and far from what an array holds


def check_fields(row: Any, check: Callable[[str, Any], Any], *names: str, optional: bool = False, of: str = "") -> None:
    """Replace fields of ``row`` by what ``check`` returns; those that are None stay it where they are ``optional``.

    ``of`` (""): comes before a field's name in errors.
    """
    for name in names:
        given = getattr(row, name)
        if given is None and optional:
            continue
        value = check(of + name, given)
        if value is not given:
            force_setattr(row, name, value)


def check_time(name: str, value: Any) -> float:
    """Return a finite number of at least 0, numpy's as Python's own. Raises for anything else."""
    if type(value) is float and 0 <= value < math.inf:  # most are
        return value
    return _read(_time, value, f"a row's {name} is a finite number of at least 0")


def check_times(name: str, values: object) -> Sequence[float]:
    """Return a list of finite numbers of at least 0. Raises for anything else."""
    given = _items(name, values)
    if all(type(each) is float and 0 <= each < math.inf for each in given):
        return given
    return [check_time(name, each) for each in given]


def check_count(name: str, value: Any, most: int = MOST_TOKENS) -> int:
    """Return a whole number of at least 0 and at most ``most``, numpy's as Python's own. Raises for others."""
    if type(value) is int and 0 <= value <= most:  # most are
        return value
    said = f"a row's {name} is a whole number of at least 0 and at most 2**{most.bit_length() - 1}"
    return _read(lambda number: _count(number, most), value, said)


def check_counts(name: str, values: object) -> Sequence[int]:
    """Return a list of whole numbers of at least 0. Raises for anything else."""
    given = _items(name, values)
    if all(type(each) is int and each >= 0 for each in given):
        return given
    return [_read(_count, each, f"a row's {name} are whole numbers of at least 0") for each in given]


def check_row(row: Any, media: Mapping[str, type]) -> None:
    """Check every field of a ``TraceRow``. ``media``: the type of what each field of media lists."""
    check_fields(row, check_time, "timestamp")
    check_fields(row, check_count, "input_length", "output_length")
    check_fields(row, check_count, "text_length", "max_tokens", optional=True)
    for name, kind in media.items():
        given = getattr(row, name)
        if not isinstance(given, (list, tuple)) or not all(isinstance(each, kind) for each in given):
            raise TraceError(f"a row's {name} are a list of {kind.__name__}, got {show(given)[:80]}")
    check_fields(row, check_counts, "hash_ids")
    check_fields(row, check_time, "ttft_s", "latency_s", "late_s", optional=True)
    check_fields(row, check_times, "itl_s")
    check_fields(row, check_text, "request_id", "session", "finish_reason")
    check_fields(row, check_flag, "emulated")
    if type(row.spans) is not dict or row.spans:
        check_fields(row, check_spans, "spans")


def check_text(name: str, value: Any, said: str = "a row's {} is a text") -> str:
    """Return Python's own text. Raises for others, and for half a character."""
    return value if type(value) is str and value.isascii() else _read(plain_str, value, said.format(name))


def check_flag(name: str, value: Any) -> bool:
    """Return Python's own True or False. Raises for anything else."""
    return value if type(value) is bool else _read(plain_bool, value, f"a row's {name} is True or False")


def check_content(name: str, value: Any) -> str:
    """Return a text that UTF-8 can encode. Raises for anything else."""
    return check_text(name, value, "a medium's {} is the text of a hash")


def check_spans(name: str, value: Any) -> dict[str, float]:
    """Return seconds by name. Raises for anything else."""
    said = f"a row's {name} are seconds by name"
    given = _read(lambda spans: [(plain_str(each), seconds) for each, seconds in dict.items(spans)], value, said)
    return {each: check_time(name, seconds) for each, seconds in given}


def _read(read: Callable[[Any], T], value: Any, said: str) -> T:
    try:
        return read(value)
    except Exception:  # another type or out of bounds, half a character, or an object of somebody's own
        raise TraceError(f"{said}, got {show(value)[:80]}") from None


def _time(value: Any) -> float:
    number = plain_real(value)
    if not 0 <= number < math.inf:
        raise ValueError
    return number


def _count(value: Any, most: float = math.inf) -> int:
    number = plain_int(value)
    if not 0 <= number <= most:
        raise ValueError
    return number


def _items(name: str, values: object) -> Sequence[Any]:
    if not isinstance(values, (list, tuple)):
        raise TraceError(f"a row's {name} is a list, got {show(values)[:80]}")
    return values
