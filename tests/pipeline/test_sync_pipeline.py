"""SyncPipeline: the same doors without await, from scripts, threads and notebooks; interrupted, and forgotten."""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import trinity
from support.checkpoint_files import checkpoint
from support.emulated_pipelines import LIVENESS_S, MODEL, POOLS, asked, right
from support.interrupts import interrupt_at, interrupt_everywhere
from support.pipeline_driver import TEXT, TWO
from trinity.emulation.model import EmulatedRequest
from trinity.errors import ClosedError, ConfigError, RequestTooLarge
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.pipeline.stream import Stream
from trinity.pipeline.sync_pipeline import SyncPipeline, SyncStream

CACHE = CacheConfig(pools=POOLS)


@pytest.fixture(scope="module")
def pipe() -> Iterator[SyncPipeline]:
    with SyncPipeline(MODEL, "1EP1D", cache=CACHE) as started:
        yield started


@pytest.fixture(autouse=True, scope="module")
def ctrl_c_interrupts() -> Iterator[None]:
    """Whatever a shell starts in the background ignores SIGINT, and Python then leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# ---------------------------------------------------------------- it is Pipeline

RENAMED = {"aclose": "close"}
ONLY_ASYNC = {"loop", "auto", "streams"}  # of the loop that nobody sees
INSIDE = {"pipeline", "thread"}


def methods(kind: type) -> dict[str, Any]:
    return {name: each for name, each in vars(kind).items() if not name.startswith("_") and callable(each)}


@pytest.mark.parametrize("name", methods(Pipeline))
def test_each_method_has_the_pipelines_signature(name: str) -> None:
    ours = inspect.signature(getattr(SyncPipeline, RENAMED.get(name, name)))
    theirs = inspect.signature(getattr(Pipeline, name))
    assert ours.parameters == theirs.parameters
    assert getattr(SyncPipeline, RENAMED.get(name, name)).__doc__


def test_it_is_made_as_a_pipeline_is() -> None:
    assert inspect.signature(SyncPipeline).parameters == inspect.signature(Pipeline).parameters


def test_it_has_no_more_and_no_less() -> None:
    theirs = {RENAMED.get(name, name) for name in vars(Pipeline) if not name.startswith("_")}
    ours = {name for name in vars(SyncPipeline) if not name.startswith("_")}
    missing = {"instances", "hosts", "processor", "processes", "pools"}  # by `pipeline`
    assert theirs - ours == missing | (ONLY_ASYNC & theirs)
    assert ours - theirs == {"metrics", "trace", "timeline"}, "attributes there"
    streams = {name for name in vars(Stream) if not name.startswith("_")}
    internal = {"begin", "deliver", "end", "fail", "close", "wait_first", "encode_only"}
    assert streams - internal <= {name for name in vars(SyncStream) if not name.startswith("_")} | {"next_tokens"}


# ---------------------------------------------------------------- it serves


def test_a_real_model_gives_its_own_tokens() -> None:
    wanted = [TEXT.tokens, TWO.tokens]
    pools = {"image": 16, "kv": 256}
    with trinity.SyncPipeline(checkpoint("llava"), dtype="float32", cache=CacheConfig(pools=pools)) as real:
        assert real.state == "running"
        assert [real.complete(each.request()).token_ids for each in (TEXT, TWO)] == wanted
        assert [each.token_ids for each in real.map([TEXT.request(), TWO.request()])] == wanted
        assert real.chat("Hello", max_tokens=3).finish_reason in ("length", "stop")
        assert [len(each.token_ids) for each in real.complete_n(TEXT.request(), 2)] == [TEXT.max_tokens] * 2
    assert repr(real).endswith("closed, 7 ended)")
    with pytest.raises(ClosedError):
        real.complete(TEXT.request())
    real.close()


def test_a_stream_is_iterated_and_left(pipe: SyncPipeline) -> None:
    request = asked()[0]
    with pipe.stream(request) as tokens:
        assert [each.id for each in tokens] == right(request)
    assert tokens.done
    assert tokens.output.token_ids == right(request)
    assert tokens.request.request_id == request.request_id
    assert len(tokens.token_times) == tokens.token_count == len(right(request))
    assert tokens.place == ""
    with pipe.stream(EmulatedRequest(max_tokens=500)) as tokens:
        next(iter(tokens))
    assert tokens.output.finish_reason == "cancelled"
    request = asked()[1]
    with pipe.stream(request) as tokens:
        assert tokens.collect().token_ids == right(request)
    pipe.wait_idle()


def test_errors_are_the_pipelines(pipe: SyncPipeline) -> None:
    with pytest.raises(RequestTooLarge):
        pipe.complete(EmulatedRequest(text_tokens=MODEL.shape.context + 1))
    with pytest.raises(ConfigError, match="concurrency"):
        pipe.map([], concurrency=0)
    with pytest.raises(ClosedError, match="a pipeline starts once"):
        pipe.start()


def test_a_map_that_is_left_ends_its_requests(pipe: SyncPipeline) -> None:
    endless = (EmulatedRequest(max_tokens=40) for _ in itertools.count())
    for each in pipe.map(endless, concurrency=3):
        assert each.finish_reason == "length"
        break
    pipe.wait_idle()
    assert pipe.pipeline.streams == ()


def test_several_threads_may_call(pipe: SyncPipeline) -> None:
    requests = [*asked(), *asked(), *asked()]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(pipe.complete, requests))
    assert [each.token_ids for each in found] == [right(each) for each in requests]


def test_its_own_thread_is_refused(pipe: SyncPipeline) -> None:
    """A progress function is called there; waiting would be for ever."""
    seen: list[Exception] = []

    def report(done: int, total: int | None) -> None:
        try:
            pipe.complete(asked()[0])
        except ConfigError as error:
            seen.append(error)

    assert len(list(pipe.map(asked()[:1], progress=report))) == 1
    assert "runs on the pipeline's own thread" in str(seen[0])


# ---------------------------------------------------------------- interrupted, and forgotten


def test_ctrl_c_ends_the_request_that_is_waited_for(pipe: SyncPipeline) -> None:
    def interrupt() -> None:
        while not pipe.pipeline.streams:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    before = pipe.metrics.summary()["finished"].get("cancelled", 0)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        pipe.complete(EmulatedRequest(max_tokens=2000))
    until = time.monotonic() + LIVENESS_S
    while pipe.pipeline.streams:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert pipe.metrics.summary()["finished"]["cancelled"] == before + 1
    request = asked()[0]
    assert pipe.complete(request).token_ids == right(request)


def read_a_stream(pipe: SyncPipeline) -> None:
    with pipe.stream(EmulatedRequest(max_tokens=4000)) as tokens:
        next(tokens)


CALLS = {
    "complete": lambda pipe: pipe.complete(EmulatedRequest(max_tokens=4000)),
    "map": lambda pipe: list(pipe.map([EmulatedRequest(max_tokens=4000)])),
    "stream": read_a_stream,
}


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_bytecode_ends_the_request(pipe: SyncPipeline, name: str) -> None:
    """A signal may come between the submission and the wait, and as a stream's block is entered and left."""

    def count_served() -> int:
        while pipe.pipeline.streams:
            time.sleep(0.0005)
        return pipe.metrics.summary()["finished"].get("length", 0)

    def call() -> None:
        CALLS[name](pipe)

    files, served, number = ("sync_pipeline.py", "loop_thread.py"), count_served(), 0
    for place in interrupt_everywhere(call, files):
        for _ in range(5):  # a busy machine may serve a request whole before its end is asked for
            before, served = served, count_served()
            if before == served:
                break
            interrupt_at(number, call, files)
        else:
            pytest.fail(f"served to its end, again and again: {place}")
        number += 1
        if name != "stream" and place.startswith("LoopCall.wait"):  # for very long, if not interrupted
            break
    assert number > 25


