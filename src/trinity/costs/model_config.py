"""Model shapes from the ``config.json`` of a transformers checkpoint; loads no weights and no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trinity.costs import visual_tokens
from trinity.costs.model_shape import LayerShape, ModelShape, VisionShape
from trinity.errors import ConfigError, UnsupportedModel
from trinity.errors.files import read_regular_file
from trinity.traces.synthetic import VisualTokenRule

ConfigFields = Mapping[str, Any]

_LLAMA = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
_DEFAULTS: Mapping[str, ConfigFields] = {  # transformers' own defaults, which checkpoints leave out
    "llama": {**_LLAMA, "vocab_size": 32_000},
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 32_000},
    "qwen2_vl_vision": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_size": 3584},
    "clip_vision_model": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "patch_size": 32},
    "siglip_vision_model": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "patch_size": 16},
}
_HEADS = {"clip_vision_model": 12, "siglip_vision_model": 12}
_PATCHES_PER_TOKEN = {"qwen2_vl": 4, "qwen2_5_vl": 4, "internvl": 4, "gemma3": 16}
_PATCHES_OF_IMAGE = ("qwen2_vl", "qwen2_5_vl")  # encode each image at its own size, not in tiles of one
_SPLIT = ("idefics3", "smolvlm")
_TYPICAL = (1024, 768)  # (width, height) in pixels of a typical image


def read_model_shape(folder: str | Path) -> ModelShape:
    """Read the shape of a model from a checkpoint's folder or its ``config.json``.

    A ``preprocessor_config.json`` beside it gives the limits of the rule for visual tokens. Raises ``ConfigError``
    where the file cannot be read or lacks a size, ``UnsupportedModel`` for a vision model whose rule for visual tokens
    is unknown.
    """
    path = Path(folder)
    path = path / "config.json" if path.is_dir() else path
    config = _read_json(path)
    beside = path.with_name("preprocessor_config.json")
    name = str(config.get("_name_or_path") or path.resolve().parent.name)
    return from_config(config, _read_json(beside) if beside.is_file() else {}, name=name)


def from_config(config: ConfigFields, preprocessor: ConfigFields | None = None, *, name: str = "model") -> ModelShape:
    """Build the shape from the contents of both files; raises as ``read_model_shape`` does."""
    text = _with_defaults(config.get("text_config") or config)
    language = _layer_shape(text, "language", gated=True)
    vision = _vision_shape(config, text) if config.get("vision_config") else None
    rule = _visual_token_rule(config, preprocessor or {}) if vision else visual_tokens.fixed_tokens
    return ModelShape(
        name=name,
        language=language,
        vocabulary=_size(text, "language", "vocab_size"),
        vision=vision,
        visual_tokens=rule,
        image_tokens=rule(*_TYPICAL) if vision else 0,
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        dtype_bytes=4 if "float32" in (config.get("torch_dtype"), config.get("dtype")) else 2,
        context=int(text.get("max_position_embeddings") or 4096),
        source="config.json",
    )


def _read_json(path: Path) -> ConfigFields:
    try:
        return msgspec.json.decode(read_regular_file(path), type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{path} holds no configuration of a transformers model: {error}") from error


def _with_defaults(fields: ConfigFields) -> ConfigFields:
    kind = str(fields.get("model_type", ""))
    return {**_DEFAULTS.get(kind.removesuffix("_text"), _DEFAULTS.get(kind, {})), **fields}


def _size(fields: ConfigFields, part: str, *names: str) -> int:
    """Get the first of these names that is present: families call the same thing differently.

    Raises ``ConfigError`` where none is, or it is below 1.
    """
    for name in names:
        value = fields.get(name)
        if isinstance(value, (int, float)) and value >= 1:
            return int(value)
    raise ConfigError(
        f"the {part} model's configuration has no {' or '.join(names)}: it must be a number of at least 1"
    )


def _layer_shape(fields: ConfigFields, part: str, *, gated: bool) -> LayerShape:
    width = _size(fields, part, "embed_dim", "hidden_size")
    heads = _size({**_default_heads(fields), **fields}, part, "num_attention_heads", "num_heads")
    ratio = fields.get("mlp_ratio")
    ffn = int(width * ratio) if ratio and "intermediate_size" not in fields else 0
    return LayerShape(
        layers=_size(fields, part, "num_hidden_layers", "depth"),
        width=width,
        heads=heads,
        kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or max(1, width // heads)),
        ffn=ffn or _size(fields, part, "intermediate_size"),
        gated=gated,
    )


def _default_heads(fields: ConfigFields) -> ConfigFields:
    heads = _HEADS.get(str(fields.get("model_type")))
    return {"num_attention_heads": heads} if heads else {}


def _vision_shape(config: ConfigFields, text: ConfigFields) -> VisionShape:
    family = str(config.get("model_type"))
    fields = dict(_with_defaults(config["vision_config"]))
    if family.startswith("qwen2") and "num_hidden_layers" in fields:
        fields.pop("num_hidden_layers")  # a leftover of the checkpoint; the encoder is built from depth
    layers = _layer_shape(fields, "vision", gated=family == "qwen2_5_vl")
    width = _size(text, "language", "hidden_size")
    patches = int(config.get("scale_factor") or 2) ** 2 if family in _SPLIT else _PATCHES_PER_TOKEN.get(family, 1)
    side = _side(fields, "image_size") // _side(fields, "patch_size") if "image_size" in fields else 0
    span = side * side or _window_patches(fields) or patches * _visual_token_rule(config, {})(*_TYPICAL)
    return VisionShape(
        layers=layers,
        patches=patches,
        span=span,
        projector=_projector(family, layers.width, patches, width),
        full_layers=_count_full_layers(fields, layers.layers) if family in _PATCHES_OF_IMAGE else 0,
    )


def _window_patches(fields: ConfigFields) -> int:
    """Count the patches of a window; 0 where the encoder has none."""
    return (int(fields.get("window_size") or 0) // _side(fields, "patch_size")) ** 2 if "window_size" in fields else 0


def _count_full_layers(fields: ConfigFields, layers: int) -> int:
    """Count the layers whose patches attend to all of their image."""
    if not _window_patches(fields):
        return layers
    return len(fields.get("fullatt_block_indexes") or ())


def _projector(family: str, features: int, patches: int, width: int) -> int:
    """Count the weights from the patches' ``features`` to the language model's ``width``."""
    if family == "gemma3":  # patches are averaged
        return features * width
    merged = features * patches
    if family in _SPLIT:
        return merged * width
    return merged * (merged + width) if family.startswith("qwen2") else (merged + width) * width


def _side(fields: ConfigFields, name: str) -> int:
    value = fields.get(name)
    return int(value[0]) if isinstance(value, list) and value else _size(fields, "vision", name)


def _visual_token_rule(config: ConfigFields, preprocessor: ConfigFields) -> VisualTokenRule:
    family, vision = str(config.get("model_type")), _with_defaults(config["vision_config"])
    if family in ("qwen2_vl", "qwen2_5_vl"):
        return _smart_resize_rule(vision, preprocessor)
    if family == "gemma3":
        crops = int(preprocessor.get("pan_and_scan_max_num_crops") or 0) if preprocessor.get("do_pan_and_scan") else 0
        return partial(
            visual_tokens.pan_and_scan_tokens, tokens=int(config.get("mm_tokens_per_image") or 256), crops=crops
        )
    if family not in ("llava", "llava_next", "internvl", *_SPLIT):
        raise UnsupportedModel(
            f"the number of visual tokens of an image is unknown for {family!r} models; build a "
            "trinity.costs.model_shape.ModelShape with your own rule"
        )
    tile, patch = _side(vision, "image_size"), _side(vision, "patch_size")
    side = tile // patch
    if family == "llava":
        return partial(visual_tokens.fixed_tokens, tokens=side * side)
    if family == "llava_next":
        grids = tuple(map(tuple, config.get("image_grid_pinpoints") or visual_tokens.LLAVA_NEXT_GRIDS))
        return partial(visual_tokens.anyres_tokens, grids=grids, tile=tile, patch=patch)
    if family == "internvl":
        tokens = int(side * side * float(config.get("downsample_ratio") or 0.5) ** 2)
        most = int(preprocessor.get("max_patches") or 12)
        return partial(visual_tokens.tile_tokens, tile=tile, tokens=tokens, most=most)
    tokens = max(1, side * side // int(config.get("scale_factor") or 2) ** 2)
    longest = int((preprocessor.get("size") or {}).get("longest_edge") or 4 * tile)
    return partial(visual_tokens.split_tokens, longest=longest, tile=tile, tokens=tokens)


def _smart_resize_rule(vision: ConfigFields, preprocessor: ConfigFields) -> VisualTokenRule:
    factor = int(vision.get("patch_size") or 14) * int(vision.get("spatial_merge_size") or 2)
    size = preprocessor.get("size") or {}
    least = preprocessor.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = preprocessor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    return partial(visual_tokens.smart_resize_tokens, factor=factor, least=int(least), most=int(most))
