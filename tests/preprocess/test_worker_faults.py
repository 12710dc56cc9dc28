"""Preprocessing processes that die, hang, answer late or are left: only the request concerned is harmed."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from trinity.errors import ConfigError, RequestError
from trinity.preprocess import worker, worker_processes
from trinity.preprocess.checkpoint import model_types
from trinity.preprocess.media.media_markup import IMAGE_TEXT, ImageText
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.worker_processes import KillableProcessor, WorkerProcess
from trinity.request import Request

LIVENESS_S = 400.0
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
HOLDS_THE_LOCK = "{% set x = 3 ** (10 ** 9) %}{{ x % 7 }}"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(tmp_path_factory.mktemp("endless") / "m", ENDLESS + "{% endfor %}")


@pytest.fixture(scope="module")
def llama() -> Path:
    return checkpoint("llama")


def with_template(directory: Path, template: str) -> Path:
    shutil.copytree(checkpoint("llama"), directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def only(processor: KillableProcessor) -> int:
    (each,) = processor._workers[processor._text_lane]
    return each.process


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(reached: Callable[[], bool]) -> bool:
    until = time.monotonic() + LIVENESS_S
    while not reached() and time.monotonic() < until:
        time.sleep(0.05)
    return reached()


async def test_faults_of_one_request_harm_no_other(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await asyncio.to_thread(
        KillableProcessor, endless, limits=MediaLimits(processes=1, preprocess_timeout_s=1000.0)
    )
    try:
        async with asyncio.timeout(LIVENESS_S):
            await left(made)
            await left_before_it_was_sent(made, monkeypatch)
            await died_while_idle(made)
            await killed_as_it_answered(made, monkeypatch)
            await no_memory_for_an_answer(made, monkeypatch)
            await another_answer(made, monkeypatch)
    finally:
        await made.aclose()


async def left(made: KillableProcessor) -> None:
    """A caller that leaves frees its process long before the time limit, and another starts by itself."""
    (each,) = made._workers[made._text_lane]
    first, begin, begun = only(made), each.begin, list[str]()

    def note(key: Any, name: str, content: bytes) -> Any:
        begun.append(name)
        return begin(key, name, content)

    each.begin = note  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await made.aprocess(Request(messages=HELLO, request_id="left"))
    assert await asyncio.to_thread(wait_until, lambda: gone(first)), "it is still at a request that nobody wants"
    assert (await made.aprocess(Request("good", request_id="good"))).work.prompt
    assert only(made) != first
    assert begun == ["left", "good"], "nobody wants it begun again"
    del each.begin  # type: ignore[method-assign]


async def left_before_it_was_sent(made: KillableProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 44286955 a request whose caller left while it was packed was begun, and had its process for 30 s of CPU."""
    (each,) = made._workers[made._text_lane]
    first, pack, exchange, packs, go_on = only(made), made._pack, each._exchange, asyncio.Event(), threading.Event()
    loop, sent = asyncio.get_running_loop(), list[bytes]()

    def slowly(request: Request) -> bytes:
        loop.call_soon_threadsafe(packs.set)
        assert go_on.wait(LIVENESS_S)
        return pack(request)

    def note(*parts: bytes) -> Any:
        sent.append(parts[0])
        return exchange(*parts)

    with monkeypatch.context() as patched:
        patched.setattr(worker_processes, "LEFT_S", 0.0)
        patched.setattr(made, "_pack", slowly)
        patched.setattr(each, "_exchange", note)
        asked = asyncio.create_task(made.aprocess(Request(messages=HELLO, request_id="left early")))
        await packs.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await asyncio.sleep(0.05)  # the caller's patience has ended
        go_on.set()
        assert (await made.aprocess(Request("good", request_id="good"))).work.prompt
    assert sent == [b"good"]
    assert only(made) == first


async def died_while_idle(made: KillableProcessor) -> None:
    """A process that ends before a request has reached it costs that request nothing but time."""
    (each,) = made._workers[made._text_lane]
    start, killed = each.start, only(made)

    def start_and_kill() -> None:
        start()
        if only(made) == killed:
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: gone(killed))

    each.start = start_and_kill  # type: ignore[method-assign]
    try:
        assert (await made.aprocess(Request("innocent"))).work.prompt
    finally:
        del each.start  # type: ignore[method-assign]
    assert only(made) != killed


