"""Small random checkpoints of any causal language model of transformers, shrunken from its config class's defaults.

Every field keeps the default of its type unless it is a size: widths, layers, heads, experts, lengths. So a new type
needs no line here as long as it names its sizes as others do. Per-layer lists keep every kind of layer that they name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trinity.errors import UnsupportedModel
from trinity.testing.checkpoints import write_checkpoint
from trinity.testing.checkpoints_recipes import Recipe, llama_tokenizer, text_ids

SMALL_CONTEXT, SMALL_WINDOW, SMALL_ORIGINAL = (
    512,
    20,
    24,
)  # tokens: thresholds that a prompt of some hundred tokens crosses
_LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _HIDDEN, _INNER = 3, 4, 2, 16, 64, 128

_BY_SIZE: tuple[tuple[int, str], ...] = (
    (
        _HIDDEN,
        "hidden_size d_model n_embd embed_dim embedding_dim word_embed_proj_dim emb_dim embedding_size "
        "input_embedding_size output_embedding_size lru_width attention_hidden_size linear_attn_hidden_size",
    ),
    (
        96,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff ffn_hidden_size n_inner intermediate_size_mlp "
        "feed_forward_size dense_intermediate_size dim_ff d_inner",
    ),
    (
        32,
        "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size hidden_size_per_layer_input "
        "router_hidden_size hc_lowrank ple_embed_dim",
    ),
    (
        _LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
        "num_encoder_layers num_blocks num_layers_per_stack",
    ),
    (
        _HEADS,
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads "
        "linear_num_value_heads linear_num_heads num_attention_heads_per_layer zero_expert_num",
    ),
    (
        2,
        "num_experts_per_tok num_experts_per_token moe_topk moe_k topk_size n_group num_expert_group "
        "linear_num_key_heads altup_num_inputs num_kv_shared_layers "
        "n_mamba_heads o_groups decoder_sparse_step",
    ),
    (
        1,
        "topk_group topk_groups first_k_dense_replace num_dense_layers moe_layer_start_index num_nextn_predict_layers "
        "mamba_n_groups n_groups mamba_ngroups num_mem_blocks",
    ),
    (_INNER, "mamba_d_ssm"),
    (
        8,
        "mamba_n_heads mamba_num_heads num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim "
        "rotary_dim laurel_rank mamba_chunk_size chunk_size time_step_rank mamba_dt_rank adapter_rank mamba_d_state "
        "ssm_state_size state_size d_rel gated_norm_rank",
    ),
    (
        _HEAD_DIM,
        "head_dim qk_nope_head_dim kv_channels d_head dim_head swa_head_dim linear_head_dim linear_key_head_dim "
        "linear_value_head_dim mamba_head_dim mamba_d_head mamba_headdim index_head_dim attention_head_dim "
        "global_head_dim o_lora_rank query_pre_attn_scalar index_topk index_n_heads",
    ),
    (12, "v_head_dim"),
    (24, "kv_lora_rank q_lora_rank"),
    (
        SMALL_WINDOW,
        "sliding_window window_size local_attention attention_window_size sliding_window_size keep_window_size "
        "attention_chunk_size local_attention_window_len",
    ),
    (512, "vocab_size vocab_size_per_layer_input"),
    (SMALL_ORIGINAL, "original_max_position_embeddings floor_scale log_scaling_n_floor"),
    (SMALL_CONTEXT, "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length rel_extent"),
)
_SIZES = {name: size for size, names in _BY_SIZE for name in names.split()}
_DEPTHS = next(names for size, names in _BY_SIZE if size == _LAYERS).split()
_GROUPED = ("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "num_query_groups")
_DERIVED = ("qk_head_dim", "id2label", "label2id", "num_labels")  # computed by the class itself
_EXPERTS = {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
_LINEAR, _FULL, _SLIDING = "linear_attention", "full_attention", "sliding_attention"
_MIXED = [_LINEAR, _FULL, _LINEAR]
_OF_TYPE: dict[str, dict[str, Any]] = {  # what a checkpoint of the type has and the class's defaults leave out
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {_FULL: {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {**_EXPERTS, "topk_method": "group_limited_greedy"},
    "dots1": {**_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_head": _HEAD_DIM},
    "gemma3n_text": {"num_hidden_layers": 5, "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL]},
    "granitemoehybrid": {"layer_types": _MIXED},
    "hrm_text": {"num_layers_per_stack": None},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", _FULL, "conv"]},
    "mamba2": {"num_heads": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"]},
    "zamba2": {"num_key_value_heads": _HEADS},
}


def list_causal_types() -> list[str]:
    """List every ``model_type`` for which transformers has a causal language model, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build_any_text(model_type: str, directory: Path, *, seed: int = 0, **fields: Any) -> Path:
    """Write a tiny float32 checkpoint of any causal type, with tokenizer and chat template, into ``directory``.

    ``fields`` are values of the config. The same seed gives the same weights. Raises ``UnsupportedModel`` where
    transformers has no such type, and what the type's own classes raise.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    tokenizer = llama_tokenizer()
    config = make_small_config(model_type, **{**text_ids(tokenizer), **fields})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"transformers has no causal language model for {model_type!r}")
    recipe = Recipe(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], tokenizer)
    return write_checkpoint(recipe, directory, seed)


def make_small_config(model_type: str, **fields: Any) -> Any:
    """Make the config of a type with few, narrow layers and low thresholds; ``fields`` win over all of it.

    Raises ``UnsupportedModel`` where transformers has no such type.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(f"transformers has no model type {model_type!r}")
    kind: Any = CONFIG_MAPPING[model_type]
    given = {**_OF_TYPE.get(model_type, {}), **fields}
    return kind(**{**shrink_fields(kind, given.get("num_hidden_layers")), **given})


