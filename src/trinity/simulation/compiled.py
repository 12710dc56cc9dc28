"""The compiled twin of ``trinity.simulation.cluster_model``: the same replay, event for event, by csrc/simulation/.

Its scope is frozen: ``trinity.simulation.screening`` says what stands for other settings. Within it
tests/simulation/test_compiled.py holds the two together: every event, command, count of free blocks and float time of
random replays (decisions 0017 and 0033).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trinity.core.instance.state import Settings
from trinity.core.messages import IMAGE, KV
from trinity.core.routing import number_of
from trinity.core.scheduler import BatchRules, StepTime
from trinity.costs.budgets import StepCost
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost, TableCost
from trinity.costs.model_shape import ModelShape
from trinity.costs.step_cost import CostTables, Roofline
from trinity.memory.native import extension
from trinity.simulation.compiled_workload import Workload, rows_of
from trinity.traces.trace import SLO

SPARE = 1.1
SIMULATOR = 4  # of the extension's part that this file calls
ROLES = {"E": 1, "P": 2, "D": 4}
POLICIES = ("alg1", "time", "prefill_first")
ORDERS = ("fcfs", "sjf", "deadline")
REASONS = ("", "length", "cancelled", "deadline", "error", "stop", "preempted")
KINDS = (IMAGE, KV)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


class Raw(NamedTuple):
    """What the extension answers: arrays by request and by instance."""

    times: Floats
    counts: Ints
    reasons: npt.NDArray[np.uint8]
    busy: Floats
    peak: Ints
    moved: npt.NDArray[np.int64]
    ended: float
    events: int
    unsettled: int
    preemptions: int
    log: tuple[Floats, Ints]


class Tried(NamedTuple):
    """What a replay that was only judged came to: requests in time by rule, those whose first token was, when those
    that were complete ended, how many have ended (``settled``)."""

    p90: int
    p99: int
    guard: int
    tpot: int
    first: int
    finishes: Floats
    busy: Floats
    peak: Ints
    ended: float
    unsettled: int
    settled: int


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a replay came to. ``times`` of the tokens of request n begin at ``first[n]``, and are ``counts[n]``.

    ``unsettled`` counts instances that still held something at the end: 0 unless there is a fault.
    """

    times: Floats
    first: npt.NDArray[np.int64]
    counts: Ints
    reasons: list[str]
    busy: list[dict[str, float]]
    peak: list[dict[str, int]]
    moved: dict[str, int]
    ended: float
    events: int
    unsettled: int
    preemptions: int
    log: list[tuple[Any, ...]]

    def tokens(self, number: int) -> list[float]:
        """When each token of a request came."""
        start = int(self.first[number])
        found: list[float] = self.times[start : start + int(self.counts[number])].tolist()
        return found


def missing() -> str:
    """Why there is no twin here; "" where there is one."""
    if extension is None or getattr(extension, "SIMULATOR", 0) != SIMULATOR:
        return "the extension is not built, or is of another version: `pip install` builds it where a compiler is found"
    return ""


Act = tuple[float, int, bool]  # when, which request, whether it is given up


class Deployed:
    """Instances in the twin's form. ``settings`` as ``trinity.simulation.screening.screened`` gives them.

    Messages, steps and pulls take what ``trinity.simulation.cluster_model.Simulated`` says. Requests ask for ``ask``
    tokens.
    """

    def __init__(
        self,
        settings: Sequence[Settings],
        *,
        cluster: Cluster,
        costs: Sequence[StepTime],
        model: ModelShape,
        max_waiting: int,
        interference: float,
        ask: int = 0,
        least_loaded: bool = False,
    ) -> None:
        self.settings, self.ask = settings, ask
        known: list[tuple[StepTime, Any]] = []
        limits = [inf if each.rules.limit_s is None else each.rules.limit_s for each in settings]
        self._given = (
            rows_of([_setup(each, place, cluster) for place, each in enumerate(settings)], 12, np.int32),
            np.array(limits, np.float64),
            _costs(costs, known),
            _costs([each.rules.cost for each in settings], known),
            *_options(settings[0], cluster, model, max_waiting, interference, least_loaded),
        )

    def run(self, work: Workload, times: Floats, asked: Ints, aborts: npt.NDArray[np.uint8], log: bool = False) -> Raw:
        """Acts in their order: when, which request, whether it is given up. With ``log`` every event is told."""
        return Raw(*extension.simulate(work.made, times, asked, aborts, *self._given, log))

    def tried(self, work: Workload, arrivals: Floats, asked: Ints, slo: SLO) -> Tried:
        """Those asked, each when it arrives, judged as ``SLO.is_met`` does: no token's time is told."""
        bounds = (arrivals, slo.ttft, slo.tbt)
        return Tried(*extension.sim_tried(work.made, arrivals[asked], asked, *self._given, *bounds))


def simulate(work: Workload, acts: Sequence[Act], deployed: Deployed, *, log: bool = False) -> Told:
    """A replay. Arrivals come first among acts at equal times."""
    ordered = sorted(acts, key=lambda act: (act[0], act[2]))
    times, asked, aborts = zip(*ordered, strict=True) if ordered else ((), (), ())
    raw = deployed.run(work, np.array(times, np.float64), np.array(asked, np.int32), np.array(aborts, np.uint8), log)
    return told(raw, work, deployed.settings)


