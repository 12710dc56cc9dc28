"""FrontendRequest: what the front end remembers of a request, which lives of instances have it, and when it is lost."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import Any

from msgspec.structs import replace

from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.messages import Adopt, FormerLife
from trinity.core.frontend.resumption import Prefilled
from trinity.core.frontend.suspicion import Life, Suspicion
from trinity.core.messages import FRONTEND, KV, NOWHERE, PREEMPTED, UNFIT, Failure, Finished, Moved, Sampled, Work
from trinity.core.routing.router import Router
from trinity.core.values import name_life
from trinity.stage_kinds import roles_of

ROUNDING_S = 1e-3  # of sums of pauses: one that is short of its wait by less has waited
PAUSE_S, MOST_PAUSE_S = 0.05, 1.0  # before a request goes back to one that has not heard yet who is up


@dataclass(slots=True)
class FrontendRequest:
    """Record of a request that has not ended on every instance.

    ``id`` is its reader's name for it, ``work.request`` that of its present life, which the instances know.

    - ``hops``: the lives of instances that this attempt of it has come to, by number, as far as they are known: it is
      at the last one. ``waited_at``: those where it only waited for room, and a sibling had some.
    - ``senders``: the lives that send its tokens before an index, from which on others do.
    - ``moving``: the instance that its decode was asked to move to, until that is answered.
    - ``let_go``: the lost instance of which its source said that it went with it. ``passed``: a source has it again of
      which a lost one's target has spoken.
    - ``lost``: the instance that was lost with it, once that is known.
    - ``waits``: it is at no instance, until one with the stage that it needs is up, or till ``retry_at``; at
      ``gives_up_at`` (clock times) it is given up. ``waited_s``: how long it waited before that, since its last loss.
      ``pauses``: how often it was told that an instance is away.
    - ``dropped``: its inputs are not kept, so that they must be prepared again before it can be sent again;
      ``preparing``: they are just now.
    - ``watched``: it goes on after a loss, and has no new token yet, or has not got through its stage alone.
    - ``names``: of its former lives. ``ended_by``: lost lives of instances that ended lives of it.
    - ``suspicion``: deaths of instances that it may have caused. ``not_before``: it waits until then, for news of one.
    - ``prefilled``: where its text was prefilled last, for an instance with D: it may still be cached there.
      ``blamed``: the instance of which another said, as it ended the life before, that it is lost; "" for none.
    - ``unfit_at``: the instance where an encoder could not take its media the first time; "" for none.
    - ``was_prefilled``: in a life that was lost, as far as is known.
    - ``recomputing``: positions to prefill because a former life was lost; ``recomputed``: of lives that have ended.
    """

    id: str
    work: Work
    deadline: float
    first: str = ""
    delivered: int = 0
    hops: dict[int, Life] = field(default_factory=dict)
    waited_at: frozenset[int] = frozenset()
    early: dict[int, Sampled] = field(default_factory=dict)
    aborted: str | None = None
    ended: bool = False
    finished: Finished | None = None
    tokens: list[int] = field(default_factory=list)
    inputs: tuple[Any, ...] = ()
    past: Finished | None = None  # the end of its former attempts, before it was sent back
    base: int = 0  # count of tokens delivered by then
    input_bytes: int = 0  # of its inputs that wait here, on the way or at an instance
    kept_bytes: int = 0  # of its inputs that are kept here
    dropped: bool = False
    preparing: bool = False
    senders: list[tuple[Life, int]] = field(default_factory=list)
    moving: str = ""
    let_go: Life | None = None
    passed: bool = False
    lost: Life | None = None
    began: float = 0.0  # clock time at which this life was sent
    recoveries: int = 0
    former: tuple[FormerLife, ...] = ()
    prefilled: Prefilled | None = None
    blamed: str = ""
    unfit_at: str = ""
    was_prefilled: bool = False
    recomputing: int = 0
    recomputed: int = 0
    waits: bool = False
    retry_at: float = inf
    gives_up_at: float = inf
    waited_s: float = 0.0
    waits_since: float = 0.0
    pauses: int = 0
    watched: bool = False
    names: frozenset[str] = frozenset()
    ended_by: frozenset[Life] = frozenset()
    suspicion: Suspicion = field(default_factory=Suspicion)
    not_before: float = -inf

    @property
    def place(self) -> Life | None:
        """The life of an instance that it is at, as far as is known; None while it is at none."""
        return self.hops[max(self.hops)] if self.hops and not self.waits else None

    @property
    def holder(self) -> str:
        """The instance that has it or had it last, as far as is known; "" of one that has ended, or was at none."""
        hops = {} if self.ended else self.hops.copy()  # readers on other threads ask, too
        return hops[max(hops)].name if hops else ""

    def pardon(self, lives: Collection[Life]) -> None:
        """Give it the recoveries back that deaths of these lives of instances cost it: another request did that.

        The deaths stay what they are: it may be a second one of that kind.
        """
        self.recoveries -= sum(death.life in lives for death in self.suspicion.deaths)

    @property
    def route(self) -> tuple[str, ...]:
        """Names of the instances that it has come to, as far as they are known."""
        return tuple(self.hops[hop].name for hop in sorted(self.hops))

    @property
    def said(self) -> str:
        """Reason of an end that its tokens tell though no instance has: "stop" or "length"; "" where more follow."""
        if self.tokens and self.tokens[-1] in self.work.stop_ids:
            return "stop"
        return "length" if self.tokens and len(self.tokens) >= self.work.max_tokens else ""

    @property
    def lives(self) -> int:
        """Count of its lives that were sent to an instance; 1 where none was."""
        return max(1, len(self.former) + bool(self.first))

    def may_not_go_on(self, policy: FailurePolicy, lost: bool) -> bool:
        """True where it is ``lost``, has had its recoveries and is not to run alone, or has waited for long enough."""
        waited = policy.wait_s is not None and self.waited_s + ROUNDING_S >= policy.wait_s > 0
        spent = self.recoveries > policy.recoveries
        return waited or not policy.recoveries or (lost and spent and not self._has_a_chance_alone(policy))

    def is_suspect(self, policy: FailurePolicy) -> bool:
        """True for one that is to run alone: so many instances in a row died with it, or it has had its recoveries.

        In the latter case the last one may have died of another, and that is no reason to end it: one life alone shows
        whether it has. Only its getting through ends the suspicion that a row of deaths has raised.
        """
        spent = self.recoveries > policy.recoveries
        many = self.suspicion.row >= policy.alone_after and self._may_be_alone(policy)
        return many or (spent and self._has_a_chance_alone(policy))

    def _may_be_alone(self, policy: FailurePolicy) -> bool:
        """True where an instance died with it, and requests run alone: the first front end's, where they may wait."""
        return bool(self.work.owner == FRONTEND and policy.recoveries and policy.wait_s != 0 and self.suspicion.row)

    def _has_a_chance_alone(self, policy: FailurePolicy) -> bool:
        """True where no life of it was alone since the last death, nor in that; or the row is not of one stage."""
        return self._may_be_alone(policy) and not self.suspicion.has_been_alone

    def is_due(self, alarm: float) -> bool:
        """True where this clock time still means something to it."""
        return alarm == self.deadline or (self.waits and alarm in (self.retry_at, self.gives_up_at))

    def finish(self, reason: str, why: Failure | None = None) -> None:
        """End it here, where it waits and no instance reports."""
        name, attempt = self.work.request, self.work.attempt
        self.waits = False
        self.finished = Finished(request=name, attempt=attempt, reason=reason, failure=why, count=self.delivered)

    def find_failure(self, reason: str) -> Failure | None:
        """Find why it ends for its reader; None where that is no error."""
        if reason == "deadline":
            return Failure("DeadlineExceeded", f"the deadline passed after {self.delivered} tokens")
        return self.finished.failure if self.finished is not None and reason == "error" else None

    def count_loss(self, finished: Finished, waits: bool, planned: bool) -> float | None:
        """Count the loss of this life. Returns seconds until the next one may begin; None for at once.

        A ``planned`` one does not count. Nor does one because an instance had not heard who is up: it knew of none with
        the next stage, or handed it to a life that has ended a life of this request before. It ``waits`` then, for the
        two would send it to and fro in no time.
        """
        nowhere = finished.failure is not None and finished.failure.fields.get("cause") == NOWHERE
        if waits and (nowhere or self.lost in self.ended_by):
            self.pauses += 1
            return min(MOST_PAUSE_S, PAUSE_S * 2.0 ** min(self.pauses - 1, 10))
        self.recoveries, self.pauses, self.waited_s = (self.recoveries + (not planned), 0, 0.0)
        return None

    def next_attempt(self, now: float, name: str) -> None:
        """Go on with its tokens so far, as part of what is prefilled, and with the time that is left."""
        left = max(0.0, self.deadline - now) if self.work.deadline_s is not None else None
        attempt, outputs = self.work.attempt + 1, len(self.tokens)
        self.work = replace(self.work, request=name, attempt=attempt, deadline_s=left, outputs=outputs)

    def enter(self, first: Life, now: float, alone_at: frozenset[Life] = frozenset()) -> None:
        """Note that this life of it is sent to its first instance, and which were empty for it then."""
        self.suspicion.send(alone_at)
        self.waited_s += now - self.waits_since if self.waits else 0.0
        self.first, self.hops, self.waited_at, self.began = first.name, {0: first}, frozenset(), now
        self.finished = self.lost = self.let_go = None
        self.passed = False
        self.senders.clear()
        self.base, self.waits, self.retry_at, self.gives_up_at = (self.delivered, False, inf, inf)
        self.recomputing = len(self.work.prompt) + self.delivered if self.was_prefilled else 0

    def wait(self, now: float, retry_at: float, wait_s: float | None) -> None:
        """Note that it is at no instance, for ``wait_s`` at most, and what is left of its former life is not awaited.

        Inputs that are not kept are prepared again once they can be sent: nothing bounds those that wait here.
        """
        if not self.waits:
            self.waits_since = now
            self.gives_up_at = inf if wait_s is None else now + max(0.0, wait_s - self.waited_s)
        self.first, self.hops, self.waits, self.retry_at = "", {}, True, retry_at
        self.finished = self.lost = None
        self.senders.clear()
        self.inputs = () if self.dropped and self.work.attempt else self.inputs

    def end_life(self, finished: Finished, now: float, prefilled: bool) -> None:
        """Note how a loss ended a life of it, and whether its prefill may have begun there.

        Tokens that came ahead of a missing one will come again.
        """
        self.count_recomputed(finished)
        fields = finished.failure.fields if finished.failure is not None else {}
        why = finished.failure.message if finished.failure is not None else ""
        self.blamed = fields.get("source", "") if fields.get("cause") == "PeerLost" else ""
        self.was_prefilled = self.was_prefilled or prefilled
        route = finished.route or self.route
        unexplained = not self.suspicion.deaths or self.suspicion.died_at != now
        alone = not unexplained and self.suspicion.deaths[-1].alone
        self.former += (FormerLife(why, self.delivered, now - self.began, route, finished.spans, alone),)
        self.early.clear()
        self.ended_by |= {self.lost} if self.lost is not None else frozenset()
        if self.work.alone and unexplained and fields.get("cause") != NOWHERE:
            self.suspicion.tried_alone = True
        speaker = finished.route[-1] if finished.route and self.lost is None else ""  # it has done with it
        last = [self.hops[hop] for hop in sorted(self.hops)[-2:] if self.hops[hop].name != speaker]
        self.suspicion.leave_behind({life: life in self.suspicion.alone_at for life in last if unexplained}, now)
        self.names |= {self.work.request}
        self.first = ""

    def count_recomputed(self, finished: Finished) -> None:
        """Count what this life prefilled because of a loss: nothing where nobody knows whether it came to that."""
        if finished.spans or self.delivered > self.base:
            self.recomputed += max(0, self.recomputing - finished.cached_tokens)
        self.recomputing = 0


