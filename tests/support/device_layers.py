"""Models whose decoder layers run as on a GPU, in Triton's interpreter on a CPU, and what a call of them launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.operator_tape import LOOKS
from support.operator_tape import graphs as recorded_graphs
from trinity.memory.block_memory import BlockMemory
from trinity.stages.attention.gpu import triton_kernels
from trinity.stages.attention.gpu.triton import TritonAttention
from trinity.stages.batch import Decodes
from trinity.stages.gpu.decode_graphs import DecodeGraphs
from trinity.stages.kernels.gpu import triton_elementwise
from trinity.stages.kernels.gpu.device_layers import fuse_device_layers
from trinity.stages.models import LoadedModel, load_model, loader


@cache
def load_for_device(directory: Path) -> LoadedModel:
    """The language part with none of the swaps of a CPU, and those of a GPU in all layers; in float32."""
    model = load_model(directory, "PD", dtype="float32")
    part = loader._load_part(directory, "language", torch.float32).eval().requires_grad_(False)
    assert fuse_device_layers(part) == model.adapter.text_config.num_hidden_layers
    return replace(model, language=part)


KERNELS = {
    triton_elementwise: ("norm_row", "rotate_heads", "gate_row"),
    triton_kernels: ("write_kv", "attend_tile", "combine_splits"),
}
NO_KERNEL = {  # views and empty tensors
    *("view", "_unsafe_view", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze", "permute"),
    *("split", "split_with_sizes", "alias", "detach", "as_strided", "unbind", "reshape", "empty", "new_empty"),
    *("empty_strided", "empty_like", "chunk", "lift_fresh", "_reshape_alias", "narrow"),
}


class _Launches:
    """Stands in for a kernel: launches are told to ``note`` and do not run."""

    def __init__(self, kernel: Any, note: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> None:
        self._kernel, self._note = kernel, note

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **named: self._note(self._kernel, given, named)


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in LOOKS:
            raise RuntimeError("operation not permitted when stream is capturing")
        if name not in NO_KERNEL:
            self._counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def launches_told(note: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Tell ``note`` of each launch of a Triton kernel, and run none."""
    with_names = [(module, name) for module, names in KERNELS.items() for name in names if hasattr(module, name)]
    patches: Sequence[Any] = [
        patch.object(module, name, _Launches(getattr(module, name), note)) for module, name in with_names
    ]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


@contextmanager
def operators_counted() -> Iterator[Counter[str]]:
    """Count kernels: launches of Triton's, and torch's operators but views. A look at a tensor's value raises."""
    counts = Counter[str]()

    def note(kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        counts[kernel.fn.__name__] += 1

    with launches_told(note), _Operators(counts):
        yield counts


@torch.inference_mode()
def count_decode_step(model: LoadedModel, layers: int, size: int = 4) -> Counter[str]:
    """Count the kernels of one decode step, as a CUDA graph records it, through the first ``layers``.

    Attention of few rows splits its keys on a large GPU, which is one kernel more; here it does not.
    """
    kv = BlockMemory(model.kv_shape(), 8)
    graphs, _ = recorded_graphs()
    steps = DecodeGraphs(model, kv.tensor, TritonAttention(1), graphs)
    at = np.arange(size)
    decodes = Decodes(at, at, at + 1, np.zeros((size, 1), np.int64))
    steps.state.write(decodes, size, None, None)
    text = model.adapter.language(model.language)
    with patch.dict(text._modules, layers=text.layers[:layers]), operators_counted() as found:
        steps._forward(size)
    return found