def _setup(each: Settings, place: int, cluster: Cluster) -> tuple[int, ...]:
    rules: BatchRules = each.rules
    return (
        sum(ROLES[role] for role in each.roles),
        int(len(each.lanes) > 1),
        each.pools.get(IMAGE, 0),
        each.pools.get(KV, 0),
        cluster.hosts.index(cluster.hosts[place]) if cluster.hosts else 0,
        rules.token_budget,
        rules.image_budget,
        POLICIES.index(rules.policy),
        ORDERS.index(rules.order),
        int(rules.chunked),
        int(rules.limit_encodes),
        number_of(each.name),
    )


def _options(
    like: Settings, cluster: Cluster, model: ModelShape, max_waiting: int, interference: float, least_loaded: bool
) -> tuple[npt.NDArray[np.int64], Floats]:
    moves, link, network = like.transfers, cluster.link, cluster.network
    whole = (
        *(like.image_block_size, like.kv_block_size, like.image_cache, like.prefix_cache, moves.prefetch, moves.early),
        *(like.reservation == "optimistic", least_loaded, max_waiting),
        *(model.feature_bytes * like.image_block_size, model.kv_bytes * like.kv_block_size),
    )
    real = (cluster.message_s, interference, link.bandwidth, link.fixed_s, network.bandwidth, network.fixed_s)
    return np.array(whole, np.int64), np.array(real, np.float64)


def told(raw: Raw, work: Workload, settings: Sequence[Settings]) -> Told:
    """By names in place of numbers."""
    at, rest = raw.log
    return Told(
        times=raw.times,
        first=work.first,
        counts=raw.counts,
        reasons=[REASONS[each] for each in raw.reasons.tolist()],
        busy=worked(raw.busy, settings),
        peak=held(raw.peak, settings),
        moved=dict(zip(KINDS, raw.moved.tolist()[1:], strict=True)),
        ended=raw.ended,
        events=raw.events,
        unsettled=raw.unsettled,
        preemptions=raw.preemptions,
        log=[(time, *line) for time, line in zip(at.tolist(), rest.reshape(-1, 6).tolist(), strict=True)],
    )


def worked(busy: Floats, settings: Sequence[Settings]) -> list[dict[str, float]]:
    """Seconds of each instance at each of its stages."""
    rows = busy.reshape(-1, 3).tolist()
    return [{role: own["EPD".index(role)] for role in each.roles} for own, each in zip(rows, settings, strict=True)]


def held(peak: Ints, settings: Sequence[Settings]) -> list[dict[str, int]]:
    """The most blocks of each kind on each instance."""
    rows = peak.reshape(-1, 2).tolist()
    return [{kind: own[KINDS.index(kind)] for kind in each.pools} for own, each in zip(rows, settings, strict=True)]


def load(told: Tried, settings: Sequence[Settings], began: float, span: float) -> dict[str, float]:
    """How long the instances of each roles were at work on average, of the time until all was done.

    Of ``SPARE`` times the ``span`` in which the requests came where that is shorter: long outputs at the end do not
    make idle what was overloaded before. It may exceed 1.
    """
    span = min(told.ended - began, SPARE * span) or inf
    worked = (told.busy.reshape(-1, 3).sum(axis=1) / span).tolist()
    groups: dict[str, list[float]] = {}
    for share, each in zip(worked, settings, strict=True):
        groups.setdefault("".join(each.roles), []).append(share)
    return {roles: sum(shares) / len(shares) for roles, shares in groups.items()}


def _kind_of(cost: StepTime) -> Any:
    return COSTS.get(type(cost))


def _costs(costs: Sequence[StepTime | None], known: list[tuple[StepTime, Any]]) -> list[Any]:
    """In the twin's form, equal ones once; None stays None."""
    made = []
    for cost in costs:
        found = next((each for other, each in known if other is cost or other == cost), None)
        if found is None and cost is not None:
            found = _kind_of(cost)(cost)
            known.append((cost, found))
        made.append(found)
    return made


def _roofline(cost: Roofline) -> Any:
    model, device, language, vision = cost.model, cost.device, cost.model.language, cost.model.vision
    seen = vision.layers if vision else language
    whole = (
        *(language.weights, model.head, language.attended, language.layers, language.width, model.dtype_bytes),
        *(model.read_bytes, model.kv_bytes, vision is not None, isinstance(vision.patches if vision else 0, int)),
        *(seen.weights, vision.projector if vision else 0, vision.span if vision else 0, seen.attended, seen.layers),
        *(seen.width, model.vision_bytes, model.feature_bytes),
    )
    speeds = (device.flops, device.flops_share, device.bandwidth, device.bandwidth_share, device.pass_s, device.row_s)
    real = (cost.context, vision.patches if vision else 0, *speeds)
    return extension.sim_roofline(np.array(whole, np.int64), np.array(real, np.float64))


def _step_cost(cost: StepCost) -> Any:
    tables = (cost.decodes, cost.prefill, cost.media)
    return extension.sim_step_cost(*(np.array(each, np.float64).reshape(-1, 2) for each in tables))


def _tables(cost: CostTables) -> Any:
    contexts, costs = zip(*cost.costs, strict=True)
    return extension.sim_tables(cost.context, [float(each) for each in contexts], [_step_cost(each) for each in costs])


def _linear(cost: LinearCost) -> Any:
    return extension.sim_linear(cost.step_s, cost.decode_s, cost.prefill_s, cost.encode_s, cost.media_s)


COSTS: dict[type, Any] = {
    Roofline: _roofline,
    StepCost: _step_cost,
    TableCost: _step_cost,
    CostTables: _tables,
    LinearCost: _linear,
}
