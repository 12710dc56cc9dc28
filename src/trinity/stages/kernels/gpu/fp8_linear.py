"""Linear layers whose weights stay in FP8 on a GPU, by Triton: half the bytes to hold, and to read at each decode.

A checkpoint of transformers' method "fp8" has weights in E4M3 with a float32 scale for each block, and its layers
round their inputs as they run (``triton_fp8``). transformers fetches kernels for that from a hub; these need none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trinity.errors import pip_install
from trinity.stages.attention.backends import explain_no_fp8
from trinity.stages.attention.fp8 import FP8, LARGEST_FP8
from trinity.stages.kernels.swaps import make_swapped_class

logger = logging.getLogger("trinity")
BLOCK = (128, 128)  # outputs and inputs of a scale, of published checkpoints
LEAST_FP8_SCALE = 1e-12
GROUPS_PER_PROGRAM, MOST_OUTPUT_GRAIN = 8, 16
TILES = (
    (16, 32, 4, 8),
    (64, 64, 4, 4),
    (128, 128, 8, 3),
)  # rows, outputs, warps, stages: a tile for each size of batch
_FEW, _SEVERAL = 16, 64  # rows
_PROBE_ROWS = (1, 40, 130)
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1.6e-2, torch.float16: 4e-3}  # of the largest; sums differ


@dataclass(frozen=True, slots=True)
class Fp8Product:
    """Weight [outputs, inputs] in E4M3, its scales [blocks of outputs, groups of inputs] and bias.

    ``block``: outputs that share a scale.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    block: int

    def __call__(self, rows: Tensor) -> Tensor:
        return launch_fp8_product(rows, self)

    def part(self, outputs: slice) -> Fp8Product:
        """Return some of the outputs, of whole blocks; nothing is copied."""
        first, last = (outputs.start or 0) // self.block, -(-(outputs.stop or len(self.weight)) // self.block)
        bias = None if self.bias is None else self.bias[outputs]
        return Fp8Product(self.weight[outputs], self.scales[first:last], bias, self.block)


class Fp8Linear(nn.Module):
    """Base put before transformers' ``FP8Linear``, whose own forward needs kernels that may not be there."""

    irreversible = True
    weight: Tensor
    weight_scale_inv: Tensor
    bias: Tensor | None
    block_size: Sequence[int]
    in_features: int

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.dtype != FP8:  # widened for a while, by ``in_float32``
            return linear(input, self.weight, self.bias)
        found = self.product()(input.reshape(-1, self.in_features))
        return found.view(*input.shape[:-1], len(self.weight))

    def product(self) -> Fp8Product:
        """Return the layer's product over its own weights."""
        return Fp8Product(self.weight, self.weight_scale_inv, self.bias, self.block_size[0])

    def to_dense(self) -> Tensor:
        """Compute the weight that the blocks stand for, in float32."""
        return scale_blocks(self.weight.float(), self.weight_scale_inv, self.block_size)


def scale_blocks(weight: Tensor, scales: Tensor, block: Sequence[int]) -> Tensor:
    """Multiply each block of ``weight`` [outputs, inputs] with its scale."""
    wide = scales.repeat_interleave(block[0], 0)[: weight.shape[0]]
    return weight * wide.repeat_interleave(block[1], 1)[:, : weight.shape[1]]


def use_fp8_products(model: Any) -> int:
    """Make transformers' FP8 layers of ``model`` use these kernels; returns their number."""
    found = [each for each in model.modules() if hasattr(each, "weight_scale_inv") and each.weight.dtype == FP8]
    for module in found:
        kind: Any = type(module)
        module.__class__ = _make_fp8_class(kind)
    if found:
        logger.info("%d linear layers keep their weights in FP8", len(found))
    return len(found)


@cache
def _make_fp8_class(kind: Any) -> Any:
    return make_swapped_class(Fp8Linear, kind, irreversible=True)


def can_merge(modules: Sequence[Any]) -> bool:
    """Tell if no block of scales would span two of these FP8 layers."""
    block = modules[0].block_size[0]
    alike = len({tuple(each.block_size) for each in modules}) == len({each.bias is None for each in modules}) == 1
    return alike and all(len(each.weight) % block == 0 for each in modules[:-1])


