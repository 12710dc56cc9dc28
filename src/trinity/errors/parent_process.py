"""The process that started this one: what works for it alone ends with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_lifeline: list[int] = []  # both ends of a pipe, of which only this program holds the second


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent's thread ends that started it; Linux alone can.

    - ``parent``: the parent's process, which may have ended by now.
    """
    import ctypes

    with contextlib.suppress(AttributeError, TypeError):  # of another system's library
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def name_process(name: str) -> None:
    """Give this process a name that ps, top and /proc show, cut to the 15 bytes of Linux; nothing on other systems."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(f"trinity:{name}".encode(errors="replace")[:15])


def hold_lifeline() -> int:
    """Return the end of a pipe to be inherited by processes that call ``die_with_holder``; this program is the holder.

    The other end is closed with the program, by the kernel. A copy of the program, made by ``fork``, has one of its
    own.
    """
    if not _lifeline:
        _lifeline.extend(os.pipe())  # of two threads the second's is held for nothing
    return _lifeline[0]


def die_with_holder(lifeline: int) -> None:
    """Have the kernel kill this process, frozen or not, once the program that holds ``lifeline`` has ended.

    Whoever started this one does not matter, and may have ended long before. Linux alone can, with /proc.
    """
    with contextlib.suppress(AttributeError, OSError):
        # A description of the pipe that no other process shares: it can have one owner.
        own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)  # SIGIO would wait for a frozen one to go on
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    if has_holder_ended(lifeline):  # before the calls above
        os._exit(1)


def has_holder_ended(lifeline: int) -> bool:
    """Tell if nobody holds the other end of a pipe any more; ``select`` would take no descriptor of 1024 or more."""
    look = select.poll()
    look.register(lifeline, select.POLLIN)
    return bool(look.poll(0))


def _let_go() -> None:
    """Close what a copy of the program has of its lifeline: it would outlive the program."""
    for each in _lifeline:
        with contextlib.suppress(OSError):
            os.close(each)
    _lifeline.clear()


os.register_at_fork(after_in_child=_let_go)
