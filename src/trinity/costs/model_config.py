"""Model shapes from the ``config.json`` of a transformers checkpoint; loads no weights and no transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trinity.costs import visual_tokens
from trinity.costs.config_fields import (
    LARGEST_SIZE,
    ConfigFields,
    get_optional,
    get_part,
    get_ratio,
    get_size,
)
from trinity.costs.expert_config import read_experts, read_latent
from trinity.costs.layer_parts import StateShape
from trinity.costs.layer_shape import whisper_shape
from trinity.costs.media_tokens import USUAL_S, WINDOW_FRAMES, AudioRule, MediaRules, VideoRule
from trinity.costs.model_shape import MODELS, LayerShape, ModelShape, VisionShape, get_model_shape
from trinity.errors import ConfigError, UnsupportedModel
from trinity.errors.arguments import check_call, show
from trinity.errors.files import read_regular_file
from trinity.errors.hub_ids import explain_no_config, locate_model
from trinity.errors.internvl_chat import convert_config, count_image, is_internvl_chat
from trinity.traces.synthetic import VisualTokenRule

_LLAMA = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
_DEFAULTS: Mapping[str, ConfigFields] = {  # transformers' own defaults, which checkpoints leave out
    "llama": {**_LLAMA, "vocab_size": 32_000},
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 32_000},
    "qwen2_vl_vision": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_size": 3584},
    "qwen2_5_vl_vision": {
        **{"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14},
        **{"spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": (7, 15, 23, 31)},
    },
    "clip_vision_model": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "patch_size": 32},
    "siglip_vision_model": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "patch_size": 16},
}
_HEADS = {"clip_vision_model": 12, "siglip_vision_model": 12}
_PATCHES_PER_TOKEN = {"qwen2_vl": 4, "qwen2_5_vl": 4, "qwen3_vl": 4, "internvl": 4, "gemma3": 16}
_PIXELS: Mapping[str, tuple[int, int]] = {  # (least, most) of an image where no preprocessor says
    "qwen2_vl": (56 * 56, 28 * 28 * 1280),
    "qwen2_5_vl": (56 * 56, 28 * 28 * 1280),
    "qwen3_vl": (256 * 256, 4096 * 4096),
}
_PATCHES_OF_IMAGE = tuple(_PIXELS)  # encode each image at its own size, not in tiles of one
_SPLIT = ("idefics3", "smolvlm")
_WHISPER_NAMES = {  # Whisper's names of an encoder's sizes, and the usual ones
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
}
_AUDIO_RULES = {
    "qwen2_audio": AudioRule(stack=2, window=WINDOW_FRAMES, most=WINDOW_FRAMES),
    "voxtral": AudioRule(stack=4, window=WINDOW_FRAMES, silence_counts=True),
}
_VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl")
_PACKED = ("auto-round", "awq", "gptq")  # methods that say of how many bits their weights are
_MOST_TILES = 256  # of InternVL's, whose shapes are all tried
_TYPICAL = (1024, 768)  # (width, height) in pixels of a typical image
_DELTA, _CONV, _RECURRENT_BYTES = "linear_attention", "conv", 4  # a recurrence is kept in float32


@check_call
def find_model_shape(model: ModelShape | str | Path) -> ModelShape:
    """Return a shape as it is, one of ``MODELS`` by its name, or that of a checkpoint's folder or hub id.

    Raises ``UnknownName`` for what is none of these, and as ``read_model_shape`` does.
    """
    if isinstance(model, ModelShape):
        return model
    with suppress(OSError):  # a name that no file can have
        if str(model) not in MODELS and locate_model(model).exists():
            return read_model_shape(model)
    return get_model_shape(str(model))


@check_call
def read_model_shape(folder: str | Path) -> ModelShape:
    """Read the shape of a model from a checkpoint's folder, its ``config.json``, or the hub id of a cached one.

    A ``preprocessor_config.json`` beside it gives the limits of the rule for visual tokens. Raises ``ConfigError``
    where the file cannot be read or lacks a size, ``UnsupportedModel`` for a vision model whose rule for visual tokens
    is unknown.
    """
    found = locate_model(folder)
    path = found / "config.json" if os.path.isdir(found) else found
    if not os.path.isfile(path) or path.suffix == ".gguf":
        raise ConfigError(f"model {show(str(folder))} {explain_no_config(found)}")
    config = _read_json(path)
    beside = path.with_name("preprocessor_config.json")
    called = path.parent.resolve().name if found == Path(folder) else str(folder)  # a snapshot is called as its commit
    name = str(config.get("_name_or_path") or called)
    if is_internvl_chat(config):
        return from_config(convert_config(config), {"max_patches": count_image(config)[1]}, name=name)
    return from_config(config, _read_json(beside) if beside.is_file() else {}, name=name)


def from_config(config: ConfigFields, preprocessor: ConfigFields | None = None, *, name: str = "model") -> ModelShape:
    """Build the shape from the contents of both files; raises as ``read_model_shape`` does, for odd values too."""
    text = _with_defaults(get_part(config, "text_config") or config)
    language = _layer_shape(text, "language", gated=True)
    experts, latent = read_experts(text, language.layers), read_latent(text)
    language = msgspec.structs.replace(language, experts=experts, latent=latent)
    vision = _vision_shape(config, text) if get_part(config, "vision_config") else None
    rule = _visual_token_rule(config, preprocessor or {}) if vision else visual_tokens.fixed_tokens
    audio = _audio_shape(config, language.width) if get_part(config, "audio_config") else None
    media = _media_rules(config, preprocessor or {}, rule)
    quantised = get_part(config, "quantization_config") or get_part(text, "quantization_config")
    dtype_bytes = 4 if "float32" in (config.get("torch_dtype"), config.get("dtype")) else 2
    return ModelShape(
        name=name,
        language=language,
        states=read_states(text, language.layers, dtype_bytes),
        vocabulary=get_size(text, "language", "vocab_size"),
        vision=vision,
        audio=audio,
        media=media,
        visual_tokens=rule,
        image_tokens=rule(*_TYPICAL) if vision else media.audio.count_tokens(USUAL_S) if audio and media.audio else 0,
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        layer_dtype_bytes=_quantised_bytes(quantised),
        dtype_bytes=dtype_bytes,
        context=get_optional(text, "language", "max_position_embeddings", 4096),
        source="config.json",
    )


def _quantised_bytes(fields: ConfigFields) -> float | None:
    """Return the bytes of a linear weight that stays quantised; None where it is widened as it is loaded, or plain."""
    method, bits = fields.get("quant_method"), fields.get("bits")
    if method == "fp8" or fields.get("load_in_8bit") is True:
        return 1
    if fields.get("load_in_4bit") is True:
        return 0.5
    if method == "torchao":
        named = re.search(r"Int([48])", str(fields.get("quant_type")))
        return int(named[1]) / 8 if named else None
    return bits / 8 if method in _PACKED and type(bits) is int and bits in (2, 3, 4, 8) else None


def _read_json(path: Path) -> ConfigFields:
    try:
        return msgspec.json.decode(read_regular_file(path), type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{path} holds no configuration of a transformers model: {error}") from error


def _with_defaults(fields: ConfigFields) -> ConfigFields:
    kind = str(fields.get("model_type", ""))
    return {**_DEFAULTS.get(kind.removesuffix("_text"), _DEFAULTS.get(kind, {})), **fields}


def _layer_shape(fields: ConfigFields, part: str, *, gated: bool) -> LayerShape:
    width = get_size(fields, part, "embed_dim", "hidden_size")
    heads = get_size({**_default_heads(fields), **fields}, part, "num_attention_heads", "num_heads")
    ratio = fields.get("mlp_ratio") and "intermediate_size" not in fields
    ffn = int(width * get_ratio(fields, part, "mlp_ratio", 4)) if ratio else 0
    return LayerShape(
        layers=get_size(fields, part, "num_hidden_layers", "depth"),
        width=width,
        heads=heads,
        kv_heads=get_optional(fields, part, "num_key_value_heads", heads),
        head_dim=get_optional(fields, part, "head_dim", max(1, width // heads)),
        ffn=ffn or get_size(fields, part, "intermediate_size"),
        gated=gated,
    )


def _default_heads(fields: ConfigFields) -> ConfigFields:
    heads = _HEADS.get(str(fields.get("model_type")))
    return {"num_attention_heads": heads} if heads else {}


def _vision_shape(config: ConfigFields, text: ConfigFields) -> VisionShape:
    family = str(config.get("model_type"))
    fields = dict(_vision_fields(config))
    if family.startswith("qwen2") and "num_hidden_layers" in fields:
        fields.pop("num_hidden_layers")  # a leftover of the checkpoint; the encoder is built from depth
    layers = _layer_shape(fields, "vision", gated=family == "qwen2_5_vl")
    width = get_size(text, "language", "hidden_size")
    split, deep = family in _SPLIT, _count_deep_layers(fields)
    patches = get_optional(config, family, "scale_factor", 2) ** 2 if split else _PATCHES_PER_TOKEN.get(family, 1)
    side = _side(fields, "image_size") // _side(fields, "patch_size") if "image_size" in fields else 0
    span = side * side or _window_patches(fields) or patches * _visual_token_rule(config, {})(*_TYPICAL)
    return VisionShape(
        layers=layers,
        patches=patches,
        span=span,
        projector=_projector(family, layers.width, patches, width) * (1 + deep),
        deep_layers=deep,
        full_layers=_count_full_layers(fields, layers.layers) if family in _PATCHES_OF_IMAGE else 0,
    )


def _audio_shape(config: ConfigFields, width: int) -> VisionShape:
    """Read an encoder as Whisper's. Raises ``UnsupportedModel`` for a family whose rule for tokens is unknown."""
    family, fields = str(config.get("model_type")), get_part(config, "audio_config")
    if family not in _AUDIO_RULES:
        raise UnsupportedModel(
            f"the number of tokens of an audio clip is unknown for {family!r} models; build a "
            "trinity.costs.model_shape.ModelShape with your own media=MediaRules(audio=AudioRule(...))"
        )
    layers = _layer_shape({_WHISPER_NAMES.get(name, name): fields[name] for name in fields}, "audio", gated=False)
    stack = _AUDIO_RULES[family].stack
    projector = layers.width * width if family == "qwen2_audio" else (stack * layers.width + width) * width
    return whisper_shape(layers, mel=get_size(fields, "audio", "num_mel_bins"), stack=stack, projector=projector)


