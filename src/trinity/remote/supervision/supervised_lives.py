"""Records of SupervisorCore: phases of an instance's life, an instance, its next life, and the links of each two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from trinity.remote.supervision.supervisor_messages import Event, Introduce, Separate

SUSPECT_S = 2.0  # of silence: requests are routed past it, and one that was prepared is not relied on
MEET_S = 30.0  # for two instances that have loaded and speak to be linked
RELINK_S = 2.0  # until one of two that have lost their link must have been heard to be lost
HEARD_S = 2 * SUSPECT_S  # of one that speaks again, to be linked before it counts as one that cannot be reached
PARTIES = 2  # to a link
MOST_UNMET = 3  # lives that could not reach an elder, before it is the elder that is at fault


class LifePhase(Enum):
    """Phases of an instance's life."""

    WAITING = "waiting"  # for its next start
    LOADING = "loading"
    MEETING = "meeting"
    UP = "up"
    ENDING = "ending"  # lost, and its process not known to have ended
    CLOSED = "closed"


PRESENT = (LifePhase.MEETING, LifePhase.UP)
ALIVE = (LifePhase.LOADING, *PRESENT)


@dataclass(slots=True)
class NextLife:
    """A life that is prepared beside the present one of its name, and holds nothing that the name stands for.

    ``prepared``: it waits for the word to go on. ``suspected``: it waits, and has said nothing of late.
    """

    epoch: int
    prepared: bool = False
    suspected: bool = False


@dataclass(slots=True)
class Member:
    """Record of one instance."""

    name: str
    by_hand: bool
    phase: LifePhase = LifePhase.WAITING
    epoch: int = -1
    newest: int = -1  # epoch of the last life that was launched, also of one that was prepared for nothing
    next: NextLife | None = None
    dismissed: set[int] = field(default_factory=set)  # epochs of such, until they have ended
    born: int = 0  # order of loading: of two that do not get on the younger goes
    since: float = -inf  # when it came up
    due: float = inf  # of its next start
    losses: int = 0
    failures: int = 0  # in a row to come up
    unmet: int = 0  # younger lives in a row that could not reach it
    suspected: bool = False  # silent without a reason: requests go past it
    deaf: bool = False  # silent, for whatever reason: nobody waits to meet it
    leaving: bool = False
    planned: bool = False  # the end that its next start follows
    removed: bool = False  # no life follows the present one
    why: str = ""
    pause: float = 0.0


@dataclass(slots=True)
class PeerLink:
    """Link of two instances that have loaded: who says that it is there, and when it must be (``due``, clock time)."""

    one: Member
    two: Member
    due: float
    said: set[str] = field(default_factory=set)

    @property
    def met(self) -> bool:
        """True once both say that it is there."""
        return len(self.said) == PARTIES

    @property
    def by_age(self) -> tuple[Member, Member]:
        """The younger of the two, and the elder."""
        return (self.one, self.two) if self.one.born > self.two.born else (self.two, self.one)

    def confirm(self, member: Member) -> None:
        """Note that one of the two can reach the other."""
        self.said.add(member.name)
        if self.met:
            self.due, self.one.unmet, self.two.unmet = inf, 0, 0

    def expect_loss(self, now: float) -> None:
        """Note that one of the two can reach the other no more: soon one must have been heard to be lost."""
        self.due = min(self.due, now + RELINK_S)

    def postpone(self, now: float) -> None:
        """Wait for a link of which one side is silent: time will tell which of the two is at fault."""
        self.due = now + (RELINK_S if self.met else MEET_S)


class PeerLinks:
    """Links of the instances that have loaded and not ended, each to every other."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, str], PeerLink] = {}

    @property
    def due(self) -> float:
        """Clock time at which the first of them is overdue; inf for never."""
        return min((link.due for link in self._links.values()), default=inf)

    def find(self, one: Member, two: Member) -> PeerLink | None:
        return self._links.get(_key(one, two))

    def introduce(self, member: Member, others: Sequence[Member], now: float) -> list[Event]:
        """Have an instance that has loaded and each of the others connect to each other."""
        commands: list[Event] = []
        for other in others:
            self._links[_key(member, other)] = PeerLink(member, other, now + MEET_S)
            for one, two in ((member, other), (other, member)):
                commands.append(Introduce(one.name, one.epoch, two.name, two.epoch))
        return commands

    def separate(self, member: Member, others: Sequence[Member]) -> list[Event]:
        """Drop the links of an instance whose life ends, and tell the others."""
        for other in others:
            self._links.pop(_key(member, other), None)
        return [Separate(other.name, other.epoch, member.name, member.epoch) for other in others]

    def has_met(self, member: Member, other: Member) -> bool:
        """Tell whether two have met, or the other is silent now, at work or not: it is met later."""
        return other.deaf or self._links[_key(member, other)].met

    def grant_time(self, member: Member, other: Member, now: float) -> None:
        """Give an instance that speaks again a while to be linked."""
        link = self._links[_key(member, other)]
        link.due = max(link.due, now + HEARD_S)

    def list_overdue(self, now: float) -> Iterator[PeerLink]:
        """List the links that must be there by now, but those that are dropped meanwhile."""
        for key, link in list(self._links.items()):
            if link.due <= now and key in self._links:
                yield link

    def blame(self, link: PeerLink) -> Member:
        """Choose which of two that cannot reach each other goes: the elder once nobody has reached it several times."""
        younger, elder = link.by_age
        own = [each for each in self._links.values() if younger is each.one or younger is each.two]
        elder.unmet += sum(not each.met for each in own) <= 1  # who reaches several others no more is at fault itself
        return elder if elder.unmet >= MOST_UNMET else younger

    def clear(self) -> None:
        """Drop all, as everything ends."""
        self._links.clear()


def _key(one: Member, two: Member) -> tuple[str, str]:
    return (one.name, two.name) if one.name < two.name else (two.name, one.name)
