"""Linear layers on a CPU through oneDNN, where that is faster than torch's own choice.

In float32 torch calls MKL, which leaves half of the speed unused on CPUs of other makers. Unpacked weights stay as they
are: no second copy, and memory-mapped files stay shared.

Packed weights are copied into the order in which oneDNN reads them. A decode step, which streams all weights for a few
rows, becomes up to twice as fast; long prefills gain nothing. The copy belongs to this process (decision 0023).

Products of few rows with packed weights use trinity's own kernel (``small_batch_gemm``) if it knows oneDNN's order and
is faster still.

oneDNN compiles and keeps code for every shape, some hundred KiB each, and a ragged batch has another number of rows at
each step. torch would keep 1,024 shapes, most of a GiB; this keeps ``KERNELS_KEPT``, unless the environment sets
LRU_CACHE_CAPACITY or ONEDNN_PRIMITIVE_CACHE_CAPACITY.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from trinity.stages.attention.latent import expands_latents
from trinity.stages.kernels import small_batch_gemm
from trinity.stages.kernels.admission import is_known_module
from trinity.stages.kernels.huge_pages import use_huge_pages
from trinity.stages.kernels.known_sources import LayerPart
from trinity.stages.kernels.small_batch_gemm import SmallBatchGemm
from trinity.stages.kernels.swaps import find_own_class

_ROWS, _INPUTS, _OUTPUTS = 16, 512, 1024
_GEMM_TRIAL = (8, 768, 2048, 6)  # rows, inputs, outputs, and enough weights that none stays in a cache
_REPEATS = 9
_READ_WEIGHT = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size))")
KERNELS_KEPT = 256
_WORTH_IT, _AS_GOOD = 0.9, 1.0


class OneDnnLinear(nn.Linear):
    """``nn.Linear`` through oneDNN, made by ``use_onednn``; inference only."""

    swapped_from = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        return run_onednn(input, self.weight, self.bias)


class PackedLinear(nn.Linear):
    """``nn.Linear`` with packed weights, made by ``pack_weights``; inference only.

    ``weight`` has shape and dtype, but no values.
    """

    swapped_from, irreversible = nn.Linear, True
    packed: Tensor  # opaque: neither parameter nor buffer, so that nothing converts or saves it
    gemm: SmallBatchGemm | None  # for few rows, where it can read what oneDNN has packed

    def forward(self, input: Tensor) -> Tensor:
        if self.gemm is not None and self.gemm.accepts(input):
            return self.gemm(input)
        return run_onednn(input, self.packed, self.bias)


def use_onednn(model: Any) -> None:
    """Make the linear layers of ``model`` on a CPU use oneDNN, if that is faster there."""
    for module in find_linears(model):
        if _is_onednn_faster(module.weight.dtype):
            module.__class__ = OneDnnLinear


def pack_weights(model: Any) -> None:
    """Pack the weights of the linear layers of ``model`` on a CPU, if products of few rows are then faster.

    The plain weights are freed; embeddings tied to them keep theirs. Layers whose weights somebody else reads stay
    plain: projections of latents, and what the code around them takes the ``weight`` of, as some routers do.
    """
    module: Any
    kept = _find_read_weights(model)
    for module in find_linears(model):
        if is_packing_faster(module.weight.dtype) and not (module in kept or expands_latents(module)):
            module.packed = pack_weight(module.weight)
            module.gemm = _make_gemm(module)
            module.weight = nn.Parameter(torch.empty_like(module.weight, device="meta"), requires_grad=False)
            module.__class__ = PackedLinear
    use_huge_pages([_address(module.packed) for module in model.modules() if isinstance(module, PackedLinear)])


def _find_read_weights(model: Any) -> set[Any]:
    """Find the modules whose ``weight`` the class around them reads by name."""
    return {
        child
        for module in model.modules()
        for name, child in module.named_children()
        if name in _list_read_names(find_own_class(module))
    }


@cache
def _list_read_names(kind: Any) -> frozenset[str]:
    """List the attributes whose ``weight`` the source of a class names; none where there is no source."""
    try:
        return frozenset(_READ_WEIGHT.findall(inspect.getsource(kind)))
    except (OSError, TypeError):
        return frozenset()


def count_packed_bytes(model: Any) -> int:
    """Count the bytes of packed weights in ``model``, without oneDNN's padding."""
    return sum(module.weight.nbytes for module in model.modules() if isinstance(module, PackedLinear))


