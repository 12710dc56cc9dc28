"""Resumption of ``pipe.map``: what a stopped run has kept, torn lines, foreign files, and a run that was killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.checkpoint_files import checkpoint
from support.emulated_pipelines import MODEL, POOLS, QUICK, right
from support.map_requests import asked, bad, collect
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel
from trinity.errors import ConfigError, RequestTooLarge
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.pipeline.results_file import ResultsFile, digest_request
from trinity.request import Output, Request
from trinity.runtime.loader import name_weights


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def pipe(runner: asyncio.Runner) -> Iterator[Pipeline]:
    started = Pipeline(MODEL, "1EP1D", cache=CacheConfig(pools=POOLS))
    runner.run(started.start())
    yield started
    runner.run(started.aclose())


@settings(max_examples=25)
@given(stops=st.lists(st.integers(1, 6), max_size=4), ordered=st.booleans(), torn=st.booleans())
def test_what_a_stopped_run_has_kept_is_not_served_again(
    pipe: Pipeline,
    runner: asyncio.Runner,
    tmp_path_factory: pytest.TempPathFactory,
    stops: list[int],
    ordered: bool,
    torn: bool,
) -> None:
    kept = tmp_path_factory.mktemp("kept") / "outputs.jsonl"
    requests = asked(8, itertools.cycle([3, 1, 5]))

    async def read(stop: int | None) -> list[Output]:
        found = []
        async with aclosing(pipe.map(requests, concurrency=3, ordered=ordered, resume=kept)) as results:
            async for each in results:
                found.append(each)
                if len(found) == stop:
                    break
        return found

    served: set[str] = set()
    for stop in [*stops, None]:
        before, had = pipe.metrics.summary()["finished"].get("length", 0), lines(kept)
        found = runner.run(read(stop))
        now = lines(kept)
        assert now[: len(had)] == had
        assert pipe.metrics.summary()["finished"]["length"] - before >= len(now) - len(had)
        assert {each.request_id for each in found} <= {each["request_id"] for each in now}
        served |= {each["request_id"] for each in now}
        if torn and stop is not None:
            with kept.open("ab") as file:
                file.write(b'{"request_id":"r7","tok')
    assert [each.token_ids for each in sorted(found, key=lambda each: each.request_id)] == list(map(right, requests))
    assert len(lines(kept)) == len(requests) == len(served)


def lines(path: Path) -> list[dict[str, Any]]:
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [msgspec.json.decode(each) for each in whole]


def test_failed_requests_are_served_again(pipe: Pipeline, runner: asyncio.Runner, tmp_path: Path) -> None:
    kept = tmp_path / "outputs.jsonl"
    found = runner.run(collect(pipe.map([*asked(2), bad("no")], resume=kept, on_error="return")))
    assert isinstance(found[-1], RequestTooLarge)
    assert [each["request_id"] for each in lines(kept)] == ["r0", "r1"]
    again = runner.run(collect(pipe.map([*asked(2), bad("no")], resume=kept, on_error="return")))
    assert again[:2] == found[:2]
    assert isinstance(again[-1], RequestTooLarge)


def test_another_request_under_a_kept_id_is_refused(pipe: Pipeline, runner: asyncio.Runner, tmp_path: Path) -> None:
    kept = tmp_path / "outputs.jsonl"
    runner.run(collect(pipe.map(asked(2), resume=kept)))
    other = msgspec.structs.replace(asked(1)[0], text_tokens=99)
    with pytest.raises(ConfigError, match=r"has the output of another request or model under the id 'r0'"):
        runner.run(collect(pipe.map([other], resume=kept, on_error="return")))


def test_an_output_of_another_model_is_not_taken_for_this_ones(
    pipe: Pipeline, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """It was given back as this model's, silently."""
    kept = tmp_path / "outputs.jsonl"
    runner.run(collect(pipe.map(asked(2), resume=kept)))

    async def resume_with_another() -> None:
        other = EmulatedModel(shape=LLAVA_15_7B, cost=QUICK, scale=MODEL.scale // 2)
        async with Pipeline(other, "EPD", cache=CacheConfig(pools=POOLS)) as served:
            await collect(served.map(asked(2), resume=kept))

    with pytest.raises(ConfigError, match="another request or model"):
        runner.run(resume_with_another())
    assert name_weights(Path(checkpoint("llama"))) != name_weights(Path(checkpoint("llava")))


def test_an_output_of_another_dtype_is_not_taken_for_this_ones(runner: asyncio.Runner, tmp_path: Path) -> None:
    kept = tmp_path / "outputs.jsonl"

    async def serve_in(dtype: str) -> None:
        async with Pipeline(MODEL, "EPD", cache=CacheConfig(pools=POOLS), dtype=dtype) as served:
            await collect(served.map(asked(2), resume=kept))

    runner.run(serve_in("float32"))
    with pytest.raises(ConfigError, match="another request or model"):
        runner.run(serve_in("bfloat16"))


def test_a_file_of_another_kind_is_left_as_it_is(pipe: Pipeline, runner: asyncio.Runner, tmp_path: Path) -> None:
    foreign = tmp_path / "notes.txt"
    for content in ("not mine\n", "not mine", '{"custom_id": 1}', "\n\0", '{"request_id": 3}\n'):
        foreign.write_text(content)
        with pytest.raises(ConfigError, match=r"line . is no result of pipe.map|it holds something else"):
            runner.run(collect(pipe.map(asked(1), resume=foreign)))
        assert foreign.read_text() == content
    for path in (tmp_path, tmp_path / "no" / "folder.jsonl", Path(os.devnull)):
        with pytest.raises(ConfigError, match=r"cannot (be opened to )?keep results"):
            runner.run(collect(pipe.map(asked(1), resume=path)))


def test_a_file_that_another_run_has_is_refused(pipe: Pipeline, runner: asyncio.Runner, tmp_path: Path) -> None:
    async def read() -> None:
        async with aclosing(pipe.map(asked(3), resume=tmp_path / "kept")) as first:
            await anext(first)
            with pytest.raises(ConfigError, match="another run has it"):
                await collect(pipe.map(asked(1), resume=tmp_path / "kept"))

    runner.run(read())


def test_a_full_disk_is_an_error_and_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    """The system's own limit on a file's size stands for the disk: the last write is cut short."""
    kept = ResultsFile(tmp_path / "kept")
    first, second = Request("x", request_id="a"), Request("y", request_id="b")
    kept.keep(first, Output(request_id="a", finish_reason="stop"))
    size = (tmp_path / "kept").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        with pytest.raises(ConfigError, match="a result cannot be written to"):
            kept.keep(second, Output(request_id="b"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "kept").stat().st_size == size
    kept.keep(second, Output(request_id="b", finish_reason="stop"))
    kept.close()
    kept.close()
    again = ResultsFile(tmp_path / "kept")
    assert len(again) == 2
    assert again.find(second) == Output(request_id="b", finish_reason="stop")
    assert again.find(Request("z", request_id="c")) is None
    again.close()


def test_a_digest_tells_requests_apart_by_all_that_an_output_depends_on() -> None:
    class Opened:
        pass

    first = Request("x", request_id="a", images=["a.png"])
    same = Request("x", request_id="b", images=["a.png"], session="s", deadline_s=3.0)
    assert digest_request(first) == digest_request(same)
    others = [
        Request("y", images=["a.png"]),
        Request("x", images=["b.png"]),
        Request("x", images=[b"a.png"]),
        Request("x", images=[Opened()]),
        Request("x", images=["a.png"], max_tokens=3),
        Request(messages=[{"role": "user", "content": "x"}], images=["a.png"]),
    ]
    assert len({digest_request(each) for each in [first, *others]}) == 7
    assert digest_request(Request("x", images=[Path("a.png")])) == digest_request(first)


# ---------------------------------------------------------------- killed

KILLED = """
import sys, trinity
from support.emulated_pipelines import MODEL, POOLS
from support.map_requests import asked
with trinity.SyncPipeline(MODEL, "1EP1D", cache=trinity.CacheConfig(pools=POOLS)) as pipe:
    for output in pipe.map(asked(400, [5] * 400), concurrency=3, resume=sys.argv[1]):
        print(output.request_id, flush=True)
"""


def test_a_run_that_is_killed_goes_on_where_it_was(pipe: Pipeline, runner: asyncio.Runner, tmp_path: Path) -> None:
    """SIGKILL after a few outputs: each that was seen is kept, no more are served than lack, and all are exact."""
    kept = tmp_path / "outputs.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", KILLED, str(kept)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        seen = [run.stdout.readline().strip() for _ in range(9)]
        run.send_signal(signal.SIGKILL)
        seen += run.stdout.read().split()
    assert run.returncode == -signal.SIGKILL
    had = {each["request_id"] for each in lines(kept)}
    assert seen[:9] == [f"r{at}" for at in range(9)]
    assert set(seen) <= had
    assert len(had) < 400, "it was over before it was killed"
    before = pipe.metrics.requests
    requests = asked(400, [5] * 400)
    found = runner.run(collect(pipe.map(requests, resume=kept)))
    assert [each.token_ids for each in found] == [right(each) for each in requests]
    assert pipe.metrics.requests - before == 400 - len(had)
