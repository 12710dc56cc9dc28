"""From what was found of a deployment to a candidate of a plan, with a replay behind its figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from trinity.core.messages import IMAGE, KV
from trinity.errors import TraceTooShort
from trinity.placement import STAGES
from trinity.planner.candidates import Deployment
from trinity.planner.confirmation import Confirmed
from trinity.planner.plan import Candidate
from trinity.planner.problem import Case
from trinity.planner.search import Found
from trinity.planner.trials import rate_of, step_of
from trinity.simulation.rate_sweep import InstanceUsage
from trinity.simulation.simulator import Replay
from trinity.traces.goodput import RequestOutcome
from trinity.traces.trace import SLO, SLO_RULES, SLORule, Trace

IMAGE_BLOCK, KV_BLOCK = 576, 16  # tokens of a block (TriInfer 5.1), as the simulator sizes pools
VERIFIED = 500  # requests of the winner that both engines replay
VERIFIED_EACH = 16_000  # at most, times instances: the Python cores take longer for more of them
VERIFIED_LEAST = 200


def candidate(case: Case, found: Found) -> Candidate:
    """What the search itself says of it."""
    deployment, rule = found.entry.deployment, case.asked.rule
    mixed = deployment.devices != case.hardware.names or len(case.hardware.by_name) > 1
    return Candidate(
        placement=str(deployment),
        method=deployment.method,
        devices=deployment.devices if mixed else (),
        exact=found.exact,
        score=found.score if found.exact else None,
        goodput={rule: found.rate} if found.exact and (found.value is None or found.step is not None) else {},
        bound=None if math.isinf(found.bound) else found.bound,
        nominal=None if math.isinf(found.entry.nominal) else found.entry.nominal,
        attainment=case.trials.points(deployment),
        bottleneck=case.bounds.bottleneck(deployment),
        price=case.hardware.price(deployment.devices),
        settings=dict(deployment.settings),
        screened=found.screened,
    )


def every_rule(case: Case, found: Found) -> dict[str, float]:
    """Its goodput by each rule, searched on from what was seen."""
    known = {case.asked.rule: found.rate}
    if case.dear:
        return {case.asked.rule: found.rate}
    for rule in SLO_RULES:
        if rule not in known:
            step = case.trials.limit(found.entry.deployment, found.rate or found.entry.nominal, rule)
            known[rule] = 0.0 if step is None else rate_of(step)
    return {rule: known[rule] for rule in SLO_RULES}


def detailed(case: Case, found: Found, seeds: Sequence[int]) -> tuple[Candidate, str]:
    """With goodput by every rule, utilisation, memory, bottleneck at its goodput, and confidence; and the engine."""
    goodput = every_rule(case, found)
    spread = tuple(_redrawn(case, found, seed) for seed in seeds) if found.step is not None else ()
    made = candidate(case, found)
    seen = min(made.attainment, key=lambda point: point.rate)
    if found.step is not None:
        seen = case.trials.point(found.entry.deployment, found.step)
    usage = _usage(case, found, found.rate or seen.rate)
    sure = tuple(each for each in spread if each is not None)
    late = limiting(1 - seen.attainment[case.asked.rule], 1 - seen.ttft_attainment)
    figured = figures(case, found.entry.deployment, usage, late)
    return msgspec.structs.replace(made, goodput=goodput, spread=sure, **figured), usage.engine


def confirmed_details(case: Case, confirmed: Confirmed, seeds: Sequence[int]) -> Candidate:
    """As the cores have it: goodput by the rule that was asked for, and what they did at it.

    Confidence is the screening engine's on redrawn traces, with its gap to the cores.
    """
    found, replay = confirmed.found, confirmed.replay
    made = msgspec.structs.replace(candidate(case, found), attainment=confirmed.points)
    if replay is None or not found.screened:
        return made
    late = limiting(*missed(replay.outcomes, case.asked.slo, case.asked.rule))
    screened = found._replace(step=step_of(found.screened))
    spread = (_redrawn(case, screened, seed) for seed in seeds)
    sure = tuple(each * found.rate / found.screened for each in spread if each is not None)
    return msgspec.structs.replace(made, spread=sure, **figures(case, found.entry.deployment, replay, late))


def seen_in(case: Case, found: Found, offered: Trace) -> tuple[Candidate, str]:
    """With utilisation, memory and bottleneck of one replay, where there is no goodput; and the engine."""
    replay = _replay(case, found.entry.deployment, offered)
    late = limiting(*missed(replay.outcomes, case.asked.slo, case.asked.rule))
    figured = figures(case, found.entry.deployment, replay, late)
    return msgspec.structs.replace(candidate(case, found), **figured), replay.engine


def figures(case: Case, deployment: Deployment, seen: InstanceUsage | Replay, late: str) -> dict[str, Any]:
    """Utilisation, memory and bottleneck as seen in a replay; this among the stages that are ``late``."""
    return {
        "utilisation": seen.utilisation,
        "memory": _memory(case, deployment, seen),
        "bottleneck": busiest(deployment, seen.utilisation, late) or case.bounds.bottleneck(deployment),
    }


def missed(outcomes: Sequence[RequestOutcome], slo: SLO, rule: SLORule) -> tuple[float, float]:
    """How many requests are not in time, and how many of them by their first token already."""
    late = [each for each in outcomes if not slo.is_met(each, rule)]
    return len(late), sum(each.ttft_s is None or each.ttft_s >= slo.ttft for each in late)


def limiting(late: float, first: float) -> str:
    """The stages by which most of the ``late`` miss it: before the first token, as ``first`` of them do, or after."""
    if not late:
        return STAGES
    return "EP" if 2 * first >= late else "D"


def busiest(deployment: Deployment, utilisation: dict[str, dict[str, float]], stages: str = STAGES) -> str:
    """Of these stages, the one that takes most of the time of the group of instances that is busiest."""
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


def _memory(case: Case, deployment: Deployment, seen: InstanceUsage | Replay) -> dict[str, dict[str, float]]:
    model = case.hardware.model
    block = {IMAGE: model.feature_bytes * IMAGE_BLOCK, KV: model.kv_bytes * KV_BLOCK}
    found: dict[str, dict[str, float]] = {}
    for name, roles in deployment.placement.instances():
        found[name] = {"weights": float(model.weight_bytes(roles))}
        for kind, blocks in seen.pools[name].items():
            found[name][kind] = float(blocks * block[kind])
            found[name][f"{kind}_peak"] = seen.peak_blocks[name].get(kind, 0) / blocks
    return found


def _redrawn(case: Case, found: Found, seed: int) -> float | None:
    """Its goodput on a trace drawn again; None where that is too short for one."""
    trials = case.redrawn(seed)
    before = trials.runs
    try:
        step = trials.limit(found.entry.deployment, found.rate)
    except TraceTooShort:
        return None
    finally:
        case.trials.runs += trials.runs - before
    return 0.0 if step is None else rate_of(step)


def _usage(case: Case, found: Found, rate: float) -> InstanceUsage | Replay:
    """Of the trial at its goodput, or of a replay at this rate where there is none, or it does not say."""
    deployment = found.entry.deployment
    known = case.trials.usage(deployment, rate)
    if known is None:
        return _replay(case, deployment, case.trace.scale(rate=rate))
    case.trials.runs += found.step is None
    return known


def _replay(case: Case, deployment: Deployment, offered: Trace) -> Replay:
    case.trials.tell(f"{deployment} in detail")
    return case.hardware.screening(deployment, case.asked.slo).replay(offered, deployment.placement)


# ---------------------------------------------------------------- the compiled engine against the cores that serve


def verified(case: Case, found: Found) -> str:
    """The winner that a compiled engine found, replayed on the Python cores as well; what to say of that.

    Raises ``AssertionError`` where the engines differ: that is a fault of trinity.
    """
    deployment, slo = found.entry.deployment, case.asked.slo
    count = max(VERIFIED_LEAST, min(VERIFIED, VERIFIED_EACH // len(deployment.devices)))
    offered = case.trace.head(count)
    if found.step is not None:
        offered = offered.scale(found.rate / case.trials.own)  # as those of the whole trace at that rate
    first, second = (
        case.hardware.simulator(deployment, slo, **choice).replay(offered, deployment.placement)
        for choice in ({}, {"engine": "python"})
    )
    case.trials.runs += 2
    if second.outcomes != first.outcomes:
        differ = sum(a != b for a, b in zip(first.outcomes, second.outcomes, strict=True))
        raise AssertionError(
            f"the {first.engine} engine and the Python cores differ in {differ} of {len(offered)} requests on "
            f'{deployment}: use engine="python" and report it'
        )
    return f"The winner's first {len(offered):,} requests were replayed on the cores that serve, with equal outcomes."
