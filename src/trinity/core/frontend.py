"""FrontendCore: tracks every request from submission to its end on any instance, as a state machine without I/O.

Keeps the route, tokens, attempt and end of each. Drops duplicates and puts tokens in order: the first comes from the
prefill instance, the rest from the decode instance, on two channels. It alone decides when a request has ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from trinity.core.messages import (
    PREEMPTED,
    Cancel,
    Emit,
    Failure,
    Finished,
    Forget,
    Moved,
    PeerDown,
    PeerLoad,
    PeerUp,
    Sampled,
    Send,
    Submit,
    Tick,
    Value,
    Work,
)
from trinity.core.routing import Router, RoutingPolicy, needs

MAX_WAITING_BYTES = 4 << 30


class Abort(Value, frozen=True):
    """User to front end: end this request. ``reason``: cancelled (the reader left) or stop (a stop string matched)."""

    request: str
    reason: str


class Deliver(Value, frozen=True):
    """Front end to reader: the next token of a request, in order, once."""

    request: str
    index: int
    sampled: Sampled


class End(Value, frozen=True):
    """Front end to reader: the end of a request. ``reason``: stop, length, cancelled, deadline or error."""

    request: str
    reason: str
    failure: Failure | None = None
    finished: Finished | None = None


@dataclass(slots=True)
class FrontendRequest:
    """Record of a request that has not ended on every instance."""

    work: Work
    first: str
    deadline: float
    delivered: int = 0
    route: list[str] = field(default_factory=list)
    early: dict[int, Sampled] = field(default_factory=dict)
    aborted: str | None = None
    ended: bool = False
    finished: Finished | None = None
    tokens: list[int] = field(default_factory=list)
    inputs: tuple[Any, ...] = ()
    past: Finished | None = None  # the end of its former attempts, before it was sent back
    base: int = 0  # count of tokens delivered by then
    input_bytes: int = 0  # of its inputs that wait here, on the way or at an instance


class FrontendCore:
    """``handle(event, now) -> [command]``: Send to instances, Deliver and End to readers.

    ``max_waiting`` bounds the requests that have no token yet, ``max_waiting_bytes`` the bytes of their inputs.
    """

    def __init__(
        self, policy: RoutingPolicy, max_waiting: int = 1024, max_waiting_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self.router = Router(policy)
        self.max_waiting, self.max_waiting_bytes = max_waiting, max_waiting_bytes
        self.waiting_bytes = 0
        self.entries: dict[str, FrontendRequest] = {}
        self.waiting = self.taken = 0
        self._deadlines: list[tuple[float, str]] = []
        self._out: list[Value] = []

    def handle(self, event: Value, now: float) -> list[Value]:
        self._out = []
        if isinstance(event, Emit):
            self._emit(event, now)
        elif isinstance(event, Finished):
            self._finished(event, now)
        elif isinstance(event, Submit):
            self._submit(event, now)
        elif isinstance(event, Abort):
            self._abort(event, now)
        elif isinstance(event, Tick):
            self._expire(now)
        elif isinstance(event, Moved):
            self._moved(event, now)
        elif isinstance(event, PeerLoad):
            self.router.take(event)
        elif isinstance(event, PeerUp):
            self.router.add(event)
        elif isinstance(event, PeerDown):
            self._lost(event, now)
        return self._out

    def next_timer(self) -> float | None:
        """Clock time at which a Tick is due; None where no deadline is set."""
        while self._deadlines:
            due, request = self._deadlines[0]
            if request in self.entries and self.entries[request].deadline == due:
                return due
            heapq.heappop(self._deadlines)  # of a request that has ended, whose id may be in use again
        return None

    def _submit(self, event: Submit, now: float) -> None:
        self.taken += 1
        work = replace(event.work, number=self.taken)
        problem = self._problem(work, event.input_bytes)
        if problem is not None:
            self._out.append(End(work.request, "error", problem))
            return
        first = self.router.enter(work)
        assert first is not None
        deadline = now + work.deadline_s if work.deadline_s is not None else float("inf")
        inputs = event.inputs if any(peer.returns for peer in self.router.peers.values()) else ()
        entry = FrontendRequest(work, first, deadline, route=[first], inputs=inputs, input_bytes=event.input_bytes)
        self.entries[work.request] = entry
        self.waiting += 1
        self.waiting_bytes += event.input_bytes
        if work.deadline_s is not None:
            heapq.heappush(self._deadlines, (deadline, work.request))
        self._out.append(Send(first, Submit(work, event.inputs)))

    def _problem(self, work: Work, input_bytes: int) -> Failure | None:
        if work.request in self.entries:  # its reader may be gone, but steps in flight still end
            text = f"a request {work.request!r} is still being served or ended; wait, or use another request_id"
            return Failure("RequestError", text)
        if not work.prompt or work.max_tokens < 1:
            text = f"a prompt of {len(work.prompt)} tokens and an output of {work.max_tokens}; both need at least one"
            return Failure("RequestError", text)
        if self.waiting >= self.max_waiting:
            return Failure("Overloaded", f"{self.waiting} requests wait already; try later or raise max_waiting")
        if input_bytes > self.max_waiting_bytes:
            text = f"its media make {input_bytes} bytes, above max_waiting_bytes ({self.max_waiting_bytes})"
            return Failure("RequestTooLarge", f"{text}; send fewer or smaller images")
        if self.waiting_bytes + input_bytes > self.max_waiting_bytes:
            text = f"the media of requests that wait have {self.waiting_bytes} bytes already"
            return Failure("Overloaded", f"{text}; try later or raise max_waiting_bytes")
        path = ("E", "P", "D") if work.media else ("P", "D")
        for letter in path if work.max_tokens > 1 else path[:-1]:
            if self.router.misses(letter):
                return Failure("Overloaded", f"no instance is up at stage {letter} just now; try again in a while")
            if next(self.router.fitting(letter, work), None) is None:
                return _too_large(self.router, work, letter)
        return None

    def _emit(self, event: Emit, now: float) -> None:
        entries, out, behind = self.entries, self._out, event.behind
        rows = zip(event.requests, event.attempts, event.starts, event.sampled, strict=True)
        for request, attempt, start, sampled in rows:
            entry, index = entries.get(request), start + behind
            if entry is None or entry.aborted or attempt != entry.work.attempt or index < entry.delivered:
                continue
            if index == entry.delivered and index and not entry.early and entry.finished is None:  # most tokens
                out.append(Deliver(request, index, sampled))
                entry.tokens.append(sampled.token)
                entry.delivered = index + 1
            else:
                self._emitted(entry, index, sampled, now)

    def _emitted(self, entry: FrontendRequest, index: int, sampled: Sampled, now: float) -> None:
        """Deliver a token that may be the first, the last, or early."""
        entry.early[index] = sampled
        while entry.delivered in entry.early:
            if not entry.delivered:
                self.waiting -= 1
                if not entry.inputs:  # those that are kept may be sent once more
                    self._free_inputs(entry)
            sampled = entry.early.pop(entry.delivered)
            self._out.append(Deliver(entry.work.request, entry.delivered, sampled))
            entry.tokens.append(sampled.token)
            entry.delivered += 1
        self._settle(entry, now)

    def _moved(self, event: Moved, now: float) -> None:
        entry = self.entries.get(event.request)
        if entry is not None and event.attempt == entry.work.attempt:
            entry.route.extend([""] * (event.hop + 1 - len(entry.route)))
            entry.route[event.hop] = event.to
            if event.to in self.router.lost:  # said before its loss was known there
                self._gone(entry, self.router.lost[event.to], now)

    def _lost(self, event: PeerDown, now: float) -> None:
        """Fail the requests on a lost instance; the other instances drop what they hold of these."""
        peer = self.router.drop(event.name) or PeerUp(event.name, "")
        for entry in list(self.entries.values()):
            self._gone(entry, peer, now)

    def _gone(self, entry: FrontendRequest, peer: PeerUp, now: float) -> None:
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
            self._settle(entry, now)

    def _is_lost(self, entry: FrontendRequest, peer: PeerUp) -> bool:
        """True where the request was on the lost instance, or its first token was and was never sent.

        All messages that the instance sent before its end have been handled.
        """
        if entry.route[-1] == peer.name:
            return entry.finished is None
        if entry.delivered > entry.base or "P" not in peer.roles or peer.name not in entry.route:
            return False
        after = entry.route[entry.route.index(peer.name) + 1]
        known = self.router.peers.get(after) or self.router.lost.get(after)
        return known is not None and "D" in known.roles

    def _finished(self, event: Finished, now: float) -> None:
        entry = self.entries.get(event.request)
        if entry is None:  # it was given up when an instance was lost
            self._forget(event.request, event.route)
        if entry is not None and event.attempt == entry.work.attempt:
            if entry.finished is None or event.cut:  # a source whose lease ran out may report what ended well
                entry.finished = event
            self._settle(entry, now)

    def _abort(self, event: Abort, now: float) -> None:
        entry = self.entries.get(event.request)
        if entry is None or entry.aborted or entry.ended:
            return
        entry.aborted = event.reason
        self._out.append(Send(entry.first, Cancel(event.request)))
        if event.reason != "stop":  # nobody waits for this end; a stop string's reader waits for the spans
            self._end(entry, event.reason)
        self._settle(entry, now)  # it may have finished already, and waited for a token on a slower channel

    def _expire(self, now: float) -> None:
        while (due := self.next_timer()) is not None and due <= now:
            _, request = heapq.heappop(self._deadlines)
            self._abort(Abort(request, "deadline"), now)

    def _settle(self, entry: FrontendRequest, now: float) -> None:
        """End the request, and drop its record, once Finished and all tokens before it have arrived."""
        finished = entry.finished
        if finished is None or (not entry.aborted and entry.delivered < finished.count):
            return
        if finished.reason == PREEMPTED and not entry.aborted:
            nowhere = self._again(entry, finished, now)
            if nowhere is None:
                return
            finished = entry.finished = nowhere
        if entry.past is not None:
            finished = entry.finished = _joined(entry.past, finished)
        if not entry.ended:
            self._end(entry, entry.aborted or _reason(finished))
        self._forget(finished.request, (entry.first, *finished.route))
        self._free_inputs(entry)
        del self.entries[finished.request]

    def _again(self, entry: FrontendRequest, finished: Finished, now: float) -> Finished | None:
        """Resubmit a request that was preempted where it cannot be recomputed, with its tokens so far.

        Returns its end where no instance has its first stage any more, else None.
        """
        left = entry.deadline - now if entry.work.deadline_s is not None else None
        outputs = len(entry.tokens)
        work = replace(entry.work, attempt=entry.work.attempt + 1, deadline_s=left, outputs=outputs)
        if self.router.has("P") and next(self.router.fitting("P", work), None) is None:
            advice = f"it was preempted, and its {outputs} outputs count as prompt; enlarge the pools"
            return replace(finished, reason="error", failure=_too_large(self.router, work, "P", advice))
        first = self.router.enter(work)
        if first is None:
            text = "the request was preempted, and no instance is up at its first stage just now; send it again"
            return replace(finished, reason="error", failure=Failure("Overloaded", text))
        entry.past = finished if entry.past is None else _joined(entry.past, finished)
        entry.work, entry.first, entry.route, entry.base = work, first, [first], entry.delivered
        entry.finished = None
        self._out.append(Send(first, Submit(work, entry.inputs, tokens=tuple(entry.tokens))))
        return None

    def _free_inputs(self, entry: FrontendRequest) -> None:
        self.waiting_bytes -= entry.input_bytes
        entry.input_bytes = 0

    def _forget(self, request: str, route: Sequence[str]) -> None:
        for name in dict.fromkeys(route):
            self._out.append(Send(name, Forget(request)))

    def _end(self, entry: FrontendRequest, reason: str) -> None:
        entry.ended = True
        if not entry.delivered:
            self.waiting -= 1
        finished = entry.finished
        failure = finished.failure if finished is not None and reason == "error" else None
        if reason == "deadline":
            failure = Failure("DeadlineExceeded", f"the deadline passed after {entry.delivered} tokens")
        self._out.append(End(entry.work.request, reason, failure, finished))


def _reason(finished: Finished) -> str:
    """Reason for the reader: "deadline" also where an instance saw it pass first."""
    late = finished.failure is not None and finished.failure.error == "DeadlineExceeded"
    return "deadline" if late else finished.reason


def _joined(past: Finished, last: Finished) -> Finished:
    """Merge the records of two attempts of a request into one end."""
    spans = {name: past.spans.get(name, 0.0) + last.spans.get(name, 0.0) for name in {**past.spans, **last.spans}}
    return replace(
        last,
        spans=spans,
        cached_tokens=past.cached_tokens,
        transfers=past.transfers + last.transfers,
        route=past.route + last.route,
        preemptions=past.preemptions + last.preemptions,
    )


def _too_large(
    router: Router, work: Work, letter: str, advice: str = "shorten the prompt or max_tokens, or enlarge the pools"
) -> Failure:
    """Failure that lists the blocks needed and the pool size of every instance with this stage."""
    found = []
    for peer in router.peers.values():
        if letter in peer.roles:
            need = needs(letter, work, peer.roles, peer.image_block_size, peer.kv_block_size)
            found += [f"{count} {kind} of {peer.pools.get(kind, 0)} in {peer.name}" for kind, count in need.items()]
    text = f"no instance can hold this request at stage {letter}; blocks that it needs of the pools: {', '.join(found)}"
    return Failure("RequestTooLarge", f"{text}; {advice}")