def _media_rules(config: ConfigFields, preprocessor: ConfigFields, rule: VisualTokenRule) -> MediaRules:
    """Get the rules for videos and audio of the families that have them; without files, transformers' defaults."""
    family = str(config.get("model_type"))
    if family in _VIDEO_FAMILIES:
        sized = any(name in preprocessor for name in ("size", "min_pixels", "max_pixels"))
        bounds = rule.keywords if sized and isinstance(rule, partial) else {}
        return MediaRules(video=VideoRule(group=2, **bounds))
    if family == "internvl" and isinstance(rule, partial):  # a frame is one tile
        return MediaRules(video=VideoRule(tokens=rule.keywords["tokens"]))
    return MediaRules(audio=_AUDIO_RULES.get(family))


def _vision_fields(config: ConfigFields) -> ConfigFields:
    """Get the encoder's fields with transformers' defaults; the family names its kind where it does not itself."""
    fields = get_part(config, "vision_config")
    usual = _DEFAULTS.get(f"{config.get('model_type')}_vision", {}) if config.get("model_type") == "qwen2_5_vl" else {}
    return _with_defaults({**usual, **{name: value for name, value in fields.items() if value is not None}})


def _window_patches(fields: ConfigFields) -> int:
    """Count the patches of a window, which is whole visual tokens; 0 where the encoder has none."""
    if "window_size" not in fields:
        return 0
    merge = get_optional(fields, "vision", "spatial_merge_size", 2)
    side = get_size(fields, "vision", "window_size") // (merge * _side(fields, "patch_size")) * merge
    if not side:
        raise ConfigError(f"the vision model's window_size of {fields['window_size']} holds no visual token")
    return side * side


