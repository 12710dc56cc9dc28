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
from typing import Any, ClassVar

from trinity.core.messages import Tick
from trinity.remote.supervision.prepared_lives import LOADING_SILENCE_S, PreparedLives
from trinity.remote.supervision.supervised_lives import (
    ALIVE,
    PRESENT,
    SUSPECT_S,
    LifePhase,
    Member,
    PeerLink,
    PeerLinks,
)
from trinity.remote.supervision.supervisor_messages import (
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
    Suspect,
    Unlinked,
    Up,
)

LEAVING_SILENCE_S = 4.0  # when the pipeline is being closed, nothing is lost with one that is slow
STEP_TIMES = 10.0  # its predicted time: a step that takes longer hangs
STEP_FLOOR_S = 60.0  # a step hangs after no less: machines are busy, and a first one of a shape compiles
STEP_UNKNOWN_S = 600.0  # of a step at a stage that has run none yet
BACKOFF_S = 0.1  # before the first restart; doubled each time
LONGEST_BACKOFF_S = 60.0  # of one that comes up and is lost again, each time with what it was given
MAX_DOUBLINGS = 30
LONGEST_AWAY_S = 30.0  # of one that did not come up
LONGEST_BY_HAND_S = 5.0  # of one that somebody else starts
STEADY_S = 30.0  # up for so long, it is as good as one that was never lost