def make_adopted(event: Adopt, number: int, owner: str, now: float) -> FrontendRequest:
    """Make the record of a request of another front end that was lost, without its inputs, for its first life here."""
    work, count = event.work, len(event.tokens)
    life = name_life(work.request, number, 1, owner)
    left = work.deadline_s
    return FrontendRequest(
        work.request,
        replace(work, request=life, number=number, owner=owner, attempt=1, outputs=count, alone=""),
        inf if left is None else now + left,
        delivered=count,
        tokens=list(event.tokens),
        base=count,
        former=(event.former,),
        was_prefilled=count > 0,
    )


def join_attempts(past: Finished | None, last: Finished) -> Finished:
    """Merge the records of two attempts of a request into one end."""
    if past is None:
        return last
    spans = {name: past.spans.get(name, 0.0) + last.spans.get(name, 0.0) for name in {**past.spans, **last.spans}}
    return replace(
        last,
        spans=spans,
        cached_tokens=past.cached_tokens,
        transfers=past.transfers + last.transfers,
        route=past.route + last.route,
        preemptions=past.preemptions + last.preemptions,
    )


def may_go_on(finished: Finished) -> bool:
    """True for an end by no fault of the request: its blocks were lost on their way, or it was preempted."""
    why = finished.failure
    return finished.reason == PREEMPTED or (why is not None and why.error == "MigrationError" and not finished.cut)


