"""Requests of any iterable, served with bounded concurrency: their outputs in order, or as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Sequence, Sized
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from trinity.errors import ConfigError, RequestError
from trinity.errors.arguments import Whole, check_value, show
from trinity.errors.display import is_display_watched
from trinity.pipeline.results_file import ResultsFile
from trinity.request import Output, Request, check_request
from trinity.runtime.shielded_wait import run_to_end, wait_shielded
from trinity.traces.trace import COMPLETE

Requests = Iterable[Request] | AsyncIterable[Request]
OnError = Literal["raise", "return"]
MapResult = Output | RequestError
Progress = Callable[[int, int | None], None]  # results so far, and how many there will be, where that is known
ServeOne = Callable[[Request], Awaitable[Output]]
READ_AHEAD = 2  # times the concurrency: requests taken from the iterable and not yet given back as results
_END: Any = object()


def map_requests(
    serve: ServeOne,
    requests: Requests,
    *,
    concurrency: int,
    ordered: bool,
    progress: bool | Progress | None,
    resume: str | Path | None,
    model: str,
    on_error: OnError,
) -> AsyncGenerator[Any, None]:
    """Check the arguments and begin nothing yet: the first result asked for does. See ``Pipeline.map``."""
    concurrency = check_value("concurrency", concurrency, Whole)
    ordered = check_value("ordered", ordered, bool)
    resume = check_value("resume", resume, str | Path | None)
    returns = check_value("on_error", on_error, OnError) == "return"
    if not isinstance(requests, Iterable | AsyncIterable) or isinstance(requests, str | bytes):
        raise ConfigError(f"requests must be an iterable of trinity.Request, got {show(requests)}")
    shown = MapProgress(progress, len(requests) if isinstance(requests, Sized) else None)
    return _serve_all(serve, requests, concurrency, ordered, shown, resume, model, returns)


async def _serve_all(
    serve: ServeOne,
    requests: Requests,
    concurrency: int,
    ordered: bool,
    progress: MapProgress,
    resume: str | Path | None,
    model: str,
    returns: bool,
) -> AsyncGenerator[MapResult, None]:
    keeper = None if resume is None else Keeper(await run_to_end(ResultsFile, resume, model), serve)
    flight = Flight(keeper.serve if keeper is not None else serve, requests, concurrency, ordered)
    try:
        with progress:
            async for result in flight:
                progress.count()
                if isinstance(result, RequestError) and not returns:
                    raise result
                yield result
    finally:
        await flight.aclose()
        if keeper is not None:
            await keeper.aclose()


class Keeper:
    """Serves requests whose outputs a file has not got yet, and keeps them there before they are given back."""

    def __init__(self, file: ResultsFile, serve: ServeOne) -> None:
        self._file, self._serve = file, serve
        self._turn = asyncio.Lock()

    async def serve(self, request: Request) -> Output:
        """Return the output that is kept, or serve the request and keep its output if it ended by itself."""
        request = check_request(request)
        async with self._turn:
            kept = await run_to_end(self._file.find, request)
        if kept is not None:
            return kept
        output = await self._serve(request)
        if output.finish_reason in COMPLETE:
            async with self._turn:
                await run_to_end(self._file.keep, request, output)
        return output

    async def aclose(self) -> None:
        await run_to_end(self._file.close)


class Flight:
    """Takes requests, serves at most ``concurrency`` at once, and gives their results.

    At most ``READ_AHEAD`` times as many have been taken and not been given back: a slow reader stops the taking, and
    a slow request does not stop those behind it at once.
    """

    def __init__(self, serve: ServeOne, requests: Requests, concurrency: int, ordered: bool) -> None:
        self._serve, self._requests, self._ordered = serve, requests, ordered
        self._slots = asyncio.Semaphore(concurrency)
        self._ahead = asyncio.Semaphore(READ_AHEAD * concurrency)
        self._queue: asyncio.Queue[asyncio.Future[Output] | None] = asyncio.Queue()
        self._unread: set[asyncio.Future[Output]] = set()
        self._feeder: asyncio.Task[None] | None = None
        self._fed = False

    def __aiter__(self) -> Flight:
        return self

    async def __anext__(self) -> MapResult:
        """Wait for the next result: an output, or a request's own error. Any other error is raised at its place."""
        if self._feeder is None:
            self._feeder = asyncio.create_task(self._feed(), name="trinity-map")
        while self._unread or not self._fed:
            served = await self._queue.get()
            if served is None:
                self._fed = True
                continue
            result = await _outcome(served)
            self._unread.discard(served)
            self._ahead.release()
            return result
        raise StopAsyncIteration

    async def _feed(self) -> None:
        """Take requests while there is room. An error of the iterable is a result at its place, the last one."""
        source = step_source(self._requests)
        try:
            while True:
                await self._ahead.acquire()
                await self._slots.acquire()
                request = await source()
                if request is _END:
                    break
                self._add(asyncio.ensure_future(self._serve_one(request)))
        except Exception as error:
            failed: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            self._add(failed)
        self._queue.put_nowait(None)

    def _add(self, served: asyncio.Future[Output]) -> None:
        self._unread.add(served)
        if self._ordered:
            self._queue.put_nowait(served)
        else:
            served.add_done_callback(self._queue.put_nowait)

    async def _serve_one(self, request: Request) -> Output:
        try:
            return await self._serve(request)
        finally:
            self._slots.release()

    async def aclose(self) -> None:
        """End the requests in flight, and wait until they have ended."""
        left: list[asyncio.Future[Any]] = [*self._unread, *([self._feeder] if self._feeder is not None else [])]
        for each in left:
            each.cancel()
        await wait_shielded(asyncio.gather(*left, return_exceptions=True))


