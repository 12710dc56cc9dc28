"""SupervisorCore: lives of a pipeline's instances, as a state machine without I/O: events in, commands out.

======================  ============================================================================================
event                   commands
======================  ============================================================================================
``Begin``               ``Launch`` of every instance
``Loaded``              ``Introduce`` it and each that has loaded to each other
``Linked``              ``Up`` once it is linked to every other that has loaded and speaks; then ``Suspect`` of others
``Unlinked``            none; after ``RELINK_S`` with both still there the younger counts as lost; the elder where
                        ``MOST_UNMET`` lives in a row could not reach it
``Refused``             the same as ``Lost`` for the younger of the two, which counts as one that did not come up
``Lost``                ``Fence`` it, ``Separate`` the others from it, ``Down``; ``Up`` of whoever waited for it
``Ended``               none; after a pause ``Proceed`` of the next life if one was prepared and speaks, else ``Launch``
``Leave``               ``Leaving``, which is told again when another comes up
``LoadNext``            ``Launch`` of the next life, which waits; ``Fence`` first of one that was prepared before
``NextLoaded``          none
``Lost`` of the next    ``Fence`` it, ``NextLost``: the present life goes on, and whatever follows it is launched
``Quiet`` of the next   the same from ``silence_s`` on, as while one loads
``Ended`` of the next   none
``DropNext``           ``Fence`` of the next one
``Replace``             the same as ``Lost``, but planned: not counted, and no pause before the next ``Launch``
``Add``                 the same as ``Begin``, of one more; its epochs follow those of one of its name before
``Remove``              the same as ``Replace``, without a next life: ``Removed`` once it has ``Ended``
``Quiet``               ``Suspect`` from ``SUSPECT_S`` on; the same as ``Lost`` from ``silence_s`` on. At a step that is
                        long: ``Suspect`` from its predicted time on, ``Lost`` from ten times that on, silent or not;
                        ``Up`` of whoever waited for it from ``SUSPECT_S`` on, at work or not
``Retire``              ``Fence`` of what was prepared; whoever is lost from now on stays away
``CloseAll``            ``Fence`` of all
``Tick``                whatever is due
======================  ============================================================================================

A life is a name and an epoch; an event of another life than the present one, and the next one where it is prepared, is
ignored. A new life is launched, or told to proceed, only after the old one has ``Ended``, so that two of a name never
reach the same memory: one that is prepared has none of it (``prepared_lives``). It has an epoch of its own from the
first, which no other gets. Where the present life is lost it takes over, also before it has said that it is ready.
What starts a life, such as a launcher, is none of this: where it fails or is gone the life is ``Lost``, and launched
again; no life ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from typing import Any

from trinity.core.messages import Tick
from trinity.remote.prepared_lives import LOADING_SILENCE_S as LOADING_SILENCE_S
from trinity.remote.prepared_lives import OF_THE_NEXT, PreparedLives
from trinity.remote.prepared_lives import SUSPECT_S as SUSPECT_S
from trinity.remote.supervised_lives import ALIVE, PRESENT, Member, Pair
from trinity.remote.supervised_lives import LifePhase as LifePhase
from trinity.remote.supervisor_messages import (
    Add,
    Begin,
    CloseAll,
    Down,
    DropNext,
    Ended,
    Event,
    Fence,
    HealthState,
    InstanceHealth,
    Introduce,
    Launch,
    Leave,
    Leaving,
    Linked,
    Loaded,
    LoadNext,
    Lost,
    NextLoaded,
    OfALife,
    Quiet,
    Refused,
    Remove,
    Removed,
    Replace,
    Retire,
    Separate,
    Suspect,
    Unlinked,
    Up,
)

LEAVING_SILENCE_S = 4.0  # when the pipeline is being closed, nothing is lost with one that is slow
STEP_TIMES = 10.0  # its predicted time: a step that takes longer hangs
STEP_FLOOR_S = 60.0  # a step hangs after no less: machines are busy, and a first one of a shape compiles
STEP_UNKNOWN_S = 600.0  # of a step at a stage that has run none yet
MEET_S = 30.0  # for two instances that have loaded and speak to be linked
RELINK_S = 2.0  # until one of two that have lost their link must have been heard to be lost
HEARD_S = 2 * SUSPECT_S  # of one that speaks again, to be linked before it counts as one that cannot be reached
BACKOFF_S = 0.1  # before the first restart; doubled each time
LONGEST_BACKOFF_S = 60.0  # of one that comes up and is lost again, each time with what it was given
MAX_DOUBLINGS = 30
LONGEST_AWAY_S = 30.0  # of one that did not come up
LONGEST_BY_HAND_S = 5.0  # of one that somebody else starts
PARTIES = 2  # to a link
MOST_UNMET = 3  # lives that could not reach an elder, before it is the elder that is at fault
STEADY_S = 30.0  # up for so long, it is as good as one that was never lost


class SupervisorCore(PreparedLives):
    """``handle(event, now) -> [command]``; ``next_timer()`` is when a Tick is due. See the module's table."""

    def __init__(self, names: Sequence[str], by_hand: Sequence[str] = (), silence_s: float = 20.0) -> None:
        self.members = {name: Member(name, name in by_hand) for name in names}
        self.silence_s = silence_s
        self.closing = False
        self._births = count()
        self._last_epochs: dict[str, int] = {}  # of instances that were removed
        self._pairs: dict[tuple[str, str], Pair] = {}
        self._out: list[Event] = []

    def handle(self, event: Event | Tick, now: float) -> list[Event]:
        self._out = []
        if isinstance(event, OfALife):
            member = self.members.get(event.name)
            if member is not None and member.epoch == event.epoch:
                OF_A_LIFE[type(event)](self, member, event, now)
            elif member is not None and self._is_of_next(member, event.epoch) and type(event) in OF_THE_NEXT:
                OF_THE_NEXT[type(event)](self, member, event, now)
            if member is not None:
                self._drop_if_over(member)
        else:
            OF_ALL[type(event)](self, event, now)
        return self._out

    @property
    def unended(self) -> list[str]:
        """Names of instances of which a process is not known to have ended, or another may still be started."""
        return [each.name for each in self.members.values() if each.phase is not LifePhase.CLOSED or each.dismissed]

    def next_timer(self) -> float | None:
        """Clock time at which a Tick is due; None for never."""
        dues = [member.due for member in self.members.values()] + [pair.due for pair in self._pairs.values()]
        due = min(dues, default=inf)
        return None if due == inf else due

    def health(self, name: str, now: float) -> InstanceHealth:
        """Describe an instance's state."""
        member = self.members[name]
        state = STATES[member.phase]
        if state == "up":
            state = "silent" if member.suspected else "leaving" if member.leaving else state
        elif state == "lost" and member.planned:
            state = "starting"
        left = max(0.0, member.due - now) if member.phase is LifePhase.WAITING and member.due < inf else None
        return InstanceHealth(name, state, max(0, member.epoch), member.losses, member.why, left, member.planned)

    # ------------------------------------------------------------ a life

    def _start(self, member: Member) -> None:
        member.phase, member.due, member.unmet = LifePhase.LOADING, inf, 0
        if self._launch_next(member):
            return
        member.newest += 1
        member.epoch = member.newest
        self._out.append(Launch(member.name, member.epoch))

    def _loaded(self, member: Member, event: Loaded, now: float) -> None:
        if member.phase is not LifePhase.LOADING:
            return
        member.phase, member.born = LifePhase.MEETING, next(self._births)
        for other in self._others(member):
            self._pairs[_key(member, other)] = Pair(now + MEET_S, set())
            for one, two in ((member, other), (other, member)):
                self._out.append(Introduce(one.name, one.epoch, two.name, two.epoch))
        self._check_up(member, now)

    def _others(self, member: Member) -> list[Member]:
        return [each for each in self.members.values() if each.phase in PRESENT and each is not member]

    def _linked(self, member: Member, event: Linked, now: float) -> None:
        pair, other = self._pair(member, event), self.members.get(event.peer)
        if pair is not None and other is not None:
            pair.said.add(member.name)
            if len(pair.said) == PARTIES:
                pair.due, member.unmet, other.unmet = inf, 0, 0
            for each in (member, other):
                self._check_up(each, now)

    def _unlinked(self, member: Member, event: Unlinked, now: float) -> None:
        pair = self._pair(member, event)
        if pair is not None:
            pair.due = min(pair.due, now + RELINK_S)

    def _refused(self, member: Member, event: Refused, now: float) -> None:
        """Lose the newcomer of two that do not belong together: whoever says so, the other has served before."""
        if self._pair(member, event) is not None:
            younger, elder = self._by_age(member, self.members[event.peer])
            at_fault = younger if event.for_good else self._blame(younger, elder)
            self._lose(at_fault, event.why, now, refused=at_fault is younger)

    def _pair(self, member: Member, event: Linked | Unlinked | Refused) -> Pair | None:
        """Find the link that is spoken of, unless one of its ends is another life by now."""
        other = self.members.get(event.peer)
        same = other is not None and other.epoch == event.peer_epoch
        return self._pairs.get(_key(member, other)) if same and other is not None else None

    def _check_up(self, member: Member, now: float) -> None:
        """Bring up an instance that has met all that speak: one that is silent now, at work or not, is met later."""
        if member.phase is LifePhase.MEETING and all(self._has_met(member, other) for other in self._others(member)):
            member.phase, member.since = LifePhase.UP, now
            self._out.append(Up(member.name, member.epoch))
            for each in (member, *self._others(member)):  # what was said before it came up it has not heard, nor others
                if each.suspected:
                    self._out.append(Suspect(each.name, each.epoch, True))
                if each.leaving:
                    self._out.append(Leaving(each.name, each.epoch, True))

    def _has_met(self, member: Member, other: Member) -> bool:
        return other.deaf or len(self._pairs[_key(member, other)].said) == PARTIES

    # ------------------------------------------------------------ its end

    def _lost(self, member: Member, event: Lost, now: float) -> None:
        if member.phase in ALIVE:
            self._lose(member, event.why, now)

    def _leave(self, member: Member, event: Leave, now: float) -> None:
        if member.phase is LifePhase.UP and member.leaving is not event.leaving:
            member.leaving = event.leaving
            self._out.append(Leaving(member.name, member.epoch, member.leaving))

    def _replace(self, member: Member, event: Replace, now: float) -> None:
        """End a life for the next one, which begins at once: nothing is wrong with it."""
        if member.phase in ALIVE:
            member.pause, member.failures = now, 0
            self._end(member, event.why, now, planned=True)

    def _lose(self, member: Member, why: str, now: float, refused: bool = False) -> None:
        came_up = member.phase is LifePhase.UP and not refused
        member.losses = 1 if came_up and now - member.since >= STEADY_S else member.losses + 1
        member.failures = 0 if came_up else member.failures + 1
        longest = LONGEST_BY_HAND_S if member.by_hand else LONGEST_BACKOFF_S if came_up else LONGEST_AWAY_S
        doublings = min((member.losses if came_up else member.failures) - 1, MAX_DOUBLINGS)
        member.pause = now + min(BACKOFF_S * 2.0**doublings, longest)
        self._end(member, why, now)

    def _end(self, member: Member, why: str, now: float, planned: bool = False) -> None:
        member.phase, member.why, member.due = LifePhase.ENDING, why, inf
        member.suspected = member.deaf = member.leaving = False
        member.planned = planned
        self._out.append(Fence(member.name, member.epoch))
        for other in self._others(member):
            self._pairs.pop(_key(member, other), None)
            self._out.append(Separate(other.name, other.epoch, member.name, member.epoch))
        self._out.append(Down(member.name, member.epoch, why, planned))
        for other in self._others(member):
            self._check_up(other, now)

    def _remove(self, event: Remove, now: float) -> None:
        """End an instance for good: its present life first, where there is one."""
        member = self.members[event.name]
        member.removed = True
        self._dismiss(member)
        if member.phase in ALIVE:
            self._end(member, event.why, now, planned=True)
        elif member.phase is not LifePhase.ENDING:
            member.phase, member.due = LifePhase.CLOSED, inf
        self._drop_if_over(member)

    def _drop_if_over(self, member: Member) -> None:
        """Forget an instance that was removed once no process of it is left."""
        if member.removed and member.phase is LifePhase.CLOSED and not member.dismissed:
            del self.members[member.name]
            self._last_epochs[member.name] = member.newest
            self._out.append(Removed(member.name, member.epoch))

    def _ended(self, member: Member, event: Ended, now: float) -> None:
        if member.phase is LifePhase.ENDING:
            over = self.closing or member.removed
            member.phase = LifePhase.CLOSED if over else LifePhase.WAITING
            member.due = inf if over else max(now, member.pause)

    def _quiet(self, member: Member, event: Quiet, now: float) -> None:
        at_work = event.step_s is not None and member.phase in PRESENT  # may hold its interpreter for as long
        longest = self.silence_s if member.phase in PRESENT else max(self.silence_s, LOADING_SILENCE_S)
        longest = max(longest, find_silence_limit(event.predicted_s)) if at_work else longest
        longest = min(longest, LEAVING_SILENCE_S) if self.closing else longest
        if event.seconds > longest and member.phase in ALIVE:
            self._lose(member, f"it said nothing for {event.seconds:.1f} s", now)
        elif at_work and event.step_s is not None and event.step_s > find_step_limit(event.predicted_s):
            known = f"{event.predicted_s:.2g} s were predicted" if event.predicted_s else "none was predicted"
            self._lose(member, f"a step of it hangs: it has taken {event.step_s:.1f} s, and {known}", now)
        elif member.phase in PRESENT:
            self._note_silence(member, event, now)

    def _note_silence(self, member: Member, event: Quiet, now: float) -> None:
        """Note if it is silent now, and if its step does not explain that; once it speaks it has a while to be met."""
        expected_s = event.predicted_s if event.step_s is not None else 0.0
        if (event.seconds > max(SUSPECT_S, expected_s)) is not member.suspected:
            member.suspected = not member.suspected
            self._out.append(Suspect(member.name, member.epoch, member.suspected))
        if (event.seconds > SUSPECT_S) is not member.deaf:
            member.deaf = not member.deaf
            for other in self._others(member):
                pair = self._pairs[_key(member, other)]
                pair.due = pair.due if member.deaf else max(pair.due, now + HEARD_S)
                self._check_up(other, now)

    # ------------------------------------------------------------ all

    def _begin(self, event: Begin, now: float) -> None:
        for member in self.members.values():
            self._start(member)

    def _add(self, event: Add, now: float) -> None:
        if not self.closing:
            last = self._last_epochs.pop(event.name, -1)
            self.members[event.name] = Member(event.name, event.by_hand, epoch=last, newest=last)
            self._start(self.members[event.name])

    def _tick(self, event: Tick, now: float) -> None:
        for member in self.members.values():
            if member.due <= now:
                self._start(member)
        for key, pair in list(self._pairs.items()):
            if pair.due <= now and key in self._pairs:
                self._part(pair, self.members[key[0]], self.members[key[1]], now)

    def _part(self, pair: Pair, one: Member, two: Member, now: float) -> None:
        """Give up two that cannot reach each other, unless one is silent: then time will tell which."""
        if one.deaf or two.deaf:
            pair.due = now + (RELINK_S if len(pair.said) == PARTIES else MEET_S)
            return
        younger, elder = self._by_age(one, two)
        at_fault = self._blame(younger, elder)
        other = elder if at_fault is younger else younger
        self._lose(at_fault, f"it and {other.name} could not reach each other", now)

    def _by_age(self, one: Member, two: Member) -> tuple[Member, Member]:
        return (one, two) if one.born > two.born else (two, one)

    def _blame(self, younger: Member, elder: Member) -> Member:
        """Tell which of two that cannot reach each other goes: the elder once nobody has reached it several times."""
        unmet = [other for other in self._others(younger) if len(self._pairs[_key(younger, other)].said) < PARTIES]
        elder.unmet += len(unmet) <= 1  # who reaches several others no more is at fault itself
        return elder if elder.unmet >= MOST_UNMET else younger

    def _retire(self, event: Retire | CloseAll, now: float) -> None:
        self.closing = True
        for member in self.members.values():
            self._dismiss(member)
            if member.phase is LifePhase.WAITING:
                member.phase, member.due = LifePhase.CLOSED, inf

    def _close(self, event: CloseAll, now: float) -> None:
        self._retire(event, now)
        self._pairs.clear()
        for member in self.members.values():
            if member.phase in ALIVE:
                member.phase = LifePhase.ENDING
                self._out.append(Fence(member.name, member.epoch))


