"""Who gives a core its events: its own thread, or a lane that waits for the answer. One at a time, none lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trinity.core import InstanceCore
from trinity.core.messages import Cancel, Close, Encode, MediaSpan, Prefill, Sampled, Step, Tick, Value
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.runtime.core_thread import CoreThread, StopCore
from trinity.runtime.lane import Lane
from trinity.timeline import Timeline

SOON_S = 120.0
FAR = 1e8


class Core:
    """What a CoreThread asks of a core, and who gave it which event."""

    settings = SimpleNamespace(name="D0")

    def __init__(self) -> None:
        self.due: float | None = None
        self.busy = False
        self.heard: list[tuple[Value, str]] = []
        self.hooks: dict[Value, Callable[[], None]] = {}
        self.inside = threading.Lock()

    def next_timer(self) -> float | None:
        return self.due

    def idle(self) -> bool:
        return not self.busy

    def handle(self, event: Value, now: float) -> None:
        assert self.inside.acquire(blocking=False), "two threads at once"
        try:
            if isinstance(event, Tick):
                self.due = None
            self.hooks.pop(event, lambda: None)()
            self.heard.append((event, threading.current_thread().name))
        finally:
            self.inside.release()

    @property
    def events(self) -> list[Value]:
        return [event for event, _ in self.heard]


class Ends:
    """What a CoreThread says of its end."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.ended = threading.Event()


@contextmanager
def deciding(core: Core) -> Iterator[tuple[CoreThread, Ends]]:
    ends = Ends()
    thread = CoreThread(cast(InstanceCore, core), core.handle, ends.failures.append, ends.ended.set)
    thread.start()
    try:
        yield thread, ends
    finally:
        thread.post(StopCore(at_once=True))
        thread.join()
    assert ends.ended.is_set()


def until(reached: Callable[[], Any]) -> None:
    for _ in range(int(SOON_S * 1000)):
        if reached():
            return
        threading.Event().wait(0.001)
    pytest.fail("not reached")


def event(number: int, sender: str = "") -> Cancel:
    return Cancel(f"{sender}{number}")


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name="other")
    thread.start()
    return thread


def test_a_lane_that_waits_decides_on_its_own_thread_and_nobody_is_woken() -> None:
    core = Core()
    with deciding(core) as (thread, _):
        for number in range(3):
            thread.decide(event(number))
        assert core.heard == [(event(number), "MainThread") for number in range(3)]
        assert thread._bell.empty()


def test_what_was_posted_before_comes_first() -> None:
    core = Core()
    for _ in range(50):
        core.heard.clear()
        with deciding(core) as (thread, _):
            for number in range(9):
                (thread.decide if number % 3 == 2 else thread.post)(event(number))
            until(lambda: len(core.heard) == 9)
        assert core.events == [event(number) for number in range(9)]


def test_events_of_each_of_many_threads_come_in_order_once_and_one_at_a_time() -> None:
    core, count = Core(), 300
    with deciding(core) as (thread, ends):

        def lane(name: str) -> None:
            for number in range(count):
                (thread.decide if number % 2 else thread.post)(event(number, name))

        senders = [in_thread(lambda name=name: lane(name)) for name in "abc"]  # type: ignore[misc]
        for sender in senders:
            sender.join()
        until(lambda: len(core.heard) == 3 * count)
        assert not ends.failures
    for name in "abc":
        mine = [each for each in core.events if isinstance(each, Cancel) and each.request.startswith(name)]
        assert mine == [event(number, name) for number in range(count)]


def test_nobody_waits_for_a_decision_in_progress() -> None:
    """What a lane says meanwhile is decided by the core's own thread."""
    core, begun, go_on = Core(), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(SOON_S)

    core.hooks[event(1)] = slow
    with deciding(core) as (thread, _):
        other = in_thread(lambda: thread.decide(event(1)))
        assert begun.wait(SOON_S)
        thread.decide(event(2))  # returns
        assert not core.heard
        go_on.set()
        other.join()
        until(lambda: len(core.heard) == 2)
    assert core.heard[0] == (event(1), "other")
    assert core.heard[1] == (event(2), "trinity-D0-core")


def test_a_lane_decides_on_nothing_that_comes_behind_its_own() -> None:
    """Its next step is there by then."""
    core = Core()
    with deciding(core) as (thread, _):
        core.hooks[event(1)] = lambda: thread.post(event(2))
        thread.decide(event(1))
        until(lambda: len(core.heard) == 2)
    assert core.heard == [(event(1), "MainThread"), (event(2), "trinity-D0-core")]


class Late:
    """A lock that the lane gets only once the thread, which was at it, has decided on what the lane has just posted."""

    def __init__(self, thread: CoreThread, decided: Callable[[], bool]) -> None:
        self._lock, self._thread, self._decided = thread._lock, thread, decided

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    release = __exit__

    def acquire(self, blocking: bool) -> bool:
        self._thread._bell.put(None)
        until(self._decided)
        return self._lock.acquire()


