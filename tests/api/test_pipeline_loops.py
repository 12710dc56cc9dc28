"""Inside other people's programs: task groups of asyncio and anyio, timeouts, uvloop, a notebook's running loop."""

from __future__ import annotations

import ast
import asyncio
import inspect
import signal
import sys
import types
from typing import Any

import anyio
import pytest

from support.checkpoint_files import checkpoint
from support.pipeline_driver import GOOD, LONG, ONE, TEXT, all_tokens, good_ones, nothing_left, serving
from support.wrapped_transports import WrappedTransport
from trinity.errors import BadMedia
from trinity.pipeline import Pipeline
from trinity.request import Output, Request

try:
    import uvloop

    uvloop.new_event_loop().close()  # libuv opens one pipe per process, which no test is to blame for
except ImportError:
    uvloop = None  # type: ignore[assignment]


@pytest.fixture(scope="module", autouse=True)
def expected() -> None:
    all_tokens()


# ---------------------------------------------------------------- task groups and timeouts


async def test_inside_a_task_group() -> None:
    async with asyncio.TaskGroup() as group, serving() as pipe:
        tasks = [group.create_task(pipe.complete(case.request())) for case in GOOD * 2]
        for task in tasks:
            await task
    assert [task.result().token_ids for task in tasks] == [case.tokens for case in GOOD * 2]


async def test_a_bad_request_in_a_task_group_cancels_its_siblings_as_always() -> None:
    async with serving() as pipe:
        with pytest.raises(ExceptionGroup) as caught:
            await _group(pipe)
        (error,) = caught.value.exceptions
        assert isinstance(error, BadMedia)
        async with asyncio.timeout(120):
            await pipe.wait_idle()
        await good_ones(pipe)


async def _group(pipe: Pipeline) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(pipe.complete(LONG.request()))
        await asyncio.sleep(0.01)
        group.create_task(pipe.complete(Request("<image>")))


async def test_a_pipeline_whose_group_is_cancelled_closes_first() -> None:
    pipes: list[Pipeline] = []

    async def serve() -> None:
        async with Pipeline(checkpoint("llava"), "E+P+D", dtype="float32") as pipe:
            pipes.append(pipe)
            await pipe.complete(LONG.request())

    async def program() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(serve())
            while not (pipes and pipes[0]._frontend.core.entries):
                await asyncio.sleep(0.001)
            raise LookupError("the rest of the program failed")

    with pytest.raises(ExceptionGroup, match="unhandled"):
        await program()
    nothing_left(pipes[0])


async def test_a_timeout_of_the_user() -> None:
    async with serving() as pipe:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await pipe.complete(LONG.request(max_tokens=1900))
        await pipe.wait_idle()
        await good_ones(pipe)


async def test_a_timeout_around_the_pipeline() -> None:
    pipe = Pipeline(checkpoint("llava"), "E+P+D", dtype="float32")

    async def serve() -> None:
        async with asyncio.timeout(0.4), pipe:
            while True:
                await pipe.complete(LONG.request())

    with pytest.raises(TimeoutError):
        await serve()
    nothing_left(pipe)


async def test_a_cancelled_scope_of_anyio_closes_the_pipeline_first() -> None:
    """Such a scope cancels every await anew, the ones in aclose() as well."""
    with anyio.CancelScope() as scope:
        async with Pipeline(checkpoint("llava"), "E+P+D", dtype="float32") as pipe:
            async with pipe.stream(LONG.request()) as tokens:
                async for token in tokens:
                    if token.index == 3:
                        scope.cancel()
            pytest.fail("the scope was cancelled")
    assert scope.cancelled_caught
    nothing_left(pipe)


async def test_closing_in_a_cancelled_scope_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    real, waits = asyncio.wait, []

    async def wait(tasks: Any, **settings: Any) -> Any:
        waits.append(tasks)
        return await real(tasks, **settings)

    monkeypatch.setattr(asyncio, "wait", wait)
    with anyio.CancelScope() as scope:
        connector = WrappedTransport(delay_s=0.05)
        async with Pipeline(checkpoint("llava"), "EP+D", dtype="float32", connector=connector) as pipe:
            async with pipe.stream(TEXT.request()):
                while not any(host._tasks for host in pipe.hosts.values()):
                    await asyncio.sleep(0.001)
            waits.clear()
            scope.cancel()
    assert 1 <= len(waits) <= 2
    nothing_left(pipe)


async def test_an_anyio_task_group() -> None:
    found: list[Output] = []

    async def serve(pipe: Pipeline, request: Request) -> None:
        found.append(await pipe.complete(request))

    async with serving() as pipe:
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(serve, pipe, ONE.request())
        with anyio.move_on_after(0.05) as scope:
            await pipe.complete(LONG.request(max_tokens=1900))
        assert scope.cancelled_caught
        await good_ones(pipe)
    assert [output.token_ids for output in found] == [ONE.tokens] * 4


def test_under_anyio_run() -> None:
    anyio.run(_serve_good_ones)


async def _serve_good_ones() -> None:
    async with serving("2E2P2D") as pipe:
        await good_ones(pipe, rounds=2)


# ---------------------------------------------------------------- loops


@pytest.mark.skipif(uvloop is None, reason="uvloop is not installed")
def test_uvloop() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_good_ones())
        runner.run(_leave_early_and_time_out())


async def _leave_early_and_time_out() -> None:
    assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    async with serving("E+P+D") as pipe:
        async with pipe.stream(LONG.request()) as tokens:
            await anext(aiter(tokens))
        found = await asyncio.gather(pipe.complete(LONG.request(deadline_s=0.05)), return_exceptions=True)
        assert type(found[0]).__name__ == "DeadlineExceeded"
        await good_ones(pipe)


def test_one_loop_after_another_in_one_process() -> None:
    for _ in range(2):
        asyncio.run(_serve_good_ones())


CELLS = (
    "from trinity.pipeline import Pipeline",
    "pipe = Pipeline(model, '1E1P1D', dtype='float32')\nawait pipe.start()",
    "output = await pipe.complete(make())",
    "async with pipe.stream(make()) as tokens:\n    ids = [token.id async for token in tokens]",
    "await pipe.aclose()",
)


async def test_cells_with_top_level_await_in_a_loop_that_runs() -> None:
    """As IPython runs them: each cell is compiled with top-level await and awaited on the kernel's loop."""
    names = {"model": checkpoint("llava"), "make": ONE.request}
    for cell in CELLS:
        code = compile(cell, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = types.FunctionType(code, names)()
        if inspect.iscoroutine(running):
            await asyncio.ensure_future(running)  # a task of its own per cell
    assert names["ids"] == names["output"].token_ids == ONE.tokens  # type: ignore[comparison-overlap, attr-defined]
    nothing_left(names["pipe"])  # type: ignore[arg-type]


def test_a_user_may_stop_the_program_with_ctrl_c() -> None:
    """KeyboardInterrupt cancels the main task; the pipeline closes and the program ends by it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        _interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt() -> None:
    pipe = Pipeline(checkpoint("llava"), "E+P+D", dtype="float32")

    async def interrupted() -> None:
        async with pipe, pipe.stream(TEXT.request(max_tokens=1000)) as tokens:
            async for token in tokens:
                if token.index == 2:
                    signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())
    nothing_left(pipe)
    assert sys.exc_info() == (None, None, None)
