"""Preprocessing processes that die, hang, answer late or are left: only the request concerned is harmed."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.warm_workers import WarmWorkers
from trinity.errors import ConfigError, RequestError
from trinity.preprocess import loader, model_types, worker
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.worker_processes import KillableProcessor, WorkerProcess
from trinity.request import Request

LIVENESS_S = 400.0
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
HOLDS_THE_LOCK = "{% set x = 3 ** (10 ** 9) %}{{ x % 7 }}"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module", autouse=True)
def warm(warm_workers: WarmWorkers) -> Iterator[None]:
    with warm_workers.instead():
        yield


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
    (each,) = processor._workers
    assert each._process is not None
    return each._process.pid


def another_runs(processor: KillableProcessor, pid: int) -> bool:
    process = processor._workers[0]._process
    return process is not None and process.pid != pid


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
            await died_while_idle(made)
            await killed_as_it_answered(made, monkeypatch)
            await no_memory_for_an_answer(made, monkeypatch)
            await another_answer(made, monkeypatch)
    finally:
        await made.aclose()


async def left(made: KillableProcessor) -> None:
    """A caller that leaves frees its process long before the time limit, and another starts by itself."""
    first = only(made)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await made.aprocess(Request(messages=HELLO))
    assert await asyncio.to_thread(wait_until, lambda: gone(first)), "it is still at a request that nobody wants"
    assert await asyncio.to_thread(wait_until, lambda: another_runs(made, first))
    second = only(made)
    assert (await made.aprocess(Request("good"))).work.prompt
    assert only(made) == second != first


async def died_while_idle(made: KillableProcessor) -> None:
    """A process that ends before a request has reached it costs that request nothing but time."""
    (each,) = made._workers
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
    (each,) = made._workers
    real = Connection.recv_bytes

    def late(self: Connection, *given: Any) -> bytes:
        got = real(self, *given)
        if each._question is not None and each._question.name == "last moment" and len(got) > 100:
            each._expire(each._question)
        return got

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "recv_bytes", late)
        assert (await made.aprocess(Request("in the last moment", request_id="last moment"))).work.prompt
    assert (await made.aprocess(Request("innocent"))).work.prompt


async def no_memory_for_an_answer(made: KillableProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of an answer that was not read is not taken for the next one's."""
    real: Any = Connection._recv  # type: ignore[attr-defined]
    failed: list[int] = []

    def low(self: Connection, size: int, *given: Any) -> Any:
        if size > 100 and not failed:
            failed.append(size)
            raise MemoryError
        return real(self, size, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "_recv", low)
        with pytest.raises(RequestError, match="MemoryError"):
            await made.aprocess(Request("large", request_id="large"))
        for name in ("second", "third"):
            assert (await made.aprocess(Request(name, request_id=name))).work.request == name


async def another_answer(made: KillableProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    def forge(data: bytes) -> Any:
        found = pickle.loads(data)
        return ("somebody else's", *found[1:]) if isinstance(found, tuple) and found[0] == "mine" else found

    with monkeypatch.context() as patch:
        patch.setattr("trinity.preprocess.worker_processes.pickle", Forged(forge))
        with pytest.raises(RequestError, match="ended at it"):
            await made.aprocess(Request("x", request_id="mine"))
    assert (await made.aprocess(Request("good"))).work.prompt


class Forged:
    """The module pickle with another ``loads``."""

    dumps = staticmethod(pickle.dumps)

    def __init__(self, loads: Callable[[bytes], Any]) -> None:
        self.loads = loads


async def test_markup_and_types_of_the_program_hold_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loader.IMAGE_TEXT, "llava", loader.ImageText(marker="(({token}))"))
    monkeypatch.setattr(model_types, "PROVEN", {})  # here alone: only what is registered loads
    monkeypatch.setattr(model_types, "registered", {"llava"})
    model = await asyncio.to_thread(checkpoint, "llava")
    threads = await asyncio.to_thread(RequestProcessor, model)
    made = await asyncio.to_thread(KillableProcessor, model, limits=MediaLimits(processes=1))
    try:
        request = Request("<image> x", images=[b"x"])
        assert made._loaded.placeholders == threads._loaded.placeholders
        setup = pickle.loads(made._workers[0]._setup)
        assert (setup.registered, setup.markup) == (True, loader.ImageText(marker="(({token}))"))
        with pytest.raises(RequestError, match="image 1 of 1"):
            await made.aprocess(request)
    finally:
        await made.aclose()
        await threads.aclose()


def test_a_processor_that_differs_is_refused_by_name(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = worker.processor_fingerprint
    monkeypatch.setattr(worker, "processor_fingerprint", lambda processor: real(processor) + " and more")
    with pytest.raises(ConfigError, match="loads another tokenizer or processor than the program"):
        KillableProcessor(llama, limits=MediaLimits(processes=1))


def test_an_end_beside_a_kill(llama: Path) -> None:
    """``stop`` and timers come from other threads, at any moment of ``end``."""
    made = KillableProcessor(llama, limits=MediaLimits(processes=1))
    (each,) = made._workers
    failed: list[BaseException] = []

    def kill() -> None:
        try:
            for _ in range(20_000):
                each._kill()
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
print(made._workers[0]._process.pid, flush=True)
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
