"""Plain values: reads what users pass (numpy's numbers, subclasses) into bounded values of Python's own types."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, TypeVar
from urllib.parse import unquote

from trinity.errors.arguments import plain_bool, plain_int, plain_str, show

T = TypeVar("T")
Reader = Callable[[str, Any], T]  # (field's name, value) to a plain value
MOST_ITEMS = 4096  # items of a list
MOST_PARTS = 1 << 16  # values in a chat, its tools and what else its template reads
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)  # one letter is a drive


class Unfit(Exception):
    """Reason why a value cannot be used, with the field's name."""


def read_text(name: str, value: Any, most: int) -> str:
    """Read text of at most ``most`` characters that UTF-8 can encode. Raises ``Unfit``."""
    if not isinstance(value, str):
        raise Unfit(f"{name} must be text, got {show(value)}")
    if str.__len__(value) > most:
        raise Unfit(f"{name} has {str.__len__(value)} characters; {most} are allowed")
    try:
        return plain_str(value)
    except UnicodeEncodeError as error:
        raise Unfit(f"{name} holds half a character (a lone surrogate, at {error.start}); repair the text") from None


def read_source(source: Any) -> Any:
    """Make an address or a path exact text, and a path absolute: the folder that counts is the caller's as it asks.

    Another process reads the file, or this one later. A file's name may hold bytes that are no UTF-8 (PEP 383).
    """
    if isinstance(source, str):
        if type(source) is not str:
            source = str.encode(source, "utf-8", "surrogatepass").decode("utf-8", "surrogatepass")
        return source if is_address(source) else _mark(_without_scheme(source))
    if isinstance(source, os.PathLike):
        with suppress(Exception):  # somebody's own: it is read later, and refused there
            path = os.fsdecode(os.fspath(source))
            marked = _mark(path)
            return source if marked == path else marked
    return source


def is_address(source: object) -> bool:
    """Tell if a source is an http(s) URL or a data: URI, and no path."""
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://", "data:"))


def _without_scheme(source: str) -> str:
    """Return the path that a file: URL of this host names, and anything else as it is."""
    if source[:7].lower() != "file://":
        return source
    host, slash, path = source[7:].partition("/")
    return unquote(slash + path, errors="surrogateescape") if slash and host.lower() in ("", "localhost") else source


def _mark(path: str) -> str:
    """Make a path absolute; a dot marks where what was given begins (rsync's way), which ``given_path`` returns."""
    marked = absolute_path(f"./{path}") if path and not os.path.isabs(path) else path
    return marked if os.path.isabs(marked) else path


def absolute_path(path: str) -> str:
    """Put the working directory before a relative path; "", or where that directory is gone, it stays as it is."""
    if not path or os.path.isabs(path):
        return path
    try:
        return os.path.join(os.getcwd(), path)  # not abspath, which makes another file of one behind a link and ".."
    except OSError:
        return path


def given_path(path: str) -> str:
    """Return the path of a source as it was given to ``read_source``."""
    return path.partition("/./")[2] or path if os.path.isabs(path) else path


def find_scheme(path: str) -> str:
    """Return the scheme of what looks like an address ("s3:" of "s3://bucket/a.png") and is no file; else ""."""
    found = _SCHEME.match(given_path(path))
    return found.group() if found and not os.path.lexists(path) else ""


def read_count(name: str, value: Any) -> int:
    """Read a whole number of any size, numpy's too. Raises ``Unfit``, for True and False as well."""
    try:
        return plain_int(value)
    except TypeError:
        raise Unfit(f"{name} must be a whole number, got {show(value)}") from None


def whole_between(low: int, high: int) -> Reader[int]:
    """Make a reader of whole numbers in [low, high]."""

    def read(name: str, value: Any) -> int:
        number = read_count(name, value)
        if not low <= number <= high:
            raise Unfit(f"{name} must lie between {low} and {high}, got {show(value)}")
        return number

    return read


def real_between(low: float, high: float) -> Reader[float]:
    """Make a reader of numbers in [low, high]; NaN is in none."""

    def read(name: str, value: Any) -> float:
        real = isinstance(value, Real) and not isinstance(value, bool)
        if not real or not low <= value <= high or not low <= (number := float(value)) <= high:
            raise Unfit(f"{name} must be a number between {low:g} and {high:g}, got {show(value)}")
        return number

    return read


def read_flag(name: str, value: Any) -> bool:
    """Read True or False, numpy's too. Raises ``Unfit``."""
    try:
        return plain_bool(value)
    except TypeError:
        raise Unfit(f"{name} must be True or False, got {show(value)}") from None


def tuple_of(read: Reader[T], what: str) -> Reader[tuple[T, ...]]:
    """Make a reader of lists, tuples, sets and arrays, each item by ``read``."""

    def read_all(name: str, value: Any) -> tuple[T, ...]:
        try:
            if isinstance(value, (str, bytes, Mapping)):
                raise TypeError
            many, items = len(value), iter(value)
        except TypeError:
            raise Unfit(f"{name} must be a tuple of {what}, got {show(value)}") from None
        _check_length(name, many)
        return tuple(read(name, item) for _, item in zip(range(many), items, strict=False))

    return read_all


def read_items(name: str, items: Any) -> list[Any]:
    """Read a list of anything. Raises ``Unfit`` if it is none, or far too long."""
    if isinstance(items, (str, bytes)) or not isinstance(items, Sequence):
        raise Unfit(f"{name} must be a list, also for one item, got {type(items).__name__}")
    many = len(items)
    _check_length(name, many)
    return [item for _, item in zip(range(many), items, strict=False)]


def read_chat(name: str, value: Any, most: int, left: list[int] | None = None) -> Any:
    """Copy lists, mappings and texts (of at most ``most`` characters in all): no later change of them is seen.

    Anything else in them stays as it is. ``left`` (``MOST_PARTS``): number of values that may come, which is counted
    down, for what is read in parts. Raises ``Unfit`` for more.
    """
    left, characters = [MOST_PARTS] if left is None else left, most

    def copy(each: Any) -> Any:
        nonlocal characters
        left[0] -= 1
        if left[0] < 0:
            raise Unfit(f"{name}: the request has more than {MOST_PARTS} values; give fewer")
        if isinstance(each, str):
            text = read_text(name, each, most)
            characters -= len(text)
            if characters < 0:
                raise Unfit(f"{name}: the texts have more than {most} characters in all; give fewer")
            return text
        if isinstance(each, Mapping):
            return {copy(key): copy(inner) for key, inner in each.items()}
        if isinstance(each, Sequence) and not isinstance(each, (bytes, bytearray, memoryview)):
            return list(map(copy, each))
        return each

    return copy(value)


def _check_length(name: str, many: int) -> None:
    if many > MOST_ITEMS:
        raise Unfit(f"{name} has {many} items; {MOST_ITEMS} are allowed")
