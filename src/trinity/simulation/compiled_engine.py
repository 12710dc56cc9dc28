"""The compiled engine (csrc/simulation/): replays of ``trinity.simulation.cluster_model``, event for event.

Its scope is frozen: ``trinity.simulation.screening_table`` names the stand-ins for other settings. Within that scope
tests/simulation/test_compiled_engine.py compares the two on random replays: every event, command, count of free blocks
and time (decisions 0017 and 0033).
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
from trinity.core.routing.router import number_of
from trinity.core.scheduler import BatchRules, StepTime
from trinity.costs.budgets import StepCost
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost, TableCost
from trinity.costs.layer_parts import ExpertShape
from trinity.costs.model_shape import ModelShape
from trinity.costs.step_cost import CostTables, Roofline
from trinity.errors import ConfigError
from trinity.memory.native import extension
from trinity.simulation.compiled_workload import CompiledWorkload, Floats, Ints, rows_of
from trinity.stage_kinds import KindOfWork, all_letters, stage_kinds, stage_of
from trinity.traces.trace import SLO

SPAN_SLACK = 1.1  # times the span of the arrivals, of which a load is at most
SIMULATOR = 5  # version of the extension's interface that this file calls
STAGES: tuple[KindOfWork, ...] = ("media", "prefill", "decodes")  # the engine's, in order: of each a bit and a column
BATCH_POLICIES = ("alg1", "time", "prefill_first")
ORDERS = ("fcfs", "sjf", "deadline")
REASONS = ("", "length", "cancelled", "deadline", "error", "stop", "preempted")
KINDS = (IMAGE, KV)


class RawReplay(NamedTuple):
    """The extension's answer: arrays by request and by instance."""

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


class ReplayScore(NamedTuple):
    """Score of a replay without its token times.

    - ``p90``, ``p99``, ``guard``, ``tpot``: requests in time by each rule.
    - ``first``: requests whose first token was in time.
    - ``finishes``: seconds at which complete requests ended.
    - ``busy``, ``peak``: as in ``RawReplay``.
    - ``ended``: seconds at which the last request ended.
    - ``unsettled``: instances that still held something at the end.
    - ``settled``: requests that have ended.
    """

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
class CompiledReplay:
    """Result of a replay. Request n has ``counts[n]`` tokens, whose times begin at ``times[first[n]]``.

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
        """Return the seconds at which each token of a request came."""
        start = int(self.first[number])
        found: list[float] = self.times[start : start + int(self.counts[number])].tolist()
        return found


def why_unavailable() -> str:
    """Return the reason why the compiled engine is unavailable here; "" where it is there."""
    if sorted(kind.work for kind in stage_kinds()) != sorted(STAGES):
        return f"it knows no other stages than E, P and D, and these are {all_letters()}"
    if extension is None:
        return "the extension is not built, or is of another version: `pip install` builds it where a compiler is found"
    built = getattr(extension, "SIMULATOR", 0)
    if built != SIMULATOR:
        return f"the extension was built from other sources (simulator {built}, not {SIMULATOR}): install trinity again"
    return ""


Act = tuple[float, int, bool]  # seconds, request, true if the request is cancelled


class CompiledPlacement:
    """Instances in the engine's form, from the ``settings`` of ``trinity.simulation.screening_table.screen_settings``.

    Messages, steps and pulls take as long as in ``trinity.simulation.cluster_model.SimulatedCluster``. Requests ask for
    ``ask`` tokens. Raises ``ConfigError`` for pools of other blocks than images and KV, such as states: it would replay
    as if a request needed none.
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
        if beyond := other_pools(settings):
            raise ConfigError(f"the compiled engine has no {beyond}: replay on the cores (backend='python')")
        self.settings, self.ask = settings, ask
        known: list[tuple[StepTime, Any]] = []
        limits = [inf if each.rules.limit_s is None else each.rules.limit_s for each in settings]
        self._given = (
            rows_of([_setup(each, place, cluster) for place, each in enumerate(settings)], 13, np.int32),
            np.array(limits, np.float64),
            _costs(costs, known),
            _costs([each.rules.cost for each in settings], known),
            *_options(settings[0], cluster, model, max_waiting, interference, least_loaded),
        )

    def run(
        self, work: CompiledWorkload, times: Floats, asked: Ints, aborts: npt.NDArray[np.uint8], log: bool = False
    ) -> RawReplay:
        """Replay acts, sorted by time, one an index: seconds, request, and 1 if it is cancelled.

        With ``log`` every event is in the answer.
        """
        return RawReplay(*extension.simulate(work.made, times, asked, aborts, *self._given, log))

    def score(self, work: CompiledWorkload, arrivals: Floats, asked: Ints, slo: SLO) -> ReplayScore:
        """Replay these requests at their arrivals and score them as ``SLO.is_met`` does, without token times."""
        bounds = (arrivals, slo.ttft, slo.tbt)
        return ReplayScore(*extension.sim_tried(work.made, arrivals[asked], asked, *self._given, *bounds))


def simulate(
    work: CompiledWorkload, acts: Sequence[Act], deployed: CompiledPlacement, *, log: bool = False
) -> CompiledReplay:
    """Replay acts in any order. At equal times arrivals come first."""
    ordered = sorted(acts, key=lambda act: (act[0], act[2]))
    times, asked, aborts = zip(*ordered, strict=True) if ordered else ((), (), ())
    raw = deployed.run(work, np.array(times, np.float64), np.array(asked, np.int32), np.array(aborts, np.uint8), log)
    return unpack_replay(raw, work, deployed.settings)


