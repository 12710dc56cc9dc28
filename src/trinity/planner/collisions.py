"""Estimates waits of KV for a decode step in progress, which bound short outputs whose TBT is near a step's time.

KV that arrives while an instance decodes waits for the end of that step, and the first gap is that rest and a step of
its own: often more than a TBT bound of less than two steps. An output of fewer than ten gaps may not miss one (TriInfer
5.2), so most requests must find their instance idle, at rates far below what its steps could serve. This is an
estimate to order candidates by, and bounds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import exp, inf, log

from trinity.traces.trace import SLO, SLORule

PULL_S = 0.002  # of a request's KV, about
_TOLERATED = {"p90": 10, "guard": 10, "p99": 100}  # gaps of which one may be late


def predict_step_waits(
    count: int, step_s: float, gaps: Mapping[int, int], slo: SLO, rule: SLORule, share: float
) -> float:
    """Estimate requests/s at which too many outputs find a step in progress on ``count`` decode instances in turn.

    ``step_s``: seconds of a step. ``gaps``: number of requests by gaps between their tokens. Returns inf where waits do
    not matter.
    """
    late = _mean({each: _late(each, step_s, slo, rule) for each in gaps}, gaps)
    if late <= 1 - share:
        return inf
    return _arrivals(count, (1 - share) / late) / (step_s * _mean({each: each for each in gaps}, gaps))


def predict_encode_waits(
    count: int, encode_s: float, step_s: float, gaps: Mapping[int, int], slo: SLO, share: float
) -> float:
    """Estimate requests/s at which ``count`` instances encode an image while too many outputs are under way there."""
    exposed = _mean({each: 0 < each < _TOLERATED["guard"] for each in gaps}, gaps)
    if exposed <= 1 - share or encode_s + step_s <= slo.tbt:
        return inf
    return -count * log(1 - (1 - share) / exposed) / (step_s * _mean({each: each for each in gaps}, gaps))


def _mean(values: Mapping[int, float], counts: Mapping[int, int]) -> float:
    total = sum(counts.values())
    return sum(values[each] * count for each, count in counts.items()) / total if total else 0.0


def _late(gaps: int, step_s: float, slo: SLO, rule: SLORule) -> float:
    """Compute the probability that the rest of a step, uniformly drawn, makes an output of this many gaps late."""
    if not gaps or (rule != "tpot" and gaps >= _TOLERATED[rule]):
        return 0.0
    spare = (gaps if rule == "tpot" else 1) * (slo.tbt - step_s) - PULL_S
    return min(1.0, max(0.0, 1 - spare / step_s))


@lru_cache(1 << 12)
def _arrivals(count: int, probability: float) -> float:
    """Find x with this probability that ``count`` arrivals of a Poisson process at rate 1 come within x (Erlang)."""
    low, high = 0.0, 4.0 * count + 50
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(count, middle) < probability else (low, middle)
    return low


def _within(count: int, x: float) -> float:
    term = none = exp(-x)
    for number in range(1, count):
        term *= x / number
        none += term
    return 1 - none
