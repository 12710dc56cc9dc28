"""KV cache in FP8 (OCP E4M3): values are rounded as they are written, and widened as they are read.

There is no scale: E4M3 holds 448 and below, with three bits of mantissa, and keys and values of the usual models lie
well inside. Larger ones become 448, as in vLLM without calibrated scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` as a cache of ``dtype`` takes them: in FP8 what is too large is the largest, NaN stays."""
    return values.clamp(-LARGEST_FP8, LARGEST_FP8).to(dtype) if dtype == FP8 else values


def round_like(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` as a cache of ``dtype`` would give them back, in their own dtype."""
    return round_to(values, dtype).to(values.dtype)


def find_spoilt(cache: Tensor, blocks: Tensor) -> Tensor:
    """Tell of each of ``blocks`` [n] if it holds a value that is not finite; bool [n]."""
    held = storage(cache)[blocks].flatten(1)
    return ((held & 0x7F) == 0x7F).any(1) if cache.dtype == FP8 else ~held.isfinite().all(1)


def storage(cache: Tensor) -> Tensor:
    """View a cache as what torch can index: the bytes of FP8, else itself."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache
