"""Ends what a program has left running as it exits: a thread that Python freezes inside native code aborts the process.

A daemon thread goes on while the interpreter shuts down. When it next asks for the interpreter's lock, as numpy, torch
and every extension do at the end of a call, CPython before 3.14 ends it where it stands, and C++ answers by abort().
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

EXIT_S = 10.0  # that a program's end waits for all threads together; a step that takes longer is left alone


class Endable(Protocol):
    """Owner of threads."""

    def end_now(self) -> Sequence[threading.Thread]:
        """Ask the threads to end, without waiting, and return them."""
        ...


_running: weakref.WeakSet[Endable] = weakref.WeakSet()
_registered = False


def end_at_exit(owner: Endable) -> None:
    """Have an owner's threads ended as the program exits, if it is still there; call it once they run.

    The hook is registered by the first call: handlers run in reverse order, and this one must precede those that close
    the files of whoever was there before.
    """
    global _registered
    _running.add(owner)
    if not _registered:
        _registered = True
        atexit.register(_end_all)


def _end_all() -> None:
    until = time.monotonic() + EXIT_S
    for thread in [thread for owner in list(_running) for thread in owner.end_now()]:
        if thread.ident is not None:
            thread.join(max(0.0, until - time.monotonic()))


os.register_at_fork(after_in_child=_running.clear)  # a fork has none of the threads