def _count_deep_layers(fields: ConfigFields) -> int:
    """Count the layers whose features enter the language model beside the last's, each by a merger of its own."""
    listed = fields.get("deepstack_visual_indexes") or ()
    if not isinstance(listed, list | tuple):
        raise ConfigError(f"deepstack_visual_indexes of a vision model is a list of layers, got {listed!r:.80}")
    return len(listed)


def _count_full_layers(fields: ConfigFields, layers: int) -> int:
    """Count the layers whose patches attend to all of their image."""
    if not _window_patches(fields):
        return layers
    listed = fields.get("fullatt_block_indexes", ())
    if not isinstance(listed, list | tuple) or not all(type(each) is int for each in listed):
        raise ConfigError(
            f"fullatt_block_indexes of a vision model is a list of layers, as transformers reads it, got {listed!r:.80}"
        )
    return len({each for each in listed if 0 <= each < layers})


def _projector(family: str, features: int, patches: int, width: int) -> int:
    """Count the weights from the patches' ``features`` to the language model's ``width``."""
    if family == "gemma3":  # patches are averaged
        return features * width
    merged = features * patches
    if family in _SPLIT:
        return merged * width
    return merged * (merged + width) if family in _PATCHES_OF_IMAGE else (merged + width) * width


def _side(fields: ConfigFields, name: str) -> int:
    value = fields.get(name)
    return get_size({name: value[0] if isinstance(value, list | tuple) and value else value}, "vision", name)


