"""Latent attention (DeepSeek's MLA) over one compressed row per token and layer.

transformers' modules compute a latent of each token, rotate a part of the key that all heads share, expand the latent
to keys and values of each head by one projection, and call the attention interface with these. Here the cache holds the
latent and the rotated part, as the model itself caches them. Queries go through the projection's key half, so that they
meet latent rows as they lie; what is read goes through its value half. That is the same sum in another order.

The latent is what the projection was given: a hook keeps it until the layer's attention is called, right after.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trinity.errors import UnsupportedModel

INDEXED = "indexed_attention"  # kind of layer in configs
_EXPANSION = "trinity_expansion"
_WIDTHS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
_given = threading.local()  # latent: the newest projection of this thread and what it was given


@dataclass(frozen=True, slots=True)
class Expansion:
    """Expansion of a layer's latent rows to heads.

    - ``name``: of the projection among the layer's modules, [heads * (plain + value), rank].
    - ``heads``, ``rank``: query heads, and width of a latent.
    - ``plain``: width of a head's key without its rotated part, which comes behind it.
    - ``value``: width of a head's value.
    """

    name: str
    heads: int
    rank: int
    plain: int
    value: int


def find_latent_width(text: Any) -> tuple[int, int] | None:
    """Return the widths of a latent and of the rotated part by a text model's config; None without latent attention.

    Raises ``UnsupportedModel`` if they differ from layer to layer.
    """
    try:
        rank, rope, plain = (getattr(text, name, None) or 0 for name in _WIDTHS)
    except Exception as exc:  # transformers' own, which older releases do not have
        raise UnsupportedModel(f"the widths of its latents differ from layer to layer ({exc!s:.100})") from exc
    return (rank, rope) if rank and rope and plain else None


def find_index_width(text: Any) -> int:
    """Return the width of the keys by which indexers choose tokens, by a text model's config; 0 without indexers."""
    indexed = INDEXED in (getattr(text, "layer_types", None) or ())
    return int(getattr(text, "index_head_dim", None) or 0) if indexed else 0


def watch_expansions(model: Any) -> int:
    """Have each attention layer with latents, known by its shape, keep what it expands; returns how many have some.

    May be called again.
    """
    found = 0
    for layer in model.modules():
        expansion = _find_expansion(layer)
        if expansion is not None:
            if not expands_latents(getattr(layer, expansion.name)):
                getattr(layer, expansion.name).register_forward_pre_hook(_keep_latent)
            setattr(layer, _EXPANSION, expansion)
            found += 1
    return found


def expands_latents(projection: Any) -> bool:
    """Tell if queries are to go through the weights of this projection, which must stay as they are."""
    return _keep_latent in projection._forward_pre_hooks.values()  # torch has no public way to ask for hooks


def _find_expansion(layer: Any) -> Expansion | None:
    config: Any = getattr(layer, "config", None)
    widths = None if config is None or not hasattr(layer, "layer_idx") else find_latent_width(config)
    if widths is None:
        return None
    heads, plain, value = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    wanted = (widths[0], heads * (plain + value))
    shapes = {
        name: (getattr(x, "in_features", None), getattr(x, "out_features", None)) for name, x in layer.named_children()
    }
    alike = [name for name, shape in shapes.items() if shape == wanted]
    names = alike if len(alike) < 2 else [name for name in alike if "kv" in name]  # queries may have a latent so wide
    return Expansion(names[0], heads, widths[0], plain, value) if len(names) == 1 else None


def _keep_latent(projection: Any, given: Any) -> None:
    _given.latent = (projection, given[0])


def compress_rows(layer: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Compress expanded queries and keys [1, heads, T, plain + rotated] to what meets in a cache of latent rows.

    Returns queries [T, heads, rank + rotated] and rows [T, 1, rank + rotated]. Raises ``UnsupportedModel`` if the layer
    did not expand its keys from a latent by the projection that was found.
    """
    expansion: Expansion | None = getattr(layer, _EXPANSION, None)
    latent = None if expansion is None else _take_latent(getattr(layer, expansion.name))
    if expansion is None or latent is None:
        raise UnsupportedModel(
            f"{type(layer).__name__} is to cache latents, and expands none by a projection of their width"
        )
    plain = expansion.plain
    rows = torch.cat((latent.reshape(-1, expansion.rank), key[0, 0, :, plain:]), -1)[:, None]
    to_key, _ = _read_weights(layer, expansion, query.dtype)
    return torch.cat((query[0, ..., :plain] @ to_key, query[0, ..., plain:]), -1).transpose(0, 1), rows


def expand_result(layer: Any, seen: Tensor) -> Tensor:
    """Expand what was read of latent rows, [T, heads, rank + rotated], to values of each head: [T, heads, value]."""
    expansion: Expansion = getattr(layer, _EXPANSION)
    _, to_value = _read_weights(layer, expansion, seen.dtype)
    return (seen[..., : expansion.rank].transpose(0, 1) @ to_value.transpose(1, 2)).transpose(0, 1)


def _take_latent(projection: Any) -> Tensor | None:
    """Take what ``projection`` was given in this call of its layer; None if it was not called."""
    owner, latent = getattr(_given, "latent", (None, None))
    _given.latent = (None, None)
    return latent if owner is projection else None


def _read_weights(layer: Any, expansion: Expansion, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Read the halves of the projection: [heads, plain, rank] for keys and [heads, value, rank] for values."""
    projection = getattr(layer, expansion.name)
    dense: Tensor = projection.to_dense() if hasattr(projection, "to_dense") else projection.weight
    each = dense.to(dtype).view(expansion.heads, expansion.plain + expansion.value, expansion.rank)
    return each[:, : expansion.plain], each[:, expansion.plain :]
