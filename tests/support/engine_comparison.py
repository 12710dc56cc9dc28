"""The Python engine and its compiled twin on the same requests: both tell what happens, line by line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import msgspec

from support.ideal_routing import Loads
from support.random_costs import any_device, random_cost
from support.scenarios import KV_BLOCK, MEDIA_BLOCK, ORDERS, PLACEMENTS, largest_need, random_document
from support.virtual.cluster import make_settings
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import Abort, Deliver, End, FrontendOptions
from trinity.core.instance.settings import RESERVATIONS, Reservation, Settings
from trinity.core.messages import (
    FRONTEND,
    IMAGE,
    KV,
    Close,
    Commit,
    Emit,
    Finished,
    Offer,
    Open,
    Pull,
    Pulled,
    Ready,
    Release,
    Send,
    Step,
    Stepped,
    Submit,
    Value,
    Withdraw,
    Work,
)
from trinity.core.scheduler import BatchRules, Policy
from trinity.core.transfers import TransferPolicy
from trinity.costs.cluster import Cluster
from trinity.costs.interconnects import Interconnect
from trinity.costs.model_shape import ModelShape, get_model_shape
from trinity.costs.step_cost import CostModel
from trinity.simulation.cluster_model import STOP, SimulatedCluster
from trinity.simulation.compiled_engine import Act, CompiledPlacement, CompiledReplay, simulate
from trinity.simulation.compiled_workload import CompiledRequest, CompiledWorkload
from trinity.simulation.workload import Job

EVENTS = (
    *("Submit", "Cancel", "Forget", "Offer", "Ready", "Commit", "Withdraw", "Release", "Moved", "Emit", "Finished"),
    *("Stepped", "Pulled", "Tick", "Abort"),
)
COMMANDS = ("step", "encode", "prefill", "decode", "pull", "open", "close", "deliver", "end", "left")
REASONS = ("", "length", "cancelled", "deadline", "error", "stop", "preempted")
SHAPE = get_model_shape("llava-1.5-7b")
Line = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """Everything that a replay hangs on."""

    settings: list[Settings]
    works: list[Work]
    acts: list[Act]
    cluster: Cluster
    costs: list[CostModel]
    max_waiting: int = 1024
    interference: float = 1.0
    model: ModelShape = SHAPE
    outputs: Sequence[int] = ()  # tokens of each request, where these are fewer than it asks for
    least_loaded: bool = False

    @property
    def used(self) -> list[int]:
        return [*self.outputs] or [work.max_tokens for work in self.works]

    def compiled(self, log: bool = True) -> CompiledReplay:
        return simulate(self.workload(), self.acts, self.deployed(), log=log)

    def deployed(self) -> CompiledPlacement:
        return CompiledPlacement(
            self.settings,
            cluster=self.cluster,
            costs=self.costs,
            model=self.model,
            max_waiting=self.max_waiting,
            interference=self.interference,
            least_loaded=self.least_loaded,
        )

    def workload(self) -> CompiledWorkload:
        return CompiledWorkload(map(CompiledRequest.of, self.works, self.used), self.settings[0])

    def python(self) -> Logged:
        logged = Logged(self)
        logged.run()
        return logged


class Logged(SimulatedCluster):
    """The Python engine, with prompts and deadlines of our own, cancels, and a log like the twin's."""

    def __init__(self, case: Case) -> None:
        self.works = list(map(_stopping, case.works, case.used))
        self.log: list[Line] = []
        self.offers: dict[str, Offer] = {}
        self.loads = Loads(case.least_loaded)
        asked = {number: at for at, number, aborts in case.acts if not aborts}
        jobs = [Job(asked.get(number, 0.0), 1, (), most) for number, most in enumerate(case.used)]
        super().__init__(
            case.settings,
            jobs,
            cluster=case.cluster,
            costs=case.costs,
            model=case.model,
            routing=self.loads.policy,
            frontend=FrontendOptions(max_waiting=case.max_waiting, failures=NO_RECOVERY),
            interference=case.interference,
            shared=True,
            record=False,
            ask=SHAPE.context,  # how much it is the works say
        )
        self.timed = True
        self.loads.watch(self)
        self.carriers = {kind: self.telling(carry) for kind, carry in self.carriers.items()}
        self.places = {name: place for place, name in enumerate([*self.cores, FRONTEND])}
        self.places[FRONTEND] = -1
        for at, number, aborts in case.acts:
            if aborts:
                self.post(at, FRONTEND, Abort(str(number), "cancelled"))

    def take(self, number: int, name: str, event: Any) -> Value | None:
        return Submit(self.works[event]) if type(event) is int else super().take(number, name, event)

    def tell(self, name: str, kind: int, request: str | int, *rest: int) -> None:
        number = int(request)
        self.log.append((self.now, self.places[name], kind, number, *rest, *(0,) * (3 - len(rest))))

    def handle(self, name: str, event: Value) -> None:
        request, what, count = self.of_event(name, event)
        self.tell(name, EVENTS.index(type(event).__name__), request, what, count)
        self.loads.arrive(name, event)
        super().handle(name, event)
        if name != FRONTEND:
            pools = self.cores[name].state.pools
            left = [pools[kind].available if kind in pools else 0 for kind in (IMAGE, KV)]
            self.tell(name, self.command("left"), request, *left)

    @staticmethod
    def command(name: str) -> int:
        return 20 + COMMANDS.index(name)

    def of_event(self, name: str, event: Any) -> tuple[str | int, int, int]:
        """Request, what and count, as the twin has them."""
        if isinstance(event, Offer):
            self.offers[event.id] = event
            return event.work.request, _kind(event.kind), 0
        if isinstance(event, (Ready, Commit, Withdraw, Release, Pulled)):
            offer = self.offers[event.offer if isinstance(event, Pulled) else event.id]
            return offer.work.request, _kind(offer.kind), _count(event)
        if isinstance(event, Emit):
            return -1, 0, len(event.requests)
        if isinstance(event, Finished):
            return event.request, REASONS.index(event.reason), event.count
        if isinstance(event, Stepped):
            return -1, list(self.cores[name].state.lanes).index(event.lane), 0
        if isinstance(event, Submit):
            return event.work.request, 0, len(event.tokens)
        return getattr(event, "request", -1), 0, 0

    def telling(self, carry: Callable[[str, Any], object]) -> Callable[[str, Any], object]:
        def told(name: str, command: Value) -> None:
            self.of_command(name, command)
            carry(name, command)

        return told

    def of_command(self, name: str, command: Value) -> None:
        if isinstance(command, Step):
            self.of_step(name, command)
        elif isinstance(command, Pull):
            self.tell(name, self.command("pull"), command.request, command.part, len(command.source_blocks))
        elif isinstance(command, Open):
            self.tell(name, self.command("open"), command.work.request, len(command.blocks), command.cached)
        elif isinstance(command, Close):
            self.tell(name, self.command("close"), command.request)
        elif isinstance(command, Deliver):
            self.tell(name, self.command("deliver"), command.request, command.index)
        elif isinstance(command, End):
            self.tell(name, self.command("end"), command.request, REASONS.index(command.reason))
        elif isinstance(command, Send) and isinstance(command.message, Offer):
            self.offers[command.message.id] = command.message

    def of_step(self, name: str, step: Step) -> None:
        lane = list(self.cores[name].state.lanes).index(step.lane)
        self.tell(name, self.command("step"), -1, step.id, lane, len(step.decodes))
        for row in step.encodes:
            self.tell(name, self.command("encode"), row.request, row.item)
        for chunk in step.prefills:
            self.tell(name, self.command("prefill"), chunk.request, chunk.start, chunk.length)
        for request in step.decodes:
            self.tell(name, self.command("decode"), request)