def _visual_token_rule(config: ConfigFields, preprocessor: ConfigFields) -> VisualTokenRule:
    family, vision = str(config.get("model_type")), _vision_fields(config)
    if family in _PATCHES_OF_IMAGE:
        return _smart_resize_rule(vision, preprocessor, *_PIXELS[family])
    if family == "gemma3":
        scans = bool(preprocessor.get("do_pan_and_scan"))
        crops = get_optional(preprocessor, "image", "pan_and_scan_max_num_crops", 0) if scans else 0
        tokens = get_optional(config, family, "mm_tokens_per_image", 256)
        return partial(visual_tokens.pan_and_scan_tokens, tokens=tokens, crops=crops)
    if family not in ("llava", "llava_next", "internvl", *_SPLIT):
        raise UnsupportedModel(
            f"the number of visual tokens of an image is unknown for {family!r} models; build a "
            "trinity.costs.model_shape.ModelShape with your own rule"
        )
    tile, patch = _side(vision, "image_size"), _side(vision, "patch_size")
    side = tile // patch
    if not side:
        raise ConfigError(f"the vision model's patch_size of {patch} is larger than its image_size of {tile}")
    if family == "llava":
        return partial(visual_tokens.fixed_tokens, tokens=side * side)
    if family == "llava_next":
        return partial(visual_tokens.anyres_tokens, grids=_grids(config, tile), tile=tile, patch=patch)
    if family == "internvl":
        tokens = int(side * side * get_ratio(config, family, "downsample_ratio", 0.5) ** 2)
        most = get_optional(preprocessor, "image", "max_patches", 12)
        if most > _MOST_TILES:
            raise ConfigError(f"max_patches of a preprocessor is at most {_MOST_TILES}, got {most}")
        return partial(visual_tokens.tile_tokens, tile=tile, tokens=tokens, most=most)
    tokens = max(1, side * side // get_optional(config, family, "scale_factor", 2) ** 2)
    longest = get_optional(get_part(preprocessor, "size"), "image", "longest_edge", 4 * tile)
    return partial(visual_tokens.split_tokens, longest=longest, tile=tile, tokens=tokens)


def _grids(config: ConfigFields, tile: int) -> tuple[tuple[int, int], ...]:
    """Get LLaVA-NeXT's resolutions. Raises ``ConfigError`` where they are no pairs of at least a tile's pixels."""
    given = config.get("image_grid_pinpoints") or visual_tokens.LLAVA_NEXT_GRIDS
    pair = isinstance(given, list | tuple) and all(isinstance(each, list | tuple) and len(each) == 2 for each in given)
    if not pair or not all(type(edge) is int and tile <= edge <= LARGEST_SIZE for each in given for edge in each):
        raise ConfigError(
            f"image_grid_pinpoints of a model's configuration are pairs of at least {tile} pixels, got {given!r:.80}"
        )
    return tuple((height, width) for height, width in given)


def _smart_resize_rule(vision: ConfigFields, preprocessor: ConfigFields, least: int, most: int) -> VisualTokenRule:
    patch = _side(vision, "patch_size") if vision.get("patch_size") else 14
    factor = patch * get_optional(vision, "vision", "spatial_merge_size", 2)
    size = get_part(preprocessor, "size")
    least = get_optional(preprocessor, "image", "min_pixels", get_optional(size, "image", "shortest_edge", least))
    most = get_optional(preprocessor, "image", "max_pixels", get_optional(size, "image", "longest_edge", most))
    return partial(visual_tokens.smart_resize_tokens, factor=factor, least=least, most=most)


def read_states(fields: ConfigFields, layers: int, dtype_bytes: int) -> StateShape | None:
    """Read the states of a text model's gated delta nets (Qwen3.5's kin) and short convolutions (LFM2's).

    None for a model without, and for layers of other kinds, which are counted as if they attended. Raises
    ``ConfigError`` for sizes that are no numbers, or out of range.
    """
    kinds = _list_kinds(fields, layers)
    found = {_DELTA: _delta_bytes, _CONV: _conv_bytes}
    known = [kind for kind in kinds if kind in found and (kind != _DELTA or fields.get("linear_num_value_heads"))]
    if not known or len(known) == layers:
        return None
    return StateShape(layers=len(known), nbytes=sum(found[kind](fields, dtype_bytes) for kind in known))


def _list_kinds(fields: ConfigFields, layers: int) -> list[str]:
    """List the kind of each layer: as named, or every so many that attend (Qwen3-Next's older files)."""
    listed = fields.get("layer_types")
    if listed is None and fields.get("full_attention_interval"):
        step = get_size(fields, "language", "full_attention_interval")
        return [_DELTA if (layer + 1) % step else "full_attention" for layer in range(layers)]
    if not isinstance(listed, list | tuple | None) or not all(isinstance(each, str) for each in listed or ()):
        raise ConfigError(f"layer_types of a language model is a list of kinds, got {listed!r:.80}")
    return list(listed or ())[:layers]


def _delta_bytes(fields: ConfigFields, dtype_bytes: int) -> int:
    """Count the bytes of a gated delta net: what its convolution still sees, and a matrix for each head."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    keys, values, key, value = (get_size(fields, "language", name) for name in names)
    seen = get_optional(fields, "language", "linear_conv_kernel_dim", 4)
    return (2 * keys * key + values * value) * seen * dtype_bytes + values * key * value * _RECURRENT_BYTES


def _conv_bytes(fields: ConfigFields, dtype_bytes: int) -> int:
    """Count the bytes of a short convolution: the rows that it still sees."""
    width = get_size(fields, "language", "hidden_size")
    return width * get_optional(fields, "language", "conv_L_cache", 3) * dtype_bytes
