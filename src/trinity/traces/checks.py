"""Checks of a row's numbers, which every reader of a trace relies on. Each raises ``TraceError``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import force_setattr

from trinity.errors import TraceError
from trinity.errors.arguments import plain_bool, plain_int, plain_str, show

NAMES = {str: "a text", bool: "True or False"}
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
    except Exception:  # no number; a whole one beyond any float; or an object of somebody's own
        pass
    raise TraceError(f"a row's {name} is a finite number of at least 0, got {show(value)[:80]}")


def check_times(name: str, values: object) -> Sequence[float]:
    """Return a list of finite numbers of at least 0. Raises for anything else."""
    given = _items(name, values)
    if all(type(each) is float and 0 <= each < math.inf for each in given):
        return given
    return [check_time(name, each) for each in given]


def check_count(name: str, value: Any, most: int | None = None) -> int:
    """Return a whole number of at least 0 and at most ``most``, numpy's as Python's own. Raises for others.

    ``most`` (None): ``MOST_TOKENS``.
    """
    number, most = _plain_whole(value), most or MOST_TOKENS
    if number is None or not 0 <= number <= most:
        bound = f"2**{most.bit_length() - 1}"
        raise TraceError(f"a row's {name} is a whole number of at least 0 and at most {bound}, got {show(value)[:80]}")
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
    check_plain(row, str, "request_id", "session", "finish_reason")
    check_plain(row, bool, "emulated")
    if type(row.spans) is not dict or row.spans:
        check_fields(row, check_spans, "spans")


def check_plain(row: Any, kind: type, *names: str) -> None:
    """Replace these fields of ``row`` by Python's own text or bool. Raises for others, and for half a character."""
    for name in names:
        value: Any = getattr(row, name)
        exact = type(value) is kind
        if exact and (kind is bool or value.isascii()):
            continue
        try:
            force_setattr(row, name, plain_bool(value) if kind is bool else plain_str(value))
        except Exception:  # another type, half a character, or an object of somebody's own
            raise TraceError(f"a row's {name} is {NAMES[kind]}, got {show(value)[:80]}") from None


def read_content(name: str, value: object) -> str:
    """Return a text that UTF-8 can encode. Raises for anything else."""
    if type(value) is str and value.isascii():  # most are
        return value
    try:
        return plain_str(value)
    except Exception:
        raise TraceError(f"a medium's {name} is the text of a hash, got {show(value)[:80]}") from None


def check_spans(name: str, value: Any) -> dict[str, float]:
    """Return seconds by name. Raises for anything else."""
    try:
        return {plain_str(each): check_time(name, seconds) for each, seconds in dict.items(value)}
    except TraceError:
        raise
    except Exception:
        raise TraceError(f"a row's {name} are seconds by name, got {show(value)[:80]}") from None


def _plain_whole(value: Any) -> int | None:
    if type(value) is int:
        return value
    try:
        return plain_int(value)
    except Exception:
        return None


def _plain_number(value: Any) -> float:
    """Return an int or a float. Raises whatever is wrong with it."""
    if isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
        raise TypeError
    number = float(value)
    return int(value) if isinstance(value, int) else number


def _items(name: str, values: object) -> Sequence[Any]:
    if not isinstance(values, (list, tuple)):
        raise TraceError(f"a row's {name} is a list, got {show(values)[:80]}")
    return values