def is_unfit(finished: Finished) -> bool:
    """True for an end because an encoder could not take the media of the request."""
    return finished.failure is not None and UNFIT in finished.failure.fields


def refuse_unfit(finished: Finished) -> Finished:
    """The same end as an error of the media, where an encoder could not take them; they have been tried twice."""
    why = finished.failure
    if why is None or UNFIT not in why.fields:
        return finished
    return replace(finished, failure=Failure("BadMedia", why.fields[UNFIT]))


def after_losses(finished: Finished, losses: int) -> Finished:
    """The same end, which says how many losses the request had survived before."""
    why = finished.failure
    if why is None or not losses:
        return finished
    return replace(finished, failure=replace(why, message=f"{why.message} (it had survived {losses} losses before)"))


def reason_for_reader(finished: Finished) -> str:
    """Reason of an end as the reader hears it: "deadline" also where an instance saw it pass first."""
    late = finished.failure is not None and finished.failure.error == "DeadlineExceeded"
    return "deadline" if late else finished.reason


def lives_on(router: Router, life: Life) -> bool:
    """True while this life of an instance lasts, as far as is known."""
    peer = router.peers.get(life.name)
    return peer is not None and peer.epoch == life.epoch


def is_planned(lost: Life | None, router: Router) -> bool:
    """True for a life that was ended so that its instance begins anew with other roles."""
    return lost is not None and router.replaced.get(lost.name) == lost.epoch