def launch_fp8_product(rows: Tensor, product: Fp8Product) -> Tensor:
    """Round ``rows`` [T, inputs] to FP8 and multiply: [T, outputs] in the dtype of ``rows``."""
    from trinity.stages.kernels.gpu import triton_fp8 as kernels

    outputs, groups = len(product.weight), product.scales.shape[1]
    count, group = len(rows), product.weight.shape[1] // groups
    out = rows.new_empty((count, outputs))
    if not count:
        return out
    rounded, scales = rows.new_empty(rows.shape, dtype=FP8), rows.new_empty((count, groups), dtype=torch.float32)
    kernels.quantize_groups[(count, -(-groups // GROUPS_PER_PROGRAM))](
        rows.contiguous(), rounded, scales, groups, group, GROUPS_PER_PROGRAM
    )
    height, width, warps, stages = TILES[(count > _FEW) + (count > _SEVERAL)]
    grain = min(MOST_OUTPUT_GRAIN, outputs & -outputs)
    kernels.multiply_groups[(-(-outputs // width), -(-count // height))](
        *(rounded, scales, product.weight, product.scales, scales if product.bias is None else product.bias, out),
        *(count, groups, outputs // grain, group, product.block, grain, height, width, product.bias is not None),
        num_warps=warps,
        num_stages=stages,
    )
    return out


# ---------------------------------------------------------------- admission


def explain_no_fp8_products(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why weights cannot stay in FP8 on ``device``, as words that end a sentence; None if they can.

    The kernels are run once per process and device beside torch, in every tile that serving needs, with a bias and
    without: so they are compiled, too.
    """
    if device.type != "cuda":
        return f"its kernels are for GPUs, and this is {device}"
    if find_spec("triton") is None:
        return f"triton is not installed: {pip_install('cuda')}"
    return explain_no_fp8(device) or _find_product_fault(device, dtype)


@cache
@torch.inference_mode()
def _find_product_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        worst = max(_product_errors(device, dtype))
    except Exception as error:  # a kernel that does not compile or launch
        return f"the kernel fails on this machine: {type(error).__name__}: {str(error)[:300]}"
    return None if worst <= 1 else f"the kernel's result differs from torch's by {worst:.1g} tolerances on this machine"


def _product_errors(device: torch.device, dtype: torch.dtype) -> Iterator[float]:
    noise = torch.Generator().manual_seed(21)
    outputs, inputs = 2 * BLOCK[0] + 16, 3 * BLOCK[1]
    weight = (torch.randn((outputs, inputs), generator=noise) * 100).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)
    scales = torch.rand((3, 3), generator=noise) + 0.1
    for count in _PROBE_ROWS:
        for bias in (None, torch.randn(outputs, generator=noise).to(device, dtype)):
            sizes = 10.0 ** torch.arange(-1, 2).repeat_interleave(BLOCK[1])
            rows = (torch.randn((count, inputs), generator=noise) * sizes).to(device, dtype)
            product = Fp8Product(weight.to(device), scales.to(device), bias, BLOCK[0])
            wanted = multiply_fp8_in_torch(rows, product, BLOCK)
            error = (product(rows).float() - wanted.float()).abs().max() / wanted.float().abs().max()
            yield float(error.nan_to_num(torch.inf)) / _PROBE_TOLERANCE[dtype]


def multiply_fp8_in_torch(rows: Tensor, product: Fp8Product, block: Sequence[int]) -> Tensor:
    """Compute the product in plain torch, in float32: what the kernels are held to."""
    parts = rows.float().view(len(rows), rows.shape[1] // block[1], block[1])
    scales = parts.abs().amax(-1, keepdim=True) / LARGEST_FP8
    rounded = (parts / scales.clamp(min=LEAST_FP8_SCALE)).to(FP8).float() * scales
    found: Tensor = rounded.flatten(1) @ scale_blocks(product.weight.float(), product.scales, block).T
    found = found.to(rows.dtype)
    return found if product.bias is None else (found.float() + product.bias.float()).to(rows.dtype)