class SupervisorCore:
    """Decides on the lives of a pipeline's instances by the module's table.

    - ``members``: the instances, by name.
    - ``silence_s``: longest silence of one that serves. ``by_hand``: names of those that somebody else starts.
    - ``closing``: no life is launched any more.
    """

    def __init__(self, names: Sequence[str], by_hand: Sequence[str] = (), silence_s: float = 20.0) -> None:
        self.members = {name: Member(name, name in by_hand) for name in names}
        self.silence_s = silence_s
        self.closing = False
        self._prepared = PreparedLives(silence_s)
        self._links = PeerLinks()
        self._births = count()
        self._last_epochs: dict[str, int] = {}  # of instances that were removed

    def handle(self, event: Event | Tick, now: float) -> list[Event]:
        """Return the commands that an event leads to; ``now``: clock time."""
        if not isinstance(event, OfALife):
            return self._of_all[type(event)](self, event, now)
        member = self.members.get(event.name)
        if member is None:
            return []
        if member.epoch == event.epoch:
            commands = self._of_a_life[type(event)](self, member, event, now)
        else:
            commands = self._prepared.handle(member, event)
        return commands + self._drop_if_over(member)

    @property
    def unended(self) -> list[str]:
        """Names of instances of which a process is not known to have ended, or another may still be started."""
        return [each.name for each in self.members.values() if each.phase is not LifePhase.CLOSED or each.dismissed]

    def next_timer(self) -> float | None:
        """Clock time at which a Tick is due; None for never."""
        due = min((member.due for member in self.members.values()), default=inf)
        due = min(due, self._links.due)
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

    def _start(self, member: Member) -> list[Event]:
        """Begin the next life: the one that was prepared, if it is to be relied on, or another."""
        member.phase, member.due, member.unmet = LifePhase.LOADING, inf, 0
        if proceed := self._prepared.proceed(member):
            return proceed
        dismissed = self._prepared.dismiss(member)
        member.newest += 1
        member.epoch = member.newest
        return [*dismissed, Launch(member.name, member.epoch)]

    def _load_next(self, member: Member, event: LoadNext, now: float) -> list[Event]:
        """Launch the next life beside the present one, where that has come up and another may follow."""
        if member.phase is not LifePhase.UP or member.by_hand or member.removed or self.closing:
            return []
        return self._prepared.prepare(member)

    def _next_loaded(self, member: Member, event: NextLoaded, now: float) -> list[Event]:
        return []  # it was given the word before it said so

    def _drop_next(self, member: Member, event: DropNext, now: float) -> list[Event]:
        return self._prepared.dismiss(member)

    def _loaded(self, member: Member, event: Loaded, now: float) -> list[Event]:
        if member.phase is not LifePhase.LOADING:
            return []
        member.phase, member.born = LifePhase.MEETING, next(self._births)
        return [*self._links.introduce(member, self._others(member), now), *self._check_up(member, now)]

    def _others(self, member: Member) -> list[Member]:
        return [each for each in self.members.values() if each.phase in PRESENT and each is not member]

    def _linked(self, member: Member, event: Linked, now: float) -> list[Event]:
        link = self._link(member, event)
        if link is None:
            return []
        link.confirm(member)
        return [*self._check_up(member, now), *self._check_up(self.members[event.peer], now)]

    def _unlinked(self, member: Member, event: Unlinked, now: float) -> list[Event]:
        link = self._link(member, event)
        if link is not None:
            link.expect_loss(now)
        return []

    def _refused(self, member: Member, event: Refused, now: float) -> list[Event]:
        """Lose the newcomer of two that do not belong together: whoever says so, the other has served before."""
        link = self._link(member, event)
        if link is None:
            return []
        younger, _ = link.by_age
        at_fault = younger if event.for_good else self._links.blame(link)
        return self._lose(at_fault, event.why, now, refused=at_fault is younger)

    def _link(self, member: Member, event: Linked | Unlinked | Refused) -> PeerLink | None:
        """Find the link that is spoken of, unless one of its ends is another life by now."""
        other = self.members.get(event.peer)
        return self._links.find(member, other) if other is not None and other.epoch == event.peer_epoch else None

    def _check_up(self, member: Member, now: float) -> list[Event]:
        """Bring up an instance that has met all that speak."""
        if member.phase is not LifePhase.MEETING:
            return []
        others = self._others(member)
        if not all(self._links.has_met(member, other) for other in others):
            return []
        member.phase, member.since = LifePhase.UP, now
        commands: list[Event] = [Up(member.name, member.epoch)]
        for each in (member, *others):  # what was said before it came up it has not heard, nor others
            if each.suspected:
                commands.append(Suspect(each.name, each.epoch, True))
            if each.leaving:
                commands.append(Leaving(each.name, each.epoch, True))
        return commands

    # ------------------------------------------------------------ its end

    def _lost(self, member: Member, event: Lost, now: float) -> list[Event]:
        return self._lose(member, event.why, now) if member.phase in ALIVE else []

    def _leave(self, member: Member, event: Leave, now: float) -> list[Event]:
        if member.phase is not LifePhase.UP or member.leaving is event.leaving:
            return []
        member.leaving = event.leaving
        return [Leaving(member.name, member.epoch, member.leaving)]

    def _replace(self, member: Member, event: Replace, now: float) -> list[Event]:
        """End a life for the next one, which begins at once: nothing is wrong with it."""
        if member.phase not in ALIVE:
            return []
        member.pause, member.failures = now, 0
        return self._end(member, event.why, now, planned=True)

    def _lose(self, member: Member, why: str, now: float, refused: bool = False) -> list[Event]:
        came_up = member.phase is LifePhase.UP and not refused
        member.losses = 1 if came_up and now - member.since >= STEADY_S else member.losses + 1
        member.failures = 0 if came_up else member.failures + 1
        longest = LONGEST_BY_HAND_S if member.by_hand else LONGEST_BACKOFF_S if came_up else LONGEST_AWAY_S
        doublings = min((member.losses if came_up else member.failures) - 1, MAX_DOUBLINGS)
        member.pause = now + min(BACKOFF_S * 2.0**doublings, longest)
        return self._end(member, why, now)

    def _end(self, member: Member, why: str, now: float, planned: bool = False) -> list[Event]:
        member.phase, member.why, member.due = LifePhase.ENDING, why, inf
        member.suspected = member.deaf = member.leaving = False
        member.planned = planned
        others = self._others(member)
        commands = [Fence(member.name, member.epoch), *self._links.separate(member, others)]
        commands.append(Down(member.name, member.epoch, why, planned))
        for other in others:
            commands += self._check_up(other, now)
        return commands

    def _remove(self, event: Remove, now: float) -> list[Event]:
        """End an instance for good: its present life first, where there is one."""
        member = self.members[event.name]
        member.removed = True
        commands = self._prepared.dismiss(member)
        if member.phase in ALIVE:
            commands += self._end(member, event.why, now, planned=True)
        elif member.phase is not LifePhase.ENDING:
            member.phase, member.due = LifePhase.CLOSED, inf
        return commands + self._drop_if_over(member)

    def _drop_if_over(self, member: Member) -> list[Event]:
        """Forget an instance that was removed once no process of it is left."""
        if not member.removed or member.phase is not LifePhase.CLOSED or member.dismissed:
            return []
        del self.members[member.name]
        self._last_epochs[member.name] = member.newest
        return [Removed(member.name, member.epoch)]

    def _ended(self, member: Member, event: Ended, now: float) -> list[Event]:
        if member.phase is LifePhase.ENDING:
            over = self.closing or member.removed
            member.phase = LifePhase.CLOSED if over else LifePhase.WAITING
            member.due = inf if over else max(now, member.pause)
        return []

    def _quiet(self, member: Member, event: Quiet, now: float) -> list[Event]:
        at_work = event.step_s is not None and member.phase in PRESENT  # may hold its interpreter for as long
        longest = self.silence_s if member.phase in PRESENT else max(self.silence_s, LOADING_SILENCE_S)
        longest = max(longest, find_silence_limit(event.predicted_s)) if at_work else longest
        longest = min(longest, LEAVING_SILENCE_S) if self.closing else longest
        if event.seconds > longest and member.phase in ALIVE:
            return self._lose(member, f"it said nothing for {event.seconds:.1f} s", now)
        if at_work and event.step_s is not None and event.step_s > find_step_limit(event.predicted_s):
            known = f"{event.predicted_s:.2g} s were predicted" if event.predicted_s else "none was predicted"
            return self._lose(member, f"a step of it hangs: it has taken {event.step_s:.1f} s, and {known}", now)
        return self._note_silence(member, event, now) if member.phase in PRESENT else []

    def _note_silence(self, member: Member, event: Quiet, now: float) -> list[Event]:
        """Note if it is silent now, and if its step does not explain that; once it speaks it has a while to be met."""
        commands: list[Event] = []
        expected_s = event.predicted_s if event.step_s is not None else 0.0
        if (event.seconds > max(SUSPECT_S, expected_s)) is not member.suspected:
            member.suspected = not member.suspected
            commands.append(Suspect(member.name, member.epoch, member.suspected))
        if (event.seconds > SUSPECT_S) is not member.deaf:
            member.deaf = not member.deaf
            for other in self._others(member):
                if not member.deaf:
                    self._links.grant_time(member, other, now)
                commands += self._check_up(other, now)
        return commands

    # ------------------------------------------------------------ all

    def _begin(self, event: Begin, now: float) -> list[Event]:
        return [command for member in self.members.values() for command in self._start(member)]

    def _add(self, event: Add, now: float) -> list[Event]:
        if self.closing:
            return []
        last = self._last_epochs.pop(event.name, -1)
        member = self.members[event.name] = Member(event.name, event.by_hand, epoch=last, newest=last)
        return self._start(member)

    def _tick(self, event: Tick, now: float) -> list[Event]:
        commands: list[Event] = []
        for member in self.members.values():
            if member.due <= now:
                commands += self._start(member)
        for link in self._links.list_overdue(now):
            commands += self._part(link, now)
        return commands

    def _part(self, link: PeerLink, now: float) -> list[Event]:
        """Give up two that cannot reach each other, unless one is silent: then time will tell which."""
        if link.one.deaf or link.two.deaf:
            link.postpone(now)
            return []
        younger, elder = link.by_age
        at_fault = self._links.blame(link)
        other = elder if at_fault is younger else younger
        return self._lose(at_fault, f"it and {other.name} could not reach each other", now)

    def _retire(self, event: Retire, now: float) -> list[Event]:
        return self._launch_no_more()

    def _launch_no_more(self) -> list[Event]:
        self.closing = True
        commands: list[Event] = []
        for member in self.members.values():
            commands += self._prepared.dismiss(member)
            if member.phase is LifePhase.WAITING:
                member.phase, member.due = LifePhase.CLOSED, inf
        return commands

    def _close(self, event: CloseAll, now: float) -> list[Event]:
        commands = self._launch_no_more()
        self._links.clear()
        for member in self.members.values():
            if member.phase in ALIVE:
                member.phase = LifePhase.ENDING
                commands.append(Fence(member.name, member.epoch))
        return commands

    _of_a_life: ClassVar[dict[type[Event], Callable[[SupervisorCore, Member, Any, float], list[Event]]]] = {
        Loaded: _loaded,
        Linked: _linked,
        Unlinked: _unlinked,
        Refused: _refused,
        Lost: _lost,
        Leave: _leave,
        LoadNext: _load_next,
        NextLoaded: _next_loaded,
        DropNext: _drop_next,
        Replace: _replace,
        Ended: _ended,
        Quiet: _quiet,
    }
    _of_all: ClassVar[dict[type[Event | Tick], Callable[[SupervisorCore, Any, float], list[Event]]]] = {
        Begin: _begin,
        Add: _add,
        Remove: _remove,
        Retire: _retire,
        CloseAll: _close,
        Tick: _tick,
    }


def find_step_limit(predicted_s: float) -> float:
    """Return the seconds after which a step hangs; ``predicted_s``: for the whole of it, 0.0 if not known."""
    return max(STEP_FLOOR_S, STEP_TIMES * predicted_s) if predicted_s else STEP_UNKNOWN_S


def find_silence_limit(predicted_s: float) -> float:
    """Return the seconds that a step may be silent for, where ``silence_s`` is shorter; see ``find_step_limit``."""
    return STEP_TIMES * predicted_s or STEP_FLOOR_S


STATES: dict[LifePhase, HealthState] = {
    LifePhase.LOADING: "starting",
    LifePhase.MEETING: "starting",
    LifePhase.UP: "up",
    LifePhase.ENDING: "lost",
    LifePhase.WAITING: "lost",
    LifePhase.CLOSED: "closed",
}
