"""Gives freed memory of this process back to the system, where its C library (glibc) would keep it.

A thread's tensors lie in a heap of its own, which shrinks from its end alone: one small piece that lives on keeps all
that was freed before it resident. An encoder's buffers so stayed with an instance that had encoded a single image.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from math import inf

_MMAP_THRESHOLD, _LARGE_BYTES = -3, 4 << 20  # glibc's name of the setting, in malloc.h, and what is large
RELEASE_EVERY_S = 1.0  # between two returns: each takes some 2 ms, and as much for pages that are needed again
_last_s = -inf  # clock time


@cache
def _find_trim() -> Callable[[int], int] | None:
    """Find glibc's malloc_trim; None with another C library."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return found


def release_freed_memory() -> bool:
    """Give all freed pages of every heap back, now. Returns False where the system has no way to."""
    trim = _find_trim()
    if trim is None:
        return False
    trim(0)
    return True


def release_at_times() -> bool:
    """``release_freed_memory``, once in ``RELEASE_EVERY_S``. Returns True where it was done. Any thread calls."""
    global _last_s
    now = time.monotonic()
    if now - _last_s < RELEASE_EVERY_S:
        return False
    _last_s = now
    return release_freed_memory()


def return_large_at_once() -> None:
    """Have large pieces of memory go back to the system as they are freed, here and in processes forked from here.

    Else glibc keeps pieces of up to 32 MiB once it has seen such freed: bodies of clients left 300 MiB behind. Costs
    the zeroing of each, so not for processes that compute tensors.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