def shrink_fields(kind: Any, layers: int | None = None) -> dict[str, Any]:
    """Shrink the default fields of a config class; those that are no sizes are left out.

    ``layers`` (None): their number; None: three, or so many as there are kinds of layers. A config within it becomes a
    mapping of its own shrunken fields.
    """
    usual = vars(kind())
    layers = layers or _count_layers(usual)
    found = {name: _shrink(name, value, usual, layers) for name, value in usual.items() if name not in _DERIVED}
    return {name: value for name, value in found.items() if value is not _KEPT}


_KEPT: Any = object()


def _shrink(name: str, value: Any, usual: Mapping[str, Any], layers: int) -> Any:
    """Shrink the value of a field, by its name; ``_KEPT`` where its default stays."""
    if hasattr(value, "to_dict") and hasattr(value, "model_type"):
        return shrink_fields(type(value))
    if isinstance(value, Mapping):
        return _shrink_mapping(name, value)
    if isinstance(value, (list, tuple)):
        return _shrink_list(name, list(value), usual, layers)
    if name in ("is_decoder", "tie_word_embeddings"):  # tied tokens repeat themselves
        return name == "is_decoder"
    if value is None and name in ("head_dim", "num_key_value_heads"):
        return _HEAD_DIM if name == "head_dim" else _KV_HEADS
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value:
        return _KEPT
    if name == "head_dim" and value == usual.get("qk_rope_head_dim"):
        return _SIZES["qk_rope_head_dim"]
    if name in _GROUPED:
        return _KV_HEADS if "kv_lora_rank" not in usual else _HEADS
    if name in _DEPTHS:
        return layers
    return min(value, _SIZES[name]) if name in _SIZES else _KEPT


def _shrink_mapping(name: str, value: Mapping[str, Any]) -> Any:
    """Lower the thresholds of rotary positions, which may be nested by kind of layer."""
    if not name.startswith("rope"):
        return _KEPT
    lowered = {"original_max_position_embeddings": SMALL_ORIGINAL}
    return {
        key: _shrink_mapping(name, each) if isinstance(each, Mapping) else lowered.get(key, each)
        for key, each in value.items()
    }


def _count_layers(usual: Mapping[str, Any]) -> int:
    """Count the layers that hold every kind of layer of each list: at least three."""
    lists = [value for value in usual.values() if _names_layers(value, usual)]
    return max([_LAYERS, *(len(_sample(value)) for value in lists)])


def _names_layers(value: Any, usual: Mapping[str, Any]) -> bool:
    """Tell if a field is a list with an entry for each layer."""
    depth = next((usual[name] for name in _DEPTHS if usual.get(name)), None)
    return isinstance(value, (list, tuple)) and len(value) == depth and len(value) > 1


def _shrink_list(name: str, value: list[Any], usual: Mapping[str, Any], layers: int) -> Any:
    if not _names_layers(value, usual):
        return _KEPT
    found = [_SIZES.get(name, each) if type(each) is int else each for each in _sample(value)]
    return (found + found * layers)[:layers]


def _sample(value: Iterable[Any]) -> list[Any]:
    """Take each value of a list once, in the order in which they appear."""
    found: list[Any] = []
    for each in value:
        if each not in found:
            found.append(each)
    return found
