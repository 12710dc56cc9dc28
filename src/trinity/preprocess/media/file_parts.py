"""A counter of the parts of one file, which bounds all walks over it together."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from trinity.preprocess.media_limits import MediaProblem

MOST_FILE_PARTS = 1 << 15  # segments, chunks, blocks of a file: readers spend a few microseconds of Python on each
UNREADABLE = (struct.error, IndexError, ValueError, ArithmeticError)
"""Errors by which a walk over a broken file ends: places and sizes in it may be any number, infinity included."""


class Parts:
    """Counts the parts of one file that walks over it look at, and raises ``MediaProblem`` beyond the most.

    Each walk takes the file's one counter as an argument; ``for _ in parts`` counts a part at each turn, and only the
    loop's own end ends it.

    - ``most`` (32,768): so many parts a file may have.
    - ``what`` ("parts"), ``instead``: a name of the parts, and a remedy, for the error.
    """

    def __init__(self, most: int = MOST_FILE_PARTS, what: str = "parts", instead: str = "save it again") -> None:
        self._found, self._most, self._problem = 0, most, f"has more than {most} {what}; {instead}"

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.take(1)
        return self._found

    @property
    def left(self) -> int:
        """Number of parts that may still be counted."""
        return max(0, self._most - self._found)

    def take(self, count: int) -> None:
        """Count so many parts at once."""
        self._found += count
        if self._found > self._most:
            raise MediaProblem(self._problem)
