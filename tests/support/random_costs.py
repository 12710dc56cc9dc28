"""Costs of steps drawn at random, of every type that the screening engine computes."""

from __future__ import annotations

from functools import lru_cache
from random import Random

from trinity.costs.budgets import StepCost
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import CostModel, CostTables, Device, Roofline


@lru_cache
def any_device(slow: float) -> Device:
    return Device(name="any", flops=1e14 * slow, bandwidth=1e12 * slow, memory=80e9, pass_s=0.01 / slow)


def random_table(draw: Random, scale: float) -> dict[int, float]:
    counts = sorted(draw.sample(range(1, 60), draw.choice([0, 1, 2, 4])))
    return {count: scale * (1 + draw.random() + count / 10) for count in counts}


def random_cost(draw: Random) -> CostModel:
    kind = draw.choice(["linear", "linear", "roofline", "tables", "step"])
    if kind == "linear":
        scale = draw.choice([0.0, 0.001, 0.02])
        step, decode, prefill, encode, media = (scale * draw.random() for _ in range(5))
        return LinearCost(step_s=step, decode_s=decode, prefill_s=prefill, encode_s=encode, media_s=media)
    if kind == "roofline":
        shape = get_model_shape(draw.choice(["llava-1.5-7b", "llava-next-7b", "qwen2-vl-7b", "minicpm-v-2.6"]))
        return Roofline(model=shape, device=any_device(draw.choice([0.3, 1.0, 3.0])))
    tables = [
        StepCost.from_samples(random_table(draw, 0.01), random_table(draw, 0.02), random_table(draw, 0.05))
        for _ in range(3)
    ]
    if kind == "step":
        return tables[0]
    contexts = sorted(draw.sample(range(1, 40), draw.randint(1, 3)))
    costs = tuple(zip(contexts, tables, strict=False))
    return CostTables(
        model="any", device="any", dtype="any", source="drawn", costs=costs, context=draw.choice([1, 7.5, 60])
    )
