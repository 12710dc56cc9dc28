"""Decoder layers of loaded models on a GPU run by Triton kernels and give what they give by themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from support.checkpoint_files import checkpoint
from trinity.stages.attention.gpu.triton import TritonAttention
from trinity.stages.batch import NO_DECODES, Chunk, Decodes, build_batch
from trinity.stages.kernels.gpu import device_layers
from trinity.stages.kernels.swaps import without_swaps
from trinity.stages.models import LoadedModel, load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch sees"),
]
PROMPT, OFF = 45, {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@torch.inference_mode()
def logits_of(model: LoadedModel, dtype: torch.dtype) -> torch.Tensor:
    """Prefill a prompt, its last layer in two passes, then decode beside a second prompt."""
    kv = torch.zeros((8, *model.kv_shape().shape), dtype=dtype, device="cuda")
    ids, table, other = np.arange(7, 7 + PROMPT), np.arange(4), np.arange(4, 8)
    at = np.arange(PROMPT)
    rope = at if model.adapter.axes == 1 else np.tile(at, (3, 1))
    ends = np.array([PROMPT])
    steps = [
        (NO_DECODES, [Chunk(ids, rope, 0, table)]),
        (Decodes(np.array([3]), ends, ends + 1, table[None]), [Chunk(ids, rope, 0, other)]),
    ]
    batches = [build_batch(decodes, chunks, 16, model.adapter.axes, model.device) for decodes, chunks in steps]
    return torch.cat([model.forward(each, kv, None, TritonAttention()).float() for each in batches])


@pytest.mark.parametrize("dtype", OFF)
@pytest.mark.parametrize("name", ["llama", "llava", "qwen2_vl"])
def test_every_layer_of_a_loaded_model_is_nine_kernels(name: str, dtype: torch.dtype) -> None:
    model = load_model(checkpoint(name), "PD", dtype=dtype, device="cuda")
    layers = model.adapter.language(model.language).layers
    assert all(map(device_layers._is_fused, layers))
    found = logits_of(model, dtype)
    with without_swaps(model.language):
        wanted = logits_of(model, dtype)
    assert (found - wanted).abs().max() <= OFF[dtype] * wanted.abs().max()
