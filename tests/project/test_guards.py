"""The guards of conftest.py, each shown to catch what it is for: a guard that cannot fail guards nothing."""

from __future__ import annotations

import re

import pytest

from support.paths import PYTHON_PATH

pytest_plugins = ["pytester"]

CONFTEST = """
from support.leak_guard import LeakGuard
from support.loop_guard import LoopGuard

def pytest_configure(config):
    config.pluginmanager.register(LoopGuard())
    config.pluginmanager.register(LeakGuard(patience_s=0.3))
"""

BLOCKED = """
import asyncio, concurrent.futures, queue, socket, threading, time
import pytest
from support.loop_guard import left_out

def run(main):
    asyncio.run(main())

def busy(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass

def test_callback_that_computes():
    async def main():
        busy(1.1)
    run(main)

def test_callback_that_computes_behind_what_is_left_out():
    async def main():
        with left_out():
            busy(0.3)
        busy(1.1)
    run(main)

def test_callback_of_a_loop_in_another_thread():
    async def main():
        await asyncio.sleep(0)
        busy(1.1)
    thread = threading.Thread(target=run, args=(main,))
    thread.start()
    thread.join()

def test_sleep():
    async def main():
        time.sleep(0.001)
    run(main)

def test_sleep_swallowed():
    async def main():
        try:
            time.sleep(0.001)
        except AssertionError:
            pass
    run(main)

def test_socket():
    left, right = socket.socketpair()
    async def main():
        left.recv(1)
    with left, right:
        run(main)

def test_simple_queue():
    async def main():
        queue.SimpleQueue().get()
    run(main)

def test_queue():
    async def main():
        queue.Queue().get()
    run(main)

def test_join():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    async def main():
        thread.join()
    try:
        run(main)
    finally:
        stop.set()

def test_event():
    async def main():
        threading.Event().wait(0.01)
    run(main)

def test_result():
    async def main():
        concurrent.futures.Future().result(0.01)
    run(main)

@pytest.fixture
def blocking_teardown():
    yield
    async def main():
        time.sleep(0.001)
    run(main)

def test_teardown(blocking_teardown):
    pass
"""

FREE = """
import asyncio, concurrent.futures, gc, queue, socket, threading, time
from support.loop_guard import left_out

def busy(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass

def test_what_is_allowed():
    left, right = socket.socketpair()
    waiting, done = queue.SimpleQueue(), concurrent.futures.Future()
    waiting.put(1)
    done.set_result(1)
    left.setblocking(False)
    ended = threading.Thread(target=time.sleep, args=(0.01,))
    async def main():
        ended.start()
        await asyncio.to_thread(ended.join)
        ended.join()
        right.setblocking(False)
        right.send(b"x")
        await asyncio.sleep(0.01)
        assert left.recv(1) == b"x"
        assert waiting.get(block=False) == 1
        assert done.result() == 1
        time.sleep(0)
    with left, right:
        asyncio.run(main())
    time.sleep(0.001)

def test_garbage_collection():
    class Slow:
        def __del__(self):
            busy(1.1)
    async def main():
        slow = Slow()
        slow.itself = slow
        del slow
        gc.collect()
    asyncio.run(main())

def test_what_a_machine_needs_once():
    async def main():
        with left_out():
            busy(1.1)
    asyncio.run(main())

def test_computing_outside_a_loop():
    busy(1.1)
"""

LEAKS = """
import asyncio, os, socket, threading
import pytest
from support.bare_launchers import BARE, Launcher, take, take_and_leave

STOP = threading.Event()

def start(name):
    thread = threading.Thread(target=STOP.wait, name=name, daemon=True)
    thread.start()
    return thread

def test_thread():
    start("trinity-lane")

def test_thread_of_somebody_else():
    start("elsewhere")

KEPT = []

def test_descriptor():
    KEPT.append(os.pipe())

class Pipe:
    def __init__(self):
        self.ends, self.me = os.pipe(), self

    def __del__(self):
        os.close(self.ends[0]), os.close(self.ends[1])

def test_garbage_is_no_leak():
    Pipe()

def test_task():
    async def main():
        asyncio.get_running_loop().create_task(asyncio.sleep(60), name="forgotten")
        await asyncio.sleep(0)
    asyncio.run(main())

def test_nothing():
    left, right = socket.socketpair()
    with left, right:
        pass

def test_ends_in_time():
    threading.Thread(target=threading.Event().wait, args=(0.05,), name="trinity-slow").start()

def test_launcher_that_waits():
    Launcher.program = ("-c", BARE)
    KEPT.append(asyncio.run(take_and_leave()))

def test_launcher_in_use():
    assert asyncio.run(take()) is KEPT[-1]
"""

OWNED = """
import threading
import pytest

def start(stop):
    thread = threading.Thread(target=stop.wait, name="trinity-shared", daemon=True)
    thread.start()

@pytest.fixture(scope="module")
def shared():
    stop = threading.Event()
    start(stop)
    yield stop
    stop.set()

@pytest.fixture(scope="class")
def careless():
    start(threading.Event())
    yield

def test_before():
    pass

def test_uses(shared):
    pass

def test_grows(shared):
    start(shared)

def test_beside():
    pass

def test_leaks_beside():
    start(threading.Event())

class TestCareless:
    def test_first(self, careless):
        pass

    def test_last(self, careless):
        pass

def test_end_of_shared(shared):
    pass
"""


def outcomes(pytester: pytest.Pytester, source: str) -> dict[str, str]:
    """Run ``source`` under the guards: test name → why it failed, in whichever phase, or an empty string."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(source)
    pytester.syspathinsert(str(pytester.path))
    result = pytester.runpytest_subprocess("-p", "no:asyncio", "-p", "no:xdist", "-rA", "--tb=line")
    verdicts: dict[str, str] = {}
    for line in result.outlines:
        if match := re.match(r"(PASSED|FAILED|ERROR) .*::(\w+)(.*)", line):
            verdict, name, why = match.groups()
            verdicts[name] = verdicts.get(name, "") + ("" if verdict == "PASSED" else why)
    assert verdicts, result.outlines
    return verdicts


@pytest.fixture(autouse=True)
def guards_importable(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    monkeypatch.setenv("COLUMNS", "400")  # pytest cuts its summary to the terminal


def failed(verdicts: dict[str, str]) -> set[str]:
    return {name for name, why in verdicts.items() if why}


def test_each_way_of_blocking_the_loop_fails_its_test(pytester: pytest.Pytester) -> None:
    verdicts = outcomes(pytester, BLOCKED)
    assert len(verdicts) == 12
    for name, why in verdicts.items():
        assert "blocks the event loop" in why or "the event loop was blocked" in why, (name, why)


def test_what_does_not_block_passes(pytester: pytest.Pytester) -> None:
    verdicts = outcomes(pytester, FREE)
    assert len(verdicts) == 4
    assert not failed(verdicts), verdicts


def test_what_a_test_leaves_behind_fails_it(pytester: pytest.Pytester) -> None:
    verdicts = outcomes(pytester, LEAKS)
    assert failed(verdicts) == {"test_thread", "test_descriptor", "test_task", "test_launcher_in_use"}, verdicts


def test_a_shared_fixture_owns_what_it_starts_until_its_tear_down(pytester: pytest.Pytester) -> None:
    verdicts = outcomes(pytester, OWNED)
    assert failed(verdicts) == {"test_leaks_beside", "test_last"}, verdicts
