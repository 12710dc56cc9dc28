"""Checkpoints as OpenGVLab publishes InternVL 2 to 3.5 (``internvl_chat``), as transformers' type ``internvl``.

What is the same there under other names is renamed. What is not is refused by name: it would answer, and wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity.errors import ConfigError, UnsupportedModel
from trinity.errors.arguments import show
from trinity.errors.files import read_regular_file

MODEL_TYPE = "internvl_chat"
ARCHITECTURE = "InternVLChatModel"
CONTEXT_TOKEN = "<IMG_CONTEXT>"
IMAGE_ENDS = ("<img>", "</img>")
MOST_TILES = 256  # of an image, as in plans; published are 12
_MOST_TOKENS = 4096  # of a tile; published are 256
_MOST_SIDE = 8192  # pixels of a tile
_HEAD = 0.5  # edge of a tile's tokens by that of its patches
_EPSILON = 1e-6  # of the norms of queries and keys, which transformers has as a constant
_ONLY: dict[str, tuple[Any, Any]] = {  # what is converted, and what the original takes where nothing is said
    "ps_version": ("v2", "v1"),
    "downsample_ratio": (_HEAD, _HEAD),
    "min_dynamic_patch": (1, 1),
    "pad2square": (False, False),
    "use_backbone_lora": (0, 0),
    "use_llm_lora": (0, 0),
}
_VISION_DEFAULTS = {  # the original's
    "num_channels": 3,
    "patch_size": 14,
    "image_size": 224,
    "qkv_bias": False,
    "hidden_size": 3200,
    "num_attention_heads": 25,
    "intermediate_size": 12800,
    "qk_normalization": True,
    "num_hidden_layers": 48,
    "hidden_act": "gelu",
    "norm_type": "rms_norm",
    "layer_norm_eps": 1e-6,
}
_VISION_NAMES = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm"}
_INTERNLM2 = {  # the original's defaults, by the names that Llama has as well
    "vocab_size": 103168,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TEXTS = {
    "InternLM2ForCausalLM": "llama",
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
_OF_ITS_CODE = ("architectures", "auto_map", "attn_implementation", "dtype", "torch_dtype", "use_flash_attn")


def is_internvl_chat(fields: Mapping[str, Any]) -> bool:
    """Tell if a config.json is of this format."""
    return fields.get("model_type") == MODEL_TYPE


def has_internvl_chat(directory: Path) -> bool:
    """Tell if a directory's config.json is of such a format. Raises ``ConfigError`` where it cannot be read."""
    return is_internvl_chat(read_chat_fields(directory))


def read_chat_fields(directory: Path) -> dict[str, Any]:
    """Read config.json; {} where it cannot be read."""
    try:
        found = json.loads(read_regular_file(directory / "config.json", most=1 << 24))
    except (ConfigError, ValueError, RecursionError):
        return {}  # what is wrong with it is said where it is read as a config
    return found if isinstance(found, dict) else {}


