"""What threads put for an event loop is taken there: in order, once, also what is there at the end."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from trinity.runtime.core_thread import Mailbox

SOON_S = 120.0
COUNT = 500


@pytest.fixture(params=["eventfd", "call_soon_threadsafe"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without eventfd, which not every system has."""
    if request.param != "eventfd":
        monkeypatch.delattr(os, "eventfd", raising=False)
    return str(request.param)


def descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if _is_eventfd(name)}


def _is_eventfd(name: str) -> bool:
    try:
        return "eventfd" in os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return False


async def test_each_thread_s_items_come_in_order_on_the_loop_s_thread(system: str) -> None:
    taken: list[tuple[str, int]] = []
    threads: set[int] = set()
    all_there = asyncio.Event()

    def take(item: tuple[str, int]) -> None:
        taken.append(item)
        threads.add(threading.get_ident())
        if len(taken) == 3 * COUNT:
            all_there.set()

    box = Mailbox(take)
    box.open(asyncio.get_running_loop())

    def put(name: str) -> None:
        for number in range(COUNT):
            box.put((name, number))

    await asyncio.gather(*(asyncio.to_thread(put, name) for name in "abc"))
    async with asyncio.timeout(SOON_S):
        await all_there.wait()
    box.close()
    assert threads == {threading.get_ident()}
    for name in "abc":
        assert [each for each in taken if each[0] == name] == [(name, number) for number in range(COUNT)]


async def test_a_sleeping_loop_is_woken(system: str) -> None:
    woken = asyncio.Event()
    box = Mailbox[int](lambda item: woken.set())
    box.open(asyncio.get_running_loop())
    threading.Timer(0.05, box.put, (1,)).start()
    async with asyncio.timeout(SOON_S):
        await woken.wait()
    box.close()


async def test_what_is_there_at_the_end_is_taken_and_the_descriptor_is_given_back(system: str) -> None:
    before, taken = descriptors(), list[int]()
    box = Mailbox(taken.append)
    box.open(asyncio.get_running_loop())
    assert len(descriptors() - before) == (system == "eventfd")
    for number in range(3):
        box.put(number)
    box.close()
    assert taken == [0, 1, 2]
    assert descriptors() == before
    box.close()
    await asyncio.sleep(0)
    assert taken == [0, 1, 2]


async def test_what_is_put_while_an_item_is_taken_comes_behind_it(system: str) -> None:
    taken: list[int] = []

    def take(item: int) -> None:
        if item == 1:
            box.put(2)
        taken.append(item)

    box = Mailbox(take)
    box.open(asyncio.get_running_loop())
    box.put(1)
    box.drain()
    assert taken == [1, 2]
    box.close()


async def test_one_that_was_never_opened_is_closed() -> None:
    box = Mailbox[int](lambda item: None)
    box.close()


def test_a_loop_that_is_gone_is_told_of(system: str) -> None:
    box = Mailbox[int](lambda item: pytest.fail("the loop is gone"))
    loop = asyncio.new_event_loop()
    box.open(loop)
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        box.put(1)


async def test_one_that_cannot_be_taken_does_not_keep_those_behind_it(system: str) -> None:
    taken, told, done = list[int](), list[str](), asyncio.Event()

    def take(item: int) -> None:
        if item == 1:
            raise ZeroDivisionError
        taken.append(item)
        done.set()

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: told.append(repr(context["exception"])))
    box = Mailbox(take)
    box.open(loop)
    box.put(1)
    box.put(2)
    async with asyncio.timeout(SOON_S):
        await done.wait()
    box.close()
    assert (taken, told) == ([2], ["ZeroDivisionError()"])
