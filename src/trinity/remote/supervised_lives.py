"""Records of SupervisorCore: phases of an instance's life, an instance, its next life, and the link of two."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf


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
class Pair:
    """Link of two instances that have loaded: who says that it is there, and when it must be."""

    due: float
    said: set[str]
