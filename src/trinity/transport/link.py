"""Links: a connection to one pool of a peer, used by one thread alone, for media whose transfers cannot be recalled.

A peer that froze and goes on later may still fill our blocks. Only the end of the connection stops that for certain, so
every remote pool has a link of its own, which fails as a whole, may end without harm to others, and is then made anew.
Nobody is told of a failure before the link's end: until then the blocks that it was to fill are not free.
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
from trinity.transport.base import Within, check_numbers, check_read

logger = logging.getLogger("trinity")
GRACE_S = 1.0  # a cancelled read may end by itself for so long; then its link ends
OPEN_S = 10.0
JOIN_S = 5.0


class Stoppable(Protocol):
    """Something with a thread that must be at rest before the process takes its libraries down."""

    def stop(self) -> None: ...

    def join(self) -> None: ...


_alive: weakref.WeakSet[Any] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def stop_at_exit(each: Stoppable, thread: threading.Thread) -> None:
    """``thread`` is what ``each`` runs on: it may outlive it, for its last act is to free what that held."""
    _alive.add(each)
    _threads.add(thread)


@dataclass(eq=False)
class Reading:
    """One read: ``make`` begins it on the link's thread. ``until``: when it is given up, on the monotonic clock."""

    make: Callable[[], Any]
    what: str
    until: float
    done: Future[Any] = field(default_factory=Future)
    handle: Any = None

    async def wait(self) -> Any:
        """Its result, once nothing more is written. A cancelled one has ``GRACE_S`` to end by itself."""
        waiting = asyncio.wrap_future(self.done)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self.until = min(self.until, time.monotonic() + GRACE_S)
            while not waiting.done():
                with suppress(asyncio.CancelledError, TransportError):
                    await asyncio.shield(waiting)
            raise


class Link:
    """The thread and what it has to do. A medium adds ``_connect``, ``_next``, ``_start``, ``_look`` and ``_part``."""

    def __init__(self, scheme: str, peer: str) -> None:
        self.scheme, self.peer = scheme, peer
        self.opened: Future[None] = Future()
        self.failure: TransportError | None = None
        self._flying: list[Reading] = []
        self._asked: queue.Queue[Reading | None] = queue.Queue()
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"trinity-{scheme}-link", daemon=True)

    def begin(self) -> None:
        self._thread.start()
        stop_at_exit(self, self._thread)

    async def open(self) -> None:
        """Wait until the peer has answered. Raises ``PeerLost``, ``HandshakeError``, ``TransferTimeout``."""
        await asyncio.shield(asyncio.wrap_future(self.opened))

    async def read(
        self, source: Sequence[int], target: Sequence[int], piece: tuple[int, int], timeout_s: float
    ) -> None:
        """Carry blocks over. Raises ``PeerLost``, ``TransferTimeout``; nothing more is written then."""
        raise NotImplementedError

    async def generation(self, source: Sequence[int], timeout_s: float) -> int:
        raise NotImplementedError

    async def ask(self, make: Callable[[], Any], what: str, timeout_s: float) -> Any:
        reading = Reading(make, what, time.monotonic() + timeout_s)
        with self._lock:
            if self.failure is not None:
                raise again(self.failure)
            self._asked.put(reading)
            self._wake()
        return await reading.wait()

    def stop(self) -> None:
        with self._lock:
            self._closing.set()
            self._asked.put(None)
            if self.failure is None:
                self._wake()

    def join(self) -> None:
        self._thread.join(JOIN_S)

    def _wake(self) -> None:
        """Have the thread look at its queue, where it waits for something else."""

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        failure: TransportError
        try:
            self._connect()
            self.opened.set_result(None)
            while not self._closing.is_set():
                self._turn()
            failure = PeerLost("the link was closed", self.scheme, self.peer)
        except TransportError as error:
            failure = error
            failure.__traceback__ = None  # its frames would keep the connection alive
        except Exception as error:
            failure = self._typed(error)
        self._end(failure)

    def _first(self, make: Callable[[], Any], pause: Callable[[], object]) -> None:
        """A first answer from the peer, waited for here."""
        reading = Reading(make, "a first answer", time.monotonic() + OPEN_S)
        self._start(reading)
        while self._flying and not self._closing.is_set():
            pause()
            self._look_at(reading)
        if reading.done.done():
            reading.done.result()

    def _turn(self) -> None:
        """Begin what is asked, look after what is on its way."""
        asked = self._next()
        if asked is not None:
            self._start(asked)
        for reading in list(self._flying):
            self._look_at(reading)

    def _start(self, reading: Reading) -> None:
        self._flying.append(reading)
        try:
            reading.handle = reading.make()
        except OfferRefused as refused:
            self._refused(reading, refused)

    def _refused(self, reading: Reading, refused: OfferRefused) -> None:
        """This one alone fails; nothing of it is on its way."""
        self._flying.remove(reading)
        reading.done.set_exception(again(refused))

    def _look_at(self, reading: Reading) -> None:
        try:
            over, result = self._look(reading.handle)
        except OfferRefused as refused:
            self._refused(reading, refused)
            return
        if over:
            self._flying.remove(reading)
            reading.done.set_result(result)
        elif time.monotonic() > reading.until:
            raise TransferTimeout(f"{self.peer} did not deliver {reading.what} in time", self.scheme, self.peer)

    def _end(self, failure: TransportError) -> None:
        """Part from the peer, which ends whatever is on its way; only then say so."""
        failed = self._flying
        self._part([reading.handle for reading in failed])
        for reading in failed:
            reading.handle = None
        with self._lock:
            self.failure = failure
            while not self._asked.empty():
                asked = self._asked.get()
                failed += [asked] if asked is not None else []
        for each in (self.opened, *(reading.done for reading in failed)):
            if not each.done():
                each.set_exception(again(failure))
        self._flying = []

    # ------------------------------------------------------------ what a medium adds

    def _connect(self) -> None:
        """Reach the peer and have it answer."""
        raise NotImplementedError

    def _next(self) -> Reading | None:
        """Wait for the next thing to do; what is asked, if that is it."""
        raise NotImplementedError

    def _look(self, handle: Any) -> tuple[bool, Any]:
        """Whether a transfer is over, and its result. ``OfferRefused`` ends it alone, other errors the link."""
        raise NotImplementedError

    def _part(self, handles: list[Any]) -> None:
        """Leave the peer. Nothing is written to memory of ours once this returns."""
        raise NotImplementedError

    def _typed(self, error: Exception) -> TransportError:
        made = TransportError(f"{self.scheme} failed: {error!r}", self.scheme, self.peer)
        made.__cause__ = error.with_traceback(None)  # its frames would keep the connection alive
        return made


