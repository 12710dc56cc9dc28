"""Launches of the Triton kernels between the products of a decoder layer: norms, rotary embeddings, gated activations.

All tensors are contiguous, of one device and of one dtype: float32, bfloat16 or float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import triton
from torch import Tensor

from trinity.stages.kernels.gpu import triton_elementwise as kernels

DEVICE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_NORM_WIDTH = 16_384  # numbers of a row that one program holds in registers
HEADS_PER_PROGRAM, GATES_PER_PROGRAM = 8, 1024


class GateActivation(Enum):
    """Activations of a gated MLP that the kernel has; the value is its number there."""

    SILU = kernels.SILU.value
    GELU = kernels.GELU.value
    GELU_TANH = kernels.GELU_TANH.value


@dataclass(frozen=True, slots=True)
class DeviceNorm:
    """An RMS norm; ``rounds_first``: to the dtype before the product with ``weight``, and not only after it."""

    weight: Tensor
    eps: float
    rounds_first: bool = True


@dataclass(frozen=True, slots=True)
class CachePlace:
    """Places of a batch's rows in one layer of the KV cache: see ``PagedRows``; rows of a negative block have none."""

    cache: Tensor
    layer: int
    blocks: Tensor
    offsets: Tensor


def launch_norm(rows: Tensor, norm: DeviceNorm) -> Tensor:
    """Compute the norm of ``rows`` [T, width]."""
    out = torch.empty_like(rows)
    _launch_norm(rows, None, rows, out, norm)
    return out


def launch_add_norm(rows: Tensor, added: Tensor, sums: Tensor, norm: DeviceNorm | None) -> Tensor:
    """Write ``rows`` + ``added`` into ``sums``, which may be ``rows``; returns their norm, or without one ``sums``."""
    out = sums if norm is None else torch.empty_like(rows)
    _launch_norm(rows, added, sums, out, norm)
    return out


def _launch_norm(rows: Tensor, added: Tensor | None, sums: Tensor, out: Tensor, norm: DeviceNorm | None) -> None:
    count, width = rows.shape
    if not count:
        return
    wide = triton.next_power_of_2(width)
    weight, eps, first = (rows, 0.0, False) if norm is None else (norm.weight, norm.eps, norm.rounds_first)
    kernels.norm_row[(count,)](
        *(rows, rows if added is None else added, weight, sums, out, eps),
        *(width, wide, added is not None, norm is not None, first),
        num_warps=max(1, min(16, wide // 512)),
    )


def launch_rotary(
    states: Tensor, angles: tuple[Tensor, Tensor], heads: tuple[int, int], into: CachePlace | None = None
) -> None:
    """Apply the rotary embedding by halves in place.

    - ``states``: [T, (queries + 2 * keys) * width]: queries, keys and values of each row side by side.
    - ``angles``: cosines and sines, [T, width].
    - ``heads``: numbers of queries and of keys; either may be 0.
    - ``into`` (None): where keys and values are written; ``states`` then keeps them as they are.
    """
    cosine, sine = angles
    count, width = cosine.shape
    queries, keys = heads
    total = queries + keys * (1 if into is None else 2)
    if not count:
        return
    several = min(HEADS_PER_PROGRAM, triton.next_power_of_2(total))
    cache, layer, blocks, offsets = (
        (states, 0, states, states) if into is None else (into.cache, into.layer, into.blocks, into.offsets)
    )
    layers, block_rows = (1, 1) if into is None else (cache.shape[1], cache.shape[4])
    kernels.rotate_heads[(count, triton.cdiv(total, several))](
        *(states, cosine, sine, blocks, offsets, cache, layer, layers, block_rows),
        *(queries, keys, width, triton.next_power_of_2(width // 2), several, into is not None),
    )


def launch_gate(both: Tensor, activation: GateActivation) -> Tensor:
    """Compute activation(gate) * up of ``both`` [T, 2 * inner], gate and up side by side: [T, inner]."""
    count, inner = both.shape[0], both.shape[1] // 2
    out = both.new_empty((count, inner))
    if count:
        pieces = triton.cdiv(inner, GATES_PER_PROGRAM)
        kernels.gate_row[(count, pieces)](both, out, inner, GATES_PER_PROGRAM, activation.value)
    return out
