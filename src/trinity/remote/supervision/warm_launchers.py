"""Launchers that a program keeps from one pipeline to the next, so that only the first imports torch in one.

Each serves one pipeline at a time: what freezes or kills one, and secrets that pass through it, stay that pipeline's.
At most one of each kind waits, for two minutes, and only for a pipeline that would have started the very same.
One through which a secret of the user's has gone waits for none.
"""

from __future__ import annotations

import atexit
import os
import threading

from trinity.errors import ConfigError
from trinity.remote.supervision.fork_client import Launcher, find_kept
from trinity.remote.supervision.process_identity import describe_inheritance

LAUNCHER_WAITS_S = 120.0  # torch and the classes of models hold some hundred megabytes
_idle: dict[bool, Launcher] = {}  # by whether it has torch
_lock = threading.Lock()
_of_parent: list[Launcher] = []  # of the program that this one was forked from


async def take_launcher(torch: bool = True) -> tuple[Launcher, bool]:
    """Return a launcher for this pipeline alone and True, to be given to ``leave_launcher``.

    It is the one that an earlier pipeline has left, if that inherited what a new one would and takes orders. Within a
    ``kept_launcher`` it is that and False. Raises ``OSError`` if none can be started.
    """
    kept = find_kept(torch)
    if kept is not None:
        return kept, False
    with _lock:
        idle = _idle.pop(torch, None)
    if idle is None:
        return Launcher(torch), True
    taken = False
    try:
        taken = idle.inherited == describe_inheritance() and await idle.wakes()
    finally:
        if not taken:
            idle.dismiss()
    return idle if taken else Launcher(torch), True


def leave_launcher(launcher: Launcher, seconds: float = LAUNCHER_WAITS_S) -> None:
    """Keep a launcher whose pipeline has ended for the next one, or end it if it is not fit for another. Blocks.

    ``seconds`` (120): how long it waits; 0 ends it now.
    """
    if not seconds or not launcher.is_fit():
        return launcher.close()
    with _lock:
        try:
            launcher.rest(seconds, _end_idle)
        except ConfigError:
            surplus: Launcher | None = launcher
        else:
            surplus, _idle[launcher.torch] = _idle.get(launcher.torch), launcher
    if surplus is not None:
        surplus.close()


def close_idle() -> None:
    """End the launchers that wait for another pipeline. Blocks."""
    with _lock:
        idle = list(_idle.values())
        _idle.clear()
    for launcher in idle:
        launcher.close()


def _end_idle(launcher: Launcher) -> None:
    """End a launcher that has waited for long, or has ended, unless a pipeline has taken it meanwhile."""
    with _lock:
        waits = _idle.get(launcher.torch) is launcher
        if waits:
            del _idle[launcher.torch]
    if waits:
        launcher.dismiss()


def _forget_idle() -> None:
    """Leave the launchers to the program that this copy was forked from, and have a lock that nobody holds."""
    global _lock
    _lock = threading.Lock()
    _of_parent.extend(_idle.values())
    _idle.clear()


atexit.register(close_idle)
os.register_at_fork(after_in_child=_forget_idle)