def _stopping(work: Work, used: int) -> Work:
    return msgspec.structs.replace(work, stop_ids=frozenset({STOP.token})) if used < work.max_tokens else work


def _kind(kind: str) -> int:
    return 1 + (IMAGE, KV).index(kind)


def _count(event: Any) -> int:
    if isinstance(event, Ready):
        return len(event.parts)
    if isinstance(event, Commit):
        return len(event.tokens)
    if isinstance(event, Withdraw):
        return int(event.failure is not None and event.failure.error == "DeadlineExceeded")
    return event.part if isinstance(event, Pulled) else 0


def shown(line: Line) -> str:
    """A line of the log in words."""
    time, who, kind, request, *rest = line
    name = COMMANDS[kind - 20] if kind >= 20 else EVENTS[kind]
    return f"{time!r} core {who}: {name} of {request} {rest}"


def differences(python: Sequence[Line], compiled: Sequence[Line]) -> str:
    """The first line in which two logs differ, with what came before it; "" where they are equal."""
    for at, (one, other) in enumerate(zip(python, compiled, strict=False)):
        if one != other:
            before = "\n".join(map(shown, python[max(0, at - 12) : at]))
            return f"{before}\nline {at}: Python has {shown(one)}\n the twin {shown(other)}"
    if len(python) != len(compiled):
        longer, at = max((python, compiled), key=len), min(len(python), len(compiled))
        return f"line {at} has only {'Python' if longer is python else 'the twin'}: {shown(longer[at])}"
    return ""


def assert_equal(case: Case) -> CompiledReplay:
    """Every line, time and figure."""
    python, compiled = case.python(), case.compiled()
    found = differences(python.log, compiled.log)
    assert not found, found
    assert [compiled.tokens(number) for number in range(len(case.works))] == list(python.times.values())
    assert (compiled.reasons, compiled.ended, compiled.events) == (python.reasons, python.ended, python.events)
    assert (compiled.moved, compiled.unsettled) == (python.moved, 0)
    assert compiled.preemptions == sum(core.state.preemptions for core in python.cores.values())
    workers = list(python.workers.values())
    assert compiled.busy == [each.busy for each in workers]
    assert compiled.peak == [each.peak for each in workers]
    untold = case.compiled(log=False)
    assert facts(untold) == facts(compiled)
    return compiled


def facts(told: CompiledReplay) -> tuple[Any, ...]:
    """All but the log."""
    tokens = [told.tokens(number) for number in range(len(told.counts))]
    figures = (told.busy, told.peak, told.moved, told.ended, told.events, told.unsettled, told.preemptions)
    return tokens, told.counts.tolist(), told.reasons, *figures


