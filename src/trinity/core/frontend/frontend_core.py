"""FrontendCore: tracks every request from submission to its end on any instance, as a state machine without I/O.

Keeps the route, tokens, attempt and end of each. Drops duplicates and puts tokens in order: the first comes from the
prefill instance, the rest from the decode instance, on two channels. It alone decides when a request has ended.

What was on a lost instance goes on from its first stage with the tokens that its reader has (``FailurePolicy``). Each
life of a request has a name of its own among the instances, for some may still have an older one: what is heard of
that is answered with Forget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from msgspec.structs import replace

from trinity.core.failure_policy import NO_RECOVERY, FailurePolicy
from trinity.core.frontend.frontend_deaths import FrontendDeaths
from trinity.core.frontend.frontend_losses import (
    end_of_loss,
    find_loss,
    is_passed_by,
    is_planned,
    may_be_prefilled,
    whom_to_cancel,
)
from trinity.core.frontend.frontend_request import (
    NEWS_S,
    FrontendRequest,
    Life,
    after_losses,
    is_unfit,
    join_attempts,
    may_go_on,
    reason_for_reader,
    refuse_unfit,
)
from trinity.core.frontend.messages import Abort as Abort
from trinity.core.frontend.messages import Adopt, MoveRequest, Prepared
from trinity.core.frontend.messages import Deliver as Deliver
from trinity.core.frontend.messages import End as End
from trinity.core.frontend.move_requests import begin_move, drop_move, note_moved, refuse_move
from trinity.core.frontend.refusals import find_malformed, find_overload
from trinity.core.life_names import LifeNames, check_owner, name_life
from trinity.core.messages import (
    FRONTEND,
    PREEMPTED,
    Cancel,
    Emit,
    Failure,
    Finished,
    Forget,
    Gone,
    Moved,
    NotMoved,
    PeerDown,
    PeerEmpty,
    PeerLoad,
    PeerReserved,
    PeerSuspect,
    PeerUp,
    Sampled,
    Send,
    Submit,
    Tick,
    Value,
    Work,
)
from trinity.core.peer_exit import PeerLeaving, PeerRemoved
from trinity.core.routing import RoutingPolicy

MAX_WAITING_BYTES = 1 << 30


class FrontendCore(FrontendDeaths):
    """``handle(event, now) -> [command]``: Send to instances, Deliver and End to readers.

    ``max_waiting`` bounds the requests that have no token yet, ``max_waiting_bytes`` the bytes of their inputs;
    ``failures`` says which requests survive a loss, and how long they wait for a stage that is away; ``spread`` how
    many encoders may encode the media of one. ``name``: which of several front ends it is, the owner of its requests.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        max_waiting: int = 1024,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        failures: FailurePolicy = NO_RECOVERY,
        spread: int = 1,
        name: str = FRONTEND,
    ) -> None:
        super().__init__(policy, failures, spread, check_owner(name))
        self.max_waiting, self.max_waiting_bytes = max_waiting, max_waiting_bytes
        self.names = LifeNames(owner=name)
        self._handlers: dict[type[Value], Callable[[Any, float], None]] = {
            Emit: self._emit,
            Finished: self._finished,
            Submit: self._submit,
            Adopt: self._adopt,
            Abort: self._abort,
            Tick: self._expire,
            Moved: self._moved,
            Gone: self._missing,
            MoveRequest: lambda each, now: self._out.extend(begin_move(self.entries, self.router, each)),
            NotMoved: lambda each, now: self._out.extend(refuse_move(self.lives, each)),
            Prepared: self._prepared,
            PeerUp: self._back,
            PeerDown: self._lost,
            PeerEmpty: self._emptied,
            PeerLoad: self._loaded,
            PeerReserved: self._reserved,
            PeerSuspect: self._suspected,
            PeerLeaving: self._leaving,
            PeerRemoved: self._removed,
        }

    def handle(self, event: Value, now: float) -> list[Value]:
        self._out = []
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event, now)
            if self.retries.waiting or self.preparations.waiting or self.isolation.lifted:
                self._begin_next(now)
            if self.router.leaving:
                self._move_decodes(now)
        return self._out

    def reader_of(self, name: str) -> str:
        """The id that its reader gave the request of which this is the present life."""
        return self.lives[name].id if name in self.lives else name

    # ---------------------------------------------------------------- a request comes, and is sent

    def _submit(self, event: Submit, now: float) -> None:
        self.taken += 1
        work = replace(event.work, number=self.taken, owner=self.name)
        problem = self._problem(work, event.input_bytes)
        work = work if problem else replace(work, request=self.names.name_first(work.request, self.taken))
        entry = FrontendRequest(event.work.request, work, inf if work.deadline_s is None else now + work.deadline_s)
        if problem is None:
            entry.inputs, entry.input_bytes = event.inputs, event.input_bytes
            self._keep_inputs(entry)
            problem = self._start(entry, now)
        if problem is not None:
            self.kept_bytes -= entry.kept_bytes
            self._out.append(End(entry.id, "error", problem))
            return
        self.entries[entry.id] = self.lives[work.request] = entry
        self.waiting += 1
        self.waiting_bytes += event.input_bytes
        self._alarms.set(entry.deadline, entry.id)

    def _problem(self, work: Work, input_bytes: int) -> Failure | None:
        problem = find_malformed(work, self.router, work.request in self.entries)
        held, most = self.waiting_bytes, self.max_waiting_bytes
        return problem or find_overload(self.waiting, self.max_waiting, held, input_bytes, most)

    def _emit(self, event: Emit, now: float) -> None:
        lives: dict[str, FrontendRequest] = self.lives
        out, behind = self._out, event.behind
        rows = zip(event.requests, event.attempts, event.starts, event.sampled, strict=True)
        for request, attempt, start, sampled in rows:
            entry, index = lives.get(request), start + behind
            if entry is None or entry.aborted or attempt != entry.work.attempt or index < entry.delivered:
                continue
            if index == entry.delivered and index and not (entry.early or entry.watched or entry.finished):  # most
                out.append(Deliver(entry.id, index, sampled))
                entry.tokens.append(sampled.token)
                entry.delivered = index + 1
            else:
                self._emitted(entry, index, sampled, now)

    def _emitted(self, entry: FrontendRequest, index: int, sampled: Sampled, now: float) -> None:
        """Deliver a token that may be the first, of a life as well, the last, or early."""
        entry.early[index] = sampled
        while entry.delivered in entry.early:
            if not entry.delivered:
                self.waiting -= 1
            self._free_inputs(entry)
            sampled = entry.early.pop(entry.delivered)
            self._out.append(Deliver(entry.id, entry.delivered, sampled))
            entry.tokens.append(sampled.token)
            entry.delivered += 1
        self._has_gone_on(entry)
        self._settle_or_fail(entry, now)

    def _settle_or_fail(self, entry: FrontendRequest, now: float) -> None:
        """Settle it, unless tokens that are missing were those of a lost instance: whoever has it has spoken."""
        missing = entry.early or (entry.finished is not None and entry.delivered < entry.finished.count)
        lost = find_loss(entry, self.router) if missing else None
        if lost is not None:
            self._fail(entry, lost, now)
        else:
            self._settle(entry, now)

    # ---------------------------------------------------------------- instances come and go

    def _current(self, request: str, attempt: int, speaker: str) -> FrontendRequest | None:
        """Find the record of this attempt. An instance that speaks of one that is over is told to forget it."""
        entry = self.lives.get(request)
        if entry is not None and entry.work.attempt == attempt:
            return entry
        self._forget(request, attempt, (speaker,))
        return None

    def _moved(self, event: Moved, now: float) -> None:
        entry = self._current(event.request, event.attempt, event.to)
        if entry is None:
            self._trace(event.request, Life(event.to, event.epoch), now)
            return
        if is_passed_by(entry, event, self.router):
            entry.passed = True
        else:
            self._out += note_moved(entry, event)
        self._check_lives(entry, now)

    def _missing(self, event: Gone, now: float) -> None:
        """Fail a request that was handed to a lost instance, unless that one or a later one has spoken of it."""
        entry = self._current(event.request, event.attempt, event.source)
        if entry is None:
            self._trace(event.request, Life(event.to, event.epoch), now)
            return
        last, to = max(entry.hops), Life(event.to, event.epoch)
        if event.hop > last or (event.hop == last and entry.hops[last] != to):
            self._fail(entry, to, now)
        elif event.hop == last:
            entry.let_go = to
            self._check_lives(entry, now)

    def _back(self, event: PeerUp, now: float) -> None:
        """Add an instance, for which some may wait. What was on a former life of it is lost, even if nobody said so."""
        self.router.add(event)
        if self.name != FRONTEND:
            self.router.reserved.pop(event.name, None)  # it says so itself, where this life is reserved as well
        self._out.extend(Send(event.name, each) for each in self.isolation.reservations())
        if event.epoch:
            for entry in list(self.entries.values()):
                self._check_lives(entry, now)
        self._retry_waiting(now)

    def _suspected(self, event: PeerSuspect, now: float) -> None:
        """Route past a silent instance. Nobody waits for its word of what it offered to one that is lost."""
        self.router.avoid(event)
        for entry in list(self.entries.values()) if event.suspected else ():
            self._check_lives(entry, now)

    def _emptied(self, event: PeerEmpty, now: float) -> None:
        self.isolation.note_empty(event)
        ward = self.entries.get(self.isolation.ward)
        if ward is not None and ward.waits:
            self._try_again(ward, now)

    def _lost(self, event: PeerDown, now: float) -> None:
        """Fail the requests on a lost instance, or send them on; the other instances drop what they hold of these."""
        self.losses[event.name] = event.why
        lost = self.router.drop(event.name, event.planned)
        for request, entry in list(self.entries.items()):
            if lost is not None and not event.planned:
                self._count_lost(entry, lost, now)
            if request not in self.entries:
                continue
            self._check_lives(entry, now)
            if request in self.entries and entry.aborted and event.name in entry.route:
                self._cancel(entry)  # the first one may have ended there

    def _cancel(self, entry: FrontendRequest) -> None:
        self._out += [Send(name, Cancel(entry.work.request)) for name in whom_to_cancel(entry, self.router)]

    def _check_lives(self, entry: FrontendRequest, now: float) -> None:
        lost = find_loss(entry, self.router)
        if lost is not None:
            self._fail(entry, lost, now)

    def _fail(self, entry: FrontendRequest, lost: Life, now: float) -> None:
        """End a life of a request that this loss has left without an end."""
        entry.lost, entry.finished = lost, end_of_loss(entry, lost, self.router)
        self._settle(entry, now)

    def _finished(self, event: Finished, now: float) -> None:
        entry = self.lives.get(event.request)
        if entry is None or event.attempt != entry.work.attempt:  # it was given up when an instance was lost
            self._forget(event.request, event.attempt, event.route)
            return
        if entry.finished is None or event.cut:  # a source whose lease ran out may report what ended well
            entry.finished = event
        self._settle_or_fail(entry, now)

    def _abort(self, event: Abort, now: float) -> None:
        entry = self.entries.get(event.request)
        if entry is None or entry.ended or entry.aborted == event.reason:
            return
        if entry.aborted:  # by a stop string; now its reader has left, and waits for no spans
            return self._end(entry, entry.aborted)
        entry.aborted = event.reason
        if entry.waits:
            entry.finish("cancelled")
        else:
            self._cancel(entry)
        if event.reason != "stop":  # nobody waits for this end; a stop string's reader waits for the spans
            self._end(entry, event.reason)
        self._settle(entry, now)  # it may have finished already, and waited for a token on a slower channel

    def _expire(self, event: Tick, now: float) -> None:
        due: dict[str, FrontendRequest] = {}
        while (request := self._alarms.pop(now)) is not None:
            due[request] = self.entries[request]
        for entry in sorted(due.values(), key=lambda each: each.work.number if each.deadline > now else 0):
            if entry.deadline <= now:  # these first, in order of time; turns go by age
                self._abort(Abort(entry.id, "deadline"), now)
            else:
                self._try_again(entry, now)

    # ---------------------------------------------------------------- a life of a request ends, or the request does

    def _settle(self, entry: FrontendRequest, now: float) -> None:
        """End the request, or send it on, once Finished and all tokens before it have arrived."""
        finished = entry.finished
        if finished is None or (not entry.aborted and entry.delivered < finished.count):
            return
        self._out += drop_move(entry)
        again = is_unfit(finished) and not entry.unfit_at
        if not entry.aborted and (entry.lost is not None or again or may_go_on(finished)):
            problem = self._go_on(entry, finished, now)
            if problem is None:
                return
            finished = problem
        entry.finished = refuse_unfit(finished)
        self._conclude(entry)

    def _go_on(self, entry: FrontendRequest, finished: Finished, now: float) -> Finished | None:
        """Send a request on with its tokens so far: it was preempted where it cannot be recomputed, or lost, or an
        encoder could not take its media, which another one tries once more.

        Returns its end where it cannot go on, or has all its tokens, else None.
        """
        pause_s = None
        if finished.reason == PREEMPTED:
            entry.waited_s = 0.0
            entry.next_attempt(now, entry.work.request)
        elif entry.said:
            return replace(finished, reason=entry.said, failure=None, count=entry.delivered)
        elif entry.lost is None and is_unfit(finished):
            entry.unfit_at = finished.route[-1] if finished.route else entry.holder
            self._leave(entry, finished, now)
        else:
            waits, planned = self.failures.wait_s != 0, is_planned(entry.lost, self.router)
            pause_s = entry.count_loss(finished, waits, planned)
            verdict = self._count_death(entry, finished, now)
            if verdict is not None:
                return replace(finished, failure=verdict)
            if pause_s is None:
                self.isolation.lift(entry)
            if entry.may_not_go_on(self.failures, lost=pause_s is None):
                return after_losses(finished, len(entry.former))
            self._leave(entry, finished, now)
            if pause_s is None and waits and not planned and entry.awaits_news(now):
                entry.not_before = now + NEWS_S
        problem = None
        if pause_s is None:
            problem = self._start(entry, now)
        else:
            self._wait(entry, now, pause_s)
        if problem is not None:
            return replace(finished, reason="error", failure=problem)
        entry.past = join_attempts(entry.past, finished)
        return None

    def _leave(self, entry: FrontendRequest, finished: Finished, now: float) -> None:
        """Leave this life of a request, which no instance is to go on with, for the next one, under another name."""
        work = entry.work
        self.retries.leave(entry.id)
        self.preparations.leave(entry.id)
        attempted = entry.past.route if entry.past is not None else ()  # by this life, before it was preempted
        self._forget(work.request, work.attempt, (entry.first, *finished.route, *entry.route, *attempted))
        entry.end_life(finished, now, may_be_prefilled(entry, finished, self.router))
        name = name_life(entry.id, work.number, work.attempt + 1, self.name)
        self.lives[name] = self.lives.pop(work.request)
        entry.next_attempt(now, name)

    def _conclude(self, entry: FrontendRequest) -> None:
        """End the request, and drop its record."""
        finished = entry.finished
        assert finished is not None
        entry.count_recomputed(finished)
        finished = entry.finished = join_attempts(entry.past, finished)
        if not entry.ended:
            self._end(entry, entry.aborted or reason_for_reader(finished))
        self._forget(entry.work.request, entry.work.attempt, (entry.first, *finished.route, *entry.route))
        self._free_inputs(entry)
        self._leave_turns(entry)
        self.kept_bytes -= entry.kept_bytes
        del self.entries[entry.id], self.lives[entry.work.request]

    def _forget(self, request: str, attempt: int, route: Sequence[str]) -> None:
        self._out += [Send(name, Forget(request, attempt)) for name in filter(None, dict.fromkeys(route))]

    def _end(self, entry: FrontendRequest, reason: str) -> None:
        entry.ended = True
        if not entry.delivered:
            self.waiting -= 1
        told = (entry.work.attempt + 1, entry.former, entry.recomputed, entry.lives)
        self._out.append(End(entry.id, reason, entry.find_failure(reason), entry.finished, *told))
