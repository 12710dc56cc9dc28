"""SyncPipeline: a pipeline for scripts and notebooks without await, on a thread of its own event loop.

Its methods are made of ``Pipeline``'s, so that the two cannot differ.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from trinity.core.messages import PeerLoad
from trinity.core.progress import StalledPart
from trinity.errors import ClosedError
from trinity.errors.live_objects import forbid_copies
from trinity.metrics import Metrics
from trinity.pipeline.adoptions import WITHIN_S, Resumption
from trinity.pipeline.frontend_host import PipelineState
from trinity.pipeline.loop_thread import LoopThread
from trinity.pipeline.pipeline import Pipeline
from trinity.pipeline.stream import Stream
from trinity.placement import Placement
from trinity.remote.supervision.supervisor_messages import InstanceHealth
from trinity.request import Output, Request, Token
from trinity.timeline import Timeline
from trinity.traces.trace import Trace

P = ParamSpec("P")
T = TypeVar("T")
_numbers = itertools.count()
_END: Any = object()


def _made_as(
    make: Callable[P, Pipeline],
) -> Callable[[Callable[..., None]], Callable[Concatenate[SyncPipeline, P], None]]:
    """Give a constructor the arguments of ``make`` (a decorator)."""

    def adopt(constructor: Callable[..., None]) -> Callable[Concatenate[SyncPipeline, P], None]:
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(make)
        signature = signature.replace(parameters=[own, *signature.parameters.values()], return_annotation=None)
        constructor.__signature__ = signature  # type: ignore[attr-defined]
        return constructor

    return adopt


def _waiting(
    method: Callable[Concatenate[Pipeline, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncPipeline, P], T]:
    """Make a method that waits for ``method`` of the pipeline inside."""

    @functools.wraps(method)
    def call(self: SyncPipeline, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.thread.run(method, self.pipeline, *args, **kwargs)

    return call


def _iterating(
    method: Callable[Concatenate[Pipeline, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[SyncPipeline, P], Iterator[T]]:
    """Make a method that iterates over what ``method`` of the pipeline inside gives."""

    @functools.wraps(method)
    def call(self: SyncPipeline, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return _iterate(self, method(self.pipeline, *args, **kwargs))

    return call


@forbid_copies("make it where it is used, and pass its arguments")
class SyncPipeline:
    """A ``Pipeline`` without await: the same arguments, and the same methods, which wait. ``close`` is its ``aclose``.

    ::

        with trinity.SyncPipeline("path/to/llava", placement="1E1P1D") as pipe:
            print(pipe.chat("What is this?", images=["cat.jpg"]).text)
            with pipe.stream(trinity.Request("A story:")) as tokens:
                for token in tokens:
                    print(token.text, end="")

    It serves on a thread of its own event loop, so it may be called from several threads, and in a notebook, whose own
    loop waits meanwhile. Ctrl-C ends the request that is waited for, and is raised. One that is never closed holds up
    no program's end. ``pipeline`` is the ``Pipeline`` inside: read its attributes, but call it on its loop alone.
    """

    @_made_as(Pipeline)
    def __init__(self, *given: Any, **named: Any) -> None:
        self.pipeline = Pipeline(*given, **named)
        self.thread = LoopThread(f"trinity-sync-{next(_numbers)}")
        self._forgotten = weakref.finalize(self, _close_later, self.thread, self.pipeline)
        self._forgotten.atexit = False

    start = _waiting(Pipeline.start)
    complete = _waiting(Pipeline.complete)
    complete_n = _waiting(Pipeline.complete_n)
    chat = _waiting(Pipeline.chat)
    features = _waiting(Pipeline.features)
    switch = _waiting(Pipeline.switch)
    add = _waiting(Pipeline.add)
    remove = _waiting(Pipeline.remove)
    apply = _waiting(Pipeline.apply)
    profile = _waiting(Pipeline.profile)
    wait_idle = _waiting(Pipeline.wait_idle)
    map = _iterating(Pipeline.map)

    def stream(self, request: Request) -> SyncStream:
        """Make a stream of the request's tokens: a context manager and iterator. Leaving it ends the request."""
        return SyncStream(self, self.pipeline.stream(request))

    def resume(self, /, request_id: str, after: int = -1, within_s: float = WITHIN_S) -> SyncResumption:
        """As ``Pipeline.resume``: ``with pipe.resume("chat-17", after=41) as tokens: for token in tokens``."""
        return SyncResumption(self, self.pipeline.resume(request_id, after, within_s))

    @property
    def has_buddy(self) -> bool:
        """As ``Pipeline.has_buddy``."""
        return self.pipeline.has_buddy

    @property
    def journal_address(self) -> str:
        """As ``Pipeline.journal_address``."""
        return self.pipeline.journal_address

    def close(self) -> None:
        """End every request, wait for steps and transfers in flight, stop all threads. May be called twice."""
        with suppress(ClosedError):  # it is, or is another process's
            self.thread.run(self.pipeline.aclose)
            self.thread.close()
        self._forgotten.detach()

    def __enter__(self) -> SyncPipeline:
        try:
            self.start()
            return self
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def state(self) -> PipelineState:
        """As ``Pipeline.state``."""
        return self.pipeline.state

    @property
    def change(self) -> str:
        """As ``Pipeline.change``."""
        return self.pipeline.change

    @property
    def change_obstacle(self) -> str:
        """As ``Pipeline.change_obstacle``."""
        return self.pipeline.change_obstacle

    @property
    def placement(self) -> Placement:
        """The placement in use."""
        return self.pipeline.placement

    @property
    def health(self) -> dict[str, InstanceHealth]:
        """As ``Pipeline.health``."""
        return self.pipeline.health

    @property
    def loads(self) -> dict[str, PeerLoad]:
        """As ``Pipeline.loads``."""
        return self.pipeline.loads

    def find_stalled(self, after_s: float) -> list[StalledPart]:
        """List the parts that make no progress, as ``Pipeline.find_stalled`` does."""
        return self.pipeline.find_stalled(after_s)

    @property
    def metrics(self) -> Metrics:
        """Counts and latencies of all requests."""
        return self.pipeline.metrics

    @property
    def trace(self) -> Trace:
        """Every request that it saw."""
        return self.pipeline.trace

    @property
    def timeline(self) -> Timeline:
        """The work of its instances."""
        return self.pipeline.timeline

    def __repr__(self) -> str:
        return repr(self.pipeline).replace("Pipeline(", "SyncPipeline(", 1)

    def _repr_html_(self) -> str:
        return self.pipeline._repr_html_()


