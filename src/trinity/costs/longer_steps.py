"""Cost models whose steps take a factor longer than another's."""

from __future__ import annotations

from typing import Any

import msgspec

from trinity.costs.budgets import CostCurve, StepCost
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.step_cost import CostModel, CostTables, Roofline

_LINEAR = ("step_s", "decode_s", "prefill_s", "encode_s", "media_s")


def stretch_cost(cost: CostModel, factor: float) -> CostModel:
    """Return a cost model of the same type whose steps take ``factor`` times as long; of a foreign type, a wrapper."""
    if factor == 1:
        return cost
    if isinstance(cost, Roofline):
        here = cost.device
        slow = {"flops": here.flops / factor, "bandwidth": here.bandwidth / factor}
        slow |= {"pass_s": here.pass_s * factor, "row_s": here.row_s * factor}
        return msgspec.structs.replace(cost, device=msgspec.structs.replace(here, **slow))
    if isinstance(cost, CostTables):
        costs = tuple((context, _stretch_curves(each, factor)) for context, each in cost.costs)
        return msgspec.structs.replace(cost, costs=costs)
    if isinstance(cost, StepCost):
        return _stretch_curves(cost, factor)
    if isinstance(cost, LinearCost):
        return msgspec.structs.replace(cost, **{name: factor * getattr(cost, name) for name in _LINEAR})
    return _Longer(cost, factor)


def _stretch_curves(cost: StepCost, factor: float) -> StepCost:
    def longer(curve: CostCurve) -> CostCurve:
        return tuple((count, factor * seconds) for count, seconds in curve)

    return msgspec.structs.replace(
        cost, decodes=longer(cost.decodes), prefill=longer(cost.prefill), media=longer(cost.media)
    )


class _Longer:
    """Any cost model, its seconds times a factor."""

    def __init__(self, cost: CostModel, factor: float) -> None:
        self.cost, self.factor = cost, factor

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        return self.factor * self.cost.seconds(decodes, prefill_tokens, media_tokens)

    def at(self, decodes: int, prefill_tokens: int, media_tokens: int, **means: Any) -> float:
        return self.factor * self.cost.at(decodes, prefill_tokens, media_tokens, **means)
