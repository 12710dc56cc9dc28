"""FrontendCore: tracks every request from submission to its end on any instance, as a state machine without I/O.

Keeps the route, tokens, attempt and end of each. Drops duplicates and puts tokens in order: the first comes from the
prefill instance, the rest from the decode instance, on two channels. It alone decides when a request has ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from msgspec.structs import replace

from trinity.core.frontend_request import FrontendRequest, Life, join_attempts
from trinity.core.messages import (
    PREEMPTED,
    Cancel,
    Emit,
    Failure,
    Finished,
    Forget,
    Gone,
    Moved,
    PeerDown,
    PeerLoad,
    PeerSuspect,
    PeerUp,
    Sampled,
    Send,
    Submit,
    Tick,
    Value,
    Work,
)
from trinity.core.routing import BadChoice, Router, RoutingPolicy, needs

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
        self.losses: dict[str, str] = {}  # why each instance was lost last
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
        elif isinstance(event, Gone):
            self._missing(event, now)
        elif isinstance(event, PeerLoad):
            self.router.take(event)
        elif isinstance(event, PeerUp):
            self._back(event, now)
        elif isinstance(event, PeerDown):
            self._lost(event, now)
        elif isinstance(event, PeerSuspect):
            self.router.suspect(event)
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
        try:
            first = self.router.enter(work)
        except BadChoice as problem:
            self._out.append(End(work.request, "error", Failure("StageError", str(problem))))
            return
        assert first is not None
        deadline = now + work.deadline_s if work.deadline_s is not None else float("inf")
        inputs = event.inputs if any(peer.returns for peer in self.router.peers.values()) else ()
        entry = FrontendRequest(work, first, deadline, inputs=inputs, input_bytes=event.input_bytes)
        entry.hops = self._first_hop(first)
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
        if work.encode_only and not (work.media and self.router.known("E")):
            text = "the features of a request need at least one image, and an instance with stage E"
            return Failure("RequestError", text)
        if not work.encode_only and (not work.prompt or work.max_tokens < 1):
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
        for letter in _path(work):
            if self.router.misses(letter):
                return Failure("Overloaded", self._away(letter), {"stage": letter})
            if next(self.router.fitting(letter, work), None) is None:
                return _too_large(self.router, work, letter)
        return None

    def _away(self, letter: str) -> str:
        """Name the instances of a stage that are all away, and why."""
        gone = [peer.name for peer in self.router.lost.values() if letter in peer.roles]
        why = "; ".join(f"{name} is started again: {self.losses.get(name) or 'it was lost'}" for name in gone)
        return f"no instance is up at stage {letter} just now ({why}); try again in a while"

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

    def _first_hop(self, name: str) -> dict[int, Life]:
        return {0: Life(name, self.router.peers[name].epoch)}

    def _is_up(self, life: Life) -> bool:
        peer = self.router.peers.get(life.name)
        return peer is not None and peer.epoch == life.epoch

    def _current(self, request: str, attempt: int, speaker: str) -> FrontendRequest | None:
        """Find the record of this attempt. An instance that speaks of one that is over is told to forget it."""
        entry = self.entries.get(request)
        if entry is not None and entry.work.attempt == attempt:
            return entry
        self._forget(request, attempt, (speaker,))
        return None

    def _moved(self, event: Moved, now: float) -> None:
        entry = self._current(event.request, event.attempt, event.to)
        if entry is not None:
            entry.hops[event.hop] = Life(event.to, event.epoch)
            if event.source:
                entry.prefilled_at = entry.hops[event.hop - 1] = Life(event.source, event.source_epoch)
            self._check_lives(entry, now)

    def _missing(self, event: Gone, now: float) -> None:
        """Fail a request that was handed to a lost instance, unless that one or a later one has spoken of it."""
        entry = self._current(event.request, event.attempt, event.source)
        if entry is None:
            return
        last, to = max(entry.hops), Life(event.to, event.epoch)
        if event.hop > last or (event.hop == last and entry.hops[last] != to):
            self._fail(entry, to, now)

    def _back(self, event: PeerUp, now: float) -> None:
        """Add an instance. What was on a former life of it is lost, even if that was never told."""
        self.router.add(event)
        if event.epoch:
            for entry in list(self.entries.values()):
                self._check_lives(entry, now)

    def _lost(self, event: PeerDown, now: float) -> None:
        """Fail the requests on a lost instance; the other instances drop what they hold of these."""
        self.losses[event.name] = event.why
        self.router.drop(event.name)
        for request, entry in list(self.entries.items()):
            self._check_lives(entry, now)
            if request in self.entries and entry.aborted and event.name in entry.route:
                self._cancel(entry)  # the first one may have ended there

    def _cancel(self, entry: FrontendRequest) -> None:
        """Send a Cancel, which follows the request from its first instance; past a lost one, to all that are up."""
        up = [life.name for life in entry.hops.values() if self._is_up(life)]
        names = [entry.first] if len(up) == len(entry.hops) else sorted(set(up), key=entry.route.index)
        for name in names:
            self._out.append(Send(name, Cancel(entry.work.request)))

    def _check_lives(self, entry: FrontendRequest, now: float) -> None:
        """Fail a request whose instance is lost, or the one that alone has its first token.

        An instance's words come in order, and those that were cut off were its last ones: after its end all is heard
        of it that ever will be. What it gave to others is heard from them (``Moved``, ``Gone``).
        """
        place, first = entry.hops[max(entry.hops)], entry.prefilled_at
        if entry.finished is None and not self._is_up(place):
            self._fail(entry, place, now)
        elif first is not None and entry.delivered == entry.base and not entry.aborted and not self._is_up(first):
            self._fail(entry, first, now)

    def _fail(self, entry: FrontendRequest, lost: Life, now: float) -> None:
        """End a request that this loss has left without an end."""
        peer = self.router.lost.get(lost.name) or self.router.peers.get(lost.name)
        text = f"instance {lost.name} was lost while the request was there; send it again"
        entry.finished = Finished(
            request=entry.work.request,
            attempt=entry.work.attempt,
            reason="error",
            failure=Failure("StageError", text, {"stage": peer.roles if peer is not None else ""}),
            count=entry.delivered,
            route=entry.route,
        )
        self._settle(entry, now)

    def _finished(self, event: Finished, now: float) -> None:
        entry = self.entries.get(event.request)
        if entry is None or event.attempt != entry.work.attempt:  # it was given up when an instance was lost
            self._forget(event.request, event.attempt, event.route)
            return
        if entry.finished is None or event.cut:  # a source whose lease ran out may report what ended well
            entry.finished = event
        self._settle(entry, now)

    def _abort(self, event: Abort, now: float) -> None:
        entry = self.entries.get(event.request)
        if entry is None or entry.aborted or entry.ended:
            return
        entry.aborted = event.reason
        self._cancel(entry)
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
            finished = entry.finished = join_attempts(entry.past, finished)
        if not entry.ended:
            self._end(entry, entry.aborted or _reason(finished))
        self._forget(finished.request, entry.work.attempt, (entry.first, *finished.route, *entry.route))
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
        try:
            first = self.router.enter(work)
        except BadChoice as problem:
            return replace(finished, reason="error", failure=Failure("StageError", str(problem)))
        if first is None:
            text = "the request was preempted, and no instance is up at its first stage just now; send it again"
            return replace(finished, reason="error", failure=Failure("Overloaded", text))
        entry.past = finished if entry.past is None else join_attempts(entry.past, finished)
        entry.work, entry.first, entry.hops, entry.base = work, first, self._first_hop(first), entry.delivered
        entry.finished = entry.prefilled_at = None
        self._out.append(Send(first, Submit(work, entry.inputs, tokens=tuple(entry.tokens))))
        return None

    def _free_inputs(self, entry: FrontendRequest) -> None:
        self.waiting_bytes -= entry.input_bytes
        entry.input_bytes = 0

    def _forget(self, request: str, attempt: int, route: Sequence[str]) -> None:
        for name in dict.fromkeys(route):
            self._out.append(Send(name, Forget(request, attempt)))

    def _end(self, entry: FrontendRequest, reason: str) -> None:
        entry.ended = True
        if not entry.delivered:
            self.waiting -= 1
        finished = entry.finished
        failure = finished.failure if finished is not None and reason == "error" else None
        if reason == "deadline":
            failure = Failure("DeadlineExceeded", f"the deadline passed after {entry.delivered} tokens")
        self._out.append(End(entry.work.request, reason, failure, finished))


def _path(work: Work) -> str:
    """Letters of the stages that a request needs."""
    if work.encode_only:
        return "E"
    return ("E" if work.media else "") + ("PD" if work.max_tokens > 1 else "P")


def _reason(finished: Finished) -> str:
    """Reason for the reader: "deadline" also where an instance saw it pass first."""
    late = finished.failure is not None and finished.failure.error == "DeadlineExceeded"
    return "deadline" if late else finished.reason


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
