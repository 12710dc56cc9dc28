"""Every order of events of a few requests on real cores, with the death of one instance: a search over states.

A core has no clock and does no I/O, so what it does follows from the events that it has handled, in their order. A
state of the whole is: the state of each core with its steps and pulls in flight, and what is on the way in each
channel. ``Search`` walks all of them that can be reached. Its moves are:

- a core takes the next message of any channel to it, or the end of a step or of a pull of its own;
- the user says the next of ``asked``;
- the victim dies, once, anywhere. What is on the way to it is gone. Each survivor hears of that at any later moment:
  what it has not taken from the victim by then is cut off, so each channel is cut at every place;
- with ``back``, it returns with its next epoch, once the front end knows of the death. Each survivor's channel leads to
  the new life from any moment on, also before it knows that the old one is dead; it hears of the new one after that.

No order is left out. Where two orders lead to equal states, all that follows is the same, and it is walked once. Most
do: two events at different cores commute, since each takes the head of a channel that only its core reads, and adds
behind the tails of channels that only its core writes (``commutes`` takes both orders). Whether states are equal is
told by all that they hold (``local_states.freeze``).

In each state where nothing is left to do, each request has ended and nothing of it is left anywhere; a death and a
return may still come there. In all states the invariants of ``support.virtual.checks`` hold for each core, and each
reader gets every token once, in order, and one end. What blocks hold is not followed here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from support.local_states import Events, FrontEnd, Instance, LocalStates
from trinity.core import InstanceCore
from trinity.core.failure_policy import NO_RECOVERY, FailurePolicy
from trinity.core.instance.settings import Settings
from trinity.core.messages import FRONTEND, PeerDown, Value
from trinity.core.routing.router import RoundRobin, RoutingPolicy

DEAD = -1


class Whole(NamedTuple):
    """A state of everything. By actor: ``local`` state, ``told`` of the death (1) and of the return (2), ``linked``:
    its channel leads to the victim's new life. ``on_the_way``: messages by channel, source times actors plus target;
    the victim's new life comes last among the sources.
    """

    local: tuple[int, ...]
    on_the_way: tuple[tuple[int, ...], ...]
    asked: int = 0
    life: int = 0
    told: tuple[int, ...] = ()
    linked: tuple[bool, ...] = ()


class Search:
    """All states of ``settings`` serving ``asked``, with the death of ``victim`` ("" for none) and its return.

    ``becomes``: settings of the next life, where its end is planned. ``failures`` and ``spread``: of the front end.
    ``routing``: makes the policy of each instance.
    There is no clock, so that nothing may wait for a time in it (``wait_s=0``).
    """

    def __init__(
        self,
        settings: Sequence[Settings],
        asked: Sequence[Value],
        victim: str = "",
        back: bool = False,
        failures: FailurePolicy = NO_RECOVERY,
        spread: int = 1,
        becomes: Settings | None = None,
        routing: Callable[[], RoutingPolicy] = RoundRobin,
    ) -> None:
        self.names = (FRONTEND, *(each.name for each in settings))
        self.asked, self.back = asked, back
        self.victim = self.names.index(victim) if victim else -1
        self.count = len(self.names)
        self.events = Events()
        self._announcements = [self._number(InstanceCore(each).announcement()) for each in (settings[0], *settings)]
        self.lives = {(0, 0): self._states(lambda: FrontEnd(settings, failures, spread))}
        for place, own in enumerate(settings, start=1):
            peers = [each for each in settings if each is not own]
            self.lives[place, 0] = self._states(partial(Instance, own, peers, routing))
        if victim:
            again = replace(becomes or next(each for each in settings if each.name == victim), epoch=1)
            self.lives[self.victim, 1] = self._states(partial(Instance, again, (), routing))
            self._return = self._number(InstanceCore(again).announcement())
            self._death = self._number(PeerDown(victim, planned=becomes is not None))
        self.ends: Counter[tuple[tuple[str, str], ...]] = Counter()
        self.moves = 0

    def start(self) -> Whole:
        no, quiet = (0,) * self.count, ((),) * (self.count * (self.count + 1))
        local = tuple(self.lives[place, 0].start for place in range(self.count))
        return Whole(local, quiet, told=no, linked=(False,) * self.count)

    def _number(self, value: Value) -> int:
        return self.events.number(value)

    def _states(self, make: Callable[[], Instance | FrontEnd]) -> LocalStates:
        return LocalStates(make, self.names, self.events)

    def states(self, place: int, state: Whole) -> LocalStates:
        return self.lives[place, state.life if place == self.victim else 0]

    def handle(self, state: Whole, place: int, event: int) -> Whole:
        """Have an actor handle an event, and put what it sends on the way."""
        after, sent = self.states(place, state).step(state.local[place], event)
        local, channels = _put(state.local, place, after), state.on_the_way
        source = self.count if place == self.victim and state.life else place
        for to, message in sent:
            if to != self.victim or not state.life or (state.linked[place] and local[to] != DEAD):
                channel = source * self.count + to
                channels = _put(channels, channel, (*channels[channel], message))
        return state._replace(local=local, on_the_way=channels)

    def next(self, state: Whole) -> list[tuple[int, str, Whole]]:
        """List the moves from here: the actor that it is at, its name and what follows; -1 where it may not come."""
        found: list[tuple[int, str, Whole]] = []
        if state.asked < len(self.asked):
            event = self._number(self.asked[state.asked])
            found.append((0, f"the user: {event}", self.handle(state._replace(asked=state.asked + 1), 0, event)))
        lost = self.names[self.victim] if state.life else ""
        for place, local in enumerate(state.local):
            if local == DEAD:
                continue
            for source in range(self.count + 1):
                number = source * self.count + place
                channel = state.on_the_way[number]
                if channel and self._may_take(state, source, place):
                    taken = state._replace(on_the_way=_put(state.on_the_way, number, channel[1:]))
                    found.append((place, f"{source} to {place}: {channel[0]}", self.handle(taken, place, channel[0])))
            for event in self.states(place, state).results(local, lost):
                found.append((place, f"{place}: {event}", self.handle(state, place, event)))
        return found + self._deaths(state)

    def _may_take(self, state: Whole, source: int, place: int) -> bool:
        """The new life's words come after those of its death and, at the front end, after that of its return."""
        return source < self.count or state.told[place] >= (1 if place else 2)

    def _deaths(self, state: Whole) -> list[tuple[int, str, Whole]]:
        if self.victim < 0:
            return []
        found, victim = [], self.victim
        if not state.life:
            found.append((-1, "death", self._die(state)))
            return found
        if self.back and state.local[victim] == DEAD and state.told[0]:
            local = _put(state.local, victim, self.lives[victim, 1].start)
            found.append((-1, "return", state._replace(local=local)))
        for place in range(self.count):
            if place == victim:
                continue
            name, linked = self.names[place], state.linked[place]
            if not state.told[place]:
                found.append((place, f"{name} hears of the death", self._hear(state, place)))
            elif state.told[place] == 1 and linked:
                after = state._replace(told=_put(state.told, place, 2))
                found.append((place, f"{name} hears of the return", self.handle(after, place, self._return)))
            if state.local[victim] != DEAD and not linked:
                found.append((victim, f"{name} is linked", self._link(state, place)))
        return found

    def _die(self, state: Whole) -> Whole:
        channels = list(state.on_the_way)
        for place in range(self.count):
            channels[place * self.count + self.victim] = ()
        return state._replace(life=1, local=_put(state.local, self.victim, DEAD), on_the_way=tuple(channels))

    def _hear(self, state: Whole, place: int) -> Whole:
        """Cut the victim's channel to this survivor here."""
        cut = _put(state.on_the_way, self.victim * self.count + place, ())
        told = _put(state.told, place, 1)
        return self.handle(state._replace(on_the_way=cut, told=told), place, self._death)

    def _link(self, state: Whole, place: int) -> Whole:
        """Lead a survivor's channel to the new life, which hears of it: that one may offer to it from now on."""
        linked = state._replace(linked=_put(state.linked, place, True))
        return self.handle(linked, self.victim, self._announcements[place]) if place else linked

    def check_quiet(self, state: Whole) -> None:
        """Check that nothing of any request is left, where nothing but a death or a return can happen any more."""
        kept = []
        for place, local in enumerate(state.local):
            if local != DEAD and (problem := self.states(place, state).problems[local]):
                kept.append(problem)
        assert not kept, "; ".join(kept)
        ends = self.lives[0, 0].ends[state.local[0]]
        self.ends[tuple(sorted(ends.items()))] += 1

    def lead(self, state: Whole, may: Callable[[str], bool]) -> Whole:
        """Take the first move that ``may`` be taken, by its name, until there is none: a state to begin from."""
        while (
            after := next((each for place, name, each in self.next(state) if place >= 0 and may(name)), None)
        ) is not None:
            state = after
        return state

    def run(self, limit: int = 10_000_000, first: Whole | None = None) -> dict[Whole, tuple[Whole, str] | None]:
        """Walk all states from the ``first`` on; return them. Raises ``AssertionError`` with the way to a wrong one."""
        first = first or self.start()
        came: dict[Whole, tuple[Whole, str] | None] = {first: None}
        ahead = deque([first])
        while ahead:
            state = ahead.popleft()
            try:
                found = self.next(state)
                if not any(place >= 0 for place, _, _ in found):
                    self.check_quiet(state)
            except Exception as error:
                for name in way(came, state):
                    error.add_note(self.in_words(name))
                raise
            self.moves += len(found)
            for _, name, after in found:
                if after not in came:
                    came[after] = (state, name)
                    ahead.append(after)
            assert len(came) <= limit, f"more than {limit} states"
        return came

    def commutes(self, state: Whole) -> int:
        """Take both orders of each two events at different cores; a link is one of two. Returns how many there were."""
        moves = [each for each in self.next(state) if each[0] >= 0 and not each[1].endswith("is linked")]
        pairs = 0
        for number, (place, name, after) in enumerate(moves):
            for other, its_name, its_after in moves[number + 1 :]:
                if other != place:
                    one = next(each for _, found, each in self.next(after) if found == its_name)
                    two = next(each for _, found, each in self.next(its_after) if found == name)
                    assert one == two, f"{self.in_words(name)} and {self.in_words(its_name)} do not commute"
                    pairs += 1
        return pairs

    def in_words(self, move: str) -> str:
        """Replace the numbers in the name of a move by what they stand for."""
        where, _, event = move.rpartition(": ")
        if not event.isdigit():
            return move
        for place, name in enumerate((*self.names, self.names[self.victim])):
            where = where.replace(str(place), name)
        return f"{where}: {self.events[int(event)]}"


def way(came: dict[Whole, tuple[Whole, str] | None], state: Whole) -> list[str]:
    """List the moves that led to this state."""
    found: list[str] = []
    while (before := came[state]) is not None:
        state, name = before
        found.append(name)
    return found[::-1]


def _put(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])
