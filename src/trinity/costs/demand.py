"""Stage demand: how many seconds of E, P and D a second of traffic asks for, and how far that loads a placement.

Predicted by a cost model. It is what has to be watched: a request rate hides that what is asked has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations

import msgspec

from trinity.core.scheduler import latency_bound
from trinity.costs.budgets import MOST_TOKENS, search_budget
from trinity.costs.step_cost import Cost
from trinity.errors import ConfigError, TraceError
from trinity.placement import STAGES, Placement
from trinity.traces.trace import SLO, Trace, TraceRow

MOST_MEDIA = 32_768  # visual tokens, beyond which a step gains nothing on any device known


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted stage seconds of requests on one device: of each step that a request takes part in, its share.

    A step holds ``media`` visual tokens, ``tokens`` prefill tokens or ``decodes`` rows. Raises ``ConfigError`` where
    it would be empty.
    """

    cost: Cost
    media: int
    tokens: int
    decodes: int

    def __post_init__(self) -> None:
        if min(self.media, self.tokens, self.decodes) < 1:
            raise ConfigError(f"steps hold at least 1 of each kind, got {self.media}, {self.tokens}, {self.decodes}")

    @classmethod
    def under(cls, cost: Cost, slo: SLO, *, context: float = 1024, most_decodes: int = 512) -> Demand:
        """With the steps that an SLO leaves (Algorithm 1, lines 1 to 5), no larger than the throughput's knee.

        ``context``: tokens in the KV cache of a decode; ``most_decodes``: for how many of them there is memory. Where
        not even one row is in time, steps of one row.
        """
        ahead, decoding = (latency_bound(roles, slo.ttft, slo.tbt) for roles in ("P", "D"))
        return cls(
            cost=cost,
            media=_largest(lambda n: cost.at(0, 0, n, context=0), ahead, MOST_MEDIA),
            tokens=_largest(lambda n: cost.at(0, n, 0, context=0), ahead, MOST_TOKENS),
            decodes=_largest(lambda n: cost.at(n, 0, 0, context=context), decoding, most_decodes),
        )

    def of(self, row: TraceRow) -> dict[str, float]:
        """Seconds by stage letter of one request; its first token is P's, the other ``output_length - 1`` are D's."""
        prompt, after, visual = row.input_length, max(0, row.output_length - 1), row.visual_tokens
        found = dict.fromkeys(STAGES, 0.0)
        if visual:
            found["E"] = visual / self.media * self.cost.at(0, 0, self.media, context=0)
        if prompt:
            fit = max(1, self.tokens // prompt)
            step = self.cost.at(0, self.tokens, 0, context=0, prefilled=max(0, prompt - self.tokens) / 2, prefills=fit)
            found["P"] = prompt / self.tokens * step
        if after:
            found["D"] = after / self.decodes * self.cost.at(self.decodes, 0, 0, context=prompt + after / 2)
        return found

    def rate(self, trace: Trace) -> dict[str, float]:
        """Stage seconds a second over a whole trace. Raises ``TraceError`` where it has no rate."""
        rows = list(trace)
        times = [row.timestamp for row in rows]
        span = (max(times) - min(times)) / 1000 if rows else 0.0
        if span <= 0:
            raise TraceError("requests that all come at once (or are none) have no rate: give a longer trace")
        return {stage: seconds / span for stage, seconds in total(map(self.of, rows)).items()}


def total(seconds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum by stage."""
    found = dict.fromkeys(STAGES, 0.0)
    for each in seconds:
        for stage in STAGES:
            found[stage] += each[stage]
    return found


def load(demand: Mapping[str, float], placement: Placement | str) -> float:
    """The share of its time that a placement's most loaded part is asked for; above 1 no schedule keeps up.

    ``demand``: stage seconds a second. Hall's condition: every set of stages against the instances that serve any of
    it. Infinite where a stage that is asked for has no instance.
    """
    placed = Placement.parse(placement) if isinstance(placement, str) else placement
    worst = 0.0
    for size in range(1, len(STAGES) + 1):
        for stages in combinations(STAGES, size):
            instances = sum(group.count for group in placed.groups if set(group.roles) & set(stages))
            asked = sum(demand[stage] for stage in stages)
            worst = max(worst, asked / instances if instances else math.inf if asked else 0.0)
    return worst


def _largest(seconds: Callable[[int], float], limit_s: float, most: int) -> int:
    return search_budget(seconds, limit_s, high=most, warn=False).budget
