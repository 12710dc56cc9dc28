"""EventLoop: runs the cores of a whole placement under a virtual clock, without tensors, threads or sockets.

It handles one event at a time, earliest first; of equal times the one posted first. Subclasses decide how long
messages, steps and pulls take and what they return: ``trinity.simulation.cluster_model`` by a cost model,
the tests' ``VirtualCluster`` (``tests/support/virtual``) at random.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from typing import Any

from trinity.core import InstanceCore
from trinity.core.frontend import Deliver, End, FrontendCore, FrontendOptions
from trinity.core.instance.state import Settings
from trinity.core.messages import (
    FRONTEND,
    Close,
    Collect,
    Collected,
    Grow,
    Open,
    PeerLoad,
    Pull,
    Revoke,
    Send,
    Step,
    Tick,
    Value,
)
from trinity.core.routing.router import RoutingPolicy
from trinity.core.values import FrontendUp, is_frontend

LEASES = 4  # of the longest one: time without anything but timers, after which nothing else is expected
LEAST_WAIT_S = 60.0  # of that time
LULL_REPORTS = 2  # of each instance that are all alike, after which those until the next arrival are skipped


class EventLoop:
    """Instance cores and front ends, mostly one. Subclasses carry out commands: ``send``, ``start``, ``pull``, ...

    ``carriers`` maps each type of command to its method. ``routing()`` makes the policy of each core. ``timed`` may be
    false where no core has a timer (no reports, leases or deadlines). ``options`` are the front ends', which
    ``front_ends`` names: the first one is ``frontend``, ``frontends`` has all that live.
    """

    def __init__(
        self,
        instances: Sequence[Settings],
        routing: Callable[[], RoutingPolicy],
        options: FrontendOptions,
        front_ends: Sequence[str] = (FRONTEND,),
    ) -> None:
        self.cores = {each.name: InstanceCore(each, routing()) for each in instances}

        def make_frontend(name: str) -> FrontendCore:
            return FrontendCore(routing(), options, name)

        self.make_frontend = make_frontend
        self.frontends = {name: make_frontend(name) for name in front_ends}
        self.frontend = self.frontends[front_ends[0]]
        self.now = 0.0
        self.events = 0
        self.timed = True
        self._all: dict[str, InstanceCore | FrontendCore] = {**self.frontends, **self.cores}
        self._heap: list[tuple[float, int, str, Any]] = []
        self._sequence = count()
        self._due = dict.fromkeys(self._all, inf)
        self._lively = 0  # events on the way that are more than timers and heartbeats
        self._lively_at = 0.0  # the last one
        self._idle_turns = 0
        self._patience_s = max(LEAST_WAIT_S, LEASES * max(map(_longest_lease, instances), default=0.0))
        self.carriers: dict[type[Value], Callable[[str, Any], object]] = {
            Send: self.send,
            Step: self.start,
            Pull: self.pull,
            Collect: self.collect,
            Revoke: self.revoke,
            Deliver: self.deliver,
            End: self.end,
            Open: self.skip,
            Close: self.skip,
            Grow: self.skip,
        }
        for announced in self.cores.values():
            for core in self._all.values():
                core.handle(announced.announcement(), 0.0)
            for name in self.frontends:
                announced.handle(FrontendUp(name), 0.0)

    # ------------------------------------------------------------ for subclasses

    def take(self, number: int, name: str, event: Any) -> Value | None:
        """Turn what was posted into the event that the core ``name`` handles; None if it is void or postponed."""
        value: Value = event
        return value

    def send(self, name: str, command: Send) -> None:
        raise NotImplementedError

    def start(self, name: str, step: Step) -> None:
        raise NotImplementedError

    def pull(self, name: str, pull: Pull) -> None:
        raise NotImplementedError

    def collect(self, name: str, command: Collect) -> None:
        """Copy features for a reader, which takes no time unless a subclass says so."""
        self.post(self.now, name, Collected(command.request, tuple(blocks for blocks, _ in command.items)))

    def revoke(self, name: str, command: Revoke) -> None:
        """Give the blocks of a revoked lease a new generation."""

    def skip(self, name: str, command: Value) -> None:
        """Ignore a command that only stages need."""

    def deliver(self, name: str, command: Deliver) -> None:
        raise NotImplementedError

    def end(self, name: str, command: End) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------ the loop

    def post(self, at: float, name: str, event: Any) -> int:
        """Post ``event`` to the core ``name`` at this time; return its number, which orders events at equal times."""
        number = next(self._sequence)
        self.put(at, number, name, event)
        return number

    def put(self, at: float, number: int, name: str, event: Any) -> None:
        """Post an event under a number that it has already."""
        if self.timed:
            self._lively += is_lively(name, event)
        heapq.heappush(self._heap, (at, number, name, event))

    def forget(self, name: str) -> None:
        """Drop all that was posted to an instance whose life has ended."""
        if self.timed:
            self._lively -= sum(is_lively(name, event) for _, _, to, event in self._heap if to == name)
        self._heap = [each for each in self._heap if each[2] != name]
        heapq.heapify(self._heap)

    def is_over(self) -> bool:
        """Check if the run is over: only heartbeats are left, and no lease or deadline can bring anything else."""
        if not self._heap:
            return True
        if not self.timed or self._lively:
            return False
        return self._is_idle() or self.now - self._lively_at > self._patience_s

    def _is_idle(self) -> bool:
        return not any(each.entries for each in self.frontends.values()) and all(
            core.idle() for core in self.cores.values()
        )

    def skip_lull(self) -> None:
        """Skip the heartbeats until the next arrival, where all instances are idle and have reported that.

        A timer of a front end counts as an arrival. Each keeps the phase of its reports. Without this a trace with an
        hour's pause takes a million of them.
        """
        armed = [name for name in self.cores if self._due[name] < inf]
        waits = self._idle_turns > LULL_REPORTS * len(self._all) ** 2 and self._lively
        if not waits or len(self._heap) != self._lively + len(armed) or not self._is_idle():
            return
        ticks = []
        while not is_lively(*self._heap[0][2:]):
            ticks.append(heapq.heappop(self._heap))
        arrival = self._heap[0][0]
        for at, number, name, tick in ticks:
            every = self.cores[name].settings.report_s
            self._due[name] = at + max(0.0, (arrival - at) // every) * every
            heapq.heappush(self._heap, (self._due[name], number, name, tick))
        self._idle_turns = 0

    def advance(self) -> None:
        """Handle the next event."""
        self.now, number, name, posted = heapq.heappop(self._heap)
        if self.timed:
            self._lively -= is_lively(name, posted)
        event = self.take(number, name, posted)
        if event is None:
            return
        if self.timed:
            lively = is_lively(name, event)
            self._idle_turns = 0 if lively else self._idle_turns + 1
            self._lively_at = self.now if lively else self._lively_at
        self.events += 1
        self.handle(name, event)

    def handle(self, name: str, event: Value) -> None:
        """Pass the event to the core, and carry out its commands in their order."""
        carriers = self.carriers
        for command in self._all[name].handle(event, self.now):
            carriers[type(command)](name, command)
        if self.timed:
            self._arm(name, event)

    def _arm(self, name: str, event: Value) -> None:
        if isinstance(event, Tick) and self.now >= self._due[name]:
            self._due[name] = inf
        due = self._all[name].next_timer()
        if due is not None and due < self._due[name]:
            self._due[name] = due
            self.post(max(due, self.now), name, Tick())


def _longest_lease(own: Settings) -> float:
    return max(each for each in (0.0, own.lease_s, own.transfers.lease_s) if each < inf)


def is_lively(name: str, event: Any) -> bool:
    """Check if an event is more than an instance's timer or heartbeat."""
    return not isinstance(event, PeerLoad) and (is_frontend(name) or not isinstance(event, Tick))
