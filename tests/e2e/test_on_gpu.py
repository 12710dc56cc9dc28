"""Whole pipelines on a GPU, their kernels, CUDA graphs and sampling: `make test-gpu` where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.checkpoint_files import checkpoint
from support.sampler_rows import SamplerRow, batch
from support.stage_driver import OUTPUTS, TEXTS, generated, pictures, processed
from trinity import Instance, Pipeline, Request
from trinity.core.messages import Encode, ResolvedSampling, Step, Work
from trinity.memory.block_memory import BlockMemory
from trinity.request import Sampling
from trinity.stages.attention import backends
from trinity.stages.attention.backends import choose_backends, pick_backend
from trinity.stages.attention.choice import CacheKind
from trinity.stages.attention.measurement import measure_backends
from trinity.stages.encode import EncodeStage
from trinity.stages.gpu.cuda_graphs import GraphCache, make_graph_cache
from trinity.stages.models import load_model
from trinity.stages.sampler import draw, sample
from trinity.stages.token_bans import make_bans

DEVICE = "cuda"
# Of these families transformers 5.17 prepares images without torchvision.
RECORDED = ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision", "gemma3")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch sees"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_takes_the_triton_kernels(dtype: torch.dtype) -> None:
    kind = CacheKind((32, 2, 32, 16, 128), dtype, torch.device(DEVICE))
    assert pick_backend("auto", kind) == pick_backend("triton", kind) == "triton"


def test_the_choice_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed: decodes can be recorded, and the second start reads what the first has kept."""
    from trinity.stages.attention.gpu.triton import TritonAttention

    monkeypatch.setenv("TRINITY_CACHE", str(tmp_path))
    kind, found = CacheKind((32, 2, 8, 16, 128), torch.bfloat16, torch.device(DEVICE), 32), []
    for _ in range(2):
        monkeypatch.setattr(backends, "_known", {})
        found.append(choose_backends("auto", kind))
    assert found[0] == found[1]
    assert found[0].decodes in ("triton", "flash3")
    if found[0].decodes != found[0].chunks:
        assert len(list(tmp_path.rglob("*.json"))) == 1
    several = {name: TritonAttention() for name in ("one", "same")}
    times = measure_backends(several, kind.shape, 32, kind.dtype, kind.device)
    assert times is not None
    assert {case: set(each) for case, each in times.items()} == {case: {"one", "same"} for case in times}
    assert min(each["one"] for each in times.values()) > 0
    assert len(times) == 6, "all cases fit the time that they have"


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


def test_a_capture_that_fails_leaves_the_thread_on_its_stream() -> None:
    made = make_graph_cache(torch.device(DEVICE))
    assert made is not None
    before = torch.cuda.current_stream()

    def fails(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return [inputs[0] * 2]

    assert made.call("fails", fails, [torch.ones(3)]) is None
    assert torch.cuda.current_stream() == before
    found = made.call("next", lambda inputs: [inputs[0] * 3], [torch.ones(3)])
    assert found is not None
    assert (made.has("fails"), found[0].tolist()) == (False, [3.0] * 3)
    pinned = [torch.ones(1 << 16).pin_memory().to(DEVICE, non_blocking=True).sum().item() for _ in range(3)]
    assert pinned == [1 << 16] * 3, "both allocators go on"


@pytest.mark.parametrize("name", RECORDED)
def test_encoders_are_recorded(name: str) -> None:
    """Features of three images as on the CPU, in float32; the later ones by a recording."""
    models = [load_model(checkpoint(name), "E", dtype="float32", device=place) for place in ("cpu", DEVICE)]
    graphs = make_graph_cache(torch.device(DEVICE))
    shape = models[0].image_shape(64)
    assert graphs is not None
    assert shape is not None
    here = EncodeStage(models[0], BlockMemory(shape, 20))
    there = EncodeStage(models[1], BlockMemory(shape, 20, DEVICE), graphs)
    for seed in (0, 0, 5, 9):
        made = processed(name, 1, seed)
        for stage in (here, there):
            stage.image.tensor.zero_()
            encode = Encode("r", 0, made.work.media[0], tuple(range(20)), made.inputs[0])
            stage.forward(Step(0, "vision", encodes=(encode,)))
        torch.testing.assert_close(there.image.tensor.cpu(), here.image.tensor, atol=1e-3, rtol=1e-3)
    assert any(call is not None for call in graphs._calls.values())


def test_samples_are_those_of_the_cpu() -> None:
    """Counter-based noise: integers on both sides, so the same token unless two scores all but tie."""
    logits = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0)) * 3
    ids = np.arange(20, dtype=np.int64)
    cuts = ((1.0, 0), (0.9, 50))
    ways = [ResolvedSampling(temperature=1.0, seed=n, top_p=p, top_k=k) for n in range(16) for p, k in cuts]
    rows = [SamplerRow(way, index, ids) for index, way in enumerate([*ways, *ways])]
    there = [one.token for one in sample(logits.to(DEVICE), batch(rows, torch.device(DEVICE)))]
    assert there == [one.token for one in sample(logits, batch(rows))]


def test_features_come_to_the_host_as_a_cpu_makes_them() -> None:
    async def run(device: str) -> list[Tensor]:
        async with Pipeline(checkpoint("llava"), "1E1PD", device=device, dtype="float32") as pipe:
            return (await pipe.features(pictures(3))).rows

    there, here = asyncio.run(run(DEVICE)), asyncio.run(run("cpu"))
    assert len(there) == len(here) > 1
    for rows, right in zip(there, here, strict=True):
        assert rows.device.type == "cpu"
        torch.testing.assert_close(rows, right, rtol=1e-3, atol=1e-3)


def test_sampling_waits_for_nothing_and_draws_the_same() -> None:
    """torch raises at each call that would wait; bans, penalties and logprobs are with the cuts."""
    logits = torch.randn(48, 2048, generator=torch.Generator().manual_seed(0)) * 3
    ids, rows = np.arange(20, dtype=np.int64) % 7, list[SamplerRow]()
    for number in range(48):
        sampling = ResolvedSampling(
            temperature=(0.0, 0.7, 1.0)[number % 3],
            top_k=(0, 50)[number % 2],
            top_p=(1.0, 0.9)[number // 2 % 2],
            min_p=(0.0, 0.05)[number // 4 % 2],
            repetition_penalty=(1.0, 1.3)[number // 8 % 2],
            no_repeat_ngram_size=(0, 3)[number // 16 % 2],
            bad_words_ids=((4, 5), (6, 0), (9,)),
            seed=number,
            logprobs=(None, 2)[number // 2 % 2],
        )
        work = Work(request="r", prompt=(1,), sampling=sampling)
        rows.append(SamplerRow(sampling, number, ids, make_bans(work)))
    there = logits.to(DEVICE)
    draw(there, batch(rows, there.device))  # what is compiled or loaded at the first call
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = draw(there, batch(rows, there.device))
        flat = drawn.flat
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found, wanted = drawn.read(flat.cpu().numpy(), len(rows))[1], sample(logits, batch(rows))
    assert [one.token for one in found] == [one.token for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert (one.logprob is None) == (other.logprob is None)
        assert one.logprob is None or one.logprob == pytest.approx(other.logprob, abs=1e-4)
