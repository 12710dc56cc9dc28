"""Costs of emulated models: what a step takes, and that each kind of cost travels to other processes."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from trinity.core.messages import IMAGE, KV
from trinity.costs.budgets import StepCost
from trinity.costs.emulated_cost import LinearCost, TableCost
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import CostTables, Roofline, get_device
from trinity.costs.visual_tokens import decode_rule, encode_rule, fixed_tokens
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedShape
from trinity.errors import ConfigError

LLAVA = get_model_shape("llava-1.5-7b")
MEASURED = CostTables.from_samples(
    {1: {"decodes": {1: 0.5, 4: 0.7}, "prefill": {1: 0.1}}, 512: {"decodes": {1: 0.9}}},
    model="m",
    device="d",
    dtype="f",
)
COSTS = (
    LinearCost(step_s=1.0, source="a guess"),
    TableCost(decodes=((1, 0.5), (4, 0.75)), source="profile"),
    Roofline(model=LLAVA, device=get_device("H100")),
    Roofline(model=get_model_shape("qwen2-vl-7b"), device=get_device("H100")),
    MEASURED,
)


def test_models_travel_and_tell_each_other_apart() -> None:
    for cost in COSTS:
        model = EmulatedModel(shape=LLAVA_15_7B, cost=cost, scale=4, interference=1.5)
        travelled = msgspec.msgpack.encode(model, enc_hook=encode_rule)
        again = msgspec.msgpack.decode(travelled, type=EmulatedModel, dec_hook=decode_rule)
        assert again.fingerprint == model.fingerprint
        assert str(again) == str(model)
        assert again.cost.seconds(4, 3, 5) == cost.seconds(4, 3, 5)
        assert again.cost.at(4, 3, 5, context=900, prefilled=70, prefills=2) == cost.at(
            4, 3, 5, context=900, prefilled=70, prefills=2
        )
    assert len({EmulatedModel(shape=LLAVA_15_7B, cost=cost).fingerprint for cost in COSTS}) == len(COSTS)
    rules = (fixed_tokens, partial(fixed_tokens, tokens=4))
    models = (msgspec.structs.replace(LLAVA, visual_tokens=rule) for rule in rules)
    said = {
        EmulatedModel(shape=LLAVA_15_7B, cost=Roofline(model=each, device=get_device("cpu"))).fingerprint
        for each in models
    }
    assert len(said) == 2


def test_a_rule_of_visual_tokens_that_is_code_does_not_travel() -> None:
    own = msgspec.structs.replace(LLAVA, visual_tokens=lambda width, height: 7)
    with pytest.raises(ConfigError, match="cannot be sent"):
        _ = EmulatedModel(shape=LLAVA_15_7B, cost=Roofline(model=own, device=get_device("cpu"))).fingerprint


def test_a_named_model_has_the_shape_of_its_blocks() -> None:
    assert EmulatedShape.of(LLAVA) == LLAVA_15_7B
    qwen = get_model_shape("qwen2-vl-7b")
    shape = EmulatedShape.of(qwen)
    assert (shape.layers * shape.row_bytes(KV), shape.row_bytes(IMAGE)) == (qwen.kv_bytes, qwen.feature_bytes)
    assert EmulatedShape.of(msgspec.structs.replace(qwen, vision=None, image_tokens=0)).image_width == 0


def test_costs() -> None:
    linear = LinearCost(step_s=1, decode_s=0.1, prefill_s=0.01, encode_s=2, media_s=0.001)
    assert linear.seconds(0, 0, 0) == 0
    assert linear.seconds(2, 10, 0) == pytest.approx(1.3)
    assert linear.seconds(0, 0, 100) == pytest.approx(2.1)
    measured = StepCost.from_samples(decodes={1: 0.5, 8: 1.0}, prefill={64: 2.0})
    table = TableCost.from_step_cost(measured, "a profile")
    for rows in ((1, 0, 0), (8, 0, 0), (0, 64, 0), (3, 0, 0)):
        assert table.seconds(*rows) == measured.seconds(*rows)
