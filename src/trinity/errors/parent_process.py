"""The process that started this one: what works for it alone ends with it."""

from __future__ import annotations

import contextlib
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent's thread ends that started it; Linux alone can.

    - ``parent``: the parent's process, which may have ended by now.
    """
    import ctypes

    with contextlib.suppress(AttributeError, TypeError):  # of another system's library
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)
