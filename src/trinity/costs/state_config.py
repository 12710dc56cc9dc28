"""States of a ``config.json``: layers that keep some of a fixed size for each request in place of keys and values."""

from __future__ import annotations

from trinity.costs.config_fields import ConfigFields, get_optional, get_size
from trinity.costs.layer_parts import StateShape
from trinity.errors import ConfigError

_DELTA, _CONV, _RECURRENT_BYTES = "linear_attention", "conv", 4  # a recurrence is kept in float32


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
