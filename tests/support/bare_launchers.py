"""Launchers for tests of their own lives: all that are started are known and end, and some import nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.process_identity import has_ended, read_start
from trinity.remote.supervision.warm_launchers import LAUNCHER_WAITS_S, close_idle, leave_launcher, take_launcher

LIVENESS_S = 60.0
BARE = "from trinity.remote import fork_server as s; s.PACED_MODULES = (); s.main()"
Births = dict[int, int | None]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Births]:
    """The process of every launcher that was started, and when; each has ended at the end."""
    births: Births = {}
    make = Launcher.__init__

    def counted(self: Launcher, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        births[self._process.pid] = read_start(self._process.pid)

    close_idle()  # that of an earlier test
    monkeypatch.setattr(Launcher, "__init__", counted)
    yield births
    close_idle()
    assert gone(births)


def gone(births: Births) -> bool:
    """True once all processes have ended."""
    until = time.monotonic() + LIVENESS_S
    while left := [number for number, born in births.items() if not has_ended(number, born)]:
        if time.monotonic() > until:
            raise AssertionError(f"{left} have not ended")
        time.sleep(0.01)
    return True


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers import nothing before their first order, for tests that give none: half a second of CPU each."""
    monkeypatch.setattr(Launcher, "program", ("-c", BARE))


async def take() -> Launcher:
    launcher, own = await take_launcher(torch=False)
    assert own
    async with asyncio.timeout(LIVENESS_S):
        await asyncio.wrap_future(launcher.ready)
    return launcher


async def leave(launcher: Launcher, seconds: float = LAUNCHER_WAITS_S) -> Launcher:
    await asyncio.to_thread(leave_launcher, launcher, seconds)
    return launcher


async def take_and_leave() -> Launcher:
    return await leave(await take())


async def has_gone(launcher: Launcher, started: Births) -> bool:
    return await asyncio.to_thread(gone, {launcher._process.pid: started[launcher._process.pid]})
