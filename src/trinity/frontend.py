"""FrontendCore: one view of every request, whatever instance it is on, as a state machine without I/O.

Per request its route, emitted tokens, attempt and end. Removes duplicates and puts tokens in order: the first comes
from the prefill instance, the rest from the decode instance, on two channels. It alone decides when a request ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from trinity.messages import (
    Cancel,
    Emit,
    Emitted,
    Failure,
    Finished,
    Forget,
    Moved,
    PeerLoad,
    PeerLost,
    PeerUp,
    Sampled,
    Send,
    Submit,
    Tick,
    Value,
    Work,
)
from trinity.routing import Router, RoutingPolicy, fits, needs


class Abort(Value, frozen=True):
    """The user's side: end this request. ``reason``: cancelled (the reader left) or stop (a stop string was found)."""

    request: str
    reason: str


class Deliver(Value, frozen=True):
    """The next token of a request, in order, once."""

    request: str
    index: int
    sampled: Sampled


class End(Value, frozen=True):
    """The end of a request for its reader: reason stop, length, cancelled, deadline or error."""

    request: str
    reason: str
    failure: Failure | None = None
    finished: Finished | None = None


@dataclass(slots=True)
class Entry:
    """What the front end remembers of a request that has not ended everywhere."""

    work: Work
    first: str
    deadline: float
    delivered: int = 0
    route: list[str] = field(default_factory=list)
    early: dict[int, Sampled] = field(default_factory=dict)
    aborted: str | None = None
    ended: bool = False
    finished: Finished | None = None


