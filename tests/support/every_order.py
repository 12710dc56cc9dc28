"""Every order of events of a few requests on real cores, with the death of one instance: a search over states.

A core has no clock and does no I/O, so what it does follows from the events that it has handled, in their order. A
state of the whole is: the state of each core with its steps and pulls in flight, and what is on the way in each
channel. ``search`` walks all of them that can be reached. Its moves are:

- a core takes the next message of any channel to it, or the end of a step or of a pull of its own;
- the user submits (or cancels) the next of ``asked``;
- the victim dies, once, anywhere. What is on the way to it is gone. Each survivor hears of that at any later moment:
  what it has not taken from the victim by then is cut off, so each channel is cut at every place;
- the victim comes back with its next epoch, once the front end knows of the death. Each survivor's channel leads to the
  new life from any moment on, also before it knows that the old one is dead; it hears of the new one after that.

Two orders of events at different cores lead to the same state, whatever they are: each takes the head of a channel
that only it reads, and adds behind the tails of channels that only it writes. So it is enough to take them one after
the other, and states that were seen are not walked again: that leaves out orders, but no state, and each order of all
others leads through states that are looked at. ``test_events_at_different_cores_commute`` takes both orders of every
such pair. Equal states of a core (``freeze``: by their content) are one, however they came about, and a step of a core
from one of them is computed once.

In each state where nothing is left to do, each request has ended and nothing of it is left anywhere. In all of them
the invariants of ``trinity.testing.checks`` hold for each core, and its reader gets each token once and in order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import msgspec

from trinity.core import InstanceCore
from trinity.core.frontend import Deliver, End, FrontendCore
from trinity.core.instance.settings import Settings
from trinity.core.messages import (
    FRONTEND,
    Failure,
    PeerDown,
    Pull,
    Pulled,
    Sampled,
    Send,
    Step,
    Stepped,
    Value,
)
from trinity.core.routing import RoundRobin
from trinity.testing.checks import check_forgotten, check_state

DEAD = -1


def freeze(value: Any) -> Any:
    """Turn any state into nested tuples: equal for equal contents, in their order where that may matter."""
    if value is None or isinstance(value, (str, int, float, bytes, Enum)):
        return value
    if isinstance(value, (tuple, list, deque)):
        return tuple(map(freeze, value))
    if isinstance(value, dict):
        return tuple((freeze(key), freeze(each)) for key, each in value.items())
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(repr, value)))
    if isinstance(value, msgspec.Struct):
        return type(value).__name__, tuple(freeze(getattr(value, name)) for name in value.__struct_fields__)
    if is_dataclass(value):
        return type(value).__name__, tuple(freeze(getattr(value, each.name)) for each in fields(value))
    if callable(value) or type(value).__name__ == "count":
        return repr(value) if type(value).__name__ == "count" else None
    return type(value).__name__, freeze({k: v for k, v in _members(value) if k not in SKIPPED})


SKIPPED = {"out", "_out", "_queues", "_batches", "settings"}  # an answer, other names for the same, what never changes


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "__dict__"):
        yield from vars(value).items()
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)


class Instance:
    """One life of an instance: its core, and the steps and pulls that its shell has in flight."""

    def __init__(self, settings: Settings, peers: Sequence[Settings]) -> None:
        self.core = InstanceCore(settings, RoundRobin())
        self.flights: dict[str, deque[Step]] = {lane: deque() for lane in settings.lanes}
        self.pulls: dict[tuple[str, int], Pull] = {}
        for each in (settings, *peers):
            self.core.handle(InstanceCore(each).announcement(), 0.0)

    def handle(self, event: Value) -> list[Send]:
        if isinstance(event, Stepped):
            self.flights[event.lane].popleft()
        elif isinstance(event, Pulled):
            del self.pulls[event.offer, event.part]
        commands = self.core.handle(event, 0.0)
        for command in commands:
            if isinstance(command, Step):
                self.flights[command.lane].append(command)
            elif isinstance(command, Pull):
                self.pulls[command.offer, command.part] = command
        check_state(self.core.state)
        return [each for each in commands if isinstance(each, Send)]

    def results(self, lost: str) -> list[Value]:
        """List what may end next: the first step of each lane, every pull; one from ``lost`` may fail as well."""
        found: list[Value] = [_stepped(flight[0]) for flight in self.flights.values() if flight]
        for pull in self.pulls.values():
            found.append(Pulled(pull.offer, pull.part, None, {"source": pull.source}))
            if pull.source == lost:
                found.append(Pulled(pull.offer, pull.part, Failure("MigrationError", "the source is lost")))
        return found

    def content(self) -> Any:
        return freeze((self.core.state, self.flights, self.pulls))

    def problem(self) -> str:
        """Say what is left of any request; "" for nothing."""
        try:
            check_forgotten(self.core.settings.name, self.core.state)
        except AssertionError as error:
            return str(error)
        return ""


def _stepped(step: Step) -> Stepped:
    rows = [row.request for row in step.prefills if row.last] + list(step.decodes)
    return Stepped(step.id, step.lane, {request: Sampled(1) for request in rows})


class FrontEnd:
    """The front end, and what each reader has got of it."""

    def __init__(self, peers: Sequence[Settings]) -> None:
        self.core = FrontendCore(RoundRobin())
        self.delivered: Counter[str] = Counter()
        self.ends: dict[str, str] = {}
        for each in peers:
            self.core.handle(InstanceCore(each).announcement(), 0.0)

    def handle(self, event: Value) -> list[Send]:
        commands = self.core.handle(event, 0.0)
        for command in commands:
            if isinstance(command, Deliver):
                assert command.request not in self.ends, f"a token of {command.request} after its end"
                assert command.index == self.delivered[command.request], f"{command} out of order"
                self.delivered[command.request] += 1
            elif isinstance(command, End):
                assert command.request not in self.ends, f"{command.request} ended twice"
                whole = command.finished is not None and self.delivered[command.request] == command.finished.count
                assert whole or command.reason not in ("length", "stop"), f"{command} and tokens are missing"
                assert command.failure is not None or command.reason != "error", f"{command} is not typed"
                self.ends[command.request] = command.failure.error if command.failure else command.reason
        return [each for each in commands if isinstance(each, Send)]

    def results(self, lost: str) -> list[Value]:
        return []

    def content(self) -> Any:
        return freeze((self.core, self.delivered, self.ends))

    def problem(self) -> str:
        return f"the front end still waits for {sorted(self.core.entries)}" if self.core.entries else ""


class Events:
    """All events by number, equal ones once."""

    def __init__(self) -> None:
        self._values: list[Value] = []
        self._numbers: dict[str, int] = {}

    def __getitem__(self, number: int) -> Value:
        return self._values[number]

    def number(self, value: Value) -> int:
        number = self._numbers.setdefault(repr(value), len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number


class LocalStates:
    """The states of one life of one actor, each with a shortest known history, and the steps between them."""

    def __init__(self, make: Callable[[], Instance | FrontEnd], names: Sequence[str], events: Events) -> None:
        self._make, self._names, self._events = make, names, events
        self._numbers: dict[Any, int] = {}
        self._histories: list[tuple[Value, ...]] = []
        self._moves: dict[tuple[int, int], tuple[int, list[tuple[int, int]]]] = {}
        self._results: dict[tuple[int, str], list[int]] = {}
        self.problems: list[str] = []
        self.ends: list[dict[str, str]] = []
        self.start = self._number(make(), ())

    def __len__(self) -> int:
        return len(self._histories)

    def _number(self, actor: Instance | FrontEnd, history: tuple[Value, ...]) -> int:
        number = self._numbers.setdefault(actor.content(), len(self._numbers))
        if number == len(self._histories):
            self._histories.append(history)
            self.problems.append(actor.problem())
            self.ends.append(dict(actor.ends) if isinstance(actor, FrontEnd) else {})
        return number

    def at(self, number: int) -> Instance | FrontEnd:
        """Make the actor anew in this state."""
        actor = self._make()
        for event in self._histories[number]:
            actor.handle(event)
        return actor

    def step(self, number: int, event: int) -> tuple[int, list[tuple[int, int]]]:
        """Handle an event. Returns the next state, and what was sent: actor and event."""
        found = self._moves.get((number, event))
        if found is None:
            actor, value = self.at(number), self._events[event]
            try:
                commands = actor.handle(value)
            except Exception as error:
                for each in (*self._histories[number], value):
                    error.add_note(str(each))
                raise
            sent = [(self._names.index(each.to), self._events.number(each.message)) for each in commands]
            found = self._moves[number, event] = (self._number(actor, (*self._histories[number], value)), sent)
        return found

    def results(self, number: int, lost: str) -> list[int]:
        """List the steps and pulls that may end next, of an actor in this state."""
        if (number, lost) not in self._results:
            self._results[number, lost] = [self._events.number(each) for each in self.at(number).results(lost)]
        return self._results[number, lost]


class Whole(NamedTuple):
    """A state of everything. By actor: ``local`` state, ``told`` of the death (1) and of the return (2), ``linked``:
    its channel leads to the victim's new life. ``on_the_way``: messages by channel, source times actors plus target; the
    victim's new life comes last among the sources.
    """

    local: tuple[int, ...]
    on_the_way: tuple[tuple[int, ...], ...]
    asked: int = 0
    life: int = 0
    told: tuple[int, ...] = ()
    linked: tuple[bool, ...] = ()


class Search:
    """All states of ``settings`` serving ``asked``, with the death of ``victim`` ("" for none) and its return."""

    def __init__(self, settings: Sequence[Settings], asked: Sequence[Value], victim: str = "", back: bool = False) -> None:
        self.names = (FRONTEND, *(each.name for each in settings))
        self.asked, self.back = asked, back
        self.victim = self.names.index(victim) if victim else -1
        self.count = len(self.names)
        self.events = Events()
        self._announcements = [self._number(InstanceCore(each).announcement()) for each in (settings[0], *settings)]
        self.lives = {(0, 0): self._states(lambda: FrontEnd(settings))}
        for place, own in enumerate(settings, start=1):
            peers = [each for each in settings if each is not own]
            self.lives[place, 0] = self._states(partial(Instance, own, peers))
        if victim:
            again = replace(next(each for each in settings if each.name == victim), epoch=1)
            self.lives[self.victim, 1] = self._states(partial(Instance, again, ()))
            self._return = self._number(InstanceCore(again).announcement())
            self._death = self._number(PeerDown(victim))
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

    def run(self, limit: int = 10_000_000) -> int:
        """Walk all states; return their number. Raises ``AssertionError`` with the way to the one that is wrong."""
        first = self.start()
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
        return len(came)

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
