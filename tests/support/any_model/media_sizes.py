"""Small sizes for every config and image processor, and the form of what single types need beyond them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SIDE, _PATCH, _HIDDEN, _HEADS, _LAYERS = 56, 14, 64, 4, 2
_SMALL: dict[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "embed_dim",
            "out_hidden_size",
            "projector_hidden_size",
            "projection_dim",
            "n_embed",
            "qformer_hidden_size",
            "hidden_dim",
            "encoder_hidden_size",
            "projection_hidden_size",
            "output_dim",
            "text_hidden_size",
            "adapter_hidden_size",
            "output_hidden_size",
            "input_hidden_size",
            "dim",
        ),
        _HIDDEN,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "intermediate_size_mlp",
            "encoder_ffn_dim",
            "alignment_intermediate_size",
            "projector_intermediate_size",
            "prefix_dense_intermediate_size",
        ),
        2 * _HIDDEN,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "n_layers", "num_heads_layers"), _LAYERS
    ),
    **dict.fromkeys(
        ("num_attention_heads", "num_heads", "n_heads", "encoder_attention_heads", "attention_heads"), _HEADS
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "attention_head_dim"), _HIDDEN // _HEADS),
    "image_size": SIDE,
    "patch_size": _PATCH,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 2048,
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    "sliding_window": 40,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "attention_multiplier": (_HIDDEN // _HEADS) ** -0.5,  # Granite's factors are for its own width
    "residual_multiplier": 1.0,
    "insert_layer_id": 0,  # of MiniCPM's window merger: behind a layer that is there
}
_DROPPED = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "dtype",
    "torch_dtype",
    "no_rope_layers",
    "attention_pattern",
    "moe_layers",
    "mlp_only_layers",
    "_attn_implementation_autoset",
)


@dataclass(frozen=True)
class TypeSizes:
    """Needs of one type beyond the rules: fields by dotted path (None: left out), tokens, classes by name.

    - ``start``: keywords with which its config class is made at all.
    - ``config``: fields of the config. ``images``, ``audio``, ``processor``: of the image processor, of the feature
      extractor and of the processor.
    - ``tokens``: named special tokens. ``plain``: others. ``unnamed``: names that are left out. ``further_ids``: tokens
      that its processor adds. ``ids``: fields of the config, each the id of a token.
    - ``model_class`` (""): the class of its checkpoints, where transformers' list has another.
    - ``tekken`` (False): the tokenizer's file of its checkpoints is a tekken.json, and there is no chat template.
    - ``embedding_std`` (0.5): of token embeddings; small where images would change nothing beside them.
    - ``bos`` ("<s>"; None: its tokenizer adds none), ``pad``: special tokens.
    - ``image_token``, ``image_text``, ``audio_text``: of the chat template. ``chats`` (True): it has one at all.
    """

    start: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)
    audio: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    plain: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()
    further_ids: int = 0
    ids: dict[str, str] = field(default_factory=dict)
    image_token: str = ""
    image_text: str = ""
    chats: bool = True
    audio_text: str = ""
    bos: str | None = "<s>"
    pad: str = "<|endoftext|>"
    processor_class: str = ""
    image_processor: str = ""
    model_class: str = ""
    tekken: bool = False
    embedding_std: float = 0.5


def shrink_config(fields: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Make every known size of a config small, those of its parts too."""
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _DROPPED:
            continue
        if isinstance(value, dict) and name in ("rope_parameters", "rope_scaling"):
            small[name] = _shrink_rope(value)
        elif isinstance(value, dict):
            small[name] = shrink_config(value, vocabulary)
        elif name in ("vocab_size", "text_vocab_size") and value:
            small[name] = vocabulary
        elif name in _SMALL and value not in (None, 0):
            small[name] = (
                [_SMALL[name]] * len(value)
                if isinstance(value, list) and not isinstance(_SMALL[name], list)
                else _SMALL[name]
            )
        elif value is not None or name.endswith("_id"):
            small[name] = value
    return small


def small_images(kind: Any) -> dict[str, Any]:
    """Fields of an image processor for images of some 56 pixels, by the shape of its own defaults."""
    found: dict[str, Any] = {}
    size = getattr(kind, "size", None)
    if isinstance(size, dict):
        found["size"] = _shrink_size(size)
    if isinstance(getattr(kind, "crop_size", None), dict):
        found["crop_size"] = {"height": SIDE, "width": SIDE}
    for name in ("patch_size",):
        value = getattr(kind, name, None)
        if isinstance(value, int):
            found[name] = _PATCH
    for name, value in (("min_pixels", SIDE * SIDE), ("max_pixels", 4 * SIDE * SIDE)):
        if isinstance(getattr(kind, name, None), int):
            found[name] = value
    return found


def _shrink_size(size: dict[str, int]) -> dict[str, int]:
    if "height" in size:
        return {"height": SIDE, "width": SIDE}
    if size.get("longest_edge", 0) > 10_000:  # pixels, as Qwen-VL has it
        return {"shortest_edge": SIDE * SIDE, "longest_edge": 4 * SIDE * SIDE}
    return {name: SIDE * (2 if name == "longest_edge" and len(size) > 1 else 1) for name in size}


def _shrink_rope(rope: dict[str, Any]) -> dict[str, Any]:
    small = {name: _shrink_rope(value) if isinstance(value, dict) else value for name, value in rope.items()}
    if isinstance(small.get("mrope_section"), list):
        small["mrope_section"] = [2, 3, 3]
    return small
