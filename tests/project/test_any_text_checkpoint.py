"""Tiny checkpoints of any causal type: few weights, every kind of layer, and answers that depend on the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.any_model.text_checkpoint import (
    SMALL_CONTEXT,
    SMALL_ORIGINAL,
    SMALL_WINDOW,
    build_any_text,
    list_causal_types,
    make_small_config,
)
from trinity.errors import UnsupportedModel

MOST_WEIGHTS = 5_000_000
UNBUILT = {  # by the type's own code, or of more parts than a decoder
    *("blt", "dots3_note", "emu3", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "llama4", "mllama"),
    *("musicgen", "musicgen_melody", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "qwen4_exp_text", "reformer"),
}
LARGE = {"dots3_note_text", "llama4_text", "roc_bert"}  # by constants of their classes
PROMPTS = torch.tensor([[5 + (i * k + i * i * 11) % 300 for i in range(40)] for k in (37, 53)])


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@torch.inference_mode()
def answers(model: Any) -> list[torch.Tensor]:
    return [model(input_ids=prompt[None]).logits[0, -1] for prompt in PROMPTS]


@pytest.mark.parametrize("model_type", ["deepseek_v3", "mixtral", "olmo3"])
def test_a_checkpoint_loads_and_its_answers_depend_on_the_prompt(model_type: str, tmp_path: Path) -> None:
    model = load(build_any_text(model_type, tmp_path))
    assert sum(each.numel() for each in model.parameters()) < MOST_WEIGHTS
    assert model.config.max_position_embeddings == SMALL_CONTEXT
    first, second = answers(model)
    assert float((first - second).abs().max()) > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path)("a dog").input_ids


def test_every_kind_of_layer_is_kept_and_thresholds_are_low() -> None:
    assert set(make_small_config("olmo3").layer_types) == {"sliding_attention", "full_attention"}
    assert make_small_config("gemma2").sliding_window == SMALL_WINDOW
    assert set(make_small_config("axk1").mlp_layer_types) == {"dense", "sparse"}
    assert make_small_config("ministral3").rope_parameters["original_max_position_embeddings"] == SMALL_ORIGINAL


def test_fields_win_and_the_seed_decides(tmp_path: Path) -> None:
    build = [
        build_any_text("llama", tmp_path / name, seed=seed, hidden_size=32)
        for name, seed in zip("abc", (1, 1, 2), strict=True)
    ]
    assert json.loads((build[0] / "config.json").read_text())["hidden_size"] == 32
    same, again, other = (load(each).get_output_embeddings().weight for each in build)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


def test_experts_have_weights_as_large_as_other_layers(tmp_path: Path) -> None:
    experts = load(build_any_text("mixtral", tmp_path)).model.layers[0].mlp.experts
    assert float(experts.down_proj.detach().std()) == pytest.approx(1.6 / experts.down_proj.shape[-1] ** 0.5, rel=0.3)


def test_what_transformers_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no model type 'nonsense'"):
        build_any_text("nonsense", tmp_path)
    with pytest.raises(UnsupportedModel, match="no causal language model for 'clip'"):
        build_any_text("clip", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(list_causal_types()) - UNBUILT))
def test_any_causal_type_is_built(model_type: str, tmp_path: Path) -> None:
    model = load(build_any_text(model_type, tmp_path))
    assert model_type in LARGE or sum(each.numel() for each in model.parameters()) < MOST_WEIGHTS
