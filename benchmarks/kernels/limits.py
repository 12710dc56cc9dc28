"""Limits of one thread of this machine, and alternating timings: for benchmarks of kernels and steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

STREAM_BYTES = 160_000_000  # about the weights of llava-110m's language part in bfloat16


def alternate(runs: Mapping[str, Callable[[], object]], rounds: int, warm: bool = True) -> dict[str, float]:
    """Median seconds of thread CPU time of each run: A B C A B C ..., after one of each that does not count."""
    for run in runs.values() if warm else ():
        run()
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.thread_time()
            run()
            spent[name].append(time.thread_time() - started)
    return {name: median(seconds) for name, seconds in spent.items()}


def read_gb_s(size: int = STREAM_BYTES, rounds: int = 7) -> float:
    """GB/s at which a buffer of ``size`` bytes, larger than the caches at hand, is summed."""
    import torch

    buffer = torch.ones(size // 4)
    return size / alternate({"read": buffer.sum}, rounds)["read"] / 1e9


def gemm_gflops(dtype: Any, rounds: int = 5) -> float:
    """The best GFLOP/s of a few large products: torch's own way, packed weights and the extension's."""
    import torch

    from trinity.stages.kernels.native_linear import has_native_product, multiply

    best = 0.0
    for rows, inputs, outputs in ((1024, 2048, 2048), (608, 768, 2048), (2048, 1024, 1024)):
        left, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
        runs = {"plain": _product(left, weight)}
        if has_native_product(dtype):
            runs["native"] = partial(multiply, left, weight, None)
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            runs["packed"] = _packed_product(left, packed)
        except (RuntimeError, AttributeError):  # this torch has no oneDNN
            pass
        best = max(best, 2 * rows * inputs * outputs / min(alternate(runs, rounds).values()) / 1e9)
    return best


def _product(left: Any, weight: Any) -> Callable[[], object]:
    import torch

    return lambda: torch.nn.functional.linear(left, weight)


def _packed_product(left: Any, packed: Any) -> Callable[[], object]:
    import torch

    return lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], "")
