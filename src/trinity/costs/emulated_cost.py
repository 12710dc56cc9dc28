"""Cost models of emulated steps: linear in the rows, or interpolated from measurements."""

from __future__ import annotations

import msgspec

from trinity.costs.budgets import StepCost
from trinity.errors.arguments import KeywordsByName, Number, check_struct


class LinearCost(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True, tag=True):
    """Linear cost model of a step. Raises ``ConfigError`` for costs that are not finite numbers of at least 0.

    step_s (s, 0): each pass over the language model.
    decode_s (s, 0): each decode row.
    prefill_s (s, 0): each prefill token.
    encode_s (s, 0): each pass over the encoder.
    media_s (s, 0): each visual token.
    source (""): where the costs come from, for reports.
    """

    step_s: Number = 0.0
    decode_s: Number = 0.0
    prefill_s: Number = 0.0
    encode_s: Number = 0.0
    media_s: Number = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        check_struct(self)

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        """Seconds of one step with these rows."""
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
        image_tokens: float = 0.0,
    ) -> float:
        """Seconds as ``seconds``: they do not depend on the context or on an image's size."""
        return self.seconds(decodes, prefill_tokens, media_tokens)


class TableCost(StepCost, frozen=True, kw_only=True, tag=True):
    """Cost model of a step, interpolated from measurements; ``source`` says where they come from."""

    source: str = ""

    @classmethod
    def from_step_cost(cls, cost: StepCost, source: str) -> TableCost:
        """Build it from measurements of a running instance (``StepBudgets.cost``)."""
        return cls(decodes=cost.decodes, prefill=cost.prefill, media=cost.media, source=source)
