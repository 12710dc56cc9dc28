"""SimulatedCluster: an event loop whose steps, pulls and messages take times from a cost model and a cluster."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from trinity.core import InstanceCore
from trinity.core.frontend import Deliver, End, FrontendOptions
from trinity.core.instance.state import Settings
from trinity.core.messages import (
    FRONTEND,
    KV,
    STATE,
    LayersWritten,
    Pull,
    Pulled,
    Sampled,
    Send,
    Step,
    Stepped,
    Submit,
    Value,
    Work,
)
from trinity.core.role_changes import Switch
from trinity.core.routing.router import RoutingPolicy
from trinity.core.transfers import FEED_FORWARD, rows_moved
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import ModelShape
from trinity.costs.step_cost import CostModel
from trinity.simulation.event_loop import EventLoop
from trinity.simulation.workload import OUTPUT, Job, asked_tokens, work_of
from trinity.stage_kinds import DECODE, KINDS_OF_WORK, KindOfWork, block_kinds, count_alone, feature_kinds, stage_of
from trinity.timeline import Slice

StepCounts = tuple[int, int, int]  # decodes, prefill tokens, visual tokens of a step
SAMPLED = Sampled(OUTPUT)
STOP = Sampled(OUTPUT + 1)  # the last one of those that asked for more


@dataclass(slots=True)
class SimulatedStep:
    """A step on a lane, with ``left`` seconds to go.

    ``due``: (seconds left, layers) of each event to post: KV of these layers is written, or None at the step's end.
    ``numbers``: of the posted events that are still valid.
    """

    step: Step
    counts: StepCounts
    started: float
    left: float
    due: list[tuple[float, tuple[int, int] | None]]
    numbers: set[int] = field(default_factory=set)


class SimulatedInstance:
    """One instance: its cost model, the steps of its lanes, its device's busy seconds by stage and its peak blocks."""

    def __init__(self, core: InstanceCore, place: int, cost: CostModel, model: ModelShape) -> None:
        self.core, self.place = core, place
        self.cost, self.weigh = cost, model.media.encode_work
        self.running: dict[str, SimulatedStep] = {}
        self.waiting: dict[str, deque[Step]] = {
            lane: deque() for lane in core.settings.lanes
        }  # behind the one that runs
        self.since = 0.0
        self.free_at = 0.0  # when all pulls into it that were requested so far have ended
        self.busy = dict.fromkeys(core.settings.roles, 0.0)
        self.peak = dict.fromkeys(core.settings.pools, 0)
        own = core.settings
        features = feature_kinds()
        self.block_rows = {**dict.fromkeys(features, own.image_block_size), KV: own.kv_block_size, STATE: 1}
        self.row_bytes = {**dict.fromkeys(features, model.feature_bytes), KV: model.kv_bytes, STATE: model.state_bytes}
        self._decoded: tuple[str, ...] = ()
        self._context = 0

    def begin(self, step: Step, now: float) -> SimulatedStep:
        """Put the step on its lane, with the seconds that it takes alone on the device."""
        decodes, prefill, media, image = len(step.decodes), 0, 0, 0.0
        context = self._count_context(step.decodes) / decodes if decodes else 0.0
        prefills, prefilled = len(step.prefills), 0.0
        if decodes or prefills:
            self._decoded = step.decodes
        if prefills:
            prefill = sum([row.length for row in step.prefills])
            prefilled = sum([row.start for row in step.prefills]) / prefills
        if step.encodes:
            spans = [row.span for row in step.encodes]
            works = [self.weigh(span.kind, span.tokens) for span in spans]
            media = sum(works)
            image = sum([span.tokens * work for span, work in zip(spans, works, strict=True)]) / media
        seconds = self.cost.at(
            decodes, prefill, media, context=context, prefilled=prefilled, prefills=prefills, image_tokens=image
        )
        due: list[tuple[float, tuple[int, int] | None]] = [(0.0, None)]
        if step.group:
            due = [*_schedule_groups(step.group, self.core.settings.layers, seconds), *due]
        running = self.running[step.lane] = SimulatedStep(step, (decodes, prefill, media), now, seconds, due)
        return running

    def _count_context(self, decodes: tuple[str, ...]) -> int:
        """Count the tokens of all decode rows, prompts and outputs.

        With the rows of the last step it is one more each. A step without decode rows resets this, because one of
        the requests may have been recomputed meanwhile.
        """
        if decodes == self._decoded:
            self._context += len(decodes)
        else:
            requests = self.core.state.requests
            states = [requests[request] for request in decodes]
            self._context = sum([len(state.work.prompt) + state.outputs for state in states])
        return self._context

    def book(self, counts: StepCounts, seconds: float) -> None:
        """Add a step's seconds to its stages. A mixed step is shared in proportion to what each stage takes alone.

        All media of an instance with several encoders count at the first of them.
        """
        _, prefill, media = counts
        if not (prefill or media):
            self.busy[DECODE.letter] += seconds
            return
        given, first = dict(zip(KINDS_OF_WORK, counts, strict=True)), dict[KindOfWork, str]()
        for letter in self.busy:
            first.setdefault(stage_of(letter).work, letter)
        rows = {letter: given[work] for work, letter in first.items() if given[work]}
        alone = {letter: self.cost.seconds(*count_alone(letter, count)) for letter, count in rows.items()}
        total = 0.0
        for share in (
            alone.values()
        ):  # one after the other, as the compiled engine does: from Python 3.12 on sum() is more exact
            total += share
        for letter, share in alone.items():
            self.busy[letter] += seconds * share / total if len(alone) > 1 and total else seconds

    def update_peak(self) -> None:
        """Raise the peak of each pool to the blocks held now."""
        for kind, pool in self.core.state.pools.items():
            held = pool.held
            if held > self.peak[kind]:
                self.peak[kind] = held


