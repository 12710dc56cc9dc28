"""A stand-in for CUDA graphs on a CPU: a tape of the operators that ran, replayed on the very same tensors.

As with a CUDA graph, nothing of the Python code runs at a replay: a number that the host knew while recording is in the
tape for good, and a look at a tensor's value cannot be recorded. Here tensors of the host are those of the device, and
a list made of one goes unseen: ``cuda_stand_in`` tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.gpu.cuda_graphs import GraphCache
from trinity.stages.kernels import decoder_layers, encoder_attention, encoder_layers, fused_elementwise, native_linear


@pytest.fixture
def every_operator_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of csrc/, which a GPU never runs, would not be on the tape."""
    for each in (fused_elementwise, decoder_layers, encoder_layers):
        monkeypatch.setattr(each, "are_supported", lambda *rows: False)
    monkeypatch.setattr(encoder_attention, "fits_kernel", lambda *heads: False)
    monkeypatch.setattr(native_linear, "is_native_faster", lambda dtype: False)
    monkeypatch.setattr(native_linear.NativeProduct, "accepts", lambda *given: False)  # of a model loaded before


LOOKS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"}


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.tape: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in LOOKS:
            raise RuntimeError("operation not permitted when stream is capturing")
        made = func(*args, **(kwargs or {}))
        self.tape.append((func, args, kwargs or {}, tree_leaves(made)))
        return made


class TapeRecorder:
    """``GraphRecorder`` that counts ``recordings`` and ``replays``; ``memory``: recordings that it has room for."""

    def __init__(self, memory: int = 1000) -> None:
        self.recordings = self.replays = 0
        self.memory = memory

    def has_room(self) -> bool:
        return self.recordings < self.memory

    def record(
        self, run: Callable[[], Sequence[Tensor]], restore: Callable[[], None]
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        restore()
        run()
        restore()
        with _Recording() as recording:
            outputs = run()
        assert recording.tape
        self.recordings += 1

        def replay() -> None:
            self.replays += 1
            with torch.inference_mode():
                for func, args, kwargs, before in recording.tape:
                    for old, new in zip(before, tree_leaves(func(*args, **kwargs)), strict=True):
                        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                            old.copy_(new)

        return replay, outputs


CPU = torch.device("cpu")


def graphs(most: int = 64, memory: int = 1000) -> tuple[GraphCache, TapeRecorder]:
    recorder = TapeRecorder(memory)
    return GraphCache(recorder, CPU, most), recorder


class StaticTorch(TorchAttention):
    """Decode rows of static tables in plain torch, as a kernel reads them: on the device, padding left out."""

    supports_graphs = True

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        if "varlen" not in rows.memo:
            return super().attend(rows, cache, qkv, params)
        query, key, value = qkv
        varlen, real = rows.memo["varlen"], rows.blocks >= 0
        blocks, height = torch.where(real, rows.blocks, cache.shape[0] - 1), cache.shape[4]  # the last block is spare
        cache[blocks, params.layer, 0, :, rows.offsets] = key
        cache[blocks, params.layer, 1, :, rows.offsets] = value
        held = (
            cache[varlen.tables, params.layer].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        )  # [2, n, heads, positions, width]
        keys, values = held.repeat_interleave(query.shape[1] // key.shape[1], 2)
        scores = torch.einsum("nhd,nhpd->nhp", query, keys) * params.scale
        keys_at = torch.arange(varlen.tables.shape[1] * height, device=cache.device)
        hidden = keys_at >= varlen.lengths[:, None]
        if params.window is not None:
            hidden = hidden | (keys_at < varlen.lengths[:, None] - params.window)
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        return torch.einsum("nhp,nhpd->nhd", weights, values)
