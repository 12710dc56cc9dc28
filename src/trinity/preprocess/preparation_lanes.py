"""Lanes on which requests are prepared, and the bytes that all of them share, both in fair turns of their clients."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import inf
from types import TracebackType
from typing import Any, Self, TypeVar

from trinity.core.fair_turns import FairJob, FairTurns
from trinity.errors import ClosedError, Overloaded, RequestTooLarge
from trinity.request import Request

T = TypeVar("T")
SHORT_TEXT = 1 << 18  # characters, and 64 for each value: a tenth of a second to tokenize
MOST_PREPARED_BYTES = 1 << 30  # of processors that no pipeline has
FETCHED_AT_FIRST = 4 << 20  # bytes that are taken for a URL before anything has come of it
_CLOSED = "the request processor was closed before it had processed this request"


def takes_long(request: Request) -> bool:
    """Tell whether a request is prepared on the lane of media: for these, or since its text is long."""
    return bool(request.images or request.media) or text_size(request, SHORT_TEXT) > SHORT_TEXT


async def run_beside_loop(work: Callable[[Request], T], request: Request) -> T:
    """Return ``work(request)``. For a large request it runs in a thread, one request at a time.

    ``work`` looks at each value of the request. The more threads do so at once, the longer they hold up the loop.
    """
    try:
        large = text_size(request, SHORT_TEXT) > SHORT_TEXT
    except Exception:  # a value of a foreign type, which the check names
        large = False
    if not large:
        return work(request)
    client = request.client if isinstance(request.client, str) else ""  # what else it is, the check refuses
    return await _large_requests.run_in_thread(client, partial(work, request))


def text_size(request: Request, enough: float = inf) -> int:
    """Count the characters of a request's texts, and 64 for each value: what a template and a tokenizer read.

    Counts no further beyond ``enough``.
    """
    return measure_values([request.prompt, request.messages, request.tools, request.template_kwargs], enough)


def measure_values(values: list[Any], enough: float = inf) -> int:
    """Count the characters of texts in values, and 64 for each value, no further beyond ``enough``."""
    size, values = 0, [*values]
    while values and size <= enough:
        value = values.pop()
        size += 64
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            values += value
    return size


def _wake(waiter: asyncio.Future[None], error: Exception | None = None) -> bool:
    """Set a future of any loop from any thread; False if its loop is closed."""

    def settle() -> None:
        if not waiter.done():
            waiter.set_result(None) if error is None else waiter.set_exception(error)

    try:
        running = asyncio.get_running_loop()
    except RuntimeError:  # none runs in this thread
        running = None
    if running is waiter.get_loop():
        settle()
        return True
    try:
        waiter.get_loop().call_soon_threadsafe(settle)
    except RuntimeError:
        return False
    return True


class FairQueue:
    """Waits for places, or bytes, in turns of ``FairTurns``. Its methods may be called from any thread and loop."""

    def __init__(self, places: int) -> None:
        self.turns, self._lock, self.closed = FairTurns(places), threading.Lock(), False
        self.ended = 0  # jobs that ran
        self._waiters: dict[FairJob, asyncio.Future[None]] = {}
        self._left = set[FairJob]()  # those of closed loops, until whoever waited there is gone

    async def take(self, client: str, size: int = 1) -> FairJob:
        """Wait for the turn of a new job. Raises ``ClosedError`` after ``close()``."""
        return await self._wait(lambda: self.turns.join(client, size))

    async def run_in_thread(self, client: str, work: Callable[[], T]) -> T:
        """Return ``work()``, from a thread, when it is the turn of a new job.

        Who is cancelled waits no longer, and the job keeps its place until its thread has done with it.
        """
        turn, began = [await self.take(client)], time.monotonic()

        def leave() -> None:
            with suppress(IndexError):  # it has left
                self.leave(turn.pop(), time.monotonic() - began)
                self.start_next()

        def run() -> T:
            try:
                return work()
            finally:
                leave()

        running = asyncio.get_running_loop().run_in_executor(None, run)  # begun at once: the loop may be closed next
        running.add_done_callback(lambda _: leave())  # also where the loop's end came before the thread began
        try:
            return await asyncio.shield(running)
        finally:
            del running  # whose error has this frame, and with it what the work was given

    def take_now(self, client: str, size: int) -> FairJob | None:
        """Start a job if it is its turn at once; None if it would have to wait."""
        with self._lock:
            job = self.turns.join(client, size)
        self.start_next()
        with self._lock:
            return None if self.turns.drop(job) else job

    def start(self, client: str, size: int) -> FairJob:
        """Start a job that has what it takes, whether or not there is a place."""
        with self._lock:
            return self.turns.start(client, size)

    def pause(self, job: FairJob, cost: float) -> None:
        """Give a job's places to other clients until it goes on, or is dropped. ``cost``: what it has cost so far."""
        with self._lock:
            self.turns.pause(job, cost)
        self.start_next()

    async def go_on(self, job: FairJob) -> None:
        """Wait for the turn of a paused job, which comes before others of its client. It is dropped if that raises."""

        def join_again() -> FairJob:
            self.turns.go_on(job)
            return job

        await self._wait(join_again)

    async def _wait(self, make: Callable[[], FairJob]) -> FairJob:
        waiter = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.closed:
                raise ClosedError("the request processor is closed")
            job = make()
            self._waiters[job] = waiter
        self.start_next()
        try:
            await waiter
        except BaseException:
            self.drop(job)
            raise
        return job

    def start_first(self, client: str, size: int, most: int) -> FairJob | None:
        """Start a job at once, if its client has no places and would then have no more than were left of ``most``."""
        with self._lock:
            if self.closed or self.turns.count(client) or size > most - self.turns.running - size:
                return None
            return self.turns.start(client, size)

    def resize(self, job: FairJob, size: int, most: int) -> bool:
        """Have a job that runs take so many places, whether or not there are as many.

        False where its client would then have more than were left of ``most``: it goes on with those that it had.
        """
        with self._lock:
            more, turns = size - job.size, self.turns
            if more > 0 and turns.count(job.client) + more > most - turns.running - more:
                return False
            turns.resize(job, size)
        if more < 0:
            self.start_next()
        return True

    def drop(self, job: FairJob) -> None:
        """End a job in whatever state it is, at no cost but what it has paid as it was paused."""
        with self._lock:
            self._waiters.pop(job, None)
            if job in self._left:
                self._left.remove(job)
            elif not self.turns.drop(job) and not self.closed:
                self.turns.leave(job, 0.0)
        self.start_next()

    def leave(self, job: FairJob, cost: float) -> None:
        """End a job that ran; see ``FairTurns.leave``. Call ``start_next`` then."""
        with self._lock:
            self.turns.leave(job, cost)
            self.ended += 1

    def start_next(self) -> None:
        """Start what there is room for."""
        with self._lock:
            while (job := self.turns.take()) is not None:
                if (waiter := self._waiters.pop(job, None)) is not None and not _wake(waiter):
                    self.turns.leave(job, 0.0)  # it waited on a loop that was closed
                    self._left.add(job)

    def close(self) -> None:
        """End what waits with ``ClosedError``. May be called twice."""
        with self._lock:
            self.closed, waiters = True, list(self._waiters.items())
            self._waiters.clear()
            for job, waiter in waiters:
                self.turns.drop(job)
                _wake(waiter, ClosedError(_CLOSED))


