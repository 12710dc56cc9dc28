"""Lanes: fair turns, places that are free again only once nothing runs, and bytes that are given back in every way."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import NoneType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.errors import ClosedError, Overloaded, RequestError, RequestTooLarge
from trinity.errors.plain_values import MOST_PARTS
from trinity.preprocess.preparation_lanes import FairQueue, PreparationLane, SharedRoom, run_beside_loop, text_size
from trinity.request import Request, check_request

LIVENESS_S = 60.0


@asynccontextmanager
async def lane(places: int = 1) -> AsyncIterator[PreparationLane]:
    made = PreparationLane("test", places)
    try:
        async with asyncio.timeout(LIVENESS_S):
            yield made
    finally:
        made.stop()
        await asyncio.to_thread(made.join)


async def test_clients_take_turns_and_one_that_leaves_is_out_of_the_queue_at_once() -> None:
    order: list[str] = []
    hold = threading.Event()

    async def ask(made: PreparationLane, client: str, name: str) -> None:
        async with made.visit(client) as visit:
            await visit.run(hold.wait)
            order.append(name)

    async with lane() as made:
        asked = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("a", "a4"), ("b", "b1"), ("c", "c1")]
        tasks = [asyncio.create_task(ask(made, *each)) for each in asked]
        await asyncio.sleep(0)
        assert made.waiting == 5
        tasks[2].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert made.waiting == 4
        hold.set()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a1", "b1", "c1", "a2", "a4"]


async def test_a_place_is_free_only_once_the_thread_of_a_cancelled_request_is() -> None:
    hold, ended = threading.Event(), list[str]()

    async def ask(made: PreparationLane, client: str) -> None:
        async with made.visit(client) as visit:
            visit.at_end = lambda: ended.append(client)
            await visit.run(hold.wait)

    async with lane() as made:
        first = asyncio.create_task(ask(made, "a"))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(ask(made, "b"))
        await asyncio.sleep(0.01)
        assert (made.waiting, ended) == (1, [])
        hold.set()
        await second
    assert ended == ["a", "b"]


async def test_closing_ends_what_waits() -> None:
    hold = threading.Event()

    async def ask(made: PreparationLane) -> None:
        async with made.visit("a") as visit:
            await visit.run(hold.wait)

    made = PreparationLane("test", 1)
    tasks = [asyncio.create_task(ask(made)) for _ in range(3)]
    await asyncio.sleep(0)
    made.stop()
    found = await asyncio.gather(*tasks[1:], return_exceptions=True)
    hold.set()
    await asyncio.gather(tasks[0], asyncio.to_thread(made.join))
    assert [type(each) for each in found] == [ClosedError] * 2
    with pytest.raises(ClosedError):
        await ask(made)


async def take(room: SharedRoom, made: PreparationLane, client: str, size: int, name: str, then: Any = None) -> None:
    async with made.visit(client) as visit, room.share(size, name, visit):
        if then is not None:
            await then()


async def test_bytes_are_waited_for_and_not_for_ever() -> None:
    room = SharedRoom(100, 0.05)
    job = room.hold(60, "a")
    async with lane() as made:
        with pytest.raises(Overloaded, match=r"max_waiting_bytes \(100\)") as caught:
            await take(room, made, "b", 50, "second")
        assert caught.value.request_id == "second"
        with pytest.raises(RequestTooLarge, match="101 bytes"):
            await take(room, made, "b", 101, "third")
        room.let_go(job)
        await take(room, made, "b", 50, "fourth")
        await asyncio.sleep(0)
        assert (room.taken, made.waiting) == (0, 0)
        await take(room, made, "b", 100, "fifth")


async def test_what_waits_for_bytes_holds_no_place_on_the_lane_and_clients_have_turns() -> None:
    """At 726a4303 the place was held, so others waited for the room of a client that had filled it."""
    room, order, held = SharedRoom(100, LIVENESS_S), list[str](), asyncio.Event()
    filled = room.hold(95, "a")

    def ask(client: str, size: int, name: str) -> asyncio.Task[None]:
        async def note() -> None:
            order.append(name)
            await held.wait()

        return asyncio.create_task(take(room, made, client, size, name, note))

    async with lane(2) as made:
        tasks = [ask("a", 30, "a1"), ask("a", 10, "a2"), ask("a", 5, "a3"), ask("b", 30, "b1"), ask("c", 5, "c1")]
        await asyncio.sleep(0.01)
        assert order == ["c1"], "it passes b1, for which what is held leaves no room"
        assert made.waiting == 1, "a3: two of its client wait for bytes, and the other clients' are not kept from that"
        room.let_go(filled)
        held.set()
        await asyncio.gather(*tasks)
        assert order[:2] == ["c1", "b1"]
        assert sorted(order[2:]) == ["a1", "a2", "a3"]
        await asyncio.sleep(0)
        assert room.taken == 0
        held.clear()
        filled = room.hold(95, "a")
        waits = ask("a", 30, "a4")
        await asyncio.sleep(0.01)
        await asyncio.gather(*(take(room, made, "b", 5, "b2") for _ in range(4)))
        assert not waits.done()
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        room.let_go(filled)
        held.set()
        await ask("a", 100, "a5")


@pytest.mark.parametrize("leaves", ["as it waits for bytes", "as it waits for its place again", "at the end"])
async def test_a_client_pays_for_what_it_used_also_where_it_leaves_as_it_waits(leaves: str) -> None:
    """At 82dc40f9 who left as it waited for bytes had paid nothing, and so was served before the others each time."""
    room, taken = SharedRoom(100, LIVENESS_S), asyncio.Event()
    filled = room.hold(95, "third")

    async def ask(made: PreparationLane) -> None:
        async with made.visit("a") as visit:
            await visit.run(time.sleep, 0.2)
            async with room.share(30, "a1", visit):
                taken.set()

    async with lane() as made:
        asked = asyncio.create_task(ask(made))
        while not room._queue.turns.waiting:
            await asyncio.sleep(0.01)
        other = await made.queue.take("b")
        if leaves != "as it waits for bytes":
            room.let_go(filled)
            while not made.waiting:
                await asyncio.sleep(0.01)
        if leaves != "at the end":
            asked.cancel()
        made.queue.leave(other, 0.0)
        made.queue.start_next()
        await asyncio.gather(asked, return_exceptions=True)
        assert taken.is_set() == (leaves == "at the end")
        await asyncio.sleep(0.01)
        assert 0.2 <= made.queue.turns._former["a"].used < 0.39, "once, and not twice"


async def test_what_waits_for_bytes_goes_on_with_more_of_them_and_ends_with_the_processor() -> None:
    """At 44286955 a closed processor's requests waited on, and were told that others had taken all of the bytes."""
    room = SharedRoom(100, LIVENESS_S)
    room.hold(95, "a")
    async with lane() as made:
        first = asyncio.create_task(take(room, made, "b", 30, "first"))
        await asyncio.sleep(0.01)
        assert not first.done()
        room.most = 200
        await first
        second = asyncio.create_task(take(room, made, "b", 200, "second"))
        await asyncio.sleep(0.01)
        room.close()
        with pytest.raises(ClosedError):
            await second