async def killed_as_it_answered(made: KillableProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    (each,) = made._workers[made._text_lane]
    real = worker.receive_parts

    def late(connection: socket.socket) -> list[bytearray]:
        got = real(connection)
        if got[0] == worker.ANSWER:
            each.kill()
        return got

    with monkeypatch.context() as patch:
        patch.setattr(worker_processes, "receive_parts", late)
        assert (await made.aprocess(Request("in the last moment", request_id="last moment"))).work.prompt
    assert (await made.aprocess(Request("innocent"))).work.prompt


async def no_memory_for_an_answer(made: KillableProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of an answer that was not read is not taken for the next one's."""
    real: Any = worker._receive
    failed: list[int] = []

    def low(connection: socket.socket, size: int) -> bytearray:
        if size > 100 and not failed:
            failed.append(size)
            raise MemoryError
        found: bytearray = real(connection, size)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(worker, "_receive", low)
        with pytest.raises(RequestError, match="MemoryError"):
            await made.aprocess(Request("large", request_id="large"))
        for name in ("second", "third"):
            assert (await made.aprocess(Request(name, request_id=name))).work.request == name


async def another_answer(made: KillableProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    real, before = worker.receive_parts, only(made)

    def forge(connection: socket.socket) -> list[bytearray]:
        kind, packed, *rest = real(connection)
        if kind == worker.ANSWER:
            name, (_, *given) = pickle.loads(packed[1:], buffers=rest)
            packed = packed[:1] + pickle.dumps((name, ("somebody else's", *given)))
        return [kind, packed, *rest]

    with monkeypatch.context() as patch:
        patch.setattr(worker_processes, "receive_parts", forge)
        with pytest.raises(RequestError, match="an answer to another one"):
            await made.aprocess(Request("x", request_id="mine"))
    assert (await made.aprocess(Request("good"))).work.prompt
    assert only(made) != before


async def test_a_process_that_somebody_else_ends_costs_its_request_time_only(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system ends one where memory lacks. It is no fault of the request, which is prepared again, once."""
    made = await asyncio.to_thread(KillableProcessor, llama, limits=MediaLimits(processes=1))
    (each,) = made._workers[made._text_lane]
    kills, killed, send = 0, list[int](), worker.send_parts

    def send_and_kill(connection: socket.socket, *parts: Any) -> None:
        dies = each._at is not None and len(killed) < kills
        if dies:
            os.kill(each.process, signal.SIGSTOP)  # so that it has not answered before it is killed, on any machine
        send(connection, *parts)
        if dies:
            killed.append(each.process)
            os.kill(each.process, signal.SIGKILL)

    monkeypatch.setattr(worker_processes, "send_parts", send_and_kill)
    try:
        async with asyncio.timeout(LIVENESS_S):
            kills = 1
            assert (await made.aprocess(Request(messages=HELLO))).work.prompt
            kills = 3
            with pytest.raises(RequestError, match="ended at it"):
                await made.aprocess(Request(messages=HELLO))
            assert len(set(killed)) == 3
            assert (await made.aprocess(Request("innocent"))).work.prompt
    finally:
        await made.aclose()


async def test_markup_and_types_of_the_program_hold_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMAGE_TEXT, "llava", ImageText(marker="(({token}))"))
    monkeypatch.setattr(model_types, "PROVEN", {})  # here alone: only what is registered loads
    monkeypatch.setattr(model_types, "registered", {"llava"})
    model = await asyncio.to_thread(checkpoint, "llava")
    threads = await asyncio.to_thread(RequestProcessor, model)
    made = await asyncio.to_thread(KillableProcessor, model, limits=MediaLimits(processes=1))
    try:
        request = Request("<image> x", images=[b"x"])
        assert made.loaded.placeholders == threads.loaded.placeholders
        setup = made.origin._setup
        assert (setup.registered, setup.markup) == (True, ImageText(marker="(({token}))"))
        with pytest.raises(RequestError, match="image 1 of 1"):
            await made.aprocess(request)
    finally:
        await made.aclose()
        await threads.aclose()


def test_a_processor_that_differs_is_refused_by_name(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "forks_itself", False)
    real = worker.processor_fingerprint
    monkeypatch.setattr(worker, "processor_fingerprint", lambda processor: real(processor) + " and more")
    with pytest.raises(ConfigError, match="loads another tokenizer or processor than the program"):
        KillableProcessor(llama, limits=MediaLimits(processes=1))


def test_an_end_beside_a_kill(llama: Path) -> None:
    """``stop`` and timers come from other threads, at any moment of ``end``."""
    made = KillableProcessor(llama, limits=MediaLimits(processes=1))
    (each,) = made._workers[made._text_lane]
    failed: list[BaseException] = []

    def kill() -> None:
        try:
            for _ in range(20_000):
                each.kill()
        except BaseException as error:
            failed.append(error)

    killing = threading.Thread(target=kill)
    killing.start()
    made.close()
    killing.join()
    assert not failed
    assert each.end() == 0
    with pytest.raises(Exception, match="exit code 0"):
        WorkerProcess.start(each)


PARENT = """
import asyncio, os, sys, time
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.worker_processes import KillableProcessor
from trinity.request import Request
made = KillableProcessor(sys.argv[1], limits=MediaLimits(processes=1))
(each,) = made._workers[made._text_lane]
print(each.process, flush=True)
async def ask():
    asked = asyncio.ensure_future(made.aprocess(Request(messages=[{"role": "user", "content": "hi"}])))
    await asyncio.sleep(1.0)
    os.kill(os.getpid(), 9)
if sys.argv[2] == "fork":
    child = os.fork()
    if not child:
        os.close(1)
        time.sleep(40)
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(ask())
"""


@pytest.mark.parametrize("how", ["fork", pytest.param("lock", marks=pytest.mark.slow)])
def test_it_ends_with_a_parent_that_forked_and_while_it_holds_the_interpreter(
    how: str, llama: Path, tmp_path: Path
) -> None:
    model = with_template(tmp_path / "m", HOLDS_THE_LOCK) if how == "lock" else llama
    command = [sys.executable, "-c", PARENT, str(model), how]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIVENESS_S, check=False)
    assert done.returncode == -signal.SIGKILL
    pid, *child = map(int, done.stdout.split())
    try:
        assert wait_until(lambda: gone(pid)), "it outlived its parent"
        assert not any(map(gone, child)), "the test shows nothing"
    finally:
        for each in (pid, *child):
            if not gone(each):
                os.kill(each, signal.SIGKILL)
