"""Experts and latent attention of a ``config.json``, by the fields in which transformers' types name them."""

from __future__ import annotations

from trinity.costs.config_fields import ConfigFields, get_optional, get_size
from trinity.costs.layer_parts import ExpertShape, LatentShape
from trinity.errors import ConfigError

_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "experts_per_token")
_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def read_experts(fields: ConfigFields, layers: int) -> ExpertShape | None:
    """Read the experts of a text model of so many layers; None where no layer has some.

    Raises ``ConfigError`` for sizes that are no numbers, or out of range.
    """
    if not _first(fields, _EXPERTS):
        return None
    sparse = sum(_is_sparse(fields, layer) for layer in range(layers))
    if not sparse:
        return None
    ffn = get_size(fields, "language", *_WIDTHS)
    shared = _first(fields, _SHARED_WIDTHS) or _first(fields, _SHARED_COUNTS) * ffn
    experts = get_size(fields, "language", *_EXPERTS)
    active = get_size(fields, "language", *_ACTIVE)
    return ExpertShape(layers=sparse, experts=experts, active=active, ffn=ffn, shared=shared)


def _first(fields: ConfigFields, names: tuple[str, ...]) -> int:
    """Get the first of these sizes that is set; 0 where none is."""
    return next((size for name in names if (size := get_optional(fields, "language", name, 0))), 0)


def _is_sparse(fields: ConfigFields, layer: int) -> bool:
    """Tell if a layer has experts, by a list of layers where there is one, else by counts and steps."""
    listed = fields.get("mlp_layer_types")
    if listed:
        return _list(fields, "mlp_layer_types")[layer : layer + 1] == ["sparse"]
    step = get_optional(fields, "language", "decoder_sparse_step", 1)
    dense = layer in _list(fields, "mlp_only_layers") or layer < _first(fields, _DENSE_FIRST)
    return not dense and (layer + 1) % step == 0


def _list(fields: ConfigFields, name: str) -> list[object]:
    listed = fields.get(name) or []
    if not isinstance(listed, list | tuple):
        raise ConfigError(f"{name} of a model's configuration is a list of layers, got {listed!r:.80}")
    return list(listed)


def _read_indexer(fields: ConfigFields) -> dict[str, int]:
    """Read the sizes of the indexer beside latent attention; {} where none chooses tokens."""
    if not get_optional(fields, "language", "index_topk", 0):
        return {}
    return {
        "index": get_optional(fields, "language", "index_head_dim", 0),
        "index_heads": get_optional(fields, "language", "index_n_heads", 0),
    }


def read_latent(fields: ConfigFields) -> LatentShape | None:
    """Read the latent attention of a text model; None where it has keys and values of each head.

    Raises ``ConfigError`` for widths that are no numbers, or out of range.
    """
    if not get_optional(fields, "language", "kv_lora_rank", 0):
        return None
    plain = get_size(fields, "language", "qk_nope_head_dim")
    return LatentShape(
        rank=get_size(fields, "language", "kv_lora_rank"),
        rotated=get_size(fields, "language", "qk_rope_head_dim"),
        plain=plain,
        value=get_optional(fields, "language", "v_head_dim", plain),
        query_rank=get_optional(fields, "language", "q_lora_rank", 0),
        **_read_indexer(fields),
    )