class SimulatedCluster(EventLoop):
    """Serves jobs on a cluster in virtual time. ``run`` returns when no event is left.

    A message takes ``cluster.message_s``. A step takes the seconds of its instance's cost model; while both lanes of an
    instance are busy, each is ``interference`` times slower. A pull takes the link's time for the bytes that it moves
    (``rows_moved``); pulls into one instance run one after the other. Requests ask for ``ask`` tokens, and a stop token
    ends their output earlier. Arrivals have the lowest event numbers, so at equal times they come first.
    """

    def __init__(
        self,
        instances: Sequence[Settings],
        jobs: Sequence[Job],
        *,
        cluster: Cluster,
        costs: Sequence[CostModel],
        model: ModelShape,
        routing: Callable[[], RoutingPolicy],
        frontend: FrontendOptions,
        interference: float,
        shared: bool,
        record: bool,
        ask: int = 0,
    ) -> None:
        super().__init__(instances, routing, frontend)
        self.timed = any(core.next_timer() is not None for core in self.cores.values())
        self.cluster, self.jobs, self.shared, self.interference = cluster, jobs, shared, interference
        self.ask, self.context, self.strips = ask, model.context, frontend.spread or 1
        self.asking = any(asked_tokens(job, ask, model.context) > job.max_tokens for job in jobs)
        self.workers = {
            name: SimulatedInstance(core, place, cost, model)
            for place, ((name, core), cost) in enumerate(zip(self.cores.items(), costs, strict=True))
        }
        self.times: dict[str, list[float]] = {str(number): [] for number in range(len(jobs))}  # of each token
        self.reasons = ["error" if job.refused else "" for job in jobs]
        self.ended = 0.0
        self.switches: list[Switch] = []
        self.past_preemptions = 0  # at lives that a switch has ended
        self.moved = {kind: 0 for kind in block_kinds() if kind != STATE or model.states}
        self.timeline: list[Slice] | None = [] if record else None
        for number, job in enumerate(jobs):
            following = next(self._sequence)
            if not job.refused:
                self._heap.append((job.at, following, FRONTEND, number))
        heapq.heapify(self._heap)
        self._lively += len(self._heap)

    def run(self) -> None:
        while not self.is_over():
            if self.timed:
                self.skip_lull()
            self.advance()

    def work(self, number: int) -> Work:
        """Build the request that the front end receives for the job of this number."""
        work = work_of(self.jobs[number], number, self.shared, self.strips)
        most = asked_tokens(self.jobs[number], self.ask, self.context)
        return work if most == work.max_tokens else replace(work, max_tokens=most, stop_ids=frozenset({STOP.token}))

    def take(self, number: int, name: str, event: Any) -> Value | None:
        if name == FRONTEND and type(event) is int:
            return Submit(self.work(event))
        if type(event) is Stepped:
            return event if self._finish_step(number, name, event) else None
        if type(event) is LayersWritten and not self._take_progress(number, name, event):
            return None
        value: Value = event
        return value

    def handle(self, name: str, event: Value) -> None:
        super().handle(name, event)
        if name != FRONTEND:
            self.workers[name].update_peak()
            if type(event) is Stepped:
                self._follow(name, event.lane)

    # ------------------------------------------------------------ commands

    def send(self, name: str, command: Send) -> None:
        self.post(self.now + self.cluster.message_s, command.to, command.message)

    def deliver(self, name: str, command: Deliver) -> None:
        self.times[command.request].append(self.now)

    def end(self, name: str, command: End) -> None:
        number = int(command.request)
        assert not self.reasons[number], f"request {number} ended twice"
        self.reasons[number] = command.reason
        self.ended = self.now

    def pull(self, name: str, pull: Pull) -> None:
        target = self.workers[name]
        rows = rows_moved(len(pull.source_blocks), pull.tail, target.block_rows[pull.kind])
        size = rows * target.row_bytes[pull.kind]
        if pull.layers is not None:
            size = size * (pull.layers[1] - pull.layers[0]) // target.core.settings.layers
        link = self.cluster.link_between(self.workers[pull.source].place, target.place)
        start = max(self.now, target.free_at)
        target.free_at = start + link.seconds(size)
        self.moved[pull.kind] += size
        if self.timeline is not None:
            said = {"source": pull.source, "request": pull.request, "bytes": size}
            self.timeline.append(Slice(name, "migration", pull.kind, start, target.free_at - start, said))
        self.post(target.free_at, name, Pulled(pull.offer, pull.part))

    # ------------------------------------------------------------ steps

    def start(self, name: str, step: Step) -> None:
        worker = self.workers[name]
        if step.lane in worker.running or worker.waiting[step.lane]:
            worker.waiting[step.lane].append(step)
        else:
            self._begin(name, step)

    def _follow(self, name: str, lane: str) -> None:
        """Begin the step that waited behind the one that ended, whose results are booked by now."""
        worker = self.workers[name]
        if worker.waiting[lane] and lane not in worker.running:
            self._begin(name, worker.waiting[lane].popleft())

    def _begin(self, name: str, step: Step) -> None:
        worker = self.workers[name]
        self._elapse(worker)
        running = worker.begin(step, self.now)
        if len(worker.running) > 1 and self.interference > 1:
            self._arrange(name, worker)
        else:
            self._post_lane(name, running, 1.0)

    def _take_progress(self, number: int, name: str, event: LayersWritten) -> bool:
        """Consume a progress event; false if it is void, posted before the lane's speed changed."""
        running = self.workers[name].running.get(event.lane)
        if running is None or number not in running.numbers:
            return False
        running.due.pop(0)
        return True

    def _finish_step(self, number: int, name: str, event: Stepped) -> bool:
        """End the lane's step, so that another lane goes on at full speed; false if the event is void."""
        worker = self.workers[name]
        running = worker.running.get(event.lane)
        if running is None or number not in running.numbers:
            return False
        self._elapse(worker)
        del worker.running[event.lane]
        if worker.running and self.interference > 1:
            self._arrange(name, worker)
        seconds = self.now - running.started
        worker.book(running.counts, seconds)
        if self.timeline is not None:
            self.timeline.append(_slice(name, running, seconds))
        return True

    def _elapse(self, worker: SimulatedInstance) -> None:
        """Account for the time since the lanes' speed changed last."""
        if self.interference > 1:  # else what was posted stays as it is
            slow = self._slow(worker)
            for running in worker.running.values():
                running.left -= (self.now - worker.since) / slow
            worker.since = self.now

    def _slow(self, worker: SimulatedInstance) -> float:
        return self.interference if len(worker.running) > 1 else 1.0

    def _arrange(self, name: str, worker: SimulatedInstance) -> None:
        """Post the events of all lanes again after their speed has changed; those posted before are void."""
        slow = self._slow(worker)
        for lane in worker.core.settings.lanes:
            if lane in worker.running:
                self._post_lane(name, worker.running[lane], slow)

    def _post_lane(self, name: str, running: SimulatedStep, slow: float) -> None:
        step = running.step
        running.numbers.clear()
        for left, layers in running.due:
            at = self.now + (running.left - left) * slow
            event: Value
            if layers is not None:
                event = LayersWritten(step.id, step.lane, layers)
            else:
                sampling = [row.request for row in step.prefills if row.last]
                sampled = dict.fromkeys([*sampling, *step.decodes], SAMPLED)
                if self.asking:
                    sampled |= dict.fromkeys(filter(partial(self._stops, name), sampled), STOP)
                event = Stepped(step.id, step.lane, sampled, {}, at - running.started)
            running.numbers.add(self.post(at, name, event))

    def _stops(self, name: str, request: str) -> bool:
        """Check if the request's next token is the last one of its output."""
        job = self.jobs[int(self.frontend.reader_of(request))]
        return self.workers[name].core.state.requests[request].outputs + 1 == job.max_tokens


def _schedule_groups(group: int, layers: int, seconds: float) -> list[tuple[float, tuple[int, int] | None]]:
    """Compute the seconds left when the KV of each group of layers is written.

    Layers take equal shares of the step, attention before the feed-forward part.
    """
    ends = [(first, min(first + group, layers)) for first in range(0, layers, group)]
    return [(seconds * (1 - (end - FEED_FORWARD) / layers), (first, end)) for first, end in ends]


def _slice(name: str, running: SimulatedStep, seconds: float) -> Slice:
    step = running.step
    present = {"encode": step.encodes, "prefill": step.prefills, "decode": step.decodes}
    counts = dict(zip(("decodes", "prefill tokens", "media tokens"), running.counts, strict=True))
    title = "+".join(kind for kind, rows in present.items() if rows)
    return Slice(name, step.lane, f"simulated {title}", running.started, seconds, counts)
