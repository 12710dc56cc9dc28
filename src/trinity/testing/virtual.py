"""VirtualCluster: the cores of a whole placement under a virtual clock, without tensors, threads or sockets.

Messages between two cores keep their order (first in, first out per pair) and take as long as ``Durations`` says;
steps and pulls likewise; ``Faults`` makes rows and pulls fail. The same seed gives the same run. Every check of
``trinity.testing.checks`` runs after every event unless ``observers`` says otherwise.

::

    cluster = VirtualCluster(make_settings("1E1P1D", pools={"image": 12, "kv": 40}), seed=7)
    cluster.submit(Work(request="a", prompt=(1, 2, 3), max_tokens=4), at=0.0)
    cluster.abort("a", at=0.2)
    cluster.run()
    cluster.outcomes["a"].end.reason
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random
from typing import Any

from trinity.core.frontend import Abort, Deliver, End
from trinity.core.instance.state import Settings
from trinity.core.messages import (
    FRONTEND,
    IMAGE,
    KV,
    Failure,
    LayersWritten,
    PeerLoad,
    Pull,
    Pulled,
    Revoke,
    Sampled,
    Send,
    Step,
    Stepped,
    Submit,
    Value,
    Work,
)
from trinity.core.routing import RoundRobin, RoutingPolicy
from trinity.core.scheduler import StepTime
from trinity.placement import Placement
from trinity.simulation.event_loop import EventLoop
from trinity.testing.checks import Observer, make_checks


def _message(draw: Random, source: str, target: str) -> float:
    return draw.uniform(0.0, 0.05)


def _step(draw: Random, instance: str, step: Step) -> float:
    return draw.uniform(0.0, 0.1)


def _pull(draw: Random, pull: Pull) -> float:
    return draw.uniform(0.0, 0.1)


def predict_steps(cost: StepTime) -> Callable[[Random, str, Step], float]:
    """Make step durations from a cost model, for ``Durations.step``."""

    def seconds(draw: Random, instance: str, step: Step) -> float:
        prefill = sum(row.length for row in step.prefills)
        media = sum(row.span.tokens for row in step.encodes)
        return cost.seconds(len(step.decodes), prefill, media)

    return seconds


@dataclass(frozen=True)
class Durations:
    """Seconds that a message, a step and a pull take; each function may draw from the cluster's generator."""

    message: Callable[[Random, str, str], float] = _message
    step: Callable[[Random, str, Step], float] = _step
    pull: Callable[[Random, Pull], float] = _pull


@dataclass(frozen=True)
class Faults:
    """Choice of the rows of a step (instance, step, request) and of the pulls that fail."""

    row: Callable[[Random, str, Step, str], bool] = lambda draw, instance, step, request: False
    pull: Callable[[Random, Pull], bool] = lambda draw, pull: False

    @classmethod
    def at_random(cls, rows: float, pulls: float) -> Faults:
        """Fail each row of a step with probability ``rows``, each pull with probability ``pulls``."""
        return cls(
            lambda draw, instance, step, request: draw.random() < rows,
            lambda draw, pull: draw.random() < pulls,
        )


@dataclass
class RequestRecord:
    """Record of one request as its reader sees it; times are virtual seconds."""

    work: Work
    submitted: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    end: End | None = None
    ended: float | None = None


def make_settings(placement: str | Placement, pools: Mapping[str, int], **common: Any) -> list[Settings]:
    """Make settings for every instance of a placement.

    ``pools`` has blocks by kind; each instance gets the kinds of its roles. ``common`` has fields of ``Settings``;
    ``lanes`` goes only to instances that encode beside another stage. By default leases never expire and loads are not
    reported, so that time passes only through the cluster's requests.
    """
    common = {"lease_s": inf, "report_s": inf, **common}
    parsed = Placement.parse(placement) if isinstance(placement, str) else placement
    result = []
    for name, roles in parsed.instances():
        kinds = {IMAGE} & set(pools) if set(roles) & set("EP") else set()
        kinds |= {KV} if set(roles) & set("PD") else set()
        own = dict(common)
        if "E" not in roles or roles == "E":
            own.pop("lanes", None)
        result.append(Settings(name, roles, {kind: pools[kind] for kind in sorted(kinds)}, **own))
    return result


def _count_up(work: Work, index: int) -> int:
    return index + 1