class LinkedRemote:
    """A peer's pool behind a link. After a failed read the next one connects anew."""

    def __init__(
        self, scheme: str, peer: str, blocks: int, into: BlockMemory, timeout_s: float, make: Callable[[], Link]
    ) -> None:
        self._scheme, self._name, self._blocks, self._into = scheme, peer, blocks, into
        self._timeout_s, self._make = timeout_s, make
        self._link: Link | None = None
        self._linking = asyncio.Lock()
        self._closed = False

    async def read(self, source: Sequence[int], target: Sequence[int], within: Within = None) -> int:
        piece = check_read(self._scheme, source, self._blocks, target, self._into, within)
        link = await self.link()
        if source:
            await link.read(source, target, piece, self._timeout_s)
        return len(source) * piece[1]

    async def generation(self, source: Sequence[int]) -> int:
        check_numbers(self._scheme, "source", source, self._blocks)
        link = await self.link()
        return await link.generation(source, self._timeout_s) if source else 0

    async def link(self) -> Link:
        """The connection that is in use, made where there is none."""
        async with self._linking:
            if self._closed:
                raise PeerLost("this end has been closed", self._scheme, self._name)
            if self._link is None or self._link.failure is not None:
                await self._leave()
                self._link = self._make()
                self._link.begin()
            await self._link.open()
            return self._link

    async def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.stop()
            await asyncio.to_thread(link.join)

    async def aclose(self) -> None:
        self._closed = True
        await self._leave()

    def __del__(self) -> None:
        if self._link is not None:
            self._link.stop()


def again(failure: TransportError) -> TransportError:
    """The same error for one more who waits: one object raised twice would collect both tracebacks."""
    copy = type(failure)(str(failure), scheme=failure.scheme, peer=failure.peer)
    if isinstance(failure, OfferRefused) and isinstance(copy, OfferRefused):
        copy.reason = failure.reason
    copy.__cause__ = failure.__cause__
    return copy


@atexit.register
def _stop_all() -> None:
    """A thread inside UCX while the process takes it down would crash."""
    for each in list(_alive):
        each.stop()
    for thread in list(_threads):
        thread.join(JOIN_S)