async def _outcome(served: asyncio.Future[Output]) -> MapResult:
    try:
        return await served
    except RequestError as error:
        return error


def step_source(requests: Requests) -> Callable[[], Awaitable[Any]]:
    """Return a function that awaits the next request, ``_END`` after the last.

    What is neither a sequence nor asynchronous is stepped on a thread: it may read files as it goes.
    """
    if isinstance(requests, AsyncIterable):
        several = aiter(requests)
        return lambda: anext(several, _END)
    each = iter(requests)
    if isinstance(requests, Sequence):
        return lambda: _next_at_once(each)
    return lambda: asyncio.to_thread(next, each, _END)


async def _next_at_once(each: Any) -> Any:
    return next(each, _END)


class MapProgress:
    """Counts results.

    - ``shown``: a function to call, True for a bar, False for none; None shows a bar in a terminal or notebook.
    - ``total``: how many there will be; None where nobody knows.

    Raises ``ConfigError`` for anything else, and for True where tqdm is not installed.
    """

    def __init__(self, shown: bool | Progress | None, total: int | None) -> None:
        if not (shown is None or isinstance(shown, bool) or callable(shown)):
            raise ConfigError(f"progress is True, False, None or a function of two counts, got {show(shown)}")
        self._report = shown if callable(shown) else None
        self._total, self._count = total, 0
        wanted = shown is True or (shown is None and is_display_watched())
        self._make_bar = find_bar(required=shown is True) if wanted else None
        self._bar: Any = None

    def __enter__(self) -> MapProgress:
        if self._make_bar is not None:
            self._bar = self._make_bar(desc="requests", total=self._total, unit="", dynamic_ncols=True)
        return self

    def count(self) -> None:
        """Count one result."""
        self._count += 1
        if self._report is not None:
            self._report(self._count, self._total)
        elif self._bar is not None:
            self._bar.update()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def find_bar(*, required: bool) -> Callable[..., Any] | None:
    """Return tqdm's bar; None where it is missing, which is a ``ConfigError`` if it is required."""
    try:
        found: Callable[..., Any] = import_module("tqdm").tqdm
    except ImportError as error:
        if required:
            raise ConfigError("progress=True needs tqdm: pip install tqdm, or give a function") from error
        return None
    return found