def convert_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the config of type ``internvl``, but for ids of tokens.

    Raises ``UnsupportedModel`` for what transformers has no type for, ``ConfigError`` for values out of range.
    """
    for name, (converted, usual) in _ONLY.items():
        if (given := fields.get(name, usual)) != converted:
            raise _refuse(f"{name}={show(given)}", f"{name}={converted!r} alone is")
    vision, text = _part(fields, "vision_config"), _part(fields, "llm_config")
    if "quantization_config" in fields or "quantization_config" in text:
        raise _refuse("quantised weights", "plain ones are")
    converted, tower = _convert_text(text), _convert_vision(vision)
    side = count_image(fields)[0]
    if side != tower["image_size"]:
        raise _refuse(f"tiles of {side} pixels (force_image_size)", f"those of its encoder's {tower['image_size']} are")
    tied = text.get("tie_word_embeddings") or fields.get("tie_word_embeddings") or False
    return {
        "model_type": "internvl",
        "architectures": [ARCHITECTURE],
        "dtype": fields.get("torch_dtype") or fields.get("dtype") or text.get("torch_dtype"),
        "downsample_ratio": _HEAD,
        "image_seq_length": count_image(fields)[2],
        "vision_feature_layer": _check_layer(fields.get("select_layer", -1), tower["num_hidden_layers"]),
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": tied,
        "vision_config": tower,
        "text_config": {**converted, "tie_word_embeddings": tied},
    }


def count_image(fields: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the edge of a tile in pixels, the most tiles of an image, and a tile's tokens. Raises as above."""
    vision = {**_VISION_DEFAULTS, **_part(fields, "vision_config")}
    side = _whole(fields.get("force_image_size") or vision["image_size"], "force_image_size", _MOST_SIDE)
    patch = _whole(vision["patch_size"], "vision_config.patch_size", side)
    edge, dynamic = side // patch, fields.get("dynamic_image_size", False)
    if edge % 2 or (edge // 2) ** 2 > _MOST_TOKENS:
        raise ConfigError(
            f"a tile of {side} pixels in patches of {patch} has {edge} of them on an edge: it is an even number of at "
            f"most {2 * int(_MOST_TOKENS**0.5)}"
        )
    most = _whole(fields.get("max_dynamic_patch", 6), "max_dynamic_patch", MOST_TILES) if dynamic else 1
    if most > 1 and not fields.get("use_thumbnail", False):
        raise _refuse("use_thumbnail=False", "images of several tiles have a thumbnail behind them")
    return side, most, (edge // 2) ** 2


def _refuse(what: str, served: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"a checkpoint of type {MODEL_TYPE!r} with {what} is not converted: {served}. Its own code is never run; "
        "take a conversion in transformers' own format (names end in -hf), where there is one. docs/models.md lists "
        "what serves"
    )


def _part(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = fields.get(name)
    if not isinstance(part, Mapping):
        raise ConfigError(f"{name} of a config of type {MODEL_TYPE!r} is an object of JSON, got {show(part)}")
    return part


def _whole(value: Any, name: str, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{name} of a config of type {MODEL_TYPE!r} is a number from 1 to {most}, got {show(value)}")
    return value


def _check_layer(value: Any, layers: Any) -> int:
    if type(value) is not int or type(layers) is not int or not -layers - 1 <= value <= layers:
        raise ConfigError(f"select_layer is one of the {show(layers)} layers of the encoder, got {show(value)}")
    return value or -layers - 1  # transformers takes 0 for a layer that is not given


def _convert_vision(given: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: given.get(name, usual) for name, usual in _VISION_DEFAULTS.items()}
    if fields["qk_normalization"] and fields["layer_norm_eps"] != _EPSILON:
        raise _refuse(f"layer_norm_eps={show(fields['layer_norm_eps'])}", f"with qk_normalization {_EPSILON} is")
    if fields["num_channels"] != 3:
        raise _refuse(f"images of {show(fields['num_channels'])} channels", "those of 3 are")
    named = {_VISION_NAMES.get(name, name): value for name, value in fields.items()}
    return {"model_type": "internvl_vision", **named}


def _convert_text(given: Mapping[str, Any]) -> dict[str, Any]:
    listed = given.get("architectures")
    named = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(named, str) or named not in _TEXTS:
        raise _refuse(f"the text model {show(named)}", f"{', '.join(_TEXTS)} are")
    if named == "InternLM2ForCausalLM":
        return _convert_internlm2(given)
    kept = {name: value for name, value in given.items() if name not in _OF_ITS_CODE and not name.startswith("_")}
    return {**kept, "rope_scaling": _convert_scaling(given), "model_type": _TEXTS[named]}


def _convert_scaling(given: Mapping[str, Any]) -> Any:
    """Return how positions are scaled, but for a dynamic one: that begins beyond the context, where no request goes."""
    scaling = given.get("rope_scaling")
    named = scaling if isinstance(scaling, Mapping) else {}
    return None if "dynamic" in (named.get("rope_type"), named.get("type")) else scaling


def _convert_internlm2(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of Llama, whose layers are the same, by other names and with keys and values beside queries."""
    fields = {name: given.get(name, usual) for name, usual in _INTERNLM2.items()}
    if (scaling := _convert_scaling(given)) is not None:
        raise _refuse(f"rope_scaling={show(scaling)} of InternLM2", "none or a dynamic one is")
    bias = given.get("bias", True)
    return {"model_type": "llama", **fields, "attention_bias": bias, "mlp_bias": False}
