"""Link: one connection, served by one thread, to one pool of a peer, for media whose transfers cannot be cancelled.

A peer that freezes and later resumes may still write into local blocks. Only closing the connection rules that out.
Every remote pool therefore has its own link: it fails as a whole, without harm to other links, and the next read makes
a new one. A failure is reported only after the connection is closed, because until then the target blocks are not free.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from trinity.errors import OfferRefused, PeerLost, TransferTimeout, TransportError
from trinity.memory.block_memory import BlockMemory
from trinity.memory.devices import use_device
from trinity.transport.base import ByteRange, CopyPlan, check_block_numbers, check_read

logger = logging.getLogger("trinity")
CANCEL_GRACE_S = 1.0  # given to a cancelled read to end by itself; after that its link is closed
CONNECT_S = 10.0  # until the peer's first answer
JOIN_S = 5.0  # for a thread to end


class Stoppable(Protocol):
    """Owner of a thread that must end before the process unloads the libraries that the thread uses."""

    def stop(self) -> None:
        """Ask the thread to end; does not block."""
        ...

    def join(self) -> None:
        """Block until the thread has ended, for at most ``JOIN_S`` seconds."""
        ...


_alive: weakref.WeakSet[Any] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def stop_at_exit(each: Stoppable, thread: threading.Thread) -> None:
    """Stop ``each`` and join its ``thread`` at exit. The thread may outlive ``each``: it frees what ``each`` held."""
    _alive.add(each)
    _threads.add(thread)


@dataclass(eq=False)
class PendingRead:
    """A read, or another request to the peer, that a link carries out.

    ``make`` starts it on the link's thread. ``deadline`` (s, monotonic clock): the link fails if it takes longer.
    """

    make: Callable[[], Any]
    what: str
    deadline: float
    result: Future[Any] = field(default_factory=Future)
    handle: Any = None

    async def wait(self) -> Any:
        """Wait for the result; on return nothing more is written. After a cancellation it has ``CANCEL_GRACE_S``."""
        waiting = asyncio.wrap_future(self.result)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self.deadline = min(self.deadline, time.monotonic() + CANCEL_GRACE_S)
            while not waiting.done():
                with suppress(asyncio.CancelledError, TransportError):
                    await asyncio.shield(waiting)
            raise


class Link:
    """Connection to one pool of a peer, and the thread that alone uses it.

    ``gpu``: ordinal of the GPU that holds the local pool, which is that thread's current device; None for none. A
    medium adds ``_connect``, ``_next_read``, ``_poll_transfer`` and ``_disconnect``, and where needed ``_wake``.
    """

    def __init__(self, scheme: str, peer: str, gpu: int | None = None) -> None:
        self.scheme, self.peer, self._gpu = scheme, peer, gpu
        self.opened: Future[None] = Future()
        self.failure: TransportError | None = None
        self._in_flight: list[PendingRead] = []
        self._queue: queue.Queue[PendingRead | None] = queue.Queue()
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"trinity-{scheme}-link", daemon=True)

    def begin(self) -> None:
        """Start the thread, which connects."""
        self._thread.start()
        stop_at_exit(self, self._thread)

    async def open(self) -> None:
        """Wait until the peer has answered once. Raises ``PeerLost``, ``HandshakeError``, ``TransferTimeout``."""
        await asyncio.shield(asyncio.wrap_future(self.opened))

    async def read(self, plan: CopyPlan, timeout_s: float) -> None:
        """Copy what ``plan`` says, which is not nothing.

        Raises ``PeerLost``, ``TransferTimeout``, ``OfferRefused``; after any of them nothing more is written.
        """
        raise NotImplementedError

    async def generation(self, source: Sequence[int], timeout_s: float) -> int:
        """Fetch the highest generation of the peer's blocks ``source``, at least one. Raises as ``read`` does."""
        raise NotImplementedError

    async def ask(self, make: Callable[[], Any], what: str, timeout_s: float) -> Any:
        """Have the thread start ``make`` and wait for its result; ``what`` names it in error messages."""
        pending = PendingRead(make, what, time.monotonic() + timeout_s)
        with self._lock:
            if self.failure is not None:
                raise copy_error(self.failure)
            self._queue.put(pending)
            self._wake()
        return await pending.wait()

    def stop(self) -> None:
        """Ask the thread to disconnect and end; does not block."""
        with self._lock:
            self._closing.set()
            self._queue.put(None)
            if self.failure is None:
                self._wake()

    def join(self) -> None:
        """Block until the thread has ended, for at most ``JOIN_S`` seconds."""
        self._thread.join(JOIN_S)

    def _wake(self) -> None:
        """Make the thread look at its queue, if it may be waiting for something else."""

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        with use_device(self._gpu):  # UCX asks for the calling thread's CUDA context
            self._serve()

    def _serve(self) -> None:
        failure: TransportError
        try:
            self._connect()
            self.opened.set_result(None)
            while not self._closing.is_set():
                self._run_once()
            failure = PeerLost("the link was closed", self.scheme, self.peer)
        except TransportError as error:
            failure = error
            failure.__traceback__ = None  # its frames would keep the connection alive
        except Exception as error:
            failure = self._as_transport_error(error)
        self._end(failure)

    def _await_first(self, make: Callable[[], Any], pause: Callable[[], object]) -> None:
        """Send a first request and block until the peer has answered it."""
        pending = PendingRead(make, "a first answer", time.monotonic() + CONNECT_S)
        self._start(pending)
        while self._in_flight and not self._closing.is_set():
            pause()
            self._check(pending)
        if pending.result.done():
            pending.result.result()

    def _run_once(self) -> None:
        """Start the next read, if there is one, and check those in flight."""
        asked = self._next_read()
        if asked is not None:
            self._start(asked)
        for pending in list(self._in_flight):
            self._check(pending)

    def _start(self, pending: PendingRead) -> None:
        self._in_flight.append(pending)
        try:
            pending.handle = pending.make()
        except OfferRefused as refused:
            self._refuse(pending, refused)

    def _refuse(self, pending: PendingRead, refused: OfferRefused) -> None:
        """Fail this read alone; nothing of it is in flight."""
        self._in_flight.remove(pending)
        pending.result.set_exception(copy_error(refused))

    def _check(self, pending: PendingRead) -> None:
        try:
            over, result = self._poll_transfer(pending.handle)
        except OfferRefused as refused:
            self._refuse(pending, refused)
            return
        if over:
            self._in_flight.remove(pending)
            pending.result.set_result(result)
        elif time.monotonic() > pending.deadline:
            raise TransferTimeout(f"{self.peer} did not deliver {pending.what} in time", self.scheme, self.peer)

    def _end(self, failure: TransportError) -> None:
        """Disconnect, which ends everything in flight, and only then report the failure to those who wait."""
        failed = self._in_flight
        self._disconnect([pending.handle for pending in failed])
        for pending in failed:
            pending.handle = None
        with self._lock:
            self.failure = failure
            while not self._queue.empty():
                asked = self._queue.get()
                failed += [asked] if asked is not None else []
        for each in (self.opened, *(pending.result for pending in failed)):
            if not each.done():
                each.set_exception(copy_error(failure))
        self._in_flight = []

    # ------------------------------------------------------------ for a medium to override

    def _connect(self) -> None:
        """Connect to the peer and wait for its first answer."""
        raise NotImplementedError

    def _next_read(self) -> PendingRead | None:
        """Wait until there is something to do; return the next read, or None if it was something else."""
        raise NotImplementedError

    def _poll_transfer(self, handle: Any) -> tuple[bool, Any]:
        """Return (finished, result) of a transfer. ``OfferRefused`` ends that transfer alone, other errors the link."""
        raise NotImplementedError

    def _disconnect(self, handles: list[Any]) -> None:
        """Close the connection. Nothing is written to local memory once this returns."""
        raise NotImplementedError

    def _as_transport_error(self, error: Exception) -> TransportError:
        made = TransportError(f"{self.scheme} failed: {error!r}", self.scheme, self.peer)
        made.__cause__ = error.with_traceback(None)  # its frames would keep the connection alive
        return made