def find_loss(entry: FrontendRequest, router: Router) -> Life | None:
    """The lost instance that a request is at, or that alone has tokens of it; None where it is not lost.

    An instance's words come in order, and those that were cut off were its last ones: after its end all is heard of it
    that ever will be. What it gave to others is heard from them (``Moved``, ``Gone``).
    """
    if entry.waits:
        return None
    last = max(entry.hops)
    place = entry.hops[last]
    if entry.finished is None and not lives_on(router, place):
        return None if may_come_back(entry, last, router) else place
    owing = () if entry.aborted else [life for life, end in entry.senders if entry.delivered < end]
    lost = next((life for life in owing if not lives_on(router, life)), None)
    return None if lost is not None and _has_yet_to_say(entry, place, lost, router) else lost


def _has_yet_to_say(entry: FrontendRequest, place: Life, lost: Life, router: Router) -> bool:
    """True where the instance that a request is at will say what it has of it, after the loss of the one before.

    It hears of that as well. It ends what had not come as a whole, and says first which blocks it keeps. One to which
    all had come goes on, and its own tokens tell that those of the lost one will not come. Where the source of the lost
    one offers it once more meanwhile, two would go on with one life: nobody waits then.
    """
    speaks = not entry.passed and place != lost and place.name not in router.suspects and not is_planned(lost, router)
    return speaks and entry.finished is None and not entry.early


