"""Encoder attention (no cache) on CPUs by kernels of AMX tiles (bfloat16), AVX-512 (float32) or AVX2 (both).

An attention layer keeps its own forward, but finds another ``ALL_ATTENTION_FUNCTIONS`` among its globals. Its entry for
torch's ``scaled_dot_product_attention`` calls the extension's kernels if every row sees every other. Masks, causal
layers, other dtypes and gradients take transformers' own function.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trinity.memory import native
from trinity.stages.kernels.admission import is_known
from trinity.stages.kernels.known_sources import LayerPart

ATTENTION_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"
_UNSUPPORTED = ("position_bias", "cache", "softcap")  # keywords that change the result of sdpa
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # of values of size 1


def attend_all(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend from every row of ``query`` to all of ``key``, in bfloat16 or float32.

    ``query`` is [batch, heads, rows, width]; ``key`` and ``value`` are [batch, kv_heads, keys, width] and not empty.
    Returns [batch, rows, heads, width]. Raises ``ValueError`` if this machine has no kernel for it, or if batches
    differ: nothing is broadcast.
    """
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(
            f"batches differ: {query.shape[0]} of queries, {key.shape[0]} of keys, {value.shape[0]} of values"
        )
    batch, heads, rows, width = query.shape
    query, key, value = _make_contiguous(query), _make_contiguous(key), _make_contiguous(value)
    if key.stride() != value.stride():
        key, value = _pack_rows(key), _pack_rows(value)
    out = query.new_empty((batch, rows, heads, width))
    native.extension.attend_all(
        (query.data_ptr(), query.stride(2), query.stride(1)),
        (key.data_ptr(), key.stride(2), key.stride(1)),
        value.data_ptr(),
        (out.data_ptr(), out.stride(1), out.stride(2)),
        (batch, rows, key.shape[2]),
        (heads, key.shape[1]),
        width,
        query.dtype == torch.bfloat16,
        scale,
        torch.get_num_threads(),
    )
    return out


def _make_contiguous(heads: Tensor) -> Tensor:
    """Return ``heads`` with each head's elements beside each other and batch items one after the other."""
    follow = heads.shape[0] == 1 or heads.stride(0) == heads.shape[2] * heads.stride(2)
    return heads if heads.stride(3) == 1 and follow else _pack_rows(heads)


def _pack_rows(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def pick_attention_functions(forward: Any, dtype: torch.dtype) -> Any:
    """Return the ``ALL_ATTENTION_FUNCTIONS`` that an attention layer's ``forward`` should find; None: its own."""
    plain = getattr(forward, "__globals__", {}).get(ATTENTION_FUNCTIONS)
    if plain is None or not {ATTENTION_FUNCTIONS, "get_interface"} <= set(forward.__code__.co_names):
        return None
    if not has_attend_all(dtype) or not is_known(LayerPart.ATTENTION_FUNCTIONS, type(plain)):
        return None
    return _AttentionFunctions(plain) if is_known(LayerPart.SDPA, plain["sdpa"]) else None


@cache
@torch.inference_mode()
def has_attend_all(dtype: torch.dtype) -> bool:
    """Tell if this machine has a kernel for ``dtype`` that equals torch on a small random batch."""
    if dtype not in _TOLERANCE or not hasattr(native.extension, "attention_many"):
        return False
    if not native.extension.attention_many(dtype == torch.bfloat16, 24):
        return False
    noise = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 35, 24, generator=noise).to(dtype) for _ in range(3))
    wanted = scaled_dot_product_attention(query.float(), key.float(), value.float(), scale=0.3)
    found = attend_all(query, key, value, 0.3).transpose(1, 2).float()
    return torch.allclose(found, wanted, rtol=_TOLERANCE[dtype], atol=_TOLERANCE[dtype])


class _AttentionFunctions:
    """Transformers' attention functions with the one for sdpa replaced, unless another is registered later."""

    def __init__(self, plain: Any) -> None:
        self._plain, self._sdpa = plain, plain["sdpa"]

    def get_interface(self, name: str, default: Any) -> Any:
        found = self._plain.get_interface(name, default)
        return _wrap(found) if found is self._sdpa else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


@cache
def _wrap(plain: Any) -> Any:
    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *further: Any,
        **named: Any,
    ) -> tuple[Tensor, None]:
        if (
            attention_mask is not None
            or further
            or not (sees_all_rows(module, named) and fits_kernel(query, key, value))
        ):
            found: tuple[Tensor, None] = plain(module, query, key, value, attention_mask, *further, **named)
            return found
        scale = named.get("scaling")
        return attend_all(query, key, value, query.shape[3] ** -0.5 if scale is None else scale), None

    return attend


def sees_all_rows(module: Any, named: dict[str, Any]) -> bool:
    """Tell if each row attends to all others, and nothing but the scale changes the scores."""
    causal = named.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return not causal and not named.get("dropout") and all(named.get(name) is None for name in _UNSUPPORTED)


def fits_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Tell if ``attend_all`` can take these heads: on the CPU, of one supported dtype, alike in shape."""
    parts = (query, key, value)
    alike = query.shape[::3] == key.shape[::3] and key.shape == value.shape and query.shape[1] % key.shape[1] == 0
    ours = all(part.dtype == query.dtype and part.device.type == "cpu" and part.numel() for part in parts)
    return alike and ours and has_attend_all(query.dtype) and not any(part.requires_grad for part in parts)
