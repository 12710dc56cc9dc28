"""VirtualCluster: the cores of a whole placement under a virtual clock, without tensors, threads or sockets.

Messages between two cores keep their order (first in, first out per pair) and take as long as ``Durations`` says;
steps and pulls likewise; ``Faults`` makes rows and pulls fail. Instances die and come back (``support.virtual.lives``).
The same seed gives the same run. Every check of ``support.virtual.checks`` runs after every event unless ``observers``
says otherwise.

::

    cluster = VirtualCluster(make_settings("1E1P1D", pools={"image": 12, "kv": 40}), seed=7)
    cluster.submit(Work(request="a", prompt=(1, 2, 3), max_tokens=4), at=0.0)
    cluster.abort("a", at=0.2)
    cluster.run()
    cluster.outcomes["a"].end.reason
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from random import Random
from typing import Any

from support.virtual.checks import Observer, make_checks
from support.virtual.conditions import Durations as Durations
from support.virtual.conditions import Faults as Faults
from support.virtual.conditions import count_up, fail_pull, report_layers
from support.virtual.conditions import make_settings as make_settings
from support.virtual.conditions import predict_steps as predict_steps
from support.virtual.conversation import label_reader
from support.virtual.lives import ChannelOpened, Departure, FrontendArrival, Kill, Lives, Return
from trinity.core import InstanceCore
from trinity.core.failure_policy import NO_RECOVERY, FailurePolicy
from trinity.core.frontend import Abort, Deliver, End, FrontendOptions
from trinity.core.frontend.messages import MoveEnd
from trinity.core.instance.state import Settings
from trinity.core.messages import (
    FRONTEND,
    UNFIT,
    Collect,
    Collected,
    Failure,
    Open,
    PeerDown,
    PeerLeaving,
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
from trinity.core.routing.router import RoundRobin, RoutingPolicy
from trinity.core.values import FrontendUp
from trinity.simulation.event_loop import EventLoop


@dataclass
class RequestRecord:
    """Record of one request as its reader sees it; times are virtual seconds."""

    work: Work
    submitted: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    end: End | None = None
    ended: float | None = None


class VirtualCluster(EventLoop):
    """Instance cores and one or more front ends under one virtual clock.

    - ``routing`` (``RoundRobin``): makes the routing policy.
    - ``max_waiting`` (requests, 1024): longest queue at the front end.
    - ``durations`` (``Durations()``): seconds of messages, steps and pulls.
    - ``faults`` (none): rows and pulls that fail.
    - ``sample`` (counts up): ``sample(work, index)`` returns the token of each output.
    - ``seed`` (0): seed of all random draws.
    - ``observers`` (every check): checks to run after each event.
    - ``failures`` (``NO_RECOVERY``): the front end's policy for requests whose instance dies.
    - ``spread`` (1): encoders that may encode the media of one request.
    - ``front_ends`` (the first one): names. What is asked of another one has the name ``label_reader`` in ``outcomes``.

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
        sample: Callable[[Work, int], int] = count_up,
        seed: int = 0,
        observers: Sequence[Observer] | None = None,
        failures: FailurePolicy = NO_RECOVERY,
        spread: int = 1,
        front_ends: Sequence[str] = (FRONTEND,),
    ) -> None:
        options = FrontendOptions(max_waiting=max_waiting, failures=failures, spread=spread)
        super().__init__(instances, routing, options, front_ends)
        self.routing = routing
        self.lives = Lives(tuple(self.cores), Random(-1 - seed), front_ends=tuple(front_ends))
        self.durations, self.faults, self.sample = durations or Durations(), faults or Faults(), sample
        self.draw, self.hiccups, self.copies = Random(seed), Random(seed), Random(seed)
        self.outcomes: dict[str, RequestRecord] = {}
        self.commands: list[tuple[float, str, Value]] = []
        self.recent: deque[tuple[float, str, Value]] = deque(maxlen=40)
        self._arrival: dict[tuple[str, str], float] = {}
        self._drawn: dict[tuple[str, str], int] = {}  # tokens that an instance knows of a life of a request
        self._readers: dict[str, str] = {}  # whose life it is
        self._frozen: dict[str, list[tuple[float, float]]] = {}
        self._generations: dict[tuple[str, str, int], int] = {}
        self._stale: set[tuple[str, str, int]] = set()  # pulls of blocks taken back by a source that has died since
        self._addressed: dict[int, int] = {}  # to which life of its instance an event goes, by its number
        self._unheard: dict[tuple[str, str], list[Value]] = {}  # said to a front end ahead of news of the return
        self._pulls: dict[tuple[str, str, int], tuple[Pull, int | None]] = {}  # and its source's life; None: a former
        self._flights: dict[tuple[str, str], deque[Step]] = {}  # of each lane; the first one runs
        self._broken: set[tuple[str, str]] = set()  # whose rows cannot go on: one of an earlier step has failed
        self.carriers[Open] = self._open
        self.carriers[MoveEnd] = lambda name, command: None  # nobody waits for it here
        self.carriers = {kind: partial(self._observe, carry) for kind, carry in self.carriers.items()}
        self.observers = make_checks(self.cores, self.frontends, self.lives) if observers is None else observers

    def submit(self, work: Work, at: float = 0.0, inputs: tuple[Any, ...] = (), to: str = FRONTEND) -> None:
        """Submit a request as the user of a front end at this time, in virtual seconds."""
        reader = label_reader(to, work.request)
        assert reader not in self.outcomes, f"{reader} was submitted before"
        self.outcomes[reader] = RequestRecord(work, at)
        self.post(at, to, Submit(work, inputs))

    def abort(self, request: str, at: float, reason: str = "cancelled", to: str = FRONTEND) -> None:
        """End a request as the user at this time: cancelled (the reader left) or stop (a stop string was found)."""
        self.post(at, to, Abort(request, reason))

    def freeze(self, name: str, at: float, seconds: float) -> None:
        """Halt an instance for ``seconds``: it handles what arrives only afterwards, but its memory can be read."""
        self._frozen.setdefault(name, []).append((at, at + seconds))

    def kill(self, name: str, at: float, back_s: float | None = 0.5) -> None:
        """End an instance at this time, and begin its next life ``back_s`` later (None: never); or end a front end.

        Each of its channels is cut at a place of its own, drawn now: at the death or shortly or long before it.
        """
        self.lives.plan_cuts(name, at)
        self.put(at, next(self._sequence), name, Kill(back_s))

    def attach(self, name: str, at: float) -> None:
        """Begin one more front end at this time. When it comes to know each instance is drawn."""
        self.put(at, next(self._sequence), name, FrontendArrival())

    def switch(self, name: str, at: float, becomes: Settings, drain_s: float = 1.0, change_s: float = 0.5) -> None:
        """Have an instance leave at this time, end ``drain_s`` later, and come back with these settings' roles."""
        self.depart(name, at, drain_s, Kill(change_s, becomes))

    def depart(self, name: str, at: float, drain_s: float, end: Kill) -> None:
        """Have an instance leave at this time, and end so ``drain_s`` later. When who hears that it leaves is drawn."""
        for other in [each for each in self.lives.everybody if each != name]:
            self.put(at + self.lives.draw.uniform(0.0, self.lives.news_s), next(self._sequence), other, Departure(name))
        self.lives.plan_cuts(name, at + drain_s)
        self.put(at + drain_s, next(self._sequence), name, end)

    def run(self, limit: int = 1_000_000) -> None:
        """Run until nothing is under way any more. ``limit`` events count as a livelock (``AssertionError``)."""
        for _ in range(limit):
            if self.is_over():
                break
            self.advance()
        else:
            raise AssertionError(f"no end after {limit} events")
        self._with_recent(self._check_end)

    def post(self, at: float, name: str, event: Any) -> int:
        number = super().post(at, name, event)
        if name in self.cores:
            self._addressed[number] = self.lives.epochs[name]
        return number

    def take(self, number: int, name: str, event: Any) -> Value | None:
        if name in self.lives.dead and not isinstance(event, Return):
            return None
        if self._addressed.get(number, self.lives.epochs.get(name)) != self.lives.epochs.get(name):
            return None
        for start, end in self._frozen.get(name, ()):
            if start <= self.now < end:
                self.put(end, number, name, event)
                return None
        self._addressed.pop(number, None)
        if isinstance(event, (Kill, Return, ChannelOpened, FrontendArrival)):
            return self._turn(name, event)
        if isinstance(event, Departure):
            return PeerLeaving(event.name, self.lives.epochs[event.name], leaving=True)
        if isinstance(event, PeerDown) and event.name in self.cores:
            self.lives.hear(name, event.name)
        return self._check_pull(name, event) if isinstance(event, Pulled) else event

    def _turn(self, name: str, event: Kill | Return | ChannelOpened | FrontendArrival) -> Value | None:
        """Carry out a death, a return or a new channel. Returns what the core hears of it."""
        if isinstance(event, Kill) and name in self.cores:
            self._die(name, event)
        elif isinstance(event, Kill):
            self._lose_frontend(name)
        elif isinstance(event, FrontendArrival):
            self._add_frontend(name)
        elif isinstance(event, Return):
            if FRONTEND in self.lives.dead:
                self.post(self.now, name, PeerDown(FRONTEND))
            for other in self.lives.come_back(name):
                delay = self.lives.draw.uniform(0.0, 2 * self.lives.news_s)
                self.post(self.now + delay, other, ChannelOpened(name, self.lives.epochs[name]))
            return self.cores[name].announcement()
        elif self.lives.link(name, event.peer, event.epoch):
            up = self.cores[event.peer].announcement()
            if name in self.cores:
                self.post(self.lives.next_news(name, event.peer, self.now), name, up)
                self.post(self.lives.next_news(event.peer, name, self.now), event.peer, self.cores[name].announcement())
                return None
            self.post(self.now, event.peer, FrontendUp(name))
            at = self.lives.last_news(name, event.peer)
            for message in (up, *self._unheard.pop((event.peer, name), ())):
                self.post(max(at, self.now), name, message)
        return None

    def _die(self, name: str, kill: Kill) -> None:
        """End a life: its core, its steps and its pulls are gone; those who were in touch with it hear of that."""
        for each in self.observers:
            each.lost(name)
        survivors = self.lives.die(name)
        settings = replace(kill.becomes or self.cores[name].settings, epoch=self.lives.epochs[name])
        self.cores[name] = self._all[name] = InstanceCore(settings, self.routing())
        self._due[name] = inf
        self._unheard = {key: said for key, said in self._unheard.items() if key[0] != name}
        self._flights = {key: flight for key, flight in self._flights.items() if key[0] != name}
        self._broken = {key for key in self._broken if key[0] != name}
        self._pulls = {key: pull for key, pull in self._pulls.items() if key[0] != name}
        self._stale |= {key for key, (pull, _) in self._pulls.items() if pull.source == name and self._is_revoked(pull)}
        self._generations = {key: number for key, number in self._generations.items() if key[0] != name}
        for other in survivors:
            heard = self.lives.next_news(other, name, max(self.now, self._arrival.get((name, other), 0.0)))
            self._arrival[name, other] = heard
            for news in kill.news(name, self.lives.epochs[name] - 1):
                self.post(heard, other, news)
        if kill.back_s is not None:
            self.put(self.now + kill.back_s, next(self._sequence), name, Return())

    def _lose_frontend(self, name: str) -> None:
        """End a front end: its requests are nobody's, and each instance in touch with it hears of that."""
        for each in self.observers:
            each.lost(name)
        del self.frontends[name]
        for other in self.lives.lose_frontend(name):
            heard = self.lives.next_news(other, name, max(self.now, self._arrival.get((name, other), 0.0)))
            self.post(heard, other, PeerDown(name))

    def _add_frontend(self, name: str) -> None:
        self.frontends[name] = self._all[name] = self.make_frontend(name)
        self._due[name] = inf
        for other in self.lives.add_frontend(name):
            delay = self.lives.draw.uniform(0.0, 2 * self.lives.news_s)
            self.post(self.now + delay, name, ChannelOpened(other, self.lives.epochs[other]))

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
        if name in self.frontends and isinstance(command.message, Submit) and not command.message.asker:
            life = command.message.work.request
            self._readers[life] = label_reader(name, self.frontends[name].reader_of(life))
        if target in self.frontends and not self.lives.linked(name, target):
            self._unheard.setdefault((name, target), []).append(command.message)
        elif self.lives.carries(name, target, self.now):
            arrival = self.now + self.durations.message(self.draw, name, target)
            arrival = max(arrival, self._arrival.get((name, target), 0.0))
            self._arrival[name, target] = arrival
            self.post(arrival, target, command.message)

    def _open(self, name: str, opened: Open) -> None:
        """Have it sample behind the tokens that it has already."""
        self._drawn[name, opened.work.request] = len(opened.tokens)

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
        outcome = self.outcomes[label_reader(name, command.request)]
        outcome.tokens.append(command.sampled.token)
        outcome.times.append(self.now)

    def end(self, name: str, command: End) -> None:
        outcome = self.outcomes[label_reader(name, command.request)]
        outcome.end, outcome.ended = command, self.now

    def _progress(self, name: str, step: Step, seconds: float, fails: bool) -> None:
        layers = self.cores[name].settings.layers
        for share, report in report_layers(self.hiccups, step, layers, fails):
            self.post(self.now + seconds * share, name, report)

    def _make_result(self, name: str, step: Step, seconds: float) -> Stepped:
        rows = [row.request for row in step.encodes] + [row.request for row in step.prefills] + list(step.decodes)
        encoding = {row.request for row in step.encodes}
        failed = {
            request: Failure(
                "StageError", f"a row of {request} failed", {UNFIT: "too thin"} if request in encoding else {}
            )
            for request in dict.fromkeys(rows)
            if (name, request) in self._broken or self.faults.row(self.draw, name, step, request)
        }
        self._broken.update((name, request) for request in failed)
        sampling = [row.request for row in step.prefills if row.last] + list(step.decodes)
        sampled = {request: self._sample_token(name, request) for request in sampling if request not in failed}
        return Stepped(step.id, step.lane, sampled, failed, seconds)

    def _sample_token(self, name: str, request: str) -> Sampled:
        self._drawn[name, request] += 1
        return Sampled(self.sample(self.outcomes[self._readers[request]].work, self._drawn[name, request] - 1))

    def pull(self, name: str, pull: Pull) -> None:
        seconds = self.durations.pull(self.draw, pull)
        former, reached = self.lives.is_deaf(name, pull.source), self.lives.linked(name, pull.source)
        epoch = self.lives.epochs[pull.source] if reached and not former else None
        self._pulls[name, pull.offer, pull.part] = (pull, epoch)
        fails = self.faults.pull(self.draw, pull)
        if fails or not reached:  # one that reaches the next life reads what is there, and is none the wiser
            answer = Pulled(pull.offer, pull.part, fail_pull(pull))
        else:
            record = {"kind": pull.kind, "source": pull.source, "blocks": len(pull.source_blocks), "seconds": seconds}
            answer = Pulled(pull.offer, pull.part, None, record)
        over = self.now + seconds
        self.post(max(over, self.lives.last_news(name, pull.source)) if former and reached else over, name, answer)

    def collect(self, name: str, command: Collect) -> None:
        """Copy features in up to as long as the slowest message takes, or fail to."""
        answer = Collected(command.request, tuple(blocks for blocks, _ in command.items))
        if self.faults.collect(self.copies, command):
            answer = Collected(command.request, (), Failure("StageError", f"the copy for {command.request} failed"))
        self.post(self.now + self.durations.message(self.copies, name, name), name, answer)

    def _check_pull(self, name: str, event: Pulled) -> Pulled:
        """Fail a pull whose blocks were taken back before its copy ended, as a connector would; perhaps, if lost."""
        pull, epoch = self._pulls.pop((name, event.offer, event.part))
        if event.failure is not None or epoch is None:
            return event
        fields = {"source": pull.source, "target": name, "kind": pull.kind}
        if self.lives.epochs[pull.source] != epoch:
            why = Failure("MigrationError", "the source is lost", {**fields, "cause": "PeerLost"})
            fails = self.lives.draw.random() < 0.5 or (name, event.offer, event.part) in self._stale
            return Pulled(event.offer, event.part, why) if fails else event
        if not self._is_revoked(pull):
            return event
        why = Failure("MigrationError", "the blocks were taken back", {**fields, "cause": "OfferRefused"})
        return Pulled(event.offer, event.part, why)

    def _is_revoked(self, pull: Pull) -> bool:
        now = [self._generations.get((pull.source, pull.kind, block), 0) for block in pull.source_blocks]
        return max(now) > pull.generation
