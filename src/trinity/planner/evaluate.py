"""Turns results of a search into candidates of a plan, with a replay behind their figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from trinity.core.messages import KV
from trinity.errors import TraceTooShort
from trinity.planner.candidates import Deployment
from trinity.planner.confirmation import CoreResult
from trinity.planner.plan import Candidate
from trinity.planner.problem import PlanningProblem
from trinity.planner.search import SearchResult
from trinity.planner.trials import rate_of, step_of
from trinity.simulation.rate_sweep import InstanceUsage
from trinity.simulation.simulator import Replay
from trinity.stage_kinds import all_letters, feature_kinds, stage_kinds
from trinity.traces.goodput import RequestOutcome
from trinity.traces.trace import SLO, SLO_RULES, SLORule, Trace

IMAGE_BLOCK, KV_BLOCK = 576, 16  # tokens of a block (TriInfer 5.1), as the simulator sizes pools
VERIFIED = 500  # requests of the winner that both engines replay
VERIFIED_EACH = 16_000  # at most, times instances: the Python cores take longer for more of them
VERIFIED_LEAST = 200


def make_candidate(case: PlanningProblem, found: SearchResult) -> Candidate:
    """Make a plan's candidate from the search's own result."""
    deployment, rule = found.entry.deployment, case.asked.rule
    mixed = deployment.devices != case.hardware.names or len(case.hardware.by_name) > 1
    return Candidate(
        placement=str(deployment),
        method=deployment.method,
        devices=tuple(case.hardware.labels[name] for name in deployment.devices) if mixed else (),
        exact=found.exact,
        score=found.score if found.exact else None,
        goodput={rule: found.rate} if found.exact and (found.value is None or found.step is not None) else {},
        bound=None if math.isinf(found.bound) else found.bound,
        nominal=None if math.isinf(found.entry.nominal) else found.entry.nominal,
        attainment=case.trials.points(deployment),
        bottleneck=case.bounds.bottleneck(deployment),
        price=case.hardware.price(deployment.devices),
        settings=case.hardware.list_settings(deployment),
        screened=found.screened,
        longer_steps=case.longer_steps.get(deployment, ()),
    )


def measure_every_rule(case: PlanningProblem, found: SearchResult) -> dict[str, float]:
    """Measure its goodput by each rule, searched on from what was seen."""
    known = {case.asked.rule: found.rate}
    if case.dear:
        return {case.asked.rule: found.rate}
    for rule in SLO_RULES:
        if rule not in known:
            step = case.trials.limit(found.entry.deployment, found.rate or found.entry.nominal, rule)
            known[rule] = 0.0 if step is None else rate_of(step)
    return {rule: known[rule] for rule in SLO_RULES}


def evaluate_goodput(case: PlanningProblem, found: SearchResult, seeds: Sequence[int]) -> tuple[Candidate, str]:
    """Make a candidate with goodput by every rule, use of instances and spread; return it with the engine's name."""
    goodput = measure_every_rule(case, found)
    spread = tuple(_measure_redrawn(case, found, seed) for seed in seeds) if found.step is not None else ()
    made = make_candidate(case, found)
    seen = min(made.attainment, key=lambda point: point.rate)
    if found.step is not None:
        seen = case.trials.point(found.entry.deployment, found.step)
    usage = _usage(case, found, found.rate or seen.rate)
    sure = tuple(each for each in spread if each is not None)
    late = find_late_stages(1 - seen.attainment[case.asked.rule], 1 - seen.ttft_attainment)
    figured = collect_figures(case, found.entry.deployment, usage, late)
    return msgspec.structs.replace(made, goodput=goodput, spread=sure, **figured), usage.backend


def evaluate_core_result(case: PlanningProblem, confirmed: CoreResult, seeds: Sequence[int]) -> Candidate:
    """Make a candidate with the cores' goodput by the plan's rule, and their use of instances at it.

    Its spread is the screening engine's on redrawn traces, scaled by its gap to the cores.
    """
    found, replay = confirmed.found, confirmed.replay
    made = msgspec.structs.replace(make_candidate(case, found), attainment=confirmed.points)
    if replay is None or not found.screened:
        return made
    late = find_late_stages(*count_late(replay.outcomes, case.asked.slo, case.asked.rule))
    screened = found._replace(step=step_of(found.screened))
    spread = (_measure_redrawn(case, screened, seed) for seed in seeds)
    sure = tuple(each * found.rate / found.screened for each in spread if each is not None)
    return msgspec.structs.replace(made, spread=sure, **collect_figures(case, found.entry.deployment, replay, late))


def evaluate_replay(case: PlanningProblem, found: SearchResult, offered: Trace) -> tuple[Candidate, str]:
    """Make a candidate with the use of instances in one replay, where there is no goodput; and the engine's name."""
    replay = _replay(case, found.entry.deployment, offered)
    late = find_late_stages(*count_late(replay.outcomes, case.asked.slo, case.asked.rule))
    figured = collect_figures(case, found.entry.deployment, replay, late)
    return msgspec.structs.replace(make_candidate(case, found), **figured), replay.backend


