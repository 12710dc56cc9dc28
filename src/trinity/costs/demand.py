"""Stage demand of traffic, in seconds of E, P and D a second.

Predicted by a cost model. Watch demand rather than the request rate, which hides a change of what is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from trinity.core.scheduler import latency_bound
from trinity.costs.budgets import MAX_PREFILL_TOKENS, search_budget
from trinity.costs.step_cost import CostModel
from trinity.errors import ConfigError, TraceError
from trinity.stage_kinds import DECODE, ENCODE, PREFILL, all_letters
from trinity.traces.trace import SLO, Trace, TraceRow

MAX_VISUAL_TOKENS = 32_768  # visual tokens of a step; larger steps gain nothing on any known device


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Predicts the stage seconds of requests on one device: a request's share of each step that it takes part in.

    cost: the device's cost model.
    media (visual tokens): an encode step.
    tokens (tokens): a prefill step.
    decodes (rows): a decode step.

    Raises ``ConfigError`` for an empty step.
    """

    cost: CostModel
    media: int
    tokens: int
    decodes: int

    def __post_init__(self) -> None:
        if min(self.media, self.tokens, self.decodes) < 1:
            raise ConfigError(
                f"media, tokens and decodes must be at least 1, got {self.media}, {self.tokens}, {self.decodes}"
            )

    @classmethod
    def for_slo(cls, cost: CostModel, slo: SLO, *, context: float = 1024, most_decodes: int = 512) -> Demand:
        """Choose the largest steps that an SLO allows (TriInfer, Algorithm 1, lines 1 to 5).

        Steps end at the throughput's knee, and have one row where not even that is in time. ``context`` (tokens): KV
        cache of a decode. ``most_decodes`` (rows): decodes that memory holds.
        """
        ahead, decoding = (latency_bound(roles, slo.ttft, slo.tbt) for roles in (PREFILL.letter, DECODE.letter))
        return cls(
            cost=cost,
            media=_largest(lambda n: cost.at(0, 0, n, context=0), ahead, MAX_VISUAL_TOKENS),
            tokens=_largest(lambda n: cost.at(0, n, 0, context=0), ahead, MAX_PREFILL_TOKENS),
            decodes=_largest(lambda n: cost.at(n, 0, 0, context=context), decoding, most_decodes),
        )

    def of(self, row: TraceRow) -> dict[str, float]:
        """Stage seconds of one request; its first token is P's, the other ``output_length - 1`` are D's."""
        prompt, after, visual = row.input_length, max(0, row.output_length - 1), row.visual_tokens
        found = dict.fromkeys(all_letters(), 0.0)
        if visual:
            own = sum((image.tokens or 0) ** 2 for image in row.images) / visual
            found[ENCODE.letter] = visual / self.media * self.cost.at(0, 0, self.media, context=0, image_tokens=own)
        if prompt:
            fit = max(1, self.tokens // prompt)
            step = self.cost.at(0, self.tokens, 0, context=0, prefilled=max(0, prompt - self.tokens) / 2, prefills=fit)
            found[PREFILL.letter] = prompt / self.tokens * step
        if after:
            found[DECODE.letter] = after / self.decodes * self.cost.at(self.decodes, 0, 0, context=prompt + after / 2)
        return found

    def rate(self, trace: Trace) -> dict[str, float]:
        """Stage seconds a second over a whole trace. Raises ``TraceError`` where all requests come at once."""
        rows = list(trace)
        times = [row.timestamp for row in rows]
        span = (max(times) - min(times)) / 1000 if rows else 0.0
        if span <= 0:
            raise TraceError(
                "requests that all come at once have no rate (nor has an empty trace): give a longer trace"
            )
        return {stage: seconds / span for stage, seconds in sum_by_stage(map(self.of, rows)).items()}


def sum_by_stage(seconds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum stage seconds by stage."""
    found = dict.fromkeys(all_letters(), 0.0)
    for each in seconds:
        for stage, own in each.items():
            found[stage] += own
    return found


def _largest(seconds: Callable[[int], float], limit_s: float, most: int) -> int:
    return search_budget(seconds, limit_s, high=most, warn=False).budget
