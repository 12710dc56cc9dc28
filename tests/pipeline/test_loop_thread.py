"""LoopThread: calls of its loop that end with their caller, wherever a signal's handler raises in it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from support.interrupts import interrupt_everywhere
from trinity.errors import ClosedError, ConfigError
from trinity.pipeline.loop_thread import LoopThread

LIVENESS_S = 120.0
HERE = ("loop_thread.py",)
WAITING = ("loop_thread.py", "/asyncio/", "/threading.py", "/queue.py", "/concurrent/")


async def answer(value: int = 1) -> int:
    return value


def named(name: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == name]


def ends(name: str) -> bool:
    until = time.monotonic() + LIVENESS_S
    while named(name) and time.monotonic() < until:
        time.sleep(0.0005)
    return not named(name)


@pytest.mark.parametrize("endless", [True, False])
def test_a_call_that_is_interrupted_anywhere_ends_its_coroutine(endless: bool) -> None:
    thread = LoopThread("trinity-interrupted")
    running: set[object] = set()

    async def serve() -> None:
        running.add(me := object())
        try:
            await (asyncio.Event().wait() if endless else asyncio.sleep(0))
        finally:
            running.discard(me)

    async def is_idle() -> bool:
        return not running and len(asyncio.all_tasks()) == 2  # of the loop, and this one

    thread.run(answer)
    places = set()
    for place in interrupt_everywhere(lambda: thread.run(serve), WAITING):
        places.add(place.split(",")[0])
        until = time.monotonic() + LIVENESS_S
        while not thread.run(is_idle):
            assert time.monotonic() < until, f"the coroutine runs on after an interrupt in {place}"
        if endless and place.startswith("LoopCall.wait"):
            break
    assert {"LoopThread.run", "LoopThread._post", "LoopCall.wait"} <= places
    thread.close()


def test_a_start_that_is_interrupted_anywhere_leaves_no_thread_and_may_be_tried_again() -> None:
    """But for Python's own ``Thread.start``, which holds a condition meanwhile."""
    tried = [LoopThread("trinity-tried")]
    for place in interrupt_everywhere(lambda: tried[-1].run(answer), HERE):
        assert tried[-1].run(answer) == 1, place
        tried[-1].close()
        assert ends("trinity-tried"), place
        tried.append(LoopThread("trinity-tried"))
    tried[-1].close()
    assert len(tried) > 25


def test_a_call_that_the_loop_cancels_is_told_that_it_closes() -> None:
    async def end() -> None:
        raise asyncio.CancelledError

    thread = LoopThread("trinity-closed")
    with pytest.raises(ClosedError, match="closed while this call waited"):
        thread.run(end)
    thread.close()
    with pytest.raises(ClosedError, match="make a new one"):
        thread.run(answer)


def test_no_thread_to_be_had_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    thread = LoopThread("trinity-none")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ConfigError, match="can't start new thread"):
            thread.run(answer)
    assert thread.run(answer, value=2) == 2
    thread.close()


def test_the_error_of_a_call_that_nobody_waits_for_is_no_trouble() -> None:
    async def fail() -> None:
        raise ValueError("of a call")

    thread = LoopThread("trinity-begun")
    thread.begin(fail)
    with pytest.raises(ValueError, match="of a call"):
        thread.run(fail)
    thread.close()
