"""Configs of OpenGVLab's InternVL: what is renamed, what is refused by name, what is out of range."""

from __future__ import annotations

from typing import Any

import pytest

from support.internvl_folders import PUBLISHED, Published, make_config
from support.internvl_tokenizers import Tokens
from trinity.costs.model_config import from_config
from trinity.costs.model_shape import MODELS
from trinity.errors import ConfigError, UnsupportedModel
from trinity.errors.internvl_chat import convert_config, count_image, is_internvl_chat

TOKENS = Tokens(449, 437, 1, 2)
LARGE: dict[str, dict[str, Any]] = {  # sizes of InternVL2-8B, as published
    "llm": {
        "vocab_size": 92553,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
    },
    "vision": {"image_size": 448, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
}


def fields(made: Published = PUBLISHED["small"], **changed: Any) -> dict[str, Any]:
    """Return a config; of a part the fields that are changed, and of None what is left out."""
    found = make_config(made, TOKENS)
    for name, value in changed.items():
        if isinstance(value, dict) and isinstance(found.get(name), dict):
            found[name] = {**found[name], **value}
        else:
            found[name] = value
    return {name: value for name, value in found.items() if value is not None}


def test_a_config_is_known_by_its_type() -> None:
    assert is_internvl_chat(fields())
    assert not is_internvl_chat({"model_type": "internvl"})
    assert not is_internvl_chat({})


def test_the_vision_tower_keeps_its_settings_by_other_names() -> None:
    found = convert_config(fields(PUBLISHED["large"]))["vision_config"]
    assert (found["use_qk_norm"], found["attention_bias"], found["norm_type"]) == (True, False, "rms_norm")
    assert not {"qk_normalization", "qkv_bias", "drop_path_rate"} & found.keys()
    bare = convert_config(fields(vision_config={"image_size": 56}) | {"vision_config": {"image_size": 56}})
    original = {"hidden_size": 3200, "num_hidden_layers": 48, "use_qk_norm": True, "attention_bias": False}
    assert bare["vision_config"].items() >= original.items(), "what is left out is the original's default"


def test_internlm2_is_a_llama_and_its_scaling_begins_behind_the_context() -> None:
    found = convert_config(fields())["text_config"]
    assert (found["model_type"], found["attention_bias"], found["rope_theta"]) == ("llama", False, 1000000)
    assert "rope_scaling" not in found
    assert convert_config(fields(PUBLISHED["biased"]))["text_config"]["attention_bias"] is True
    left_out = {"architectures": ["InternLM2ForCausalLM"]}
    bare = convert_config({**fields(), "llm_config": left_out})["text_config"]
    assert (bare["vocab_size"], bare["rms_norm_eps"], bare["attention_bias"]) == (103168, 1e-6, True)


def test_other_texts_keep_their_fields_but_those_of_the_checkpoints_code() -> None:
    found = convert_config(fields(PUBLISHED["qwen"]))
    assert found["text_config"]["model_type"] == "qwen2"
    assert found["text_config"]["rope_scaling"] is None, "it begins beyond the context"
    linear = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert convert_config(fields(PUBLISHED["qwen"], llm_config=linear))["text_config"].items() >= linear.items()
    assert not {"attn_implementation", "architectures", "_name_or_path"} & found["text_config"].keys()
    assert found["vision_feature_layer"] == -2
    assert found["dtype"] == "float32"


def test_a_planner_sees_the_model_that_is_built_in() -> None:
    given = fields(force_image_size=448, max_dynamic_patch=12, torch_dtype="bfloat16")
    given["llm_config"] |= LARGE["llm"]
    given["vision_config"] |= LARGE["vision"] | {"intermediate_size": 4096}
    side, most, tokens = count_image(given)
    assert (side, most, tokens) == (448, 12, 256)
    found = from_config(convert_config(given), {"max_patches": most}, name="internvl2-8b")
    known = MODELS["internvl2-8b"]
    assert (found.language, found.vocabulary, found.context) == (known.language, known.vocabulary, known.context)
    assert found.vision is not None
    assert known.vision is not None
    assert (found.vision.layers, found.vision.projector) == (known.vision.layers, known.vision.projector)
    for width, height in ((1024, 768), (448, 448), (2000, 300), (100, 90)):
        assert found.visual_tokens(width, height) == known.visual_tokens(width, height)


def test_layers_are_counted_as_the_original_does() -> None:
    """It takes 0 for what the embeddings make; transformers takes that for no layer at all."""
    layers = {given: convert_config(fields(select_layer=given))["vision_feature_layer"] for given in (-3, -1, 0, 1, 2)}
    assert layers == {-3: -3, -1: -1, 0: -3, 1: 1, 2: 2}


def test_an_image_is_one_tile_where_the_config_says_so() -> None:
    assert count_image(fields(dynamic_image_size=False, use_thumbnail=False)) == (56, 1, 4)
    assert count_image(fields(max_dynamic_patch=1, use_thumbnail=False)) == (56, 1, 4)
    assert count_image(fields(max_dynamic_patch=None))[1] == 6, "the original's default"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ps_version": "v1"}, "ps_version='v1' is not converted: ps_version='v2' alone is"),
        ({"ps_version": None}, "ps_version='v1'"),
        ({"downsample_ratio": 1.0}, "downsample_ratio=1.0"),
        ({"min_dynamic_patch": 2}, "min_dynamic_patch=2"),
        ({"pad2square": True}, "pad2square=True"),
        ({"use_llm_lora": 16}, "use_llm_lora=16"),
        ({"use_backbone_lora": 8}, "use_backbone_lora=8"),
        ({"use_thumbnail": False}, "use_thumbnail=False"),
        ({"force_image_size": 112}, "tiles of 112 pixels"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights"),
        ({"llm_config": {"quantization_config": {}}}, "quantised weights"),
        ({"llm_config": {"architectures": ["GptOssForCausalLM"]}}, "text model 'GptOssForCausalLM'.*InternLM2"),
        ({"llm_config": {"architectures": None}}, "text model None"),
        ({"llm_config": {"architectures": "InternLM2ForCausalLM"}}, "text model None"),
        ({"llm_config": {"architectures": [[]]}}, r"text model \[\]"),
        ({"llm_config": {"rope_scaling": {"type": "linear", "factor": 2.0}}}, "rope_scaling"),
        ({"llm_config": {"rope_scaling": "dynamic"}}, "rope_scaling"),
        ({"vision_config": {"qk_normalization": True, "layer_norm_eps": 1e-5}}, "layer_norm_eps=1e-05"),
        ({"vision_config": {"num_channels": 1}}, "images of 1 channels"),
    ],
    ids=str,
)
def test_what_is_not_the_same_is_refused_by_name(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said) as caught:
        convert_config(fields(**changed))
    assert "-hf" in str(caught.value)
    assert "docs/models.md" in str(caught.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"vision_config": None},
        {"llm_config": []},
        {"force_image_size": "448"},
        {"force_image_size": -1},
        {"force_image_size": 1 << 40},
        {"force_image_size": True},
        {"vision_config": {"patch_size": 0}},
        {"vision_config": {"patch_size": [14, 14]}},
        {"vision_config": {"patch_size": 1, "image_size": 8192}, "force_image_size": 8192},
        {"vision_config": {"image_size": 42}, "force_image_size": 42},
        {"max_dynamic_patch": 257},
        {"max_dynamic_patch": 0},
        {"max_dynamic_patch": 1e9},
        {"max_dynamic_patch": {}},
        {"select_layer": 3},
        {"select_layer": -4},
        {"select_layer": [1, 2]},
        {"select_layer": 1.0},
        {"vision_config": {"num_hidden_layers": "two"}},
    ],
    ids=str,
)
def test_what_no_model_can_have_is_a_typed_error(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        convert_config(fields(**changed))