def may_come_back(entry: FrontendRequest, last: int, router: Router) -> bool:
    """True of a request at a lost instance whose source may still have all that it was to get there.

    That one will say so (``Moved``), or that it is gone (``Gone``): it hears of the loss as well. Who has tokens from
    the lost instance, or is to run alone, does not wait for that.
    """
    source = entry.hops.get(last - 1)
    if source is None or not lives_on(router, source) or source.name in router.suspects:
        return False
    first = not entry.aborted and not entry.work.attempt and not entry.work.alone
    prefilled = entry.prefilled is not None and entry.prefilled[:2] == source
    return first and entry.let_go != entry.hops[last] and entry.delivered <= entry.base + prefilled


def is_passed_by(entry: FrontendRequest, event: Moved, router: Router) -> bool:
    """True where a source has a request again of which another instance that is up has spoken at the same hop.

    The lost target had moved it there, and its Release was cut off.
    """
    there = entry.hops.get(event.hop)
    return there is not None and there.name != event.to and not event.source and lives_on(router, there)


def was_given_back(entry: FrontendRequest, life: Life, router: Router) -> bool:
    """True where a lost instance had this request, and its source has it again or may have.

    Where it only waited and was passed on nothing of it can have been the cause.
    """
    last = max(entry.hops, default=0)
    hops = [hop for hop, place in entry.hops.items() if place == life and hop not in entry.waited_at]
    back = any(entry.hops.get(hop - 1, life) == entry.hops.get(hop + 1) for hop in hops)
    return back or (last in hops and entry.finished is None and may_come_back(entry, last, router))


def end_of_loss(entry: FrontendRequest, lost: Life, router: Router) -> Finished:
    """The end that a loss leaves a request with, where it does not go on."""
    peer = router.lost.get(lost.name) or router.peers.get(lost.name)
    text = f"instance {lost.name} was lost while the request was there; send it again"
    return Finished(
        request=entry.work.request,
        attempt=entry.work.attempt,
        reason="error",
        failure=Failure("StageError", text, {"stage": peer.roles if peer is not None else ""}),
        count=entry.delivered,
        route=entry.route,
    )


def may_be_prefilled(entry: FrontendRequest, finished: Finished, router: Router) -> bool:
    """True where a life that a loss ends may have come to its prefill. One that was at encoders alone has not.

    Of one whose instance with stage P died before a token was out nobody knows: what it may have done counts as done.
    """
    why = finished.failure.fields if finished.failure is not None else {}
    if entry.delivered or "prefill" in finished.spans or why.get("kind") == KV:
        return True
    known = [router.peers.get(life.name) or router.lost.get(life.name) for life in entry.hops.values()]
    return entry.lost is not None and any(roles_of(peer.roles).prefills for peer in known if peer is not None)


def whom_to_cancel(entry: FrontendRequest, router: Router) -> list[str]:
    """The first instance of a request, from which a Cancel follows it; past a lost one, all of them that are up."""
    up = [life.name for life in entry.hops.values() if lives_on(router, life)]
    if len(up) == len(entry.hops):
        return [entry.first]
    return sorted(set(up), key=entry.route.index)
