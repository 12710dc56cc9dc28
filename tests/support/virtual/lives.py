"""Lives: instances and front ends of a virtual cluster that die, instances that come back, and channels between them.

A death cuts each of the instance's channels at a place of its own: what it says after that moment is lost, and what was
said to it is lost with it. Each survivor hears of the death after all that it will ever hear of that life. The next
life has the next epoch. Each survivor's channel leads there from a moment of its own, perhaps before it has heard of
the death; then each of the two hears that the other is up. What the new life says to a survivor comes after the news of
the death, and a front end hears nothing of it before it knows that it is up. A front end has one life.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from random import Random
from typing import NamedTuple

from trinity.core.instance.settings import Settings
from trinity.core.messages import FRONTEND, PeerDown, PeerRemoved, Value

CUT = (-inf, 0)  # of a channel that has lost a message: it will lose all that follow


class Kill(NamedTuple):
    """To a shell of an instance or a front end: die, and come back after ``back_s``; never where that is None.

    ``becomes``: settings of the next life, where the end is planned so that it has other roles. ``removed``: all are
    told that no life follows; one that comes all the same has been added under the name that is free then.
    """

    back_s: float | None
    becomes: Settings | None = None
    removed: bool = False

    def news(self, name: str, epoch: int) -> list[Value]:
        """List what a survivor hears of the end of this life."""
        planned = self.becomes is not None
        return [PeerDown(name, planned=planned), *([PeerRemoved(name, epoch)] if self.removed else [])]


class Departure(NamedTuple):
    """To the shell of another: this instance's present life is to end once it is empty."""

    name: str


class Return(NamedTuple):
    """To a dead instance's shell: begin the next life."""


class FrontendArrival(NamedTuple):
    """To the shell of a front end that is not there yet: begin."""


class ChannelOpened(NamedTuple):
    """To a survivor's shell: the channel to this life of ``peer`` is open."""

    peer: str
    epoch: int


class Lives:
    """The lives of all instances: which is the present one of each, and to which one each channel leads.

    ``epochs``: the present or, of a dead instance, the next life. ``news_s``: seconds within which a survivor hears.
    """

    def __init__(
        self, names: tuple[str, ...], draw: Random, news_s: float = 0.3, front_ends: tuple[str, ...] = (FRONTEND,)
    ) -> None:
        self.draw, self.news_s = draw, news_s
        self.front_ends = list(front_ends)
        self.epochs = dict.fromkeys(names, 0)
        self.dead: set[str] = set()
        self.kills = self.lost_messages = 0
        everybody = (*front_ends, *names)
        self._links = {(one, other): 0 for one in everybody for other in everybody if one != other}
        self._cuts: dict[tuple[str, str], tuple[float, int]] = {}
        self._deaf: Counter[tuple[str, str]] = Counter()  # deaths of the second that the first has not heard of
        self._news: dict[tuple[str, str], float] = {}  # the last time at which the first hears of the second

    @property
    def everybody(self) -> tuple[str, ...]:
        """Names of all that there are or were, front ends first."""
        return (*self.front_ends, *self.epochs)

    def plan_cuts(self, name: str, at: float) -> None:
        """Draw, for the death of ``name`` at this time, where each of its channels is cut: shortly before, or long."""
        for other in self.everybody:
            stuck = self.draw.choice([0.0, 0.0, 0.1, 1.0, at])
            self._cut(name, other, at - self.draw.uniform(0.0, stuck), self.draw.choice([0, 0, 1, 2, 5]))

    def hear_all(self, name: str, at: float) -> None:
        """Cut none of the channels of ``name`` before its death at this time."""
        for other in self.everybody:
            self._cut(name, other, at, 1 << 30)

    def _cut(self, name: str, other: str, since: float, more: int) -> None:
        """Cut a channel behind so many ``more`` messages since then; one that has lost any stays as it is."""
        if self._cuts.get((name, other)) != CUT:
            self._cuts[name, other] = (since, more)

    def carries(self, name: str, target: str, now: float) -> bool:
        """Tell whether what ``name`` says to ``target`` now gets there, as far as the two live on."""
        if target in self.dead or self._links.get((name, target), -1) != self.epochs.get(target, 0):
            return False
        since, more = self._cuts.get((name, target), (now, 1))
        if now > since:
            self._cuts[name, target] = (since, more - 1) if more > 0 else CUT
            self.lost_messages += more <= 0
            return more > 0
        return True

    def die(self, name: str) -> list[str]:
        """End the present life. Returns those who will hear of it: they had a channel to it."""
        self.kills += 1
        self.dead.add(name)
        linked = [each for each in self.everybody if self._links.get((each, name)) == self.epochs[name]]
        survivors = [each for each in linked if each not in self.dead]
        self.epochs[name] += 1
        for each in self.everybody:
            self._cuts.pop((name, each), None)
            self._links.pop((name, each), None)
            self._deaf.pop((name, each), None)
        self._deaf.update((each, name) for each in survivors)
        return survivors

    def lose_frontend(self, name: str) -> list[str]:
        """End a front end. Returns the instances that will hear of it: they have a channel to it."""
        survivors = [each for each in self.epochs if each not in self.dead and self.linked(each, name)]
        self.kills += 1
        self.dead.add(name)
        return survivors

    def add_frontend(self, name: str) -> list[str]:
        """Begin a front end. Returns the instances that live, and will have a channel to it."""
        self.front_ends.append(name)
        return [each for each in self.epochs if each not in self.dead]

    def come_back(self, name: str) -> list[str]:
        """Begin the next life. Returns those who live and will have a channel to it."""
        self.dead.remove(name)
        return [each for each in self.everybody if each != name and each not in self.dead]

    def link(self, name: str, peer: str, epoch: int) -> bool:
        """Open the channel between a survivor and a new life; False where that one is over already."""
        if peer in self.dead or self.epochs[peer] != epoch:
            return False
        self._links[name, peer], self._links[peer, name] = epoch, self.epochs.get(name, 0)
        return True

    def linked(self, name: str, peer: str) -> bool:
        """True where the channel leads to the present life of ``peer``."""
        return peer not in self.dead and self._links.get((name, peer)) == self.epochs.get(peer, 0)

    def hear(self, name: str, peer: str) -> None:
        """Note that the news of one death of ``peer`` has come to ``name``."""
        self._deaf[name, peer] -= 1

    def is_deaf(self, name: str, peer: str) -> bool:
        """True where ``peer`` has died and ``name`` has not heard of it yet."""
        return self._deaf[name, peer] > 0

    def next_news(self, name: str, peer: str, after: float) -> float:
        """Draw the time at which ``name`` hears next of the death or the return of ``peer``: one after the other."""
        at = max(after, self._news.get((name, peer), 0.0)) + self.draw.uniform(0.0, self.news_s)
        self._news[name, peer] = at
        return at

    def last_news(self, name: str, peer: str) -> float:
        return self._news.get((name, peer), 0.0)
