"""Linear layers on a CPU through oneDNN, where that is faster than torch's own choice.

In float32 torch calls MKL, which on a CPU of another maker than its own leaves half of the speed unused. The weights
stay as they are then: no second copy, and memory-mapped files stay shared.

Packed, weights are copied into the order in which oneDNN reads them. A decode step, which streams all weights for a few
rows, becomes up to twice as fast; long prefills gain nothing. The copy is this process's own (decision 0023).

Products of few rows with packed weights are then our own (``small_batch_gemm.py``), where oneDNN's order is the one
known and that is faster still.

oneDNN makes and keeps code for every shape, some hundred KiB each; a ragged batch has another number of rows at each
step. Of the 1,024 shapes that torch would keep, for most of a GiB, ``KERNELS`` are kept, where the environment
(LRU_CACHE_CAPACITY, ONEDNN_PRIMITIVE_CACHE_CAPACITY) does not say otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from trinity.stages.kernels import small_batch_gemm
from trinity.stages.kernels.huge_pages import make_huge
from trinity.stages.kernels.small_batch_gemm import FewRows

_ROWS, _INPUTS, _OUTPUTS = 16, 512, 1024
_FEW = (8, 768, 2048, 6)  # what packed weights are for: rows, inputs, outputs, and so many weights that none is cached
_REPEATS = 9
KERNELS = 256
_WORTH_IT, _AS_GOOD = 0.9, 1.0


class OneDnnLinear(nn.Linear):
    """What ``quicken`` turns an ``nn.Linear`` into; inference only."""

    def forward(self, input: Tensor) -> Tensor:
        return _onednn(input, self.weight, self.bias)


class PackedLinear(nn.Linear):
    """What ``pack`` turns an ``nn.Linear`` into; inference only. ``weight`` has shape and dtype, but no values."""

    packed: Tensor  # opaque: neither parameter nor buffer, so that nothing converts or saves it
    few: FewRows | None  # for few rows, where it can read what oneDNN has packed

    def forward(self, input: Tensor) -> Tensor:
        if self.few is not None and self.few.takes(input):
            return self.few(input)
        return _onednn(input, self.packed, self.bias)


def quicken(model: Any) -> None:
    """Let the linear layers of ``model`` use oneDNN, where they lie on a CPU and it is the faster way there."""
    for module in _plain(model):
        if _faster(module.weight.dtype):
            module.__class__ = OneDnnLinear


def pack(model: Any) -> None:
    """Give the linear layers of ``model`` packed weights, where they lie on a CPU and a few rows are faster so.

    The plain weights are let go; embeddings that are tied to them keep theirs.
    """
    module: Any
    for module in _plain(model):
        if _packed_faster(module.weight.dtype):
            module.packed = _packed(module.weight)
            module.few = _few(module)
            module.weight = nn.Parameter(torch.empty_like(module.weight, device="meta"), requires_grad=False)
            module.__class__ = PackedLinear
    make_huge([_place(module.packed) for module in model.modules() if isinstance(module, PackedLinear)])


def packed_bytes(model: Any) -> int:
    """Bytes of packed weights in ``model``; padding of oneDNN's is not counted."""
    return sum(module.weight.nbytes for module in model.modules() if isinstance(module, PackedLinear))


def _plain(model: Any) -> list[nn.Linear]:
    return [each for each in model.modules() if type(each) is nn.Linear and each.weight.device.type == "cpu"]


def _onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


def _packed(weight: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return found


def _place(packed: Tensor) -> tuple[int, int]:
    return torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)


def _few(module: Any) -> FewRows | None:
    weight, bias = module.weight, module.bias
    alike = bias is None or (bias.dtype == weight.dtype and bias.is_contiguous())
    if not (alike and small_batch_gemm.available(weight.dtype) and _readable(weight.shape, weight.dtype)):
        return None
    return FewRows(_place(module.packed)[0], bias, weight.shape, weight.dtype) if _few_faster(weight.dtype) else None


@cache
def _readable(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this shape as the kernel reads them: by packing some."""
    some = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = _packed(some)
    return small_batch_gemm.reads(some, *_place(packed))


@cache
def _few_faster(dtype: torch.dtype) -> bool:
    """Measured as the others are, in some 90 ms. A cache may hold these weights: from memory there is more to gain."""
    count, inputs, outputs, weights = _FEW
    rows = torch.ones(count, inputs, dtype=dtype)
    packed = [_packed(torch.ones(outputs, inputs, dtype=dtype)) for _ in range(weights)]
    few = [FewRows(_place(each)[0], None, torch.Size((outputs, inputs)), dtype) for each in packed]
    return _worth_it(
        lambda: [each(rows) for each in few],
        lambda: [_onednn(rows, weight, None) for weight in packed],
        _AS_GOOD,
    )


def _bound_kernels() -> None:
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):  # read at the first use
        os.environ.setdefault(name, str(KERNELS))


@cache
def _faster(dtype: torch.dtype) -> bool:
    """Measured once per process and dtype, in a few milliseconds; False where this torch lacks the operator."""
    _bound_kernels()
    rows, weight = torch.ones(_ROWS, _INPUTS, dtype=dtype), torch.ones(_OUTPUTS, _INPUTS, dtype=dtype)
    return _worth_it(lambda: _onednn(rows, weight, None), lambda: nn.functional.linear(rows, weight))


@cache
def _packed_faster(dtype: torch.dtype) -> bool:
    """The same of packed weights and a few rows, in some 200 ms."""
    _bound_kernels()
    few, inputs, outputs, weights = _FEW
    rows = torch.ones(few, inputs, dtype=dtype)
    plain = [torch.ones(outputs, inputs, dtype=dtype) for _ in range(weights)]
    try:
        packed = [_packed(weight) for weight in plain]
    except (RuntimeError, AttributeError):
        return False
    return _worth_it(
        lambda: [_onednn(rows, weight, None) for weight in packed],
        lambda: [nn.functional.linear(rows, weight) for weight in plain],
    )


@torch.inference_mode()
def _worth_it(ours: Callable[[], object], plain: Callable[[], object], most: float = _WORTH_IT) -> bool:
    """In turn, and by the middle ratio: on a busy machine one of the two may well have a lucky or an unlucky run."""
    try:
        ours()
        plain()
        return median(_seconds(ours) / _seconds(plain) for _ in range(_REPEATS)) < most
    except (RuntimeError, AttributeError):
        return False


def _seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()  # others may have the processor meanwhile
    run()
    return max(time.thread_time() - start, 1e-9)
