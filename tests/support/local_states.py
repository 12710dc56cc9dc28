"""States of one core with its shell, found by handling events: equal ones once, each step computed once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec

from support.virtual.checks import check_forgotten, check_state
from trinity.core import InstanceCore
from trinity.core.failure_policy import NO_RECOVERY, FailurePolicy
from trinity.core.frontend import Abort, Deliver, End, FrontendCore, FrontendOptions
from trinity.core.frontend.messages import MoveEnd, MoveRequest
from trinity.core.instance.settings import Settings
from trinity.core.messages import (
    Collect,
    Collected,
    Failure,
    Pull,
    Pulled,
    Sampled,
    Send,
    Step,
    Stepped,
    Value,
)
from trinity.core.routing.router import RoundRobin, RoutingPolicy


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

    def __init__(
        self, settings: Settings, peers: Sequence[Settings], routing: Callable[[], RoutingPolicy] = RoundRobin
    ) -> None:
        self.core = InstanceCore(settings, routing())
        self.flights: dict[str, deque[Step]] = {lane: deque() for lane in settings.lanes}
        self.pulls: dict[tuple[str, int], Pull] = {}
        self.copies: dict[str, Collect] = {}
        for each in (settings, *peers):
            self.core.handle(InstanceCore(each).announcement(), 0.0)

    def handle(self, event: Value) -> list[Send]:
        if isinstance(event, Stepped):
            self.flights[event.lane].popleft()
        elif isinstance(event, Pulled):
            del self.pulls[event.offer, event.part]
        elif isinstance(event, Collected):
            del self.copies[event.request]
        commands = self.core.handle(event, 0.0)
        for command in commands:
            if isinstance(command, Step):
                self.flights[command.lane].append(command)
            elif isinstance(command, Pull):
                self.pulls[command.offer, command.part] = command
            elif isinstance(command, Collect):
                self.copies[command.request] = command
        check_state(self.core.state)
        return [each for each in commands if isinstance(each, Send)]

    def results(self, lost: str) -> list[Value]:
        """List what may end next: the first step of each lane, every copy, every pull.

        One from the first life of ``lost`` may fail.
        """
        found: list[Value] = [_stepped(flight[0]) for flight in self.flights.values() if flight]
        found += [Collected(request) for request in self.copies]
        for pull in self.pulls.values():
            found.append(Pulled(pull.offer, pull.part, None, {"source": pull.source}))
            if pull.source == lost and not pull.offer.startswith(f"{lost}.1:"):  # what its next life has offered
                fields = {"source": pull.source, "kind": pull.kind, "cause": "PeerLost"}  # as connectors say it
                found.append(Pulled(pull.offer, pull.part, Failure("MigrationError", "the source is lost", fields)))
        return found

    def content(self) -> Any:
        return freeze((self.core.state, self.flights, self.pulls, self.copies))

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

    def __init__(self, peers: Sequence[Settings], failures: FailurePolicy = NO_RECOVERY, spread: int = 1) -> None:
        self.core = FrontendCore(RoundRobin(), FrontendOptions(failures=failures, spread=spread))
        self.delivered: Counter[str] = Counter()
        self.ends: dict[str, str] = {}
        self.given_up: set[str] = set()
        self.asked: Counter[str] = Counter()  # moves without an answer
        for each in peers:
            self.core.handle(InstanceCore(each).announcement(), 0.0)

    def handle(self, event: Value) -> list[Send]:
        if isinstance(event, Abort):
            self.given_up.add(event.request)
        elif isinstance(event, MoveRequest):
            self.asked[event.request] += 1
        commands = self.core.handle(event, 0.0)
        for command in commands:
            if isinstance(command, Deliver):
                assert command.request not in self.ends, f"a token of {command.request} after its end"
                assert command.index == self.delivered[command.request], f"{command} out of order"
                self.delivered[command.request] += 1
            elif isinstance(command, MoveEnd):
                self.asked[command.request] -= 1
                assert self.asked[command.request] >= 0, f"{command} again"
            elif isinstance(command, End):
                assert command.request not in self.ends, f"{command.request} ended twice"
                whole = command.finished is not None and self.delivered[command.request] == command.finished.count
                whole = whole or command.request in self.given_up
                assert whole or command.reason not in ("length", "stop"), f"{command} and tokens are missing"
                assert command.failure is not None or command.reason != "error", f"{command} is not typed"
                typed = command.failure.error if command.failure else command.reason
                self.ends[command.request] = command.reason if command.reason != "error" else typed
        return [each for each in commands if isinstance(each, Send)]

    def results(self, lost: str) -> list[Value]:
        return []

    def content(self) -> Any:
        return freeze((self.core, self.delivered, self.ends, self.given_up, +self.asked))

    def problem(self) -> str:
        waits = sorted(self.core.entries) or sorted(+self.asked)
        return f"the front end still waits for {waits}" if waits else ""


class Events:
    """All events by number, equal ones once."""

    def __init__(self) -> None:
        self._values: list[Value] = []
        self._numbers: dict[str, int] = {}

    def __getitem__(self, number: int) -> Value:
        return self._values[number]

    def all(self) -> tuple[Value, ...]:
        return tuple(self._values)

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
