"""Costs of mixtures of experts and of latent attention, against the parameters of transformers' own modules."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.any_model.text_checkpoint import make_small_config
from trinity.core.messages import KV
from trinity.costs import model_config
from trinity.costs.layer_parts import ExpertShape, LatentShape
from trinity.costs.model_shape import ModelShape, get_model_shape
from trinity.costs.step_cost import DEVICES, Roofline
from trinity.emulation.model import EmulatedShape
from trinity.errors import ConfigError
from trinity.simulation.compiled_engine import COSTS, name_cost

MIXTURES = (
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "glm4_moe_lite",
)
MORE = ("gpt_oss", "granitemoe", "granitemoeshared", "minimax_m2", "mixtral", "olmoe", "phimoe")
QWEN = ("qwen2_moe", "qwen3_moe")
LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3", "youtu")


def empty(model_type: str, **fields: Any) -> tuple[Any, ModelShape]:
    """The type's own modules without weights, and the shape that its config.json tells."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = make_small_config(model_type, vocab_size=512, **ids, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model, model_config.from_config(config.to_dict())


def matrices(model: Any) -> dict[str, torch.Tensor]:
    """Parameters of the layers that are matrices: of experts, all of one behind another."""
    found = {name: each for name, each in model.named_parameters() if ".layers." in name}
    return {name: each for name, each in found.items() if each.ndim > 1 and not name.endswith("_bias")}


def is_expert(name: str, held: torch.Tensor) -> bool:
    return ".experts." in name and held.ndim == 3


@pytest.mark.parametrize("model_type", sorted({*MIXTURES, *MORE, *QWEN, *LATENT}))
def test_the_weights_of_a_config_are_those_of_the_modules(model_type: str) -> None:
    model, shape = empty(model_type)
    held = matrices(model)
    total = sum(each.numel() for each in held.values())
    # Qwen2-MoE has a gate for its shared expert: a row of the hidden size in each layer, the one matrix left out.
    gates = sum(each.numel() for name, each in held.items() if "shared_expert_gate" in name)
    assert shape.language.weights == total - gates
    assert shape.vocabulary == 512
    mixed = shape.language.experts
    if mixed is not None:
        each = sum(value.numel() // value.shape[0] for name, value in held.items() if is_expert(name, value))
        assert shape.language.active_weights == total - gates - (mixed.experts - mixed.active) * each
        assert mixed.experts == (7 if model_type == "flex_olmo" else 8)
    assert (mixed is not None) == (model_type in (*MIXTURES, *MORE, *QWEN))


@pytest.mark.parametrize("model_type", LATENT)
def test_a_token_s_bytes_are_those_of_latent_rows(model_type: str) -> None:
    config = make_small_config(model_type)
    _, shape = empty(model_type)
    assert shape.language.latent is not None
    index = getattr(config, "index_head_dim", 0)  # the key by which an indexer chooses tokens
    assert shape.kv_bytes == config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim + index) * 2
    assert EmulatedShape.of(shape).row_bytes(KV) * shape.language.layers == shape.kv_bytes


def test_published_sizes() -> None:
    """DeepSeek V3: 671 billion weights, 37 of them active, and 70 KB of cache for a token in bfloat16."""
    from transformers import DeepseekV3Config

    shape = model_config.from_config(DeepseekV3Config().to_dict())
    assert shape.language_bytes / 2 / 1e9 == pytest.approx(671, rel=0.01)
    assert (shape.language.active_weights + shape.head) / 1e9 == pytest.approx(37, rel=0.03)
    assert shape.kv_bytes == 61 * 576 * 2


def test_the_experts_that_a_step_reads() -> None:
    """Each of so many rows chooses two of four: of all choices of three rows the mean of what they touch."""
    mixed = ExpertShape(layers=1, experts=4, active=2, ffn=1)
    pairs = [{a, b} for a in range(4) for b in range(a + 1, 4)]
    mean = sum(len(set().union(*rows)) for rows in product(pairs, repeat=3)) / len(pairs) ** 3
    assert mixed.touched(3) == pytest.approx(mean)
    assert mixed.touched(1) == 2
    assert mixed.touched(0) == 0
    assert mixed.touched(1_000) == pytest.approx(4)


def test_a_small_step_reads_few_experts_and_a_large_one_all() -> None:
    shape = model_config.from_config(make_small_config("mixtral", vocab_size=512).to_dict())
    dense = shape.language.touched_weights(0)
    one = (shape.language.weights - dense) / 8
    assert shape.language.touched_weights(1) == pytest.approx(dense + 2 * one)
    assert shape.step_bytes(10_000) == pytest.approx(shape.read_bytes)
    assert shape.step_bytes(1) < shape.read_bytes
    assert shape.language_bytes == shape.read_bytes + shape.head * 2


def test_the_roofline_multiplies_active_experts_and_reads_touched_ones() -> None:
    shape = model_config.from_config(make_small_config("mixtral", vocab_size=512).to_dict())
    mixed = shape.language.experts
    assert mixed is not None
    whole = msgspec.structs.replace(mixed, active=8)
    every = msgspec.structs.replace(shape, language=msgspec.structs.replace(shape.language, experts=whole))
    here = msgspec.structs.replace(next(iter(DEVICES.values())), pass_s=0.0, row_s=0.0)
    some, all_of_them = (Roofline(model=each, device=here) for each in (shape, every))
    assert some.seconds(1, 0, 0) < all_of_them.seconds(1, 0, 0)
    assert some.seconds(0, 100_000, 0) < all_of_them.seconds(0, 100_000, 0), "products count, where all are read"
    assert some.seconds(8, 0, 0) > some.seconds(1, 0, 0) * 1.5, "more rows touch more experts"


def test_a_mixture_is_not_screened_and_a_dense_model_is() -> None:
    shape = model_config.from_config(make_small_config("mixtral", vocab_size=512).to_dict())
    device = next(iter(DEVICES.values()))
    assert name_cost(Roofline(model=shape, device=device)) not in COSTS
    assert name_cost(Roofline(model=get_model_shape("llava-1.5-7b"), device=device)) in COSTS


@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts_per_tok": 9},
        {"num_local_experts": -4},
        {"num_local_experts": "many"},
        {"num_experts_per_tok": None},
        {"mlp_only_layers": 3},
        {"mlp_layer_types": "sparse"},
        {"kv_lora_rank": "24"},
        {"kv_lora_rank": 24},
    ],
)
def test_odd_configs_are_named(fields: dict[str, Any]) -> None:
    usual = make_small_config("mixtral", vocab_size=512).to_dict()
    with pytest.raises(ConfigError):
        model_config.from_config({**usual, **fields})


def test_odd_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="active at most experts"):
        ExpertShape(layers=1, experts=2, active=3, ffn=4)
    with pytest.raises(ConfigError, match="widths must be at least 1"):
        LatentShape(rank=0, rotated=1, plain=1, value=1)