def test_ctrl_c_ends_a_map_and_is_raised(pipe: SyncPipeline) -> None:
    def interrupt() -> None:
        while not pipe.pipeline.streams:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        list(pipe.map((EmulatedRequest(max_tokens=2000) for _ in itertools.count()), concurrency=4))
    assert not pipe.pipeline.streams


FORKED = """
import gc, os, signal, sys, trinity
from support.emulated_pipelines import MODEL, POOLS, asked
cache = trinity.CacheConfig(pools=POOLS)
unstarted = trinity.SyncPipeline(MODEL, "EPD", cache=cache)
with trinity.SyncPipeline(MODEL, "1EP1D", cache=cache) as pipe:
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            pipe.complete(asked()[0])
        except trinity.errors.ClosedError as error:
            print("refused:", "forked" in str(error), flush=True)
        with unstarted:
            print(unstarted.complete(asked()[0]).finish_reason, flush=True)
        sys.exit(0)  # leaves the block of the parent's
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    print(pipe.complete(asked()[0]).finish_reason)
"""


def test_a_forked_process_is_refused_and_has_its_own() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run(
        [sys.executable, "-c", FORKED], env=environment, capture_output=True, text=True, timeout=2 * LIVENESS_S
    )
    assert run.stdout.split("\n") == ["refused: True", "length", "0", "length", ""], run.stderr


def test_a_thread_that_gets_no_loop_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where too many files are open; it may be tried again."""

    def refuse() -> None:
        raise OSError(24, "Too many open files")

    tried = SyncPipeline(MODEL, "EPD", cache=CACHE)
    with monkeypatch.context() as patch:
        patch.setattr("asyncio.events.new_event_loop", refuse)
        with pytest.raises(ConfigError, match="Too many open files"):
            tried.start()
    with tried:
        assert tried.state == "running"


def test_one_that_is_dropped_closes_itself() -> None:
    dropped = SyncPipeline(MODEL, "EPD", cache=CACHE)
    dropped.start()
    inside, thread = dropped.pipeline, dropped.thread
    del dropped
    until = time.monotonic() + LIVENESS_S
    while thread._thread is not None and thread._thread.is_alive():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert inside.state == "closed"


def test_one_that_never_starts_leaves_nothing() -> None:
    SyncPipeline(MODEL, "EPD", cache=CACHE).close()
    with pytest.raises(ClosedError, match="not started"):
        SyncPipeline(MODEL, "EPD", cache=CACHE).complete(asked()[0])
    with pytest.raises(ConfigError), SyncPipeline(MODEL, "E+PD", cache=CacheConfig(pools={"kv": 1})):
        raise AssertionError("it has started")


FORGOTTEN = """
import itertools, trinity
from support.emulated_pipelines import MODEL, POOLS
from trinity.emulation.model import EmulatedRequest
pipe = trinity.SyncPipeline(MODEL, "1EP1D", cache=trinity.CacheConfig(pools=POOLS))
pipe.start()
left = pipe.map((EmulatedRequest(max_tokens=50) for _ in itertools.count()), concurrency=4)
print(next(left).finish_reason)
tokens = iter(pipe.stream(EmulatedRequest(max_tokens=5000)).__enter__())
next(tokens)
"""


def test_a_program_that_forgets_to_close_ends(tmp_path: Any) -> None:
    """At its end a map and a stream are half read, and threads of the pipeline run."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run(
        [sys.executable, "-c", FORGOTTEN], env=environment, capture_output=True, text=True, timeout=LIVENESS_S
    )
    assert (run.returncode, run.stdout) == (0, "length\n")
    assert run.stderr == ""