# ------------------------------------------------------------ random cases


def random_works(draw: Random, requests: int, caches: bool, longer: int = 1) -> list[Work]:
    """Requests that begin like others where there are caches, with a deadline now and then."""
    atomic = draw.random() < 0.2
    few = draw.choice([1, 3, requests]) if caches or draw.random() < 0.3 else requests
    documents = [random_document(draw, atomic) for _ in range(few)]
    late = draw.choice([0.0, 0.0, 0.2, 1.0])
    works = []
    for number in range(requests):
        prompt, media = draw.choice(documents)
        tail = [draw.randint(1, 2) for _ in range(draw.choice([1, 2, 5, 9]))]
        works.append(
            Work(
                request=str(number),
                prompt=(*prompt, *tail),
                media=tuple(media),
                max_tokens=draw.choice([1, 2, 5, 12]) * longer,
                deadline_s=draw.choice([0.0, 0.3, 1.0, draw.uniform(0.0, 3.0)]) if draw.random() < late else None,
            )
        )
    return works


def random_rules(draw: Random) -> BatchRules:
    policies: tuple[Policy, ...] = ("alg1", "alg1", "time", "prefill_first")
    return BatchRules(
        token_budget=draw.choice([1, 4, 16, 64]),
        image_budget=draw.choice([1, 1, 8, 100]),
        policy=draw.choice(policies),
        order=draw.choice(ORDERS),
        chunked=draw.random() < 0.8,
        limit_encodes=draw.random() < 0.8,
        limit_decodes=draw.random() < 0.8,
        limit_s=draw.choice([0.0, 0.03, 0.06, 0.2]),
        cost=random_cost(draw),
        leading_text=False,  # prompts here have text ahead of images, those of a simulation have none
    )


def random_settings(
    draw: Random, placement: str, works: list[Work], caches: bool, reservation: Reservation = "full"
) -> list[Settings]:
    need = largest_need(works)
    slack = draw.choice([1.0, 1.0, 1.3, 2.0, 6.0])
    settings = make_settings(
        placement,
        {kind: int(count * slack) for kind, count in need.items()},
        rules=random_rules(draw),
        lanes=draw.choice([("joint",), ("vision", "language")]),
        image_block_size=MEDIA_BLOCK,
        kv_block_size=KV_BLOCK,
        image_cache=caches and draw.random() < 0.8,
        prefix_cache=caches and draw.random() < 0.8,
        reservation=reservation,
        transfers=TransferPolicy(prefetch=draw.random() < 0.7, early=draw.random() < 0.7, kv="off"),
    )
    if draw.random() < 0.2:
        at = draw.randrange(len(settings))
        small = {kind: max(1, int(count * 0.6)) for kind, count in settings[at].pools.items()}
        settings[at] = replace(settings[at], pools=small)
    return settings


def random_case(seed: int, caches: bool | None = None) -> Case:
    """Placements of every method, tiny pools, contents that repeat, cancels, deadlines; times that often coincide."""
    draw, more = Random(seed), Random(f"{seed} more")
    reservation = more.choice(RESERVATIONS)
    longer = more.choice([1, 3]) if reservation == "optimistic" else 1
    on = draw.random() < 0.6 if caches is None else caches
    placement = draw.choice(PLACEMENTS)
    works = random_works(draw, draw.choice([1, 3, 8, 20, 40]), on, longer)
    settings = random_settings(draw, placement, works, on, reservation)
    count = len(settings)
    span = draw.choice([0.0, 0.5, 3.0])
    tick = draw.choice([0.0, 0.01])
    times = [_at(draw.uniform(0.0, span), tick) for _ in works]
    acts: list[Act] = [(at, number, False) for number, at in enumerate(times)]
    if draw.random() < 0.4:
        chosen = draw.sample(range(len(works)), max(1, len(works) // 3))
        acts += [(_at(draw.uniform(0.0, span + 1.0), tick), number, True) for number in chosen]
    link, network = (
        Interconnect(name="any", bandwidth=10 ** draw.uniform(6, 9), fixed_s=draw.choice([0.0, 0.01])) for _ in range(2)
    )
    same = random_cost(draw)
    return Case(
        settings=settings,
        works=works,
        acts=acts,
        cluster=Cluster(
            devices=(any_device(1.0),) * count,
            hosts=tuple(f"h{draw.randint(0, 1)}" for _ in range(count)) if draw.random() < 0.5 else (),
            link=link,
            network=network,
            message_s=draw.choice([0.0, 0.001, 0.01]),
        ),
        costs=[same if draw.random() < 0.7 else random_cost(draw) for _ in range(count)],
        max_waiting=draw.choice([1024, 1024, 3]),
        interference=draw.choice([1.0, 1.3, 2.0]),
        outputs=[more.randint(1, work.max_tokens) for work in works] if more.random() < 0.4 else (),
        least_loaded=more.random() < 0.4,
    )


def _at(time: float, tick: float) -> float:
    return round(time / tick) * tick if tick else time
