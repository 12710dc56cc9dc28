"""Huge pages for memory that every step reads from end to end, on Linux systems that allow them.

With pages of 4 KiB a processor's prefetch stops at the end of each page, and the next needs another address lookup.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

HUGE_PAGE_BYTES = 2 << 20
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGEPAGE, _COLLAPSE = 14, 25  # madvise: for pages to come; for present pages, at once (Linux 6.1)


def use_huge_pages(pieces: Iterable[tuple[int, int]]) -> int:
    """Ask the system to move pieces of memory (address, bytes) that lie close together to huge pages.

    Returns the bytes asked for; 0 if the system does not allow it. A system short of memory may ignore the request.
    """
    if not _is_allowed():
        return 0
    advise = ctypes.CDLL(None).madvise
    asked = 0
    for start, size in find_dense_runs(pieces):
        for how in (_HUGEPAGE, _COLLAPSE):  # advice only: a refusal is no error
            advise(ctypes.c_void_p(start), ctypes.c_size_t(size), how)
        asked += size
    return asked


def find_dense_runs(pieces: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Find runs (address, bytes) of whole huge pages, each at least half filled by ``pieces``."""
    start = end = filled = 0
    for address, size in sorted(pieces):
        low = address // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        high = -(-(address + size) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        if low > end:
            if 2 * filled >= end - start > 0:
                yield start, end - start
            start, filled = low, 0
        end, filled = max(end, high), filled + size
    if 2 * filled >= end - start > 0:
        yield start, end - start


def _is_allowed() -> bool:
    try:
        return sys.platform == "linux" and "[never]" not in _SETTING.read_text()
    except OSError:
        return False
