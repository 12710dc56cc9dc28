"""Huge pages for memory that every step reads from end to end, on Linux where the system lets programs ask for them.

With pages of 4 KiB a processor's read-ahead stops at the end of each, and it looks up another place for the next.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

HUGE = 2 << 20  # bytes of one
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGEPAGE, _COLLAPSE = 14, 25  # madvise's: from now on; what is there already, at once (Linux 6.1)


def make_huge(pieces: Iterable[tuple[int, int]]) -> int:
    """Move pieces of memory (address, bytes) that lie close together to huge pages.

    Returns the bytes that were asked for: 0 where nothing can be. A system that is short of memory may do nothing.
    """
    if not _allowed():
        return 0
    advise = ctypes.CDLL(None).madvise
    asked = 0
    for start, size in dense(pieces):
        for how in (_HUGEPAGE, _COLLAPSE):  # only a wish: that either is refused is no error
            advise(ctypes.c_void_p(start), ctypes.c_size_t(size), how)
        asked += size
    return asked


def dense(pieces: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Runs (address, bytes) of whole huge pages, at least half of each run filled by ``pieces``."""
    start = end = filled = 0
    for address, size in sorted(pieces):
        low, high = address // HUGE * HUGE, -(-(address + size) // HUGE) * HUGE
        if low > end:
            if 2 * filled >= end - start > 0:
                yield start, end - start
            start, filled = low, 0
        end, filled = max(end, high), filled + size
    if 2 * filled >= end - start > 0:
        yield start, end - start


def _allowed() -> bool:
    try:
        return sys.platform == "linux" and "[never]" not in _SETTING.read_text()
    except OSError:
        return False
