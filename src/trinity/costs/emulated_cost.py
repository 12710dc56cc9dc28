"""Costs of emulated steps: so much a row, or interpolated from measurements."""

from __future__ import annotations

import math

import msgspec

from trinity.core.scheduler import StepTime
from trinity.costs.budgets import StepCost, Table
from trinity.errors import ConfigError


class LinearCost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Seconds of a step: so much for each language pass and encode pass, and for each row. ``source``: where from."""

    step_s: float = 0.0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    encode_s: float = 0.0
    media_s: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        times = (self.step_s, self.decode_s, self.prefill_s, self.encode_s, self.media_s)
        if not all(0 <= seconds < math.inf for seconds in times):
            raise ConfigError(f"{self!r}: costs are seconds of at least 0")

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        language = self.step_s if decodes or prefill_tokens else 0.0
        vision = self.encode_s if media_tokens else 0.0
        rows = self.decode_s * decodes + self.prefill_s * prefill_tokens + self.media_s * media_tokens
        return language + vision + rows

    def at(
        self,
        decodes: int,
        prefill_tokens: int,
        media_tokens: int,
        *,
        context: float,
        prefilled: float = 0.0,
        prefills: int = 1,
    ) -> float:
        """As ``seconds``: it does not hang on what is looked back on."""
        return self.seconds(decodes, prefill_tokens, media_tokens)


class TableCost(StepCost, frozen=True, kw_only=True, tag=True):
    """Seconds of a step, interpolated from measurements. ``source``: where they come from."""

    source: str = ""

    @classmethod
    def profiled(cls, cost: StepCost, source: str) -> TableCost:
        """From what trinity measured of a running instance (``Budgets.cost``)."""
        return cls(decodes=cost.decodes, prefill=cost.prefill, media=cost.media, source=source)

    @classmethod
    def sampled(cls, cost: StepTime, counts: tuple[int, ...], source: str) -> TableCost:
        """From any cost model, asked for so many rows of each kind alone."""
        alone = [((n, 0, 0), (0, n, 0), (0, 0, n)) for n in sorted(counts)]
        tables: list[Table] = [
            tuple((max(row), cost.seconds(*row)) for row in rows) for rows in zip(*alone, strict=True)
        ]
        return cls(decodes=tables[0], prefill=tables[1], media=tables[2], source=source)
