"""Reads JSON bodies from outside: bounds their values, and holds the interpreter for no longer than a moment.

One C call parses a body of 60 MB for up to two seconds, and no other thread runs meanwhile, the event loop's included.
So a large body is parsed in a thread, in pieces: long strings are cut out, which leaves a small text, and put back.
What is made of it is made in that thread too.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from functools import partial
from math import isinf
from typing import Any, TypeVar

import msgspec

from trinity.preprocess.preparation_lanes import FairQueue

T = TypeVar("T")
MOST_VALUES = 128 << 10  # of a body: no request has as many, and Python takes 30 ms to make them
MOST_QUOTES = 1 << 19  # of a body, those inside strings included, each of which takes up to a microsecond or two
MOST_OUTSIDE = 1 << 20  # bytes of a body outside strings: numbers and spaces; one call reads them
MOST_WIDE = 16 << 20  # bytes of a string with characters beyond Latin-1: one call makes it, of up to 4 bytes each
AT_ONCE_BYTES = 64 << 10  # of a body that is read on the loop: some milliseconds, 20 for 16,000 numbers
MEDIUM_BYTES = 4 << 20  # of a body that larger ones do not delay
_QUOTES = f"more than {MOST_QUOTES} quotes"
_LONG = 64  # bytes of a string that is cut out: what is left has at most so many for each value
_WINDOW = 1 << 20  # bytes in which separators are counted at a time
_PIECE = 256 << 10  # bytes of a string that are decoded at a time
_MOST_SEARCH = 4 << 10  # backslashes in a row
_ESCAPE = 6  # bytes of the longest escape; two of them may be one character
_HIGH = re.compile(rb"\\u[dD][89abAB]")  # the first of these two


class TooManyValues(ValueError):
    """A body has more than a request may have; says of what."""


class JsonBodies:
    """Parses bodies, large ones in threads, one at a time of each of two sizes, in fair turns of their clients.

    Small ones wait for none.
    """

    def __init__(self) -> None:
        self._medium, self._large = FairQueue(1), FairQueue(1)

    async def decode(self, parts: list[bytes], client: str, read: Callable[[Any], T]) -> T:
        """Parse a client's body, and return ``read(body)``. The list of its parts may be empty afterwards.

        Raises ``TooManyValues``, ``RecursionError``, ``ValueError`` for what is no JSON, and what ``read`` raises.
        """
        size = sum(map(len, parts))
        if size <= AT_ONCE_BYTES:
            return read(_decode_short(b"".join(parts)))
        queue = self._medium if size <= MEDIUM_BYTES else self._large
        return await queue.run_in_thread(client, partial(_read_parts, parts, read))


def _read_float(text: str) -> float:
    """Read a number: the parser itself takes up to 34 microseconds for a tiny one, and no other thread runs then."""
    number = float(text)
    if isinf(number):
        raise ValueError("a number is out of range")
    return number


_DECODER = msgspec.json.Decoder(float_hook=_read_float)


def _read_parts(parts: list[bytes], read: Callable[[Any], T]) -> T:
    content = b"".join(parts)
    parts.clear()  # a body is there twice, not three times
    return read(decode_json(content))


def _decode_short(content: bytes) -> Any:
    """Parse a body of ``AT_ONCE_BYTES`` at most by one call: to look for its strings would take 20 times as long."""
    if sum(content.count(each) for each in (b",", b"[", b"{")) <= MOST_VALUES:
        return _DECODER.decode(content)
    return decode_json(content)  # which counts none inside strings


def decode_json(content: bytes) -> Any:
    """Parse a JSON text whose values are bounded: see ``JsonBodies.decode``."""
    strings = _find_long_strings(content)
    if not strings:
        return _DECODER.decode(content)
    name = secrets.token_hex(8)  # which no body has foreseen
    pieces: list[bytes] = []
    at = 0
    for number, (start, end) in enumerate(strings):
        pieces += (content[at:start], b"%s %d" % (name.encode(), number))
        at = end
    pieces.append(content[at:])
    small = _DECODER.decode(b"".join(pieces))
    texts = {f"{name} {number}": _decode_string(content, *each) for number, each in enumerate(strings)}
    return _put_back(small, texts)


def _find_long_strings(content: bytes) -> list[tuple[int, int]]:
    """Find where long strings are, without their quotes. Raises ``TooManyValues``."""
    found: list[tuple[int, int]] = []
    at, values, quotes, outside = 0, 0, 0, 0
    while True:
        start = content.find(b'"', at)
        end_of_values = len(content) if start < 0 else start
        outside += end_of_values - at
        if outside > MOST_OUTSIDE:
            raise TooManyValues(f"more than {MOST_OUTSIDE >> 20} MiB outside strings")
        while at < end_of_values:
            stop = min(at + _WINDOW, end_of_values)
            values += sum(content.count(each, at, stop) for each in (b",", b"[", b"{"))
            at = stop
            if values > MOST_VALUES:
                raise TooManyValues(f"more than {MOST_VALUES} values")
        if start < 0:
            return found
        end = content.find(b'"', start + 1)
        while end > 0 and _is_escaped(content, start, end):
            quotes += 1
            if quotes > MOST_QUOTES:
                raise TooManyValues(_QUOTES)
            end = content.find(b'"', end + 1)
        quotes += 2
        if quotes > MOST_QUOTES:
            raise TooManyValues(_QUOTES)
        if end < 0:
            return found  # it does not end, which the parser says
        if end - start > _LONG:
            found.append((start + 1, end))
        at = end + 1


def _is_escaped(content: bytes, start: int, end: int) -> bool:
    """Tell whether the quote at ``end`` belongs to the string that begins at ``start``. Raises ``TooManyValues``."""
    for window in (_LONG, _MOST_SEARCH):
        before = content[max(start + 1, end - window) : end]
        slashes = len(before) - len(before.rstrip(b"\\"))
        if slashes < window:
            return slashes % 2 == 1
    raise TooManyValues(f"{_MOST_SEARCH} backslashes in a row")


def _decode_string(content: bytes, start: int, end: int) -> str:
    """Decode a string in pieces, none of which cuts an escape or a character. Raises ``TooManyValues``.

    Pieces of plain text, as a picture's are, are looked at and not kept: the string is made of them all at once.
    """
    begin, made = start, list[str]()
    plain = content.find(b"\\", start, end) < 0
    while start < end:
        stop = _find_cut(content, start, start + _PIECE, end)
        piece = content[start:stop]
        if plain and not piece.isascii():
            plain, made = False, [str(memoryview(content)[begin:start], "ascii")]
        text = msgspec.json.decode(b'"%s"' % piece, type=str)
        if end - begin > MOST_WIDE and not text.isascii() and _is_wide(text):
            raise TooManyValues(f"more than {MOST_WIDE >> 20} MiB in a text with characters beyond Latin-1")
        if not plain:
            made.append(text)
        start = stop
    return str(memoryview(content)[begin:end], "ascii") if plain else "".join(made)


def _is_wide(text: str) -> bool:
    """Tell whether a text has characters beyond Latin-1, for which all of it takes more than a byte each."""
    try:
        text.encode("latin-1")
    except UnicodeEncodeError:
        return True
    return False


def _find_cut(content: bytes, start: int, most: int, end: int) -> int:
    """Find a place close to ``most`` that cuts no escape and no character of the string between two others."""
    while most < end:
        cut = most
        for _ in range(3):  # bytes of a character behind its first; where there are more, the piece is no UTF-8
            cut -= content[cut] & 0xC0 == 0x80
        slash = content.rfind(b"\\", max(start, cut - _ESCAPE), cut)
        if slash >= 0 and _is_escaped(content, start - 1, slash + 1):  # it is no second one: an escape begins here
            cut = slash
            high = cut - _ESCAPE
            if high >= start and _HIGH.match(content, high) and _is_escaped(content, start - 1, high + 1):
                cut = high
        if cut > start:
            return cut
        most += 2 * _ESCAPE  # a piece is longer than a character
    return end


def _put_back(small: Any, texts: dict[str, str]) -> Any:
    """Put long strings back in place of their names. Raises ``DecodeError`` for a key that is there twice, once long.

    Which of the two was the last is not known any more.
    """
    top = [small]
    waiting: list[Any] = [top]
    while waiting:
        each = waiting.pop()
        items = list(each.items()) if isinstance(each, dict) else list(enumerate(each))
        for key, value in items:
            if isinstance(value, (dict, list)):
                waiting.append(value)
            elif isinstance(value, str) and value in texts:
                each[key] = texts[value]
        if isinstance(each, dict) and any(key in texts for key in each):
            entries = list(each.items())
            if any(texts.get(key) in each for key, _ in entries):
                raise msgspec.DecodeError("an object has a key twice, in two spellings")
            each.clear()
            each.update((texts.get(key, key), value) for key, value in entries)
    return top[0]