def find_step_limit(predicted_s: float) -> float:
    """Return the seconds after which a step hangs; ``predicted_s``: for the whole of it, 0.0 if not known."""
    return max(STEP_FLOOR_S, STEP_TIMES * predicted_s) if predicted_s else STEP_UNKNOWN_S


def find_silence_limit(predicted_s: float) -> float:
    """Return the seconds that a step may be silent for, where ``silence_s`` is shorter; see ``find_step_limit``."""
    return STEP_TIMES * predicted_s or STEP_FLOOR_S


def _key(one: Member, two: Member) -> tuple[str, str]:
    return (one.name, two.name) if one.name < two.name else (two.name, one.name)


STATES: dict[LifePhase, HealthState] = {
    LifePhase.LOADING: "starting",
    LifePhase.MEETING: "starting",
    LifePhase.UP: "up",
    LifePhase.ENDING: "lost",
    LifePhase.WAITING: "lost",
    LifePhase.CLOSED: "closed",
}
OF_A_LIFE: dict[type[Event], Callable[[SupervisorCore, Member, Any, float], None]] = {
    Loaded: SupervisorCore._loaded,
    Linked: SupervisorCore._linked,
    Unlinked: SupervisorCore._unlinked,
    Refused: SupervisorCore._refused,
    Lost: SupervisorCore._lost,
    Leave: SupervisorCore._leave,
    LoadNext: SupervisorCore._load_next,
    NextLoaded: lambda core, member, event, now: None,  # it was given the word before it said so
    DropNext: SupervisorCore._drop_next,
    Replace: SupervisorCore._replace,
    Ended: SupervisorCore._ended,
    Quiet: SupervisorCore._quiet,
}
OF_ALL: dict[type[Event | Tick], Callable[[SupervisorCore, Any, float], None]] = {
    Begin: SupervisorCore._begin,
    Add: SupervisorCore._add,
    Remove: SupervisorCore._remove,
    Retire: SupervisorCore._retire,
    CloseAll: SupervisorCore._close,
    Tick: SupervisorCore._tick,
}
