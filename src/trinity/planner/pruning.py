"""Finds the other placements that a failed replay rules out, by the instances it had too few of.

Only three cases are clear enough to count. Where first tokens are late and the instances that prefill, but do not
decode, were busy nearly all the time, as many or fewer of them are late as well, whatever the rest is. The same holds
for instances that encode, where those were busy all the time and prefill was not. Where too many of the requests whose
first token was in time are late all the same, there are too few instances that decode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from trinity.planner.candidates import Deployment
from trinity.traces.goodput import RatePoint
from trinity.traces.trace import SLORule

BUSY = 0.9  # of the time at work: beyond, a group of instances is what others wait for


def find_short_roles(deployment: Deployment, point: RatePoint, share: float, rule: SLORule) -> set[str]:
    """Find roles of which this deployment had too few to hold at a rate; none where that is not clear."""
    roles = {group.roles for group in deployment.placement.groups}
    if len(roles) < 2 or point.ttft_attainment < 0:
        return set()
    short = set()
    if point.ttft_attainment - point.attainment[rule] > (1 - share) * point.ttft_attainment:
        short |= {each for each in roles if "D" in each}
    if point.ttft_attainment < share:
        prefill = {each for each in roles if "P" in each and "D" not in each}
        busy = {each for each in roles if point.load.get(each, 0.0) > BUSY}
        short |= prefill & busy or (busy & {"E"} if prefill else set())  # what decodes is always at work
    return short


def has_no_more(other: Deployment, failed: Deployment, roles: Collection[str]) -> bool:
    """Check if another one has no more instances of one of these roles, all on one kind of device."""
    if not roles or len({*other.devices, *failed.devices}) > 1:
        return False
    theirs, own = _counts(other), _counts(failed)
    return any(theirs[each] <= own[each] for each in roles)


def _counts(deployment: Deployment) -> Counter[str]:
    counts: Counter[str] = Counter()
    for group in deployment.placement.groups:
        counts[group.roles] += group.count
    return counts
