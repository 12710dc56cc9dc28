"""Rows that come at even times, a cost that is the same for every step, and plans with made-up scores."""

from __future__ import annotations

from typing import Any

from trinity.costs.demand import Demand
from trinity.traces.trace import TraceRow


class Flat:
    """E takes 0.01 s a visual token, P 0.001 s a token, D 0.1 s a token after the first."""

    def at(
        self,
        decodes: int,
        prefill_tokens: int,
        media_tokens: int,
        *,
        context: float,
        prefilled: float = 0.0,
        prefills: int = 1,
        image_tokens: float = 0.0,
    ) -> float:
        return 0.1 * decodes + 0.001 * prefill_tokens + 0.01 * media_tokens

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        return self.at(decodes, prefill_tokens, media_tokens, context=0)


FLAT = Demand(cost=Flat(), media=1, tokens=1, decodes=1)


def row(at: float, out: int = 11, tokens: int = 100, **fields: Any) -> TraceRow:
    return TraceRow(timestamp=1000 * at, input_length=tokens, output_length=out, **fields)


def steady(start: float, end: float, every: float = 1.0, **fields: Any) -> list[TraceRow]:
    return [row(start + n * every, **fields) for n in range(round((end - start) / every))]


class Best:
    def __init__(self, placement: str, score: float | None) -> None:
        self.placement, self.score = placement, score
        self.screened: float | None = None


class Plan:
    """``present``: the score of 1P1D, None where it was not searched to the end."""

    def __init__(self, placement: str, score: float = 2.0, present: float | None = 1.0, met: bool = True) -> None:
        self.best, self.met = Best(placement, score), met
        self.candidates = [self.best, Best("1P1D", present)]
