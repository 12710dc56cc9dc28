"""Attention of encoders, which keep no cache, on CPUs: bfloat16 in AMX tiles, float32 with AVX-512, where they have it.

An attention layer's forward is its own code with another ``ALL_ATTENTION_FUNCTIONS`` among its names. What that gives
for torch's ``scaled_dot_product_attention`` takes the kernels of csrc/attention_amx.cpp and attention_avx512_rows.cpp
where every row sees every other, and transformers' own way where not: masks, causal layers, other dtypes, gradients.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trinity.memory import native

FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"
_BEYOND = ("position_bias", "cache", "softcap")  # keywords that change what sdpa computes
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # of values of size 1


def attend_all(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Every row of ``query`` sees all of ``key``, in bfloat16 or float32.

    ``query`` is [batch, heads, rows, width], ``key`` and ``value`` are [batch, kv_heads, keys, width] and not empty.
    Returns [batch, rows, heads, width]. Raises ``ValueError`` where this machine has no kernel for it.
    """
    batch, heads, rows, width = query.shape
    query, key, value = _close(query), _close(key), _close(value)
    if key.stride() != value.stride():
        key, value = _rows_together(key), _rows_together(value)
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


def _close(heads: Tensor) -> Tensor:
    """Elements of a head side by side, and one part of the batch after the other."""
    follow = heads.shape[0] == 1 or heads.stride(0) == heads.shape[2] * heads.stride(2)
    return heads if heads.stride(3) == 1 and follow else _rows_together(heads)


def _rows_together(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def functions_for(forward: Any, dtype: torch.dtype) -> Any:
    """What ``forward`` of an attention layer is to find as ``ALL_ATTENTION_FUNCTIONS``; None: what it finds."""
    plain = getattr(forward, "__globals__", {}).get(FUNCTIONS)
    asked = plain is not None and {FUNCTIONS, "get_interface"} <= set(forward.__code__.co_names)
    return _Functions(plain) if asked and available(dtype) else None


@cache
@torch.inference_mode()
def available(dtype: torch.dtype) -> bool:
    """Whether there is a kernel here, and a small random batch through it is what torch gives."""
    if dtype not in _TOLERANCE or not hasattr(native.extension, "attention_many"):
        return False
    if not native.extension.attention_many(dtype == torch.bfloat16, 24):
        return False
    noise = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 35, 24, generator=noise).to(dtype) for _ in range(3))
    wanted = scaled_dot_product_attention(query.float(), key.float(), value.float(), scale=0.3)
    found = attend_all(query, key, value, 0.3).transpose(1, 2).float()
    return torch.allclose(found, wanted, rtol=_TOLERANCE[dtype], atol=_TOLERANCE[dtype])


class _Functions:
    """Transformers' attention functions, but one."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def get_interface(self, name: str, default: Any) -> Any:
        found = self._plain.get_interface(name, default)
        return _ours(found) if found is self._plain["sdpa"] else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


@cache
def _ours(plain: Any) -> Any:
    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *further: Any,
        **named: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None or further or not (_sees_all(module, named) and _fits(query, key, value)):
            found: tuple[Tensor, None] = plain(module, query, key, value, attention_mask, *further, **named)
            return found
        scale = named.get("scaling")
        return attend_all(query, key, value, query.shape[3] ** -0.5 if scale is None else scale), None

    return attend


def _sees_all(module: Any, named: dict[str, Any]) -> bool:
    causal = named.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return not causal and not named.get("dropout") and all(named.get(name) is None for name in _BEYOND)


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    parts = (query, key, value)
    alike = query.shape[3] == key.shape[3] and key.shape == value.shape and query.shape[1] % key.shape[1] == 0
    ours = all(part.dtype == query.dtype and part.device.type == "cpu" and part.numel() for part in parts)
    return alike and ours and available(query.dtype) and not any(part.requires_grad for part in parts)
