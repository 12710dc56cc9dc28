"""Whole pipelines on a GPU, their kernels, CUDA graphs and sampling: `make test-gpu` where there is one."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from support.checkpoint_files import checkpoint
from support.sampler_rows import SamplerRow, batch
from support.stage_driver import OUTPUTS, TEXTS, generated, pictures
from trinity import Instance, Pipeline, Request
from trinity.core.messages import ResolvedSampling
from trinity.request import Sampling
from trinity.stages.attention.backends import CacheKind, pick_backend
from trinity.stages.cuda_graphs import GraphCache, make_graph_cache
from trinity.stages.sampler import sample

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch sees"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_takes_the_triton_kernels(dtype: torch.dtype) -> None:
    kind = CacheKind((32, 2, 32, 16, 128), dtype, torch.device(DEVICE))
    assert pick_backend("auto", kind) == pick_backend("triton", kind) == "triton"


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
@pytest.mark.parametrize("roles", [("EPD",), ("E", "P", "D"), ("EP", "D")], ids="+".join)
async def test_tokens_are_those_of_generate(name: str, roles: tuple[str, ...], attention: str) -> None:
    """Three requests together, in float32; what ``generate()`` says, it says on the CPU."""
    pools = {"image": 64, "kv": 256}
    placement = [Instance(each, f"i{n}", attention=attention, pools=pools) for n, each in enumerate(roles)]
    sampling = Sampling(ignore_eos=True)
    async with Pipeline(checkpoint(name), placement, device=DEVICE, dtype="float32") as pipe:
        for count in (0, 1, 3):
            asked = Request(TEXTS[count], images=pictures(count), max_tokens=OUTPUTS, sampling=sampling)
            wanted = await asyncio.to_thread(generated, name, count)
            assert (await pipe.complete(asked)).token_ids == wanted.ids


async def test_two_lanes_serve_the_same() -> None:
    placement = [Instance("EPD", lanes=("vision", "language"), pools={"image": 64, "kv": 256})]
    wanted = await asyncio.to_thread(generated, "llava", 3)
    async with Pipeline(checkpoint("llava"), placement, device=DEVICE, dtype="float32") as pipe:
        asked = Request(TEXTS[3], images=pictures(3), max_tokens=OUTPUTS, sampling=Sampling(ignore_eos=True))
        assert (await pipe.complete(asked)).token_ids == wanted.ids


def test_a_graph_follows_its_inputs() -> None:
    made: GraphCache | None = make_graph_cache(torch.device(DEVICE))
    assert made is not None
    weight = torch.randn(64, 64, device=DEVICE)
    for seed in range(3):
        rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
        found = made.call("product", lambda inputs: [inputs[0] @ weight], [rows])
        assert found is not None
        torch.testing.assert_close(found[0], rows.to(DEVICE) @ weight)
    assert made.call("looks", lambda inputs: [inputs[0] * inputs[0].sum().item()], [torch.ones(3)]) is None
    torch.cuda.synchronize()


def test_samples_are_those_of_the_cpu() -> None:
    """Counter-based noise: integers on both sides, so the same token unless two scores all but tie."""
    logits = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0)) * 3
    ids = np.arange(20, dtype=np.int64)
    cuts = ((1.0, 0), (0.9, 50))
    ways = [ResolvedSampling(temperature=1.0, seed=n, top_p=p, top_k=k) for n in range(16) for p, k in cuts]
    rows = [SamplerRow(way, index, ids) for index, way in enumerate([*ways, *ways])]
    there = [one.token for one in sample(logits.to(DEVICE), batch(rows, torch.device(DEVICE)))]
    assert there == [one.token for one in sample(logits, batch(rows))]