@given(st.lists(st.tuples(st.integers(1, 120), st.sampled_from(["serve", "fail", "cancel", "late"])), max_size=30))
@settings(max_examples=60)
def test_bytes_are_given_back_in_whatever_way_a_request_ends(asked: list[tuple[int, str]]) -> None:
    room = SharedRoom(100, LIVENESS_S)
    most = 0

    async def ask(made: PreparationLane, client: str, size: int, way: str) -> None:
        async def note() -> None:
            nonlocal most
            most = max(most, room.taken)
            await asyncio.sleep(0)
            if way == "fail":
                raise ValueError

        async with asyncio.timeout(0 if way == "late" else None):
            await take(room, made, client, size, "x", note)

    async def ask_all() -> None:
        async with lane(3) as made:
            tasks = [asyncio.create_task(ask(made, "abc"[at % 3], *each)) for at, each in enumerate(asked)]
            await asyncio.sleep(0)
            for task, (_, way) in zip(tasks, asked, strict=True):
                if way == "cancel":
                    task.cancel()
                await asyncio.sleep(0)
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            expected: dict[str, Any] = {"serve": (NoneType, RequestTooLarge), "fail": (ValueError, RequestTooLarge)}
            assert all(isinstance(end, expected.get(way, object)) for end, (_, way) in zip(ended, asked, strict=True))
            assert (made.waiting, made.queue.turns.running, made.queue.turns._clients) == (0, 0, {})

    asyncio.run(ask_all())
    assert room.taken == 0
    assert not room._queue._waiters
    assert not room._queue.turns._clients
    assert most <= 100


def test_the_size_of_a_text_counts_all_that_a_template_reads() -> None:
    assert text_size(Request("x" * 5000)) > 5000
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * 5000}]}]
    assert text_size(Request(messages=messages)) > 5000
    assert text_size(Request("x", tools=[{"name": "x" * 5000}])) > 5000
    assert text_size(Request(messages=[{"role": "user", "content": ""}] * 5000)) > 5000 * 64


async def test_what_looks_at_each_value_of_a_large_request_runs_beside_the_loop() -> None:
    """At 089ae0d6 a chat of 100,000 values held the loop for 90 ms to be checked, and again for its media."""
    seen = list[bool]()

    def check(request: Request) -> Request:
        seen.append(threading.current_thread() is threading.main_thread())
        return check_request(request)

    large = Request(messages=[{"role": "user", "content": "a"}] * 10_000)
    assert (await run_beside_loop(check, large)).messages == large.messages
    assert (await run_beside_loop(check, Request("a"))).prompt == "a"
    assert seen == [False, True]
    odd: Any = 3
    with pytest.raises(RequestError, match=r"give a trinity\.Request, got 3"):
        await run_beside_loop(check_request, odd)