def _pull_failure(pull: Pull) -> Failure:
    """Make the failure of a pull; a pull of some layers fails by wrong bytes (``IntegrityError``)."""
    fields = {"cause": "IntegrityError"} if pull.layers else {}
    return Failure("MigrationError", f"a pull of {pull.request} failed", fields)


class VirtualCluster(EventLoop):
    """Instance cores and a front end under one virtual clock.

    - ``routing`` (``RoundRobin``): makes the routing policy.
    - ``max_waiting`` (requests, 1024): longest queue at the front end.
    - ``durations`` (``Durations()``): seconds of messages, steps and pulls.
    - ``faults`` (none): rows and pulls that fail.
    - ``sample`` (counts up): ``sample(work, index)`` returns the token of each output.
    - ``seed`` (0): seed of all random draws.
    - ``observers`` (every check): checks to run after each event.

    Raises ``AssertionError`` with the last events in its notes where a check fails.
    """

    def __init__(
        self,
        instances: Sequence[Settings],
        *,
        routing: Callable[[], RoutingPolicy] = RoundRobin,
        max_waiting: int = 1024,
        durations: Durations | None = None,
        faults: Faults | None = None,
        sample: Callable[[Work, int], int] = _count_up,
        seed: int = 0,
        observers: Sequence[Observer] | None = None,
    ) -> None:
        super().__init__(instances, routing, max_waiting)
        self.durations, self.faults, self.sample = durations or Durations(), faults or Faults(), sample
        self.draw, self.hiccups = Random(seed), Random(seed)
        self.outcomes: dict[str, RequestRecord] = {}
        self.commands: list[tuple[float, str, Value]] = []
        self.recent: deque[tuple[float, str, Value]] = deque(maxlen=40)
        self._arrival: dict[tuple[str, str], float] = {}
        self._drawn: dict[str, int] = {}
        self._frozen: dict[str, list[tuple[float, float]]] = {}
        self._generations: dict[tuple[str, str, int], int] = {}
        self._pulls: dict[tuple[str, str, int], Pull] = {}
        self._flights: dict[tuple[str, str], deque[Step]] = {}  # of each lane; the first one runs
        self._broken: set[tuple[str, str]] = set()  # whose rows cannot go on: one of an earlier step has failed
        self.carriers = {kind: partial(self._observe, carry) for kind, carry in self.carriers.items()}
        self.observers = make_checks(self.cores, self.frontend) if observers is None else observers

    def submit(self, work: Work, at: float = 0.0, inputs: tuple[Any, ...] = ()) -> None:
        """Submit a request as the user at this time, in virtual seconds."""
        assert work.request not in self.outcomes, f"{work.request} was submitted before"
        self.outcomes[work.request] = RequestRecord(work, at)
        self.post(at, FRONTEND, Submit(work, inputs))

    def abort(self, request: str, at: float, reason: str = "cancelled") -> None:
        """End a request as the user at this time: cancelled (the reader left) or stop (a stop string was found)."""
        self.post(at, FRONTEND, Abort(request, reason))

    def freeze(self, name: str, at: float, seconds: float) -> None:
        """Halt an instance for ``seconds``: it handles what arrives only afterwards, but its memory can be read."""
        self._frozen.setdefault(name, []).append((at, at + seconds))

    def run(self, limit: int = 1_000_000) -> None:
        """Run until nothing is under way any more. ``limit`` events count as a livelock (``AssertionError``)."""
        for _ in range(limit):
            if self.is_over():
                break
            self.advance()
        else:
            raise AssertionError(f"no end after {limit} events")
        self._with_recent(self._check_end)

    def take(self, number: int, name: str, event: Value) -> Value | None:
        for start, end in self._frozen.get(name, ()):
            if start <= self.now < end:
                self.put(end, number, name, event)
                return None
        return self._check_generations(name, event) if isinstance(event, Pulled) else event

    def _check_end(self) -> None:
        for each in self.observers:
            each.at_end()

    def _with_recent(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            for time, name, event in self.recent:
                error.add_note(f"{time:.4f} {name} <- {event}")
            raise

    def handle(self, name: str, event: Value) -> None:
        self.recent.append((self.now, name, event))
        self._with_recent(lambda: self._handle(name, event))

    def _handle(self, name: str, event: Value) -> None:
        for each in self.observers:
            each.event(name, event)
        if isinstance(event, Stepped):
            self._follow(name, event)
        super().handle(name, event)
        if not isinstance(event, PeerLoad):  # most events where there are heartbeats; no block or request changes
            for each in self.observers:
                each.after_event(name)

    def _observe(self, carry: Callable[[str, Any], object], name: str, command: Value) -> None:
        self.commands.append((self.now, name, command))
        for each in self.observers:
            each.command(name, command)
        carry(name, command)

    def send(self, name: str, command: Send) -> None:
        target = command.to
        arrival = self.now + self.durations.message(self.draw, name, target)
        arrival = max(arrival, self._arrival.get((name, target), 0.0))
        self._arrival[name, target] = arrival
        self.post(arrival, target, command.message)

    def start(self, name: str, step: Step) -> None:
        flight = self._flights.setdefault((name, step.lane), deque())
        flight.append(step)
        if len(flight) == 1:
            self._begin(name, step)

    def _follow(self, name: str, event: Stepped) -> None:
        """Begin the lane's next step."""
        flight = self._flights[name, event.lane]
        flight.popleft()
        if flight:
            self._begin(name, flight[0])

    def _begin(self, name: str, step: Step) -> None:
        seconds = self.durations.step(self.draw, name, step)
        stepped = self._make_result(name, step, seconds)
        if step.group:
            self._progress(name, step, seconds, bool(stepped.failed))
        self.post(self.now + seconds, name, stepped)

    def revoke(self, name: str, command: Revoke) -> None:
        for block in command.blocks:
            self._generations[name, command.kind, block] = command.generation

    def deliver(self, name: str, command: Deliver) -> None:
        outcome = self.outcomes[command.request]
        outcome.tokens.append(command.sampled.token)
        outcome.times.append(self.now)

    def end(self, name: str, command: End) -> None:
        outcome = self.outcomes[command.request]
        outcome.end, outcome.ended = command, self.now

    def _progress(self, name: str, step: Step, seconds: float, fails: bool) -> None:
        """Report layers evenly over the step; a failing step, and now and then another, begins anew in its middle."""
        layers = self.cores[name].settings.layers
        groups = [(first, min(first + step.group, layers)) for first in range(0, layers, step.group)]
        told = self.hiccups.randint(0, len(groups))
        again = fails or self.hiccups.random() < 0.1
        for number, group in enumerate(groups[: told if again else len(groups)]):
            self.post(
                self.now + seconds * (number + 1) / (len(groups) + 2), name, LayersWritten(step.id, step.lane, group)
            )
        if again and told:
            self.post(self.now + seconds * 0.95, name, LayersWritten(step.id, step.lane, None))

    def _make_result(self, name: str, step: Step, seconds: float) -> Stepped:
        rows = [row.request for row in step.encodes] + [row.request for row in step.prefills] + list(step.decodes)
        failed = {
            request: Failure("StageError", f"a row of {request} failed")
            for request in dict.fromkeys(rows)
            if (name, request) in self._broken or self.faults.row(self.draw, name, step, request)
        }
        self._broken.update((name, request) for request in failed)
        sampling = [row.request for row in step.prefills if row.last] + list(step.decodes)
        sampled = {request: self._sample_token(request) for request in sampling if request not in failed}
        return Stepped(step.id, step.lane, sampled, failed, seconds)

    def _sample_token(self, request: str) -> Sampled:
        index = self._drawn.get(request, 0)
        self._drawn[request] = index + 1
        return Sampled(self.sample(self.outcomes[request].work, index))

    def pull(self, name: str, pull: Pull) -> None:
        seconds = self.durations.pull(self.draw, pull)
        self._pulls[name, pull.offer, pull.part] = pull
        if self.faults.pull(self.draw, pull):
            answer = Pulled(pull.offer, pull.part, _pull_failure(pull))
        else:
            record = {"kind": pull.kind, "source": pull.source, "blocks": len(pull.source_blocks), "seconds": seconds}
            answer = Pulled(pull.offer, pull.part, None, record)
        self.post(self.now + seconds, name, answer)

    def _check_generations(self, name: str, event: Pulled) -> Pulled:
        """Fail a pull whose blocks were taken back before its copy ended, as a connector would."""
        pull = self._pulls.pop((name, event.offer, event.part))
        now = [self._generations.get((pull.source, pull.kind, block), 0) for block in pull.source_blocks]
        if event.failure is not None or max(now) <= pull.generation:
            return event
        fields = {"source": pull.source, "target": name, "kind": pull.kind, "cause": "OfferRefused"}
        return Pulled(event.offer, event.part, Failure("MigrationError", "the blocks were taken back", fields))
