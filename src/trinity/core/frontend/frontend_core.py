"""FrontendCore: tracks every request from submission to its end on any instance, as a state machine without I/O.

Keeps the route, tokens, attempt and end of each. Drops duplicates and puts tokens in order: the first comes from the
prefill instance, the rest from the decode instance, on two channels. It alone decides when a request has ended.

What was on a lost instance goes on from its first stage with the tokens that its reader has (``FailurePolicy``). Each
life of a request has a name of its own among the instances, for some may still have an older one: what is heard of
that is answered with Forget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from msgspec.structs import replace

from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.decode_moves import DecodeMoves, drop_move, note_moved, refuse_move
from trinity.core.frontend.dispatch import Dispatch, Isolation, find_malformed, find_overload
from trinity.core.frontend.frontend_request import (
    FrontendRequest,
    after_losses,
    end_of_loss,
    find_loss,
    is_passed_by,
    is_planned,
    is_unfit,
    join_attempts,
    make_adopted,
    may_be_prefilled,
    may_go_on,
    reason_for_reader,
    refuse_unfit,
    whom_to_cancel,
)
from trinity.core.frontend.messages import Abort, Adopt, Deliver, End, MoveRequest, Prepared
from trinity.core.frontend.poison_detection import PoisonDetector
from trinity.core.frontend.suspicion import NEWS_S, Life
from trinity.core.frontend.turns import Alarms, Inputs
from trinity.core.messages import (
    FRONTEND,
    NOWHERE,
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
    PeerLeaving,
    PeerLoad,
    PeerRemoved,
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
from trinity.core.routing.router import Router, RoutingOptions, RoutingPolicy
from trinity.core.values import LifeNames, check_owner, id_of, name_life
from trinity.errors.arguments import Whole


@dataclass(frozen=True, kw_only=True)
class FrontendOptions(RoutingOptions):
    """Settings of a pipeline that its front end obeys.

    - ``max_waiting_bytes`` (bytes, 1 GiB): memory of media that are being prepared or wait for an encoder; further ones
      wait, for ``MediaLimits.preprocess_timeout_s``.
    - ``failures`` (``FailurePolicy()``): what becomes of requests whose instance is lost: two recoveries each.
    """

    max_waiting_bytes: Whole = 1 << 30
    failures: FailurePolicy = FailurePolicy()


class FrontendCore:
    """``handle(event, now) -> [command]``: Send to instances, Deliver and End to readers.

    ``options``: its settings, whose ``routing`` is ``policy``. ``name``: which of several front ends it is, the owner
    of its requests. The first one alone isolates requests: two that did might wait for each other.

    - ``entries``, ``lives``: requests by id, and by the name of their present life.
    - ``waiting``: count of those that have no token yet. ``taken``: number of the last request.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        options: FrontendOptions = FrontendOptions(),
        name: str = FRONTEND,
    ) -> None:
        self.name, self.options = check_owner(name), options
        failures, spread = options.failures, options.spread or 1
        self.router = Router(policy)
        self.router.counts = spread > 1
        self.entries: dict[str, FrontendRequest] = {}
        self.lives: dict[str, FrontendRequest] = {}
        self.waiting = self.taken = 0
        self.names = LifeNames(owner=name)
        self._alarms = Alarms(self.entries)
        self.inputs = Inputs(self.router, failures)
        self.isolation = Isolation(self.router, self.entries)
        self.dispatch = Dispatch(self.router, self.entries, self.inputs, self.isolation, self._alarms, failures, spread)
        self.poison = PoisonDetector(self.router, self.entries, failures)
        self.moves = DecodeMoves(self.router, self.entries)
        self._handlers: dict[type[Value], Callable[[Any, float], list[Value]]] = {
            Emit: self._emit,
            Finished: self._finished,
            Submit: self._submit,
            Adopt: self._adopt,
            Abort: self._abort,
            Tick: self._expire,
            Moved: self._moved,
            Gone: self._missing,
            MoveRequest: lambda each, now: self.moves.begin(each),
            NotMoved: lambda each, now: refuse_move(self.lives, each),
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
        handler = self._handlers.get(type(event))
        if handler is None:
            return []
        out = handler(event, now)
        if self.dispatch.retries.waiting or self.inputs.preparations.waiting or self.isolation.lifted:
            out += self._begin_next(now)
        if self.router.leaving:
            out += self.moves.leave(now)
        return out

    def next_timer(self) -> float | None:
        """Clock time at which a Tick is due; None where no deadline is set, and nothing waits for a time."""
        due, look = self._alarms.next(), self.moves.next_look
        return look if due is None or (look is not None and look < due) else due

    def reader_of(self, name: str) -> str:
        """The id that its reader gave the request of which this is the present life."""
        return self.lives[name].id if name in self.lives else name

    # ---------------------------------------------------------------- a request comes, and its tokens

    def _submit(self, event: Submit, now: float) -> list[Value]:
        self.taken += 1
        work = replace(event.work, number=self.taken, owner=self.name)
        problem = self._find_problem(work, event.input_bytes)
        if problem is not None:
            return [End(work.request, "error", problem)]
        work = replace(work, request=self.names.name_first(work.request, self.taken))
        entry = FrontendRequest(event.work.request, work, inf if work.deadline_s is None else now + work.deadline_s)
        self.inputs.add(entry, event.inputs, event.input_bytes)
        out, problem = self.dispatch.start(entry, now)
        if problem is not None:
            self.inputs.forget(entry)
            return [*out, End(entry.id, "error", problem)]
        self._register(entry)
        return out

    def _find_problem(self, work: Work, input_bytes: int) -> Failure | None:
        problem = find_malformed(work, self.router, work.request in self.entries)
        held, most = self.inputs.waiting_bytes, self.options.max_waiting_bytes
        return problem or find_overload(self.waiting, self.options.max_waiting, held, input_bytes, most)

    def _register(self, entry: FrontendRequest) -> None:
        self.entries[entry.id] = self.lives[entry.work.request] = entry
        self.waiting += not entry.delivered
        self._alarms.set(entry.deadline, entry.id)

    def _adopt(self, event: Adopt, now: float) -> list[Value]:
        """Go on with a request of another front end that was lost, as with its own after a loss.

        No queue is too long for it, which was let in once; its turn comes as after a loss. It is the youngest: by how
        its former front end counted nobody here is older or younger.
        """
        self.taken += 1
        entry = make_adopted(event, self.taken, self.name, now)
        self._register(entry)
        self.inputs.add(entry, event.inputs, event.input_bytes)
        entry.dropped = entry.dropped or event.unread
        if entry.said:
            entry.finish(entry.said)
            return self._conclude(entry)
        return self._try_again(entry, now)

    def _emit(self, event: Emit, now: float) -> list[Value]:
        lives: dict[str, FrontendRequest] = self.lives
        behind = event.behind
        out: list[Value] = []
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
                out += self._emitted(entry, index, sampled, now)
        return out

    def _emitted(self, entry: FrontendRequest, index: int, sampled: Sampled, now: float) -> list[Value]:
        """Deliver a token that may be the first, of a life as well, the last, or early."""
        out: list[Value] = []
        entry.early[index] = sampled
        while entry.delivered in entry.early:
            if not entry.delivered:
                self.waiting -= 1
            self.inputs.free(entry)
            sampled = entry.early.pop(entry.delivered)
            out.append(Deliver(entry.id, entry.delivered, sampled))
            entry.tokens.append(sampled.token)
            entry.delivered += 1
        self.dispatch.note_token(entry)
        return out + self._settle_or_fail(entry, now)

    def _finished(self, event: Finished, now: float) -> list[Value]:
        entry = self._find(event.request, event.attempt)
        if entry is None:  # it was given up when an instance was lost
            return self._forget(event.request, event.attempt, event.route)
        if entry.finished is None or event.cut:  # a source whose lease ran out may report what ended well
            entry.finished = event
        return self._settle_or_fail(entry, now)

    def _abort(self, event: Abort, now: float) -> list[Value]:
        entry = self.entries.get(event.request)
        if entry is None or entry.ended or entry.aborted == event.reason:
            return []
        if entry.aborted:  # by a stop string; now its reader has left, and waits for no spans
            return self._end(entry, entry.aborted)
        entry.aborted = event.reason
        out: list[Value] = []
        if entry.waits:
            entry.finish("cancelled")
        else:
            out += self._cancel(entry)
        if event.reason != "stop":  # nobody waits for this end; a stop string's reader waits for the spans
            out += self._end(entry, event.reason)
        return out + self._settle(entry, now)  # it may have finished, and waited for a token on a slower channel

    def _expire(self, event: Tick, now: float) -> list[Value]:
        due: dict[str, FrontendRequest] = {}
        while (request := self._alarms.pop(now)) is not None:
            due[request] = self.entries[request]
        out: list[Value] = []
        for entry in sorted(due.values(), key=lambda each: each.work.number if each.deadline > now else 0):
            if entry.deadline <= now:  # these first, in order of time; turns go by age
                out += self._abort(Abort(entry.id, "deadline"), now)
            else:
                out += self._try_again(entry, now)
        return out

    # ---------------------------------------------------------------- where requests are, and their losses

    def _find(self, request: str, attempt: int) -> FrontendRequest | None:
        """Find the record of this attempt of this life; None where it is over."""
        entry = self.lives.get(request)
        return entry if entry is not None and entry.work.attempt == attempt else None

    def _moved(self, event: Moved, now: float) -> list[Value]:
        entry = self._find(event.request, event.attempt)
        if entry is None:
            return self._disown(event, event.to, now)
        out: list[Value] = []
        if is_passed_by(entry, event, self.router):
            entry.passed = True
        else:
            out += note_moved(entry, event)
        return out + self._check_lives(entry, now)

    def _missing(self, event: Gone, now: float) -> list[Value]:
        """Fail a request that was handed to a lost instance, unless that one or a later one has spoken of it."""
        entry = self._find(event.request, event.attempt)
        if entry is None:
            return self._disown(event, event.source, now)
        last, to = max(entry.hops), Life(event.to, event.epoch)
        if event.hop > last or (event.hop == last and entry.hops[last] != to):
            return self._fail(entry, to, now)
        if event.hop == last:
            entry.let_go = to
            return self._check_lives(entry, now)
        return []

    def _disown(self, event: Moved | Gone, speaker: str, now: float) -> list[Value]:
        """Have an instance forget a life that is over. Nobody knew that it came there: that one may have died of it."""
        out = self._forget(event.request, event.attempt, (speaker,))
        entry = self.entries.get(id_of(event.request))
        if entry is not None and self.poison.trace(entry, event.request, Life(event.to, event.epoch), now):
            out += self._judge(entry, now)
        return out

    def _lost(self, event: PeerDown, now: float) -> list[Value]:
        """Fail the requests on a lost instance, or send them on; the other instances drop what they hold of these."""
        self.dispatch.losses[event.name] = event.why
        lost = self.router.drop(event.name, event.planned)
        out: list[Value] = []
        for request, entry in list(self.entries.items()):
            if lost is not None and not event.planned:
                self.poison.count_lost(entry, lost, now)
                out += self._judge(entry, now)
            if request not in self.entries:
                continue
            out += self._check_lives(entry, now)
            if request in self.entries and entry.aborted and event.name in entry.route:
                out += self._cancel(entry)  # the first one may have ended there
        return out

    def _judge(self, entry: FrontendRequest, now: float) -> list[Value]:
        """Refuse a request for deaths that were told late, or call it back where it is to run alone and does not."""
        if entry.aborted or entry.ended or not self.options.failures.recoveries:
            return []
        why = self.poison.find_refusal(entry)
        if why is not None:
            return drop_move(entry) + self._give_up(entry, why)
        if not entry.is_suspect(self.options.failures) or entry.waits or entry.work.alone or entry.finished:
            return []
        name, attempt = entry.work.request, entry.work.attempt
        alone = Failure("MigrationError", "it is to run alone from now on", {"cause": NOWHERE})
        entry.finished = Finished(request=name, attempt=attempt, reason="error", failure=alone, count=entry.delivered)
        there = [entry.hops[hop] for hop in sorted(entry.hops)[-2:]]
        out = self._settle(entry, now)
        entry.suspicion.leave_behind(dict.fromkeys(there, False), now)
        return out

    def _check_lives(self, entry: FrontendRequest, now: float) -> list[Value]:
        lost = find_loss(entry, self.router)
        return [] if lost is None else self._fail(entry, lost, now)

    def _fail(self, entry: FrontendRequest, lost: Life, now: float) -> list[Value]:
        """End a life of a request that this loss has left without an end."""
        entry.lost, entry.finished = lost, end_of_loss(entry, lost, self.router)
        return self._settle(entry, now)

    def _cancel(self, entry: FrontendRequest) -> list[Value]:
        return [Send(name, Cancel(entry.work.request)) for name in whom_to_cancel(entry, self.router)]

    # ---------------------------------------------------------------- instances come, leave and are reserved

    def _back(self, event: PeerUp, now: float) -> list[Value]:
        """Add an instance, for which some may wait. What was on a former life of it is lost, even if nobody said so."""
        self.router.add(event)
        if self.name != FRONTEND:
            self.router.reserved.pop(event.name, None)  # it says so itself, where this life is reserved as well
        out: list[Value] = [Send(event.name, each) for each in self.isolation.reservations()]
        if event.epoch:
            out += self._check_all(now)
        return out + self._retry_waiting(now)

    def _check_all(self, now: float) -> list[Value]:
        return [command for entry in list(self.entries.values()) for command in self._check_lives(entry, now)]

    def _suspected(self, event: PeerSuspect, now: float) -> list[Value]:
        """Route past a silent instance. Nobody waits for its word of what it offered to one that is lost."""
        self.router.avoid(event)
        return self._check_all(now) if event.suspected else []

    def _emptied(self, event: PeerEmpty, now: float) -> list[Value]:
        self.isolation.note_empty(event)
        ward = self.entries.get(self.isolation.ward)
        return self._try_again(ward, now) if ward is not None and ward.waits else []

    def _loaded(self, event: PeerLoad, now: float) -> list[Value]:
        """Take a report. Requests are counted on from the highest number of any front end, as all are of one age."""
        self.router.take(event)
        self.taken = max(self.taken, event.newest)
        return []

    def _reserved(self, event: PeerReserved, now: float) -> list[Value]:
        """Route past an instance that the first front end has reserved, or no longer."""
        self.router.reserve(event)
        return [] if event.reserved else self._retry_waiting(now)

    def _leaving(self, event: PeerLeaving, now: float) -> list[Value]:
        self.router.avoid(event)
        self.moves.look_now()
        return []

    def _removed(self, event: PeerRemoved, now: float) -> list[Value]:
        """Forget an instance. Those that wait for it alone are told so, and wait no longer."""
        self.router.forget(event)
        self.dispatch.losses.pop(event.name, None)
        return self._retry_waiting(now)

    # ---------------------------------------------------------------- requests that wait are tried again

    def _begin_next(self, now: float) -> list[Value]:
        """Let those go on for which there is a turn or an instance now, the oldest first."""
        most = self.options.failures.most_retries(len(self.entries))
        out = self._reopen(now)
        while (name := self.dispatch.retries.next(most)) is not None:
            out += self._try_again(self.entries[name], now)
            out += self._reopen(now)
        while (name := self.inputs.next()) is not None:
            out += self.dispatch.prepare(self.entries[name], now)
        return out

    def _reopen(self, now: float) -> list[Value]:
        """Tell all that others may go where one ran alone, and try those that wait."""
        out: list[Value] = []
        while self.isolation.lifted:
            self.isolation.lifted = False
            out += self.isolation.announce()
            out += self._retry_waiting(now)
        return out

    def _retry_waiting(self, now: float) -> list[Value]:
        """Try all again that wait for an instance: the one that runs alone first, then the oldest."""
        ward = self.isolation.ward
        waiting = [each for each in self.entries.values() if each.waits and (each.retry_at == inf or each.work.alone)]
        waiting.sort(key=lambda each: (each.id != ward, each.work.number))
        return [command for entry in waiting for command in self._try_again(entry, now)]

    def _try_again(self, entry: FrontendRequest, now: float) -> list[Value]:
        if entry.preparing:
            return []
        out, problem = self.dispatch.start(entry, now)
        return out if problem is None else out + self._give_up(entry, problem)

    def _prepared(self, event: Prepared, now: float) -> list[Value]:
        """Send a request whose inputs were made once more, unless its media are others by now."""
        entry = self.lives.get(event.life)
        if entry is None or not entry.preparing:
            return []
        failure = self.inputs.take(entry, event)
        return self._try_again(entry, now) if failure is None else self._give_up(entry, failure)

    # ---------------------------------------------------------------- a life of a request ends, or the request does

    def _settle_or_fail(self, entry: FrontendRequest, now: float) -> list[Value]:
        """Settle it, unless tokens that are missing were those of a lost instance: whoever has it has spoken."""
        missing = entry.early or (entry.finished is not None and entry.delivered < entry.finished.count)
        lost = find_loss(entry, self.router) if missing else None
        return self._settle(entry, now) if lost is None else self._fail(entry, lost, now)

    def _settle(self, entry: FrontendRequest, now: float) -> list[Value]:
        """End the request, or send it on, once Finished and all tokens before it have arrived."""
        finished: Finished | None = entry.finished
        if finished is None or (not entry.aborted and entry.delivered < finished.count):
            return []
        out = drop_move(entry)
        again = is_unfit(finished) and not entry.unfit_at
        if not entry.aborted and (entry.lost is not None or again or may_go_on(finished)):
            sent, finished = self._go_on(entry, finished, now)
            out += sent
            if finished is None:
                return out
        entry.finished = refuse_unfit(finished)
        return out + self._conclude(entry)

    def _go_on(self, entry: FrontendRequest, finished: Finished, now: float) -> tuple[list[Value], Finished | None]:
        """Send a request on with its tokens so far: it was preempted where it cannot be recomputed, or lost, or an
        encoder could not take its media, which another one tries once more.

        Returns commands, and its end where it cannot go on, or has all its tokens, else None.
        """
        out: list[Value] = []
        pause_s = None
        if finished.reason == PREEMPTED:
            entry.waited_s = 0.0
            entry.next_attempt(now, entry.work.request)
        elif entry.said:
            return out, replace(finished, reason=entry.said, failure=None, count=entry.delivered)
        elif entry.lost is None and is_unfit(finished):
            entry.unfit_at = finished.route[-1] if finished.route else entry.holder
            out += self._leave(entry, finished, now)
        else:
            waits, planned = self.options.failures.wait_s != 0, is_planned(entry.lost, self.router)
            pause_s = entry.count_loss(finished, waits, planned)
            verdict = self.poison.count_death(entry, finished, now)
            if verdict is not None:
                return out, replace(finished, failure=verdict)
            if pause_s is None:
                self.isolation.lift(entry)
            if entry.may_not_go_on(self.options.failures, lost=pause_s is None):
                return out, after_losses(finished, len(entry.former))
            out += self._leave(entry, finished, now)
            if pause_s is None and waits and not planned and entry.suspicion.awaits_news(entry.delivered, now):
                entry.not_before = now + NEWS_S
        if pause_s is None:
            sent, problem = self.dispatch.start(entry, now)
            out += sent
            if problem is not None:
                return out, replace(finished, reason="error", failure=problem)
        else:
            self.dispatch.wait(entry, now, pause_s)
        entry.past = join_attempts(entry.past, finished)
        return out, None

    def _leave(self, entry: FrontendRequest, finished: Finished, now: float) -> list[Value]:
        """Leave this life of a request, which no instance is to go on with, for the next one, under another name."""
        work = entry.work
        self.dispatch.retries.leave(entry.id)
        self.inputs.preparations.leave(entry.id)
        attempted = entry.past.route if entry.past is not None else ()  # by this life, before it was preempted
        out = self._forget(work.request, work.attempt, (entry.first, *finished.route, *entry.route, *attempted))
        entry.end_life(finished, now, may_be_prefilled(entry, finished, self.router))
        name = name_life(entry.id, work.number, work.attempt + 1, self.name)
        self.lives[name] = self.lives.pop(work.request)
        entry.next_attempt(now, name)
        return out

    def _give_up(self, entry: FrontendRequest, why: Failure) -> list[Value]:
        entry.finish("error", why)
        return self._conclude(entry)

    def _conclude(self, entry: FrontendRequest) -> list[Value]:
        """End the request, and drop its record."""
        finished = entry.finished
        assert finished is not None
        entry.count_recomputed(finished)
        finished = entry.finished = join_attempts(entry.past, finished)
        out = [] if entry.ended else self._end(entry, entry.aborted or reason_for_reader(finished))
        out += self._forget(entry.work.request, entry.work.attempt, (entry.first, *finished.route, *entry.route))
        self.inputs.forget(entry)
        self.dispatch.forget(entry)
        del self.entries[entry.id], self.lives[entry.work.request]
        return out

    def _forget(self, request: str, attempt: int, route: Sequence[str]) -> list[Value]:
        return [Send(name, Forget(request, attempt)) for name in filter(None, dict.fromkeys(route))]

    def _end(self, entry: FrontendRequest, reason: str) -> list[Value]:
        entry.ended = True
        if not entry.delivered:
            self.waiting -= 1
        failure, attempts = entry.find_failure(reason), entry.work.attempt + 1
        return [End(entry.id, reason, failure, entry.finished, attempts, entry.former, entry.recomputed, entry.lives)]