_large_requests = FairQueue(1)


class PreparationLane:
    """Threads on which at most ``places`` requests are prepared at a time; the others wait in turns of their clients.

    A place is free again once nothing of its request runs any more, also if that was cancelled before.
    """

    def __init__(self, name: str, places: int) -> None:
        self.queue = FairQueue(places)
        self.pool = ThreadPoolExecutor(places, thread_name_prefix=name)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a place."""
        return self.queue.turns.waiting

    @property
    def ended(self) -> int | None:
        """Number of visits that have ended, a thread that runs for a caller who left included; None while none runs."""
        return self.queue.ended if self.queue.turns.running else None

    def visit(self, client: str) -> LaneVisit:
        """Make the visit of one request: an asynchronous context manager, entered once there is a place for it."""
        return LaneVisit(self, client)

    def stop(self) -> None:
        """Take no more work, and end what waits with ``ClosedError``. May be called twice."""
        self.queue.close()
        self.pool.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for running work and the end of the threads. Blocks."""
        self.pool.shutdown(wait=True)


class LaneVisit:
    """One request's stay on a lane: within, its work runs on the lane's threads.

    - ``client``: of the request.
    - ``at_end`` (None): called once nothing of it runs any more, before the place is another's.
    """

    def __init__(self, lane: PreparationLane, client: str) -> None:
        self.lane, self.client = lane, client
        self.at_end: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._inside = 1  # the block itself, and each call that runs
        self._seconds = 0.0

    async def __aenter__(self) -> Self:
        self._job: FairJob | None = await self.lane.queue.take(self.client)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_one()

    @asynccontextmanager
    async def outside(self) -> AsyncIterator[None]:
        """Have the place be another client's within, while nothing of this visit runs; then take the next one."""
        job, self._job = self._job, None
        assert job is not None, "it has a place"
        if self.at_end is not None:
            self.at_end()
        seconds, self._seconds = self._seconds, 0.0  # paid now: it may leave at any moment from here on
        self.lane.queue.pause(job, seconds)
        try:
            yield
        except BaseException:
            self.lane.queue.drop(job)
            raise
        await self.lane.queue.go_on(job)
        self._job = job

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on one of the threads. Raises ``ClosedError`` if the lane is closed before that."""

        def work() -> T:
            began = time.monotonic()
            try:
                return function(*arguments)
            finally:
                self._seconds += time.monotonic() - began

        with self._lock:
            self._inside += 1
        try:
            future = self.lane.pool.submit(work)
        except RuntimeError as error:
            self._end_one()
            raise ClosedError("the request processor is closed") from error
        future.add_done_callback(self._end_one)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.lane.queue.closed and task is not None and not task.cancelling():  # dropped by close()
                raise ClosedError(_CLOSED) from None
            raise
        finally:
            del future  # its error holds this frame, which would hold it in turn, and a body of 60 MB for minutes

    def _end_one(self, _: Future[Any] | None = None) -> None:
        with self._lock:
            self._inside -= 1
            over = not self._inside
        if over:
            if self.at_end is not None:
                self.at_end()
            if self._job is not None:
                self.lane.queue.leave(self._job, self._seconds)
                self.lane.queue.start_next()


class FetchedBytes:
    """Bytes that one request has fetched, as they come."""

    def __init__(self, queue: FairQueue, job: FairJob, request_id: str) -> None:
        self._queue, self._job, self._request_id = queue, job, request_id
        self.size = 0

    def add(self, size: int) -> None:
        """Count bytes that have come. Raises ``RequestTooLarge`` for more than there will be, ``Overloaded``."""
        self.size += size
        most = 4 * self._queue.turns.places
        if self.size <= most // 2 and (self.size <= self._job.size or self._queue.resize(self._job, self.size, most)):
            return
        told, self.size = self.size, 0
        self.end()  # at once: the next bytes that come are those of a request that would else be refused, too
        if told > most // 2:
            text = f"its URLs lead to more than {most // 2} bytes, a quarter of max_waiting_bytes"
            raise RequestTooLarge(f"{text}: give fewer or smaller media", self._request_id)
        text = "what was fetched for other requests took this client's part of max_waiting_bytes"
        raise Overloaded(f"{text}; try again later", self._request_id)

    def end(self) -> None:
        """Give back what was taken beforehand and did not come."""
        self._queue.resize(self._job, max(1, self.size), self._job.size)


class SharedRoom:
    """Bytes that all requests share which are being prepared, or are prepared and wait; clients take them in turns.

    ``most``: bytes; ``wait_s``: longest wait of a request for them.

    What was fetched waits for a place on a lane and then for these, so it takes none of them: such requests would wait
    for each other. It has half as many besides, of which a client has no more than are free; what is fetched already
    waits for none. A client's first request is fetched at once; others wait while a quarter of the half is taken.
    """

    def __init__(self, most: int, wait_s: float) -> None:
        self._queue, self._fetched, self._wait_s = FairQueue(most), FairQueue(most // 8), wait_s

    @property
    def most(self) -> int:
        """Bytes that there are."""
        return self._queue.turns.places

    @most.setter
    def most(self, most: int) -> None:
        for queue, places in ((self._queue, most), (self._fetched, most // 8)):
            queue.turns.places = places
            queue.start_next()

    @property
    def taken(self) -> int:
        """Bytes that are taken, those that were fetched included."""
        return self._queue.turns.running + self._fetched.turns.running

    @asynccontextmanager
    async def fetching(self, urls: int, request_id: str, client: str) -> AsyncIterator[FetchedBytes]:
        """Count what is fetched within for a request of so many URLs; wait until it may begin.

        Raises ``Overloaded`` after ``wait_s``.
        """
        places = self._fetched.turns.places
        size = max(1, min(urls * FETCHED_AT_FIRST, places // 4))
        job = self._fetched.start_first(client, size, 4 * places)
        if job is None:
            job = await self._wait(self._fetched, size, request_id, client)
        try:
            yield FetchedBytes(self._fetched, job, request_id)
        finally:
            self._fetched.leave(job, job.size)
            self._fetched.start_next()

    @asynccontextmanager
    async def share(self, size: int, request_id: str, visit: LaneVisit) -> AsyncIterator[None]:
        """Take so many bytes for what a visit does within.

        Where it must wait for them, others have its place on the lane meanwhile: ``at_end`` was called, and what it has
        begun there is to begin again. Raises ``RequestTooLarge`` if there never will be so many, ``Overloaded`` after
        ``wait_s``.
        """
        if size > self.most:
            text = f"its media take {size} bytes while they are prepared; the limit max_waiting_bytes is {self.most}"
            raise RequestTooLarge(f"{text}: give fewer or smaller media", request_id)
        size = max(1, size)
        job = self._queue.take_now(visit.client, size)
        try:
            if job is None:
                async with visit.outside():
                    job = await self._wait(self._queue, size, request_id, visit.client)
            yield
        finally:
            if job is not None:
                self._queue.leave(job, size)  # what waits is looked at once the caller has come to its next wait
                asyncio.get_running_loop().call_soon(self._queue.start_next)

    async def _wait(self, queue: FairQueue, size: int, request_id: str, client: str) -> FairJob:
        try:
            async with asyncio.timeout(self._wait_s):
                return await queue.take(client, size)
        except TimeoutError:
            text = f"media of other requests took all of max_waiting_bytes ({self.most}) for {self._wait_s:g} s"
            raise Overloaded(f"{text}; try again later", request_id) from None

    def close(self) -> None:
        """End with ``ClosedError`` what waits. May be called twice."""
        self._queue.close()
        self._fetched.close()

    def hold(self, size: int, client: str) -> FairJob:
        """Count bytes that a client has already."""
        return self._queue.start(client, size)

    def let_go(self, job: FairJob) -> None:
        """Give back what was held."""
        self._queue.leave(job, 0.0)
        self._queue.start_next()
