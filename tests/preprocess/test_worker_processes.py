"""Preprocessing in processes that are killed: equal to the threads', and what never ends harms its own request."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trinity
from support.checkpoint_files import checkpoint
from support.pipeline_driver import ONE, TEXT, TWO, all_tokens
from trinity.errors import BadMedia, ClosedError, ConfigError, RequestError, RequestTooLarge
from trinity.preprocess import worker_processes
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.worker_processes import KillableProcessor
from trinity.request import Request, Sampling

LIVENESS_S = 120.0
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module", autouse=True)
def expected() -> None:
    all_tokens()


pytestmark = pytest.mark.usefixtures("forked_workers")


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (56, 84, 3), dtype=np.uint8)


def endless(directory: Path) -> Path:
    """Copy a model whose chat template goes on for years, in loops that jinja's sandbox allows."""
    shutil.copytree(checkpoint("llava"), directory)
    (directory / "chat_template.jinja").write_text(ENDLESS + "{% endfor %}")
    return directory


@asynccontextmanager
async def taking(processor: KillableProcessor) -> AsyncIterator[asyncio.Task[Any]]:
    """Within, a request is at work in a process: it never ends."""
    waiting = asyncio.ensure_future(processor.aprocess(Request(messages=HELLO, request_id="never ends")))
    await asyncio.to_thread(wait_for_work, processor, 0)
    yield waiting


def wait_for_work(processor: KillableProcessor, former: int) -> int:
    """Wait until the process for texts has a request and is another one than ``former``; return its number."""
    (each,) = processor._workers[processor._text_lane]
    until = time.monotonic() + LIVENESS_S
    while each._at is None or each.process in (0, former):
        assert time.monotonic() < until, "no process has a request"
        time.sleep(0.005)
    return each.process


@asynccontextmanager
async def killable(model: Path, processes: int = 1, **limits: Any) -> AsyncIterator[KillableProcessor]:
    made = await asyncio.to_thread(KillableProcessor, model, limits=MediaLimits(processes=processes, **limits))
    try:
        async with asyncio.timeout(LIVENESS_S):
            yield made
    finally:
        await made.aclose()


def pids(processor: KillableProcessor) -> list[int]:
    """Numbers of the processes that run: those of texts, then those of media."""
    return [each.process for lane in processor._workers.values() for each in lane if each.process]


@pytest.mark.parametrize("name", ["llava", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
async def test_equal_to_what_threads_make(name: str) -> None:
    asked = [
        Request("<image> and " * (number % 3) + "what", images=[picture(seed) for seed in range(number % 3)])
        for number in range(6)
    ]
    asked = [trinity.Request(each.prompt, images=each.images, sampling=Sampling(seed=1)) for each in asked]
    threads = await asyncio.to_thread(RequestProcessor, checkpoint(name))
    async with killable(checkpoint(name), 2) as processes:
        found = await asyncio.gather(*map(processes.aprocess, asked))
        for request, one in zip(asked, found, strict=True):
            other = await threads.aprocess(request)
            assert (one.work, one.clipped, one.stop) == (other.work, other.clipped, other.stop)
            assert len(one.inputs) == len(other.inputs) == len(request.images)
            for mine, theirs in zip(one.inputs, other.inputs, strict=True):
                assert mine.keys() == theirs.keys()
                assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine)
        assert len(set(pids(processes))) == 4
    await threads.aclose()


class Local:
    """An object that the process cannot make: it does not know this module."""


async def test_errors_keep_their_type_their_text_and_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "forks_itself", False)  # a fork of this process would know the classes here
    limits: dict[str, Any] = {"max_images": 2, "max_prompt_tokens": 50}
    bad: list[tuple[Request, type[RequestError]]] = [
        (Request("<image>", images=[b"no image"]), BadMedia),
        (Request("<image>", images=[]), BadMedia),
        (Request("long " * 200), RequestTooLarge),
        (Request(messages=[{"role": "user", "content": 7}]), RequestError),
        (Request("<image>", images=[Local()]), BadMedia),
        (Request("<image>", images=[lambda: None]), BadMedia),
        (Request(messages=[{"role": "user", "content": "hi", "more": Local()}]), RequestError),
        (Request(messages=[{"role": "user", "content": "hi", "more": lambda: None}]), RequestError),
    ]
    threads = await asyncio.to_thread(RequestProcessor, checkpoint("llava"), limits=MediaLimits(**limits))
    async with killable(checkpoint("llava"), **limits) as processes:
        before = pids(processes)
        for request, kind in bad:
            with pytest.raises(kind) as caught:
                await processes.aprocess(request)
            assert type(caught.value) is kind
            assert caught.value.request_id == request.request_id
            if request not in (bad[6][0], bad[7][0]):  # a thread takes them as they are
                with pytest.raises(kind) as other:
                    await threads.aprocess(request)
                assert str(caught.value) == str(other.value)
        assert (await processes.aprocess(Request("good"))).work.prompt
        assert pids(processes) == before, "none of them cost a process"
    await threads.aclose()