class LinkRemote:
    """A peer's pool that is read over a link. After a failed read the next one connects anew."""

    def __init__(
        self, scheme: str, peer: str, blocks: int, into: BlockMemory, timeout_s: float, make: Callable[[], Link]
    ) -> None:
        self._scheme, self._name, self._blocks, self._into = scheme, peer, blocks, into
        self._timeout_s, self._make = timeout_s, make
        self._link: Link | None = None
        self._link_lock = asyncio.Lock()
        self._closed = False

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        plan = check_read(self._scheme, source, self._blocks, target, self._into, within)
        link = await self.link()
        if source:
            await link.read(plan, self._timeout_s)
        return plan.bytes

    async def generation(self, source: Sequence[int]) -> int:
        check_block_numbers(self._scheme, "source", source, self._blocks)
        link = await self.link()
        return await link.generation(source, self._timeout_s) if source else 0

    async def link(self) -> Link:
        """Return the open link, connecting if there is none or the last one failed."""
        async with self._link_lock:
            if self._closed:
                raise PeerLost("this side of the connection is closed", self._scheme, self._name)
            if self._link is None or self._link.failure is not None:
                await self._drop_link()
                self._link = self._make()
                self._link.begin()
            await self._link.open()
            return self._link

    async def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.stop()
            await asyncio.to_thread(link.join)

    async def aclose(self) -> None:
        self._closed = True
        await self._drop_link()

    def __del__(self) -> None:
        if self._link is not None:
            self._link.stop()


def copy_error(failure: TransportError) -> TransportError:
    """Copy an error for one more waiter: a single object raised twice would collect both tracebacks."""
    copy = type(failure)(str(failure), scheme=failure.scheme, peer=failure.peer)
    if isinstance(failure, OfferRefused) and isinstance(copy, OfferRefused):
        copy.reason = failure.reason
    copy.__cause__ = failure.__cause__
    return copy


@atexit.register
def _stop_all() -> None:
    """Stop every thread before UCX is unloaded: a thread still inside it would crash the process."""
    for each in list(_alive):
        each.stop()
    for thread in list(_threads):
        thread.join(JOIN_S)
