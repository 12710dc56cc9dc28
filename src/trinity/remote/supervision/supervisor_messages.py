"""Events and commands of SupervisorCore, and what it tells of an instance. They never leave this process.

``name`` and ``epoch`` name a life of an instance.
"""

from __future__ import annotations

from typing import Literal

import msgspec

HealthState = Literal["starting", "up", "silent", "leaving", "lost", "closed"]


class InstanceHealth(msgspec.Struct, frozen=True):
    """State of an instance in a process of its own.

    - ``state``: "starting", "up", "silent" (it has said nothing for two seconds; requests go past it), "leaving" (it is
      to have other roles once it is empty; requests go past it), "lost" (it will be started again) or "closed".
    - ``epoch``: how often it was started again; one start more than this in all.
    - ``losses``: in a row, without half a minute of service between them.
    - ``why`` (""): why its last life ended. ``planned``: it ended for a change of roles, and is no loss.
    - ``next_start_s`` (seconds, None): until it is started again, if it is lost.
    """

    name: str
    state: HealthState
    epoch: int
    losses: int = 0
    why: str = ""
    next_start_s: float | None = None
    planned: bool = False


# ---------------------------------------------------------------- events


class Event(msgspec.Struct, frozen=True):
    """Base of events and commands."""


class Begin(Event, frozen=True):
    """Start every instance."""


class Loaded(Event, frozen=True):
    """It has loaded its model and can be introduced."""

    name: str
    epoch: int


class Linked(Event, frozen=True):
    """It says that it can reach a peer."""

    name: str
    epoch: int
    peer: str
    peer_epoch: int


class Unlinked(Event, frozen=True):
    """It says that the channel to a peer has ended."""

    name: str
    epoch: int
    peer: str
    peer_epoch: int


class Lost(Event, frozen=True):
    """It could not be started, its channel has ended, or it cannot go on."""

    name: str
    epoch: int
    why: str


class Refused(Event, frozen=True):
    """It says that it and a peer cannot work together.

    ``for_good``: no later life of the younger can either, as it loads other weights or layouts.
    """

    name: str
    epoch: int
    why: str
    peer: str
    peer_epoch: int
    for_good: bool = True


class Ended(Event, frozen=True):
    """Its process is gone for certain."""

    name: str
    epoch: int


class Quiet(Event, frozen=True):
    """It has said nothing for so many seconds.

    - ``step_s`` (None): for how long a lane has been at a step, by its last word of that; None: at no long one.
    - ``predicted_s`` (seconds): predicted for that step; 0.0: not known.
    """

    name: str
    epoch: int
    seconds: float
    step_s: float | None = None
    predicted_s: float = 0.0


class Leave(Event, frozen=True):
    """Its life is to end once nothing is left there, for one with other roles; or it is to go on after all."""

    name: str
    epoch: int
    leaving: bool = True


class LoadNext(Event, frozen=True):
    """Its next life is to load beside it, up to where it would need what this one has."""

    name: str
    epoch: int


class NextLoaded(Event, frozen=True):
    """The life that loads beside the present one of its name waits for the word to go on."""

    name: str
    epoch: int


class DropNext(Event, frozen=True):
    """It goes on as it is: the life that was prepared to follow it is not wanted."""

    name: str
    epoch: int


class Replace(Event, frozen=True):
    """Its life is to end now, for the next one: it is not lost."""

    name: str
    epoch: int
    why: str


class Add(Event, frozen=True):
    """Start one more instance, of a name that no other has. ``by_hand``: as ``Member`` has it."""

    name: str
    by_hand: bool


class Remove(Event, frozen=True):
    """End an instance's life, if it has one, for good; answered by Removed. It is not lost."""

    name: str
    why: str


class Retire(Event, frozen=True):
    """Start nothing any more."""


class CloseAll(Event, frozen=True):
    """End everything."""


OfALife = (
    Loaded | Linked | Unlinked | Refused | Lost | Leave | LoadNext | NextLoaded | DropNext | Replace | Ended | Quiet
)

# ---------------------------------------------------------------- commands


class Launch(Event, frozen=True):
    """Start and load a life, or reach one that runs already, at its address; answered by Loaded or Lost.

    ``waits``: up to where it would need what the present life of its name has; answered by NextLoaded or Lost.
    """

    name: str
    epoch: int
    waits: bool = False


class Proceed(Event, frozen=True):
    """Give a life that was prepared the word to go on: no other of its name is left. Answered by Loaded or Lost."""

    name: str
    epoch: int


class NextLost(Event, frozen=True):
    """A life that was prepared is lost, and the present one of its name goes on."""

    name: str
    epoch: int
    why: str


class Introduce(Event, frozen=True):
    """Have ``name`` connect to a peer; answered by Linked or Refused."""

    name: str
    epoch: int
    peer: str
    peer_epoch: int


class Separate(Event, frozen=True):
    """Tell ``name`` that a peer is lost, even if its channel is open: it may be frozen."""

    name: str
    epoch: int
    peer: str
    peer_epoch: int


class Fence(Event, frozen=True):
    """Kill a life; answered by Ended."""

    name: str
    epoch: int


class Up(Event, frozen=True):
    """It serves from now on."""

    name: str
    epoch: int


class Down(Event, frozen=True):
    """It is lost, or could not be started again; or its end was ``planned``."""

    name: str
    epoch: int
    why: str
    planned: bool = False


class Removed(Event, frozen=True):
    """It has ended for certain, and does not come back."""

    name: str
    epoch: int


class Leaving(Event, frozen=True):
    """Send it nothing new where another one has its stages, or as before."""

    name: str
    epoch: int
    leaving: bool


class Suspect(Event, frozen=True):
    """Route requests past it, or no longer."""

    name: str
    epoch: int
    suspected: bool