class FrontendCore:
    """``handle(event, now) -> [command]``: Send to instances, Deliver and End to readers.

    ``max_waiting`` bounds the requests that have no token yet.
    """

    def __init__(self, policy: RoutingPolicy, max_waiting: int = 1024) -> None:
        self.router = Router(policy)
        self.max_waiting = max_waiting
        self.entries: dict[str, Entry] = {}
        self.waiting = 0
        self._deadlines: list[tuple[float, str]] = []
        self._out: list[Value] = []

    def handle(self, event: Value, now: float) -> list[Value]:
        self._out = []
        if isinstance(event, Emit):
            for emitted in event.tokens:
                self._emitted(emitted)
        elif isinstance(event, Finished):
            self._finished(event)
        elif isinstance(event, Submit):
            self._submit(event, now)
        elif isinstance(event, Abort):
            self._abort(event)
        elif isinstance(event, Tick):
            self._expire(now)
        elif isinstance(event, Moved):
            self._moved(event)
        elif isinstance(event, PeerLoad):
            self.router.take(event)
        elif isinstance(event, PeerUp):
            self.router.add(event)
        elif isinstance(event, PeerLost):
            self._lost(event)
        return self._out

    def next_timer(self) -> float | None:
        """When a Tick is due."""
        while self._deadlines:
            due, request = self._deadlines[0]
            if request in self.entries and self.entries[request].deadline == due:
                return due
            heapq.heappop(self._deadlines)  # of a request that has ended, whose id may be in use again
        return None

    def _submit(self, event: Submit, now: float) -> None:
        work = event.work
        problem = self._problem(work)
        if problem is not None:
            self._out.append(End(work.request, "error", problem))
            return
        first = self.router.enter(work)
        assert first is not None
        deadline = now + work.deadline_s if work.deadline_s is not None else float("inf")
        self.entries[work.request] = Entry(work, first, deadline, route=[first])
        self.waiting += 1
        if work.deadline_s is not None:
            heapq.heappush(self._deadlines, (deadline, work.request))
        self._out.append(Send(first, event))

    def _problem(self, work: Work) -> Failure | None:
        if work.request in self.entries:  # its reader may be gone, but steps in flight still end
            text = f"a request {work.request!r} is still being served or ended; wait, or use another request_id"
            return Failure("RequestError", text)
        if self.waiting >= self.max_waiting:
            return Failure("Overloaded", f"{self.waiting} requests wait already; try later or raise max_waiting")
        path = ("E", "P", "D") if work.media else ("P", "D")
        for letter in path if work.max_tokens > 1 else path[:-1]:
            if self.router.misses(letter):
                return Failure("Overloaded", f"no instance is up at stage {letter} just now; try again in a while")
            if not any(letter in peer.roles and fits(peer, letter, work) for peer in self.router.peers.values()):
                return _too_large(self.router, work, letter)
        return None

    def _emitted(self, emitted: Emitted) -> None:
        entry = self.entries.get(emitted.request)
        if entry is None or entry.aborted or emitted.attempt != entry.work.attempt or emitted.index < entry.delivered:
            return
        if emitted.index == entry.delivered and entry.delivered and not entry.early and entry.finished is None:
            self._out.append(Deliver(emitted.request, entry.delivered, emitted.sampled))  # most tokens
            entry.delivered += 1
            return
        entry.early[emitted.index] = emitted.sampled
        while entry.delivered in entry.early:
            if not entry.delivered:
                self.waiting -= 1
            sampled = entry.early.pop(entry.delivered)
            self._out.append(Deliver(emitted.request, entry.delivered, sampled))
            entry.delivered += 1
        self._settle(entry)

    def _moved(self, event: Moved) -> None:
        entry = self.entries.get(event.request)
        if entry is not None and event.attempt == entry.work.attempt:
            entry.route.extend([""] * (event.hop + 1 - len(entry.route)))
            entry.route[event.hop] = event.to
            if event.to in self.router.lost:  # said before its loss was known there
                self._gone(entry, self.router.lost[event.to])

    def _lost(self, event: PeerLost) -> None:
        """An instance is gone: the requests that are there have failed. What others hold of them, they drop."""
        peer = self.router.drop(event.name) or PeerUp(event.name, "")
        for entry in list(self.entries.values()):
            self._gone(entry, peer)

    def _gone(self, entry: Entry, peer: PeerUp) -> None:
        if self._is_lost(entry, peer):
            text = f"instance {peer.name} was lost while the request was there; send it again"
            entry.finished = Finished(
                request=entry.work.request,
                attempt=entry.work.attempt,
                reason="error",
                failure=Failure("StageError", text, {"stage": peer.roles}),
                count=entry.delivered,
                route=tuple(name for name in entry.route if name),
            )
            self._settle(entry)

    def _is_lost(self, entry: Entry, peer: PeerUp) -> bool:
        """Whether the request was there, or the first token was and cannot come any more: what an instance said before
        its end has been heard."""
        if entry.route[-1] == peer.name:
            return entry.finished is None
        if entry.delivered or "P" not in peer.roles or peer.name not in entry.route:
            return False
        after = entry.route[entry.route.index(peer.name) + 1]
        known = self.router.peers.get(after) or self.router.lost.get(after)
        return known is not None and "D" in known.roles

    def _finished(self, event: Finished) -> None:
        entry = self.entries.get(event.request)
        if entry is None:  # it was given up when an instance was lost
            self._forget(event.request, event.route)
        if entry is not None and event.attempt == entry.work.attempt:
            entry.finished = entry.finished or event  # a source whose lease ran out may report what ended well
            self._settle(entry)

    def _abort(self, event: Abort) -> None:
        entry = self.entries.get(event.request)
        if entry is None or entry.aborted or entry.ended:
            return
        entry.aborted = event.reason
        self._out.append(Send(entry.first, Cancel(event.request)))
        if event.reason != "stop":  # nobody waits for this end; a stop string's reader waits for the spans
            self._end(entry, event.reason)
        self._settle(entry)  # it may have finished already, and waited for a token on a slower channel

    def _expire(self, now: float) -> None:
        while (due := self.next_timer()) is not None and due <= now:
            _, request = heapq.heappop(self._deadlines)
            self._abort(Abort(request, "deadline"))

    def _settle(self, entry: Entry) -> None:
        """End the request once its Finished and every token before it are here; then nothing of it is left."""
        finished = entry.finished
        if finished is None or (not entry.aborted and entry.delivered < finished.count):
            return
        if not entry.ended:
            self._end(entry, entry.aborted or _reason(finished))
        self._forget(finished.request, (entry.first, *finished.route))
        del self.entries[finished.request]

    def _forget(self, request: str, route: Sequence[str]) -> None:
        for name in dict.fromkeys(route):
            self._out.append(Send(name, Forget(request)))

    def _end(self, entry: Entry, reason: str) -> None:
        entry.ended = True
        if not entry.delivered:
            self.waiting -= 1
        finished = entry.finished
        failure = finished.failure if finished is not None and reason == "error" else None
        if reason == "deadline":
            failure = Failure("DeadlineExceeded", f"the deadline passed after {entry.delivered} tokens")
        self._out.append(End(entry.work.request, reason, failure, finished))


def _reason(finished: Finished) -> str:
    """An instance keeps the deadline too, for when the front end is slow; the reader sees one kind of end."""
    late = finished.failure is not None and finished.failure.error == "DeadlineExceeded"
    return "deadline" if late else finished.reason


def _too_large(router: Router, work: Work, letter: str) -> Failure:
    """What the request needs of every instance with this stage, beside what that has."""
    found = []
    for peer in router.peers.values():
        if letter in peer.roles:
            need = needs(letter, work, peer.roles, peer.media_block, peer.kv_block)
            found += [f"{count} {kind} of {peer.pools.get(kind, 0)} in {peer.name}" for kind, count in need.items()]
    text = f"no instance can hold this request at stage {letter}; blocks that it needs of the pools: {', '.join(found)}"
    return Failure("RequestTooLarge", f"{text}; shorten the prompt or max_tokens, or enlarge the pools")