@forbid_copies("pass its tokens or its output")
class SyncStream:
    """One request in flight, without await: ``with pipe.stream(request) as tokens: for token in tokens``.

    As ``Stream``: leaving the block ends the request, and ``output`` is available after that.
    """

    _entered = False

    def __init__(self, door: SyncPipeline, stream: Stream, entered: bool = False) -> None:
        self._door, self._thread, self._stream = door, door.thread, stream  # a stream's pipeline is not forgotten
        self._entered = entered

    @property
    def request(self) -> Request:
        """The request that is served."""
        return self._stream.request

    @property
    def output(self) -> Output:
        """As ``Stream.output``."""
        return self._stream.output

    @property
    def done(self) -> bool:
        """As ``Stream.done``."""
        return self._stream.done

    @property
    def token_times(self) -> list[float]:
        """As ``Stream.token_times``."""
        return self._stream.token_times

    @property
    def token_count(self) -> int:
        """As ``Stream.token_count``."""
        return self._stream.token_count

    @property
    def place(self) -> str:
        """As ``Stream.place``."""
        return self._stream.place

    def move(self, to: str, within_s: float = 30.0) -> None:
        """As ``Stream.move``."""
        self._thread.run(self._stream.move, to, within_s)

    def __enter__(self) -> SyncStream:
        entered: list[Stream] = []  # a stream that was entered before is not this call's to end
        try:
            self._thread.run(_enter, self._stream, entered)
            self._entered = True
            return self
        except BaseException:
            if entered:  # interrupted on its way back: no block will be left
                self.cancel()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End the request now; does nothing if it has ended, or the pipeline is closed."""
        _run_unless_closed(self._thread, _cancel, self._stream)

    def __del__(self) -> None:
        """End the request of a stream that nobody can read any more, as where leaving it was interrupted."""
        if self._entered and not self.done and not sys.is_finalizing():
            with suppress(ClosedError):
                self._thread.begin(_cancel, self._stream)

    def __iter__(self) -> SyncStream:
        aiter(self._stream)
        return self

    def __next__(self) -> Token:
        token: Token = self._thread.run(_next, self._stream)
        if token is _END:
            raise StopIteration
        return token

    def collect(self) -> Output:
        """As ``Stream.collect``."""
        return self._thread.run(self._stream.collect)

    def __repr__(self) -> str:
        return f"Sync{self._stream!r}"


class SyncResumption:
    """A reader that comes back, without await: a block in which there is its ``SyncStream``."""

    def __init__(self, door: SyncPipeline, resumption: Resumption) -> None:
        self._door, self._resumption = door, resumption
        self._stream: SyncStream | None = None

    def __enter__(self) -> SyncStream:
        entered: list[Stream] = []
        try:
            self._door.thread.run(_enter, self._resumption, entered)
        finally:
            if entered:  # also where this call was interrupted on its way back
                self._stream = SyncStream(self._door, entered[0], entered=True)
        assert self._stream is not None
        return self._stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.cancel()


def _iterate(door: SyncPipeline, results: AsyncGenerator[T, None]) -> Iterator[T]:
    """Iterate over an asynchronous generator of the door's loop, and close it at the end or when left."""
    turn = asyncio.Lock()  # a step that Ctrl-C has left may still be ending on the loop
    try:
        while (each := door.thread.run(_next, results, turn)) is not _END:
            yield each
    finally:
        _run_unless_closed(door.thread, _leave, results, turn)


async def _next(several: Any, turn: AbstractAsyncContextManager[Any] | None = None) -> Any:
    async with turn or nullcontext():
        return await anext(several, _END)


async def _leave(results: AsyncGenerator[Any, None], turn: asyncio.Lock) -> None:
    async with turn:
        await results.aclose()


async def _enter(stream: AbstractAsyncContextManager[Stream], entered: list[Stream]) -> None:
    entered.append(await stream.__aenter__())


async def _cancel(stream: Stream) -> None:
    stream.cancel()


def _run_unless_closed(
    thread: LoopThread, function: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Run it and wait; not on the loop's own thread, where the garbage collector may call, nor at a program's end."""
    if sys.is_finalizing():  # the loop's thread runs no more
        return
    with suppress(ClosedError):
        (thread.begin if thread.is_caller else thread.run)(function, *args, **kwargs)


def _close_later(thread: LoopThread, pipeline: Pipeline) -> None:
    """Close what was forgotten, without waiting: the garbage collector calls, on any thread."""
    if pipeline.state == "new":
        thread.close()
    else:
        with suppress(ClosedError):  # a copy in a process that was forked from its own
            thread.begin(_close_both, thread, pipeline)


async def _close_both(thread: LoopThread, pipeline: Pipeline) -> None:
    await pipeline.aclose()
    thread.close()