def other_pools(settings: Sequence[Settings]) -> str:
    """Name the pools that the engine does not know, such as those of states; "" where there are none."""
    beyond = sorted({kind for each in settings for kind in each.pools} - {*KINDS})
    return f"pools of {', '.join(beyond)} blocks" if beyond else ""


def _setup(each: Settings, place: int, cluster: Cluster) -> tuple[int, ...]:
    rules: BatchRules = each.rules
    return (
        sum(1 << STAGES.index(stage_of(letter).work) for letter in each.roles),
        int(len(each.lanes) > 1),
        each.pools.get(IMAGE, 0),
        each.pools.get(KV, 0),
        cluster.hosts.index(cluster.hosts[place]) if cluster.hosts else 0,
        rules.token_budget,
        rules.image_budget,
        BATCH_POLICIES.index(rules.policy),
        ORDERS.index(rules.order),
        int(rules.chunked),
        int(rules.limit_encodes),
        int(rules.limit_decodes),
        number_of(each.name),
    )


def _options(
    like: Settings, cluster: Cluster, model: ModelShape, max_waiting: int, interference: float, least_loaded: bool
) -> tuple[npt.NDArray[np.int64], Floats]:
    moves, link, network = like.transfers, cluster.link, cluster.network
    whole = (
        *(like.image_block_size, like.kv_block_size, like.image_cache, like.prefix_cache, moves.prefetch, moves.early),
        *(like.reservation == "optimistic", least_loaded, max_waiting),
        *(model.feature_bytes, model.kv_bytes),
    )
    real = (cluster.message_s, interference, link.bandwidth, link.fixed_s, network.bandwidth, network.fixed_s)
    return np.array(whole, np.int64), np.array(real, np.float64)


def unpack_replay(raw: RawReplay, work: CompiledWorkload, settings: Sequence[Settings]) -> CompiledReplay:
    """Turn the extension's arrays into lists and dictionaries by name."""
    at, rest = raw.log
    return CompiledReplay(
        times=raw.times,
        first=work.first,
        counts=raw.counts,
        reasons=[REASONS[each] for each in raw.reasons.tolist()],
        busy=to_busy_seconds(raw.busy, settings),
        peak=to_peak_blocks(raw.peak, settings),
        moved=dict(zip(KINDS, raw.moved.tolist()[1:], strict=True)),
        ended=raw.ended,
        events=raw.events,
        unsettled=raw.unsettled,
        preemptions=raw.preemptions,
        log=[(time, *line) for time, line in zip(at.tolist(), rest.reshape(-1, 6).tolist(), strict=True)],
    )


def to_busy_seconds(busy: Floats, settings: Sequence[Settings]) -> list[dict[str, float]]:
    """Return each instance's busy seconds at each of its stages."""
    rows = busy.reshape(-1, 3).tolist()
    return [
        {letter: own[STAGES.index(stage_of(letter).work)] for letter in each.roles}
        for own, each in zip(rows, settings, strict=True)
    ]


def to_peak_blocks(peak: Ints, settings: Sequence[Settings]) -> list[dict[str, int]]:
    """Return the most blocks of each kind that each instance held."""
    rows = peak.reshape(-1, 2).tolist()
    return [{kind: own[KINDS.index(kind)] for kind in each.pools} for own, each in zip(rows, settings, strict=True)]


def measure_load(found: ReplayScore, settings: Sequence[Settings], began: float, span: float) -> dict[str, float]:
    """Average the busy share of the instances of each roles, over the time until the last request ended.

    At most ``SPAN_SLACK`` times the ``span`` of the arrivals counts as that time: long outputs at the end must not make
    an overloaded instance look idle. So a share may exceed 1.
    """
    span = min(found.ended - began, SPAN_SLACK * span) or inf
    shares = (found.busy.reshape(-1, 3).sum(axis=1) / span).tolist()
    groups: dict[str, list[float]] = {}
    for share, each in zip(shares, settings, strict=True):
        groups.setdefault("".join(each.roles), []).append(share)
    return {roles: sum(group) / len(group) for roles, group in groups.items()}


def _kind_of(cost: StepTime) -> Any:
    return COSTS.get(name_cost(cost))


def name_cost(cost: StepTime) -> type:
    """Name a cost model's kind: its class; for a roofline of a mixture of experts, which is not compiled, theirs."""
    mixed = isinstance(cost, Roofline) and cost.model.language.experts is not None
    return ExpertShape if mixed else type(cost)


def _costs(costs: Sequence[StepTime | None], known: list[tuple[StepTime, Any]]) -> list[Any]:
    """Convert cost models to the engine's form, equal ones once; None stays None."""
    made = []
    for cost in costs:
        found = next((each for other, each in known if other is cost or other == cost), None)
        if found is None and cost is not None:
            found = _kind_of(cost)(cost)
            known.append((cost, found))
        made.append(found)
    return made


def _roofline(cost: Roofline) -> Any:
    model, device, language, vision = cost.model, cost.device, cost.model.language, cost.model.encoder
    seen, patch = (vision.layers, vision.patch_weights) if vision else (language, language.weights)
    whole = (
        *(language.weights, model.head, language.attended, language.layers, language.width, model.dtype_bytes),
        *(model.read_bytes, model.kv_bytes, vision is not None, patch, vision.projector if vision else 0),
        *(vision.span if vision else 0, seen.attended_each, vision.full_layers if vision else 0, seen.layers),
        *(seen.width, model.vision_bytes, model.feature_bytes, model.image_tokens),
    )
    shares = (device.flops, device.flops_share, device.encoding_share, device.bandwidth, device.bandwidth_share)
    real = (cost.context, vision.patches if vision else 0, *shares, device.pass_s, device.row_s)
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
