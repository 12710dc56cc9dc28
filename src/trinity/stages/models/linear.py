"""Linear layers on a CPU through oneDNN, where that is faster than torch's own choice.

In float32 torch calls MKL, which on a CPU of another maker than its own leaves half of the speed unused. The weights
stay as they are: no second copy, and memory-mapped files stay shared.

oneDNN makes and keeps code for every shape, some hundred KiB each; a ragged batch has another number of rows at each
step. Of the 1,024 shapes that torch would keep, for most of a GiB, ``KERNELS`` are kept, where the environment
(LRU_CACHE_CAPACITY, ONEDNN_PRIMITIVE_CACHE_CAPACITY) does not say otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

_ROWS, _INPUTS, _OUTPUTS = 16, 512, 1024
_REPEATS = 5
KERNELS = 256
_WORTH_IT = 0.9


class OneDnnLinear(nn.Linear):
    """What ``quicken`` turns an ``nn.Linear`` into; inference only."""

    def forward(self, input: Tensor) -> Tensor:
        return _onednn(input, self.weight, self.bias)


def quicken(model: Any) -> None:
    """Let the linear layers of ``model`` use oneDNN, where they lie on a CPU and it is the faster way there."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and _faster(module.weight.dtype):
            module.__class__ = OneDnnLinear


def _onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


@cache
def _faster(dtype: torch.dtype) -> bool:
    """Measured once per process and dtype, in about a millisecond; False where this torch lacks the operator."""
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):  # read at the first use
        os.environ.setdefault(name, str(KERNELS))
    rows, weight = torch.ones(_ROWS, _INPUTS, dtype=dtype), torch.ones(_OUTPUTS, _INPUTS, dtype=dtype)
    try:
        ours = _least_seconds(lambda: _onednn(rows, weight, None))
    except (RuntimeError, AttributeError):
        return False
    return ours < _WORTH_IT * _least_seconds(lambda: nn.functional.linear(rows, weight))


@torch.inference_mode()
def _least_seconds(run: Callable[[], object]) -> float:
    run()
    spent = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        spent.append(time.perf_counter() - start)
    return min(spent)