def find_linears(model: Any) -> list[nn.Linear]:
    """Find the plain linear layers of ``model`` on the CPU whose code is known."""
    return [each for each in model.modules() if type(each) is nn.Linear and _is_ours(each)]


def _is_ours(linear: nn.Linear) -> bool:
    return linear.weight.device.type == "cpu" and is_known_module(LayerPart.LINEAR, linear)


def run_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer with a packed or plain weight by oneDNN, whose operators torch keeps private."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


def pack_weight(weight: Tensor) -> Tensor:
    """Pack a weight for oneDNN's products of few rows."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return found


def _address(packed: Tensor) -> tuple[int, int]:
    return torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)


def _make_gemm(module: Any) -> SmallBatchGemm | None:
    weight, bias = module.weight, module.bias
    alike = bias is None or (bias.dtype == weight.dtype and bias.is_contiguous())
    if not (alike and small_batch_gemm.has_gemm_kernel(weight.dtype) and _packs_readably(weight.shape, weight.dtype)):
        return None
    if not _is_gemm_faster(weight.dtype):
        return None
    return SmallBatchGemm(_address(module.packed)[0], bias, weight.shape, weight.dtype)


@cache
def _packs_readably(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Tell if oneDNN packs weights of this shape as the kernel reads them, by packing some."""
    some = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = pack_weight(some)
    return small_batch_gemm.matches_layout(some, *_address(packed))


@cache
def _is_gemm_faster(dtype: torch.dtype) -> bool:
    """Measure, in some 90 ms, if the small-batch kernel is faster than oneDNN.

    A cache may hold these weights; with weights from memory there is more to gain.
    """
    count, inputs, outputs, weights = _GEMM_TRIAL
    rows = torch.ones(count, inputs, dtype=dtype)
    packed = [pack_weight(torch.ones(outputs, inputs, dtype=dtype)) for _ in range(weights)]
    few = [SmallBatchGemm(_address(each)[0], None, torch.Size((outputs, inputs)), dtype) for each in packed]
    return is_faster(
        lambda: [each(rows) for each in few],
        lambda: [run_onednn(rows, weight, None) for weight in packed],
        _AS_GOOD,
    )


def _limit_kernels() -> None:
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):  # read at the first use
        os.environ.setdefault(name, str(KERNELS_KEPT))


@cache
def _is_onednn_faster(dtype: torch.dtype) -> bool:
    """Measure once per process and dtype, in a few ms, if oneDNN is faster; False if torch lacks the operator."""
    _limit_kernels()
    rows, weight = torch.ones(_ROWS, _INPUTS, dtype=dtype), torch.ones(_OUTPUTS, _INPUTS, dtype=dtype)
    return is_faster(lambda: run_onednn(rows, weight, None), lambda: nn.functional.linear(rows, weight))


@cache
def is_packing_faster(dtype: torch.dtype) -> bool:
    """Measure the same for packed weights and a few rows, in some 200 ms."""
    _limit_kernels()
    few, inputs, outputs, weights = _GEMM_TRIAL
    rows = torch.ones(few, inputs, dtype=dtype)
    plain = [torch.ones(outputs, inputs, dtype=dtype) for _ in range(weights)]
    try:
        packed = [pack_weight(weight) for weight in plain]
    except (RuntimeError, AttributeError):
        return False
    return is_faster(
        lambda: [run_onednn(rows, weight, None) for weight in packed],
        lambda: [nn.functional.linear(rows, weight) for weight in plain],
    )


@torch.inference_mode()
def is_faster(ours: Callable[[], object], plain: Callable[[], object], most: float = _WORTH_IT) -> bool:
    """Compare by the median ratio of runs in turn, since on a busy machine single runs of either may be off."""
    try:
        ours()
        plain()
        return median(_seconds(ours) / _seconds(plain) for _ in range(_REPEATS)) < most
    except (RuntimeError, AttributeError):
        return False


def _seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()  # CPU time: other threads may have the processor meanwhile
    run()
    return max(time.thread_time() - start, 1e-9)
