"""Linear layers by the extension's own products with plain weights, where torch and oneDNN are slower.

A processor with AVX2 but without AVX-512 has no product of bfloat16 in oneDNN, and torch's own loops reach a tenth of
the speed of float32 there. The extension widens weights in registers, or block by block, and sums in float32, rounded
once. There it leads in float32 too, for a few rows, which wait for the weights. Weights stay as they are: no second
copy, and memory-mapped files stay shared (decision 0054).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from trinity.memory import native
from trinity.stages.kernels import linear

_DTYPES = (torch.float32, torch.bfloat16)
_INPUTS = 768
_TRIALS = ((8, 2048, 6, 0.9), (192, 512, 1, 1.1))  # rows, outputs, weights, and most seconds in those of another way
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}  # relative to the largest value


def has_native_product(dtype: torch.dtype) -> bool:
    """Tell if this processor has a kernel, and the kernel gives the exact product of a small batch."""
    if dtype not in _DTYPES or not hasattr(native.extension, "product"):
        return False
    return bool(native.extension.has_product(dtype == torch.bfloat16)) and _is_exact(dtype)


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``torch.nn.functional.linear``; all contiguous on the CPU, of one of two dtypes: float32 or bfloat16."""
    outputs, inputs = weight.shape
    out = rows.new_empty((*rows.shape[:-1], outputs))
    native.extension.product(
        (rows.data_ptr(), inputs),
        (out.data_ptr(), outputs),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        rows.numel() // inputs,
        inputs,
        outputs,
        rows.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


class NativeProduct:
    """Product with one layer's ``weight`` and ``bias``."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def accepts(self, rows: Tensor) -> bool:
        """Tell if it serves these rows: of its dtype and width, contiguous, without gradients."""
        alike = rows.dtype == self._weight.dtype and rows.shape[-1] == self._weight.shape[1]
        return alike and rows.is_contiguous() and not rows.requires_grad

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply [..., inputs] to [..., outputs]."""
        return multiply(rows, self._weight, self._bias)


class NativeLinear(nn.Linear):
    """``nn.Linear`` by the extension, made by ``use_native_products``; inference only."""

    swapped_from = nn.Linear
    gemm: NativeProduct

    def forward(self, input: Tensor) -> Tensor:
        return self.gemm(input) if self.gemm.accepts(input) else nn.functional.linear(input, self.weight, self.bias)


def use_native_products(model: Any) -> None:
    """Make the linear layers of ``model`` on a CPU use the extension, if that is faster there than torch and oneDNN."""
    module: Any
    for module in linear.find_linears(model):
        if _can_serve(module) and is_native_faster(module.weight.dtype):
            module.gemm = NativeProduct(module.weight, module.bias)
            module.__class__ = NativeLinear


def run_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``torch.nn.functional.linear`` in the faster way; on the CPU, all of equal dtype."""
    if weight.is_contiguous() and is_native_faster(rows.dtype):
        return multiply(rows.contiguous(), weight, bias)
    return nn.functional.linear(rows, weight, bias)


def _can_serve(module: Any) -> bool:
    weight, bias = module.weight, module.bias
    alike = bias is None or (bias.dtype == weight.dtype and bias.is_contiguous())
    return alike and weight.is_contiguous() and has_native_product(weight.dtype)


@cache
def is_native_faster(dtype: torch.dtype) -> bool:
    """Measure, in some 300 ms once per process and dtype, if the extension is faster at few rows and no slower at many.

    Processors with AVX-512 have kernels of their own for packed weights, and are not asked.
    """
    if not has_native_product(dtype) or native.extension.instructions() != "avx2":
        return False
    return all(_wins(dtype, *trial) for trial in _TRIALS)


def _wins(dtype: torch.dtype, count: int, outputs: int, weights: int, most: float) -> bool:
    rows = torch.ones(count, _INPUTS, dtype=dtype)
    plain = [torch.ones(outputs, _INPUTS, dtype=dtype) for _ in range(weights)]

    def ours() -> object:
        return [multiply(rows, weight, None) for weight in plain]

    if not linear.is_faster(ours, lambda: [nn.functional.linear(rows, weight) for weight in plain], most):
        return False
    try:
        packed = [linear.pack_weight(weight) for weight in plain]
        linear.run_onednn(rows, packed[0], None)
    except (RuntimeError, AttributeError):  # oneDNN has no product of this dtype here
        return True
    return linear.is_faster(ours, lambda: [linear.run_onednn(rows, weight, None) for weight in packed], most)


@cache
@torch.inference_mode()
def _is_exact(dtype: torch.dtype) -> bool:
    """Compare with exact products of sizes that fill the kernels' pieces and that do not, of few and many rows."""
    noise = torch.Generator().manual_seed(0)
    for count, inputs, outputs in ((1, 50, 37), (3, 32, 16), (20, 300, 37), (31, 300, 37), (70, 300, 37)):
        rows, weight, bias = (
            torch.randn(shape, generator=noise).to(dtype) for shape in ((count, inputs), (outputs, inputs), (outputs,))
        )
        exact = nn.functional.linear(rows.double(), weight.double(), bias.double())
        error = (multiply(rows, weight, bias) - exact).abs().max()
        if not error <= _TOLERANCE[dtype] * exact.abs().max():  # NaN is no product
            return False
    return True
