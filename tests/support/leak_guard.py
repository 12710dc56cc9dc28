"""Fails a test that leaves threads, asyncio tasks, open descriptors or another scheduling behind.

The rule: what appears while a fixture of class, module, package or session scope is set up belongs to that fixture,
and so does what appears in a test that uses such an owner (a pipeline shared by many tests may grow a lane). It
must be gone when the owner is torn down. Everything else must be gone when its test's tear-down ends. What a program
keeps on purpose, a launcher that waits for the next pipeline, does not count: the next test may have it.
Threads count where their name starts with "trinity"; descriptors where they are sockets, pipes, event
descriptors or shared memory.
"""

from __future__ import annotations

import asyncio.runners
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import pytest

PATIENCE_S = 60.0  # a thread that was told to end may need its time on a busy machine
KINDS = ("socket:", "pipe:", "anon_inode:[event", "/memfd:", "/dev/shm/")

Mark = frozenset[str]


def _threads() -> set[str]:
    alive = set(threading.enumerate()) - {each._reader for each in _waiting_launchers()}
    return {f"thread {t.name} ({t.ident})" for t in alive if t.name.startswith("trinity")}


def _descriptors() -> set[str]:
    found, kept = set(), _of_python() | _of_waiting_launchers() | _of_lifeline()
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the listing's own descriptor
            continue
        if target.startswith(KINDS) and int(number) not in kept:
            found.add(f"descriptor {number} -> {target}")
    return found


def _of_python() -> set[int | None]:
    # multiprocessing starts these on first use and keeps them for the life of the process.
    tracker: Any = vars(multiprocessing.resource_tracker)["_resource_tracker"]
    server: Any = vars(multiprocessing.forkserver)["_forkserver"]
    return {tracker._fd, server._forkserver_alive_fd}


def _waiting_launchers() -> list[Any]:
    module: Any = sys.modules.get("trinity.remote.supervision.warm_launchers")
    return list(module._idle.values()) if module is not None else []


def _of_waiting_launchers() -> set[int | None]:
    found = set()
    for each in _waiting_launchers():
        with suppress(ValueError):  # it ends just now
            found |= {each._process.stdin.fileno(), each._process.stdout.fileno()}
    return found


def _of_lifeline() -> set[int]:
    """Return the pipe by which the kernel ends what the program has started, made once."""
    module: Any = sys.modules.get("trinity.errors.parent_process")
    return set(module._lifeline) if module is not None else set()


def _scheduling() -> set[str]:
    """Name the policy by which this process has its turns, unless it is the usual one; see ``usual_scheduling``."""
    policy = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else 0
    return {f"scheduling policy {policy}"} if policy else set()


def snapshot() -> Mark:
    return frozenset(_threads() | _descriptors() | _scheduling())


def settled(allowed: Mark, patience_s: float) -> Mark:
    """What is there beyond ``allowed`` once collected and given time to end."""
    for generation in range(3):  # what a test leaves is young, and a whole collection takes a second after thousands
        if not snapshot() - allowed:
            break
        gc.collect(generation)
    until = time.monotonic() + patience_s
    while (extra := snapshot() - allowed) and time.monotonic() < until:
        time.sleep(0.01)
    return extra


class LeakGuard:
    """A pytest plugin. ``_owned`` maps a wide-scope fixture to what it may keep until its own tear-down."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        self._owned: dict[Any, Mark] = {}
        self._disowned: Mark = frozenset()
        self._tasks: list[str] = []
        self._cancel_all_tasks: Callable[..., None] = asyncio.runners._cancel_all_tasks  # type: ignore[attr-defined]

    def pytest_configure(self) -> None:
        asyncio.runners._cancel_all_tasks = self._note_tasks  # type: ignore[attr-defined]

    def pytest_unconfigure(self) -> None:
        asyncio.runners._cancel_all_tasks = self._cancel_all_tasks  # type: ignore[attr-defined]

    def _note_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        # A Runner that closes cancels what still runs: every task left at this point is a leak.
        self._tasks += [f"asyncio task {task.get_name()}: {task.get_coro()!r}" for task in asyncio.all_tasks(loop)]
        self._cancel_all_tasks(loop)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = snapshot()
        result = yield
        # A wide fixture may ask for another one while it is set up.
        self._owned[fixturedef] = (snapshot() - before).difference(*self._owned.values())
        return result

    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        self._disowned |= self._owned.pop(fixturedef, frozenset())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        item.stash[_BEFORE] = snapshot()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        owners = self._owners_used_by(item)
        result = yield
        self._adopt([owner for owner in owners if owner in self._owned], item.stash[_BEFORE])
        allowed = item.stash[_BEFORE].union(*self._owned.values()) - self._disowned
        leaked = [*sorted(settled(allowed, self.patience_s)), *self._tasks]
        self._disowned, self._tasks = frozenset(), []
        if leaked:
            pytest.fail("the test left behind:\n  " + "\n  ".join(leaked), pytrace=False)
        return result

    def _owners_used_by(self, item: pytest.Item) -> list[Any]:
        known = getattr(item, "_fixtureinfo", None)
        definitions = known.name2fixturedefs.values() if known else ()
        return [one for many in definitions for one in many if self._owned.get(one)]

    def _adopt(self, owners: list[Any], before: Mark) -> None:
        if owners:
            self._owned[owners[-1]] |= snapshot() - before - self._disowned


_BEFORE: pytest.StashKey[Mark] = pytest.StashKey()