async def test_large_requests_are_looked_at_one_after_another() -> None:
    """At 24e21f4e six threads did so at once: they took turns with the loop, which had its own after half a second."""
    running = most = 0

    def look(request: Request) -> Request:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1
        return request

    large = [Request("x" * 300_000, client=str(each % 3)) for each in range(12)]
    assert await asyncio.gather(*(run_beside_loop(look, each) for each in large)) == large
    assert most == 1


@pytest.mark.parametrize("field", ["messages", "tools", "template_kwargs"])
def test_all_that_a_template_reads_shares_one_bound(field: str) -> None:
    """At 089ae0d6 each tool had a bound of its own."""
    half: dict[str, Any] = {
        "messages": [{"role": "user", "content": ["a"] * (MOST_PARTS // 2)}],
        "tools": [{"a": [1] * (MOST_PARTS // 4)}] * 2,
        "template_kwargs": {"a": [1] * (MOST_PARTS // 2)},
    }
    small = {"messages": [{"role": "user", "content": "a"}]}
    check_request(Request(**(small | {field: half[field]})))
    other = "tools" if field == "messages" else "messages"
    with pytest.raises(RequestError, match=f": the request has more than {MOST_PARTS} values; give fewer"):
        check_request(Request(**(small | {field: half[field], other: half[other]})))


async def test_a_job_whose_caller_leaves_keeps_its_place_until_its_thread_has_done() -> None:
    """At 937573d4 six that were cancelled in turn ran at once, and took all threads of the loop."""
    queue, held, running, most = FairQueue(1), threading.Event(), list[int](), list[int]()

    def work() -> None:
        running.append(1)
        most.append(len(running))
        held.wait()
        running.pop()

    try:
        for _ in range(4):
            asked = asyncio.create_task(queue.run_in_thread("a", work))
            while not running:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # for the thread of one that may not run yet
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
    finally:
        held.set()
    assert await queue.run_in_thread("b", lambda: "next") == "next"
    assert most == [1]
    with pytest.raises(ZeroDivisionError):
        await queue.run_in_thread("a", lambda: 1 // 0)
    assert (queue.turns.running, queue.turns.waiting) == (0, 0)


def test_one_that_waits_on_a_loop_that_was_closed_keeps_nobody_from_the_place() -> None:
    queue = FairQueue(1)
    running = asyncio.run(queue.take("a"))
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(queue.take("b"))
    loop.run_until_complete(asyncio.sleep(0.01))
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    queue.leave(running, 0.0)
    queue.start_next()
    job = asyncio.run(asyncio.wait_for(queue.take("b"), 60.0))
    del waiting
    gc.collect()  # what drops the job of the closed loop
    assert (queue.turns.running, queue.turns.waiting) == (1, 0)
    queue.leave(job, 0.0)
    assert (queue.turns.running, queue._waiters, queue._left) == (0, {}, set())


def test_a_loop_that_is_closed_amid_a_job_leaves_the_place_free() -> None:
    queue, held, begun = FairQueue(1), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        held.wait(60.0)

    loop = asyncio.new_event_loop()
    asked = loop.create_task(queue.run_in_thread("a", work))
    while not begun.is_set():
        loop.run_until_complete(asyncio.sleep(0.01))
    for each in asyncio.all_tasks(loop):
        each._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    del asked
    held.set()
    assert asyncio.run(asyncio.wait_for(queue.run_in_thread("b", lambda: "next"), 60.0)) == "next"
    gc.collect()
    assert (queue.turns.running, queue.turns.waiting) == (0, 0)


def test_a_loop_that_is_closed_as_a_job_begins_leaves_the_place_free() -> None:
    """At 34716446 a job whose loop was closed before its task's first step kept the place for ever."""
    for steps in range(6):
        queue, loop = FairQueue(1), asyncio.new_event_loop()

        async def begin(queue: FairQueue = queue, steps: int = steps) -> asyncio.Task[None]:
            task = asyncio.ensure_future(queue.run_in_thread("a", lambda: None))
            for _ in range(steps):
                await asyncio.sleep(0)
            return task

        task = loop.run_until_complete(begin())
        for each in asyncio.all_tasks(loop):
            each._log_destroy_pending = False  # type: ignore[attr-defined]
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
        del task
        gc.collect()
        assert asyncio.run(asyncio.wait_for(queue.run_in_thread("b", lambda: "next"), 60.0)) == "next"


async def test_an_error_of_work_in_a_thread_is_in_no_cycle() -> None:
    """At 6bb11732 a body that was refused, 40 MiB each time, stayed until the collector came."""

    class Given:
        pass

    def work(given: Given) -> None:
        raise RequestError(f"no {type(given).__name__}")

    queue, given = FairQueue(1), Given()
    gone = weakref.ref(given)
    gc.disable()
    try:
        with pytest.raises(RequestError):
            await queue.run_in_thread("a", partial(work, given))
        del given
        await asyncio.sleep(0)
        assert gone() is None
    finally:
        gc.enable()