async def test_what_never_ends_is_killed_and_the_next_request_is_served(tmp_path: Path) -> None:
    async with killable(endless(tmp_path / "m"), preprocess_timeout_s=1.0) as processes:
        first, media = pids(processes)
        with pytest.raises(RequestError, match=r"longer than preprocess_timeout_s \(1 s\)") as caught:
            await processes.aprocess(Request(messages=HELLO, request_id="mine"))
        assert caught.value.request_id == "mine"
    async with killable(endless(tmp_path / "n")) as processes:
        first, media = pids(processes)
        async with taking(processes) as waiting:
            os.kill(first, signal.SIGKILL)
            again = await asyncio.to_thread(wait_for_work, processes, first)  # nobody knows if the request did it
            os.kill(again, signal.SIGKILL)
            with pytest.raises(RequestError, match="ended at it"):
                await waiting
        assert (await processes.aprocess(Request("good"))).work.prompt
        second, _ = pids(processes)
        assert second != first
        assert pids(processes)[1] == media
        origin = processes.origin.process
        async with taking(processes) as waiting:
            await processes.aclose()
            with pytest.raises(ClosedError):
                await waiting
        with pytest.raises(ClosedError):
            await processes.aprocess(Request("good"))
    for pid in (first, second, media, origin):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


PARENT = """
import os, sys
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.worker_processes import KillableProcessor
made = KillableProcessor(sys.argv[1], limits=MediaLimits(processes=1))
print(made.origin.process, *(each.process for lane in made._workers.values() for each in lane), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_it_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT, str(checkpoint("llava"))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIVENESS_S, check=False)
    assert done.returncode == -signal.SIGKILL
    origin, text, media = map(int, done.stdout.split())
    until = time.monotonic() + LIVENESS_S
    while not all(map(gone, (origin, text, media))):
        assert time.monotonic() < until, "it outlived its parent"
        time.sleep(0.05)


async def test_a_pipeline_serves_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "forks_itself", False)  # as in a user's program
    limits = MediaLimits(processes=1)
    async with trinity.Pipeline(checkpoint("llava"), "E+PD", dtype="float32", limits=limits) as pipe:
        assert isinstance(pipe.processor, KillableProcessor)
        outputs = await asyncio.gather(*(pipe.complete(case.request()) for case in (TEXT, ONE, TWO)))
        started = [*pids(pipe.processor), pipe.processor.origin.process]
    assert [list(each.token_ids) for each in outputs] == [case.tokens for case in (TEXT, ONE, TWO)]
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("processes", [-1, 65, 1.5, "2"])
def test_a_wrong_number_is_refused(processes: Any) -> None:
    with pytest.raises(ConfigError, match="processes"):
        MediaLimits(processes=processes)