def collect_figures(
    case: PlanningProblem, deployment: Deployment, seen: InstanceUsage | Replay, late: str
) -> dict[str, Any]:
    """Collect utilisation, memory and bottleneck of a replay; the bottleneck is among the stages that are ``late``."""
    return {
        "utilisation": seen.utilisation,
        "memory": _memory(case, deployment, seen),
        "bottleneck": find_busiest_stage(deployment, seen.utilisation, late) or case.bounds.bottleneck(deployment),
    }


def count_late(outcomes: Sequence[RequestOutcome], slo: SLO, rule: SLORule) -> tuple[float, float]:
    """Count the requests that are not in time, and those of them whose first token is late already."""
    late = [each for each in outcomes if not slo.is_met(each, rule)]
    return len(late), sum(each.ttft_s is None or each.ttft_s >= slo.ttft for each in late)


def find_late_stages(late: float, first: float) -> str:
    """Find the stages that make most of the ``late`` requests late; ``first`` of them are late by their first token."""
    first_token = "ttft" if 2 * first >= late else "tbt"
    return "".join(kind.letter for kind in stage_kinds() if not late or kind.bound == first_token)


def find_busiest_stage(
    deployment: Deployment, utilisation: dict[str, dict[str, float]], stages: str | None = None
) -> str:
    """Find which of these stages (None: all) takes most of the time of the busiest group of instances."""
    stages = all_letters() if stages is None else stages
    work: dict[str, dict[str, float]] = {}
    for name, roles in deployment.placement.instances():
        group = work.setdefault(roles, {})
        for letter, share in utilisation.get(name, {}).items():
            group[letter] = group.get(letter, 0.0) + share
    counts = Counter(roles for _, roles in deployment.placement.instances())
    able = [roles for roles, group in work.items() if set(group) & set(stages)]
    if not able:
        return ""
    group = work[max(able, key=lambda roles: sum(work[roles].values()) / counts[roles])]
    return max((letter for letter in group if letter in stages), key=lambda letter: group[letter])


def _memory(case: PlanningProblem, deployment: Deployment, seen: InstanceUsage | Replay) -> dict[str, dict[str, float]]:
    model = case.hardware.model
    block = {**dict.fromkeys(feature_kinds(), model.feature_bytes * IMAGE_BLOCK), KV: model.kv_bytes * KV_BLOCK}
    found: dict[str, dict[str, float]] = {}
    for name, roles in deployment.placement.instances():
        found[name] = {"weights": float(model.weight_bytes(roles))}
        for kind, blocks in seen.pools[name].items():
            found[name][kind] = float(blocks * block[kind])
            found[name][f"{kind}_peak"] = seen.peak_blocks[name].get(kind, 0) / blocks
    return found


def _measure_redrawn(case: PlanningProblem, found: SearchResult, seed: int) -> float | None:
    """Measure its goodput on a redrawn trace; None where that is too short."""
    trials = case.make_redrawn_trials(seed)
    before = trials.runs
    try:
        step = trials.limit(found.entry.deployment, found.rate)
    except TraceTooShort:
        return None
    finally:
        case.trials.runs += trials.runs - before
    return 0.0 if step is None else rate_of(step)


def _usage(case: PlanningProblem, found: SearchResult, rate: float) -> InstanceUsage | Replay:
    """Return the use of instances in the trial at this rate, or in a new replay where the trial does not tell."""
    deployment = found.entry.deployment
    known = case.trials.usage(deployment, rate)
    if known is None:
        return _replay(case, deployment, case.trace.scale(rate=rate))
    case.trials.runs += found.step is None
    return known


def _replay(case: PlanningProblem, deployment: Deployment, offered: Trace) -> Replay:
    case.trials.tell(f"{deployment} in detail")
    return case.hardware.search_simulator(deployment, case.asked.slo).replay(offered, deployment.placement)


# ---------------------------------------------------------------- the compiled engine against the cores that serve


def verify_on_cores(case: PlanningProblem, found: SearchResult) -> str:
    """Replay the winner of the compiled engine on the Python cores as well; return a note for the plan.

    Raises ``AssertionError`` where the engines differ: that is a fault of trinity.
    """
    deployment, slo = found.entry.deployment, case.asked.slo
    count = max(VERIFIED_LEAST, min(VERIFIED, VERIFIED_EACH // len(deployment.devices)))
    offered = case.trace.head(count)
    if found.step is not None:
        offered = offered.scale(found.rate / case.trials.own)  # as those of the whole trace at that rate
    first, second = (
        case.hardware.simulator(deployment, slo, **choice).replay(offered, deployment.placement)
        for choice in ({}, {"backend": "python"})
    )
    case.trials.runs += 2
    if second.outcomes != first.outcomes:
        differ = sum(a != b for a, b in zip(first.outcomes, second.outcomes, strict=True))
        raise AssertionError(
            f"the {first.backend} engine and the Python cores differ in {differ} of {len(offered)} requests on "
            f'{deployment}: use backend="python" and report it'
        )
    return f"The winner's first {len(offered):,} requests were replayed on the cores that serve, with equal outcomes."
