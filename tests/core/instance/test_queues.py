"""Queues of waiting requests: their order is that of a list sorted anew each time, at a cost that does not grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.core_tables import brief, done, make_core, work
from trinity.core import InstanceCore
from trinity.core.instance.queues import Queue
from trinity.core.instance.request_state import RequestState
from trinity.core.messages import Cancel, Step, Submit
from trinity.core.scheduler import BatchRules, Order

OPS = st.lists(st.tuples(st.sampled_from(["append", "appendleft", "remove", "look"]), st.integers(0, 9)), max_size=60)
KEYS = {str(number): float(number % 3) for number in range(10)}


@settings(max_examples=300)
@given(OPS, st.sampled_from([None, KEYS.__getitem__]), st.integers(0, 12))
def test_the_order_is_that_of_a_list(ops: list[tuple[str, int]], key: Callable[[str], float] | None, k: int) -> None:
    queue, plain = Queue(key), list[str]()
    for op, number in ops:
        request = str(number)
        if op == "remove" and request in plain:
            plain.remove(request)
            queue.remove(request)
        elif op == "append" and request not in plain:
            plain.append(request)
            queue.append(request)
        elif op == "appendleft" and request not in plain:
            plain.insert(0, request)
            queue.appendleft(request)
        wanted = plain if key is None else sorted(plain, key=key)
        assert list(islice(queue, k)) == wanted[:k]
        assert (len(queue), bool(queue), request in queue) == (len(plain), bool(plain), request in plain)
    assert list(queue) == (plain if key is None else sorted(plain, key=key))


@pytest.mark.parametrize("key", [None, KEYS.__getitem__])
def test_one_waits_once_and_one_that_does_not_wait_cannot_leave(key: Callable[[str], float] | None) -> None:
    queue = Queue(key)
    queue.append("1")
    with pytest.raises(AssertionError, match="1 waits here already"):
        queue.append("1")
    with pytest.raises(KeyError):
        queue.remove("2")
    queue.remove("1")
    queue.append("1")
    assert list(queue) == ["1"]


class Counted(float):
    """A key that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) < float(other)

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return isinstance(other, float) and float(self) == float(other)

    __hash__ = float.__hash__


@pytest.mark.parametrize("waiting", [100, 10_000])
def test_a_look_at_the_first_few_compares_few(waiting: int) -> None:
    """Of 10,000 as of 100: what comes, what is looked at, and what leaves."""
    queue = Queue(lambda request: Counted(int(request) * 7919 % 10_007))
    for number in range(waiting):
        queue.append(str(number))
    Counted.compared = 0
    for number in range(waiting, waiting + 20):
        queue.append(str(number))
        list(islice(queue, 3))
        queue.remove(str(number - waiting))
    assert 0 < Counted.compared < 20 * 100


def test_what_has_left_is_not_kept() -> None:
    queue = Queue(float)
    for number in range(1000):
        queue.append(str(number))
    for number in range(999, 0, -1):
        queue.remove(str(number))
    assert len(queue._heap) <= 10
    assert list(queue) == ["0"]


class Looked(dict[str, RequestState]):
    """The requests of a core; counts how many were looked at."""

    count = 0

    def __getitem__(self, request: str) -> RequestState:
        Looked.count += 1
        return super().__getitem__(request)

    def get(self, request: str, default: object = None) -> RequestState | None:  # type: ignore[override]
        Looked.count += 1
        return super().get(request)

    def values(self) -> object:  # type: ignore[override]
        raise AssertionError("all requests are looked at")

    items = keys = __iter__ = values  # type: ignore[assignment]


class Watched(Queue):
    """Counts who is looked at in it."""

    def __iter__(self) -> Iterator[str]:
        for request in super().__iter__():
            Looked.count += 1
            yield request


RUNNING = 64


def busy(waiting: int, order: Order, depth: int) -> tuple[InstanceCore, Step]:
    """A core that decodes 64, whose blocks they have, and so many that wait; and its oldest step."""
    core = make_core(
        "PD0", kv=4 * RUNNING + 3, rules=BatchRules(token_budget=4096, order=order), depth=depth, prefix_cache=False
    )
    out = []
    for number in range(RUNNING):
        out += core.handle(Submit(work(f"run{number}", 3, max_tokens=14)), 0.0)
    steps = [each for each in out if isinstance(each, Step)]
    while len(steps[0].decodes) < RUNNING:
        step = steps.pop(0)
        rows = [row.request for row in step.prefills] + list(step.decodes)
        steps += [each for each in core.handle(done(step.id, **dict.fromkeys(rows, 1)), 0.0) if isinstance(each, Step)]
    core.state.requests = Looked(core.state.requests)
    core.state.prefill_queue.__class__ = Watched
    for number in range(waiting):
        late = work(f"wait{number}", 3 + number % 5, max_tokens=14, deadline_s=1000.0 - number)
        core.handle(Submit(late), 0.0)
    return core, steps[0]


def looks(waiting: int, order: Order, depth: int) -> list[int]:
    """At how many requests an arrival, a step, a cancel of one that waits, and the end of one that runs look."""
    core, step = busy(waiting, order, depth)
    counts = []
    leaving = work("new", 3, max_tokens=14, deadline_s=2000.0)
    for event in (Submit(leaving), done(step.id, **dict.fromkeys(step.decodes, 1)), Cancel("wait3"), Cancel("run5")):
        Looked.count = 0
        core.handle(event, 0.0)
        counts.append(Looked.count)
    return counts


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("order", ["fcfs", "sjf", "deadline"])
def test_ten_thousand_that_wait_cost_no_more_looks_than_ten(order: Order, depth: int) -> None:
    few, many = looks(10, order, depth), looks(10_000, order, depth)
    assert all(above <= below + 40 for below, above in zip(few, many, strict=True)), (few, many)
    assert few[1] >= RUNNING


@pytest.mark.parametrize("order", ["fcfs", "sjf", "deadline"])
def test_who_is_first_among_many_is_admitted_when_blocks_are_free(order: Order) -> None:
    core, step = busy(100, order, 1)
    core.handle(Cancel("run5"), 0.0)
    out = brief(core.handle(done(step.id, **dict.fromkeys(step.decodes, 1)), 0.0))
    first = {"fcfs": "wait0", "sjf": "wait0", "deadline": "wait99"}[order]
    assert any(line.startswith(f"open {first} ") for line in out)
