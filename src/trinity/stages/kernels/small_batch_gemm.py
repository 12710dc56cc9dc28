"""Products of at most 32 rows with weights that oneDNN has packed, by the extension.

A decode step is bound by reading its weights, and oneDNN's kernels leave some memory bandwidth unused because they do
not prefetch. These read the same packed copy: no second one is kept. In bfloat16 the results equal oneDNN's to the bit;
in float32 they differ by the order of sums.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from trinity.memory import native

MOST_GEMM_ROWS = 32
_DTYPES = (torch.float32, torch.bfloat16)


def has_gemm_kernel(dtype: torch.dtype) -> bool:
    """Tell if this processor has a kernel: AVX-512 for float32, AMX for bfloat16."""
    return dtype in _DTYPES and hasattr(native.extension, "few_rows") and bool(_block_sizes(dtype)[0])


def matches_layout(weight: Tensor, packed: int, size: int) -> bool:
    """Tell if ``weight`` [outputs, inputs] lies in the ``size`` bytes at ``packed`` as the kernel reads it."""
    outputs, inputs = _block_sizes(weight.dtype)
    if weight.nbytes != size or weight.shape[0] % outputs or weight.shape[1] % inputs:
        return False
    pair = 4 // weight.element_size()
    wanted = weight.view(-1, outputs, weight.shape[1] // pair, pair).transpose(1, 2).reshape(-1)
    memory = (ctypes.c_char * size).from_address(packed)
    return torch.equal(torch.frombuffer(memory, dtype=weight.dtype), wanted)


def _block_sizes(dtype: torch.dtype) -> tuple[int, int]:
    """Return the numbers of outputs and inputs that sizes must be multiples of."""
    found: tuple[int, int] = native.extension.few_rows_of(dtype == torch.bfloat16)
    return found


class SmallBatchGemm:
    """Product of one layer with ``weight``, an address that ``matches_layout`` accepted.

    The caller keeps weight and bias alive.
    """

    __slots__ = ("_bf16", "_bias", "_dtype", "_inputs", "_most", "_outputs", "_weight")

    def __init__(self, weight: int, bias: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> None:
        self._weight, self._bias, self._dtype = weight, 0 if bias is None else bias.data_ptr(), dtype
        self._bf16, (self._outputs, self._inputs) = dtype == torch.bfloat16, shape
        self._most = MOST_GEMM_ROWS * self._inputs

    def accepts(self, rows: Tensor) -> bool:
        """Tell if it serves these rows: few, of its dtype and width, contiguous."""
        few = rows.numel() <= self._most and rows.dtype == self._dtype
        return few and rows.shape[-1] == self._inputs and rows.is_contiguous()

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply [..., inputs] to [..., outputs]."""
        out = rows.new_empty((*rows.shape[:-1], self._outputs))
        native.extension.few_rows(
            (rows.data_ptr(), self._inputs),
            (out.data_ptr(), self._outputs),
            self._weight,
            self._bias,
            rows.numel() // self._inputs,
            self._inputs,
            self._outputs,
            self._bf16,
            torch.get_num_threads(),
        )
        return out