def test_a_lane_whose_event_was_decided_on_before_it_could_has_nothing_to_do() -> None:
    core = Core()
    with deciding(core) as (thread, ends):
        thread._lock = cast(Any, Late(thread, lambda: event(1) in core.events))
        thread.decide(event(1))
        assert core.events == [event(1)]
    assert not ends.failures


def test_a_timer_that_a_decision_sets_wakes_the_thread() -> None:
    core = Core()
    core.due = FAR
    with deciding(core) as (thread, _):
        until(lambda: thread._due == FAR)
        core.hooks[event(1)] = lambda: setattr(core, "due", 0.0)
        thread.decide(event(1))
        until(lambda: len(core.heard) == 2)
        assert core.heard == [(event(1), "MainThread"), (Tick(), "trinity-D0-core")]


def test_a_timer_that_is_due_comes_before_what_waits() -> None:
    core = Core()
    core.due = 0.0
    ends = Ends()
    thread = CoreThread(cast(InstanceCore, core), core.handle, ends.failures.append, ends.ended.set)
    thread.post(event(1))
    thread.post(StopCore(at_once=False))
    thread.start()
    thread.join()
    assert core.events == [Tick(), event(1)]
    assert ends.ended.is_set()


def test_it_ends_once_the_core_is_idle_whoever_decided_last() -> None:
    core = Core()
    core.busy = True
    with deciding(core) as (thread, ends):
        thread.post(StopCore(at_once=False))
        thread.post(event(1))
        until(lambda: core.heard)
        assert not ends.ended.is_set()
        core.hooks[event(2)] = lambda: setattr(core, "busy", False)
        thread.decide(event(2))
        assert ends.ended.wait(SOON_S)
        thread.decide(event(3))
    assert core.events == [event(1), event(2)]
    assert not ends.failures


async def test_where_no_thread_can_be_had_for_a_core_the_start_fails_and_its_lanes_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: CoreThread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(CoreThread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        async with asyncio.timeout(SOON_S):
            await Pipeline(
                EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(step_s=0.001), scale=2048),
                cache=CacheConfig(pools={"image": 4, "kv": 64}),
            ).start()


@pytest.mark.parametrize("by_lane", [True, False])
def test_a_core_that_raises_gets_nothing_more_and_the_thread_ends(by_lane: bool) -> None:
    core = Core()

    def broken() -> None:
        raise ZeroDivisionError

    core.hooks[event(1)] = broken
    with deciding(core) as (thread, ends):
        if by_lane:  # the lane tells of it, as of any error of its own
            with pytest.raises(ZeroDivisionError):
                thread.decide(event(1))
        else:
            thread.post(event(1))
        assert ends.ended.wait(SOON_S)
        thread.decide(event(2))
        assert not core.heard
        assert [type(error) for error in ends.failures] == ([] if by_lane else [ZeroDivisionError])


# ---------------------------------------------------------------- the lane's choice


class Held:
    """A stage whose steps end when they are let go."""

    letters = "EPD"

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def open(self, request: Any) -> None:
        """Nothing is kept."""

    def close(self, request: str) -> None:
        """Nothing is kept."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        self.begun.set()
        assert self.go_on.wait(SOON_S)
        return {request: Sampled(1) for request in ("a", "b")}


SPAN = MediaSpan("image", 1, 0, 1, "cat")
DECODES = Step(1, "joint", decodes=("a", "b"))
PREFILLS = Step(1, "joint", prefills=(Prefill("b", 0, 3, False),), decodes=("a",))
ENCODES = Step(1, "joint", encodes=(Encode("c", 0, SPAN, (1,), None),), decodes=("a", "b"))


@pytest.mark.parametrize(
    ("step", "waiting", "decides"),
    [
        pytest.param(DECODES, False, True, id="it waits for the core alone"),
        pytest.param(DECODES, True, False, id="it has something to run"),
        pytest.param(PREFILLS, False, False, id="a prefill may have much behind it"),
        pytest.param(ENCODES, False, False, id="and so may an encode"),
    ],
)
def test_a_lane_decides_only_behind_decodes_and_where_it_has_nothing_else_to_do(
    step: Step, waiting: bool, decides: bool
) -> None:
    stage, posted, decided = Held(), list[Value](), list[Value]()
    lane = Lane(
        "EPD0", "joint", [stage], posted.append, lambda error: None, Timeline(), threads=0, decide=decided.append
    )
    lane.start()
    lane.post(step)
    assert stage.begun.wait(SOON_S)
    if waiting:
        lane.post(Close("z"))
    stage.go_on.set()
    until(lambda: posted or decided)
    lane.stop()
    lane.join()
    assert (len(posted), len(decided)) == ((0, 1) if decides else (1, 0))
