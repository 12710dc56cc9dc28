"""Decode steps of every architecture as CUDA graphs over a stand-in for the device (no GPU)."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.checkpoint_files import checkpoint
from support.cuda_stand_in import DEVICE, CudaStandIn, cuda_stand_in, move_to_device
from support.operator_tape import StaticTorch, every_operator_is_torchs
from trinity.memory.block_memory import BlockMemory
from trinity.stages.async_steps import DeviceTokens
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.batch import Decodes
from trinity.stages.gpu import decode_graphs
from trinity.stages.gpu.cuda_graphs import make_graph_cache
from trinity.stages.gpu.decode_graphs import DecodeGraphs
from trinity.stages.language import LanguageStage
from trinity.stages.models import LoadedModel, load_model
from trinity.testing.checkpoints import ARCHITECTURES

__all__ = ["cuda_stand_in"]
TEXT_MODELS = ("llama", "qwen3_vl", "gemma3", "minicpmv4_6")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES if name not in TEXT_MODELS]
pytestmark = pytest.mark.usefixtures(every_operator_is_torchs.__name__)


@dataclass
class Decoders:
    """One D as it is, over a cache of random keys and values, and the same model for the stand-in."""

    plain: LanguageStage
    moved: LoadedModel

    def eager(self, decodes: Decodes) -> Tensor:
        with torch.inference_mode():
            return self.plain._eager(decodes, (), 0)


@pytest.fixture
def decoders(request: pytest.FixtureRequest, tmp_path: Path) -> Decoders:
    name = request.param
    own = shutil.copytree(checkpoint(name), tmp_path / name)  # weights of its own, which go to the stand-in
    plain, moved = (load_model(place, "D", dtype="float32") for place in (checkpoint(name), own))
    move_to_device(moved.language)
    memory = BlockMemory(plain.kv_shape(), 20)
    memory.tensor.copy_(torch.randn(memory.tensor.shape, generator=torch.Generator().manual_seed(0)))
    stage = LanguageStage(plain, memory, None, "D", backend=TorchAttention())
    return Decoders(stage, replace(moved, device=DEVICE))


def rows(*lengths: int) -> Decodes:
    held = np.array(sorted(lengths))
    tables = np.arange(len(held) * 4).reshape(len(held), 4)
    return Decodes(held % 7 + 5, held - 1, held, tables[:, : -(-int(held[-1]) // 16)])


@pytest.mark.parametrize("decoders", [*TEXT_MODELS, *OTHERS], indirect=True)
def test_every_decode_is_recorded(
    decoders: Decoders, cuda_stand_in: CudaStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sizes, texts of one to four blocks; after the warm-up nothing is recorded, and no step reads the device."""
    monkeypatch.setattr(decode_graphs, "BATCH_SIZES", (2, 4))
    made = make_graph_cache(DEVICE)
    assert made is not None
    with torch.inference_mode():
        kv = decoders.plain.kv.tensor.to(DEVICE)
        graphs = DecodeGraphs(decoders.moved, kv, StaticTorch(), made, DeviceTokens(DEVICE))
    graphs.warm_up()
    assert (graphs.sizes, cuda_stand_in.captures) == ((2, 4), 2)
    with torch.inference_mode():
        kv.copy_(decoders.plain.kv.tensor)
    for decodes in (rows(3, 20), rows(40), rows(1, 17, 60), rows(5, 33, 49, 64)):
        wanted = decoders.eager(decodes)
        cuda_stand_in.waits.clear()
        found = graphs.run(decodes)
        assert found is not None
        assert set(cuda_stand_in.waits) <= {"copy"}, "of the step's numbers"
        torch.testing.assert_close(found.to("cpu"), wanted, atol=1e-4, rtol=1e-4)
    assert cuda_stand_in.captures == 2
