"""A KV cache in FP8 through the Triton kernels: the bytes and the attention of the torch backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, at the imports below
pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from support.attention_scenes import LAYER, LAYERS, Scene, Text
from support.interpreted_fp8 import exact_fp8
from trinity.errors import ConfigError
from trinity.stages.attention.backends import pick_backend
from trinity.stages.attention.choice import CacheKind
from trinity.stages.attention.fp8 import FP8, find_spoilt, round_to, storage
from trinity.stages.attention.gpu.triton import TritonAttention
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.attention.probe import find_fault
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.kernels.gpu.device_elementwise import CachePlace, launch_rotary

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ONE, MANY = 1, 1000  # multiprocessors to keep busy: no split, as many as there can be


@pytest.fixture(autouse=True)
def conversions() -> Iterator[None]:
    if DEVICE.type == "cuda":
        yield
        return
    with exact_fp8():
        yield


def make_scene() -> Scene:
    """Keys of which some are too large for FP8, so that scores tell one key from the others."""
    scene = Scene([Text(70, 1, True), Text(9, 1, True), Text(40, 21, False), Text(18, 18, False)], (4, 2), 20, 16, 3)
    scene.keys = [each * 150 for each in scene.keys]
    scene._fill_past()
    scene.cache = round_to(scene.cache, FP8)
    return scene


class OnDevice:
    """A backend that is handed a scene's tensors on the device."""

    def __init__(self, processors: int) -> None:
        self.inner = TritonAttention(processors)

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        there, chunks = cache.to(DEVICE), [replace(each, table=each.table.to(DEVICE)) for each in rows.chunks]
        rows = PagedRows(rows.blocks.to(DEVICE), rows.offsets.to(DEVICE), rows.tables, rows.lengths, tuple(chunks))
        query, key, value = (part.to(DEVICE) for part in qkv)
        seen = self.inner.attend(rows, there, (query, key, value), params)
        cache.copy_(there)
        return seen.cpu()


@pytest.mark.parametrize("processors", [ONE, MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes_and_attention_are_those_of_the_torch_backend(processors: int, dtype: torch.dtype) -> None:
    params = AttentionParams(LAYER, 0.002)
    ours, theirs = make_scene(), make_scene()
    for scene in (ours, theirs):
        for parts in (scene.queries, scene.keys, scene.values):
            parts[:] = [each.to(dtype) for each in parts]
    backend: Any = OnDevice(processors)
    found, wanted = ours.run(backend, params), theirs.run(TorchAttention(), params)
    assert found.dtype == dtype
    near = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, wanted, atol=near, rtol=near)
    assert torch.equal(storage(ours.cache), storage(theirs.cache))
    assert (theirs.cache.float().abs() == 448).any(), "some were too large"
    exact = make_scene()
    exact.cache = exact.cache.float()
    assert (exact.run(TorchAttention(), params) - wanted.float()).abs().max() > 0.01, "a control: rounding shows"


def test_every_value_is_rounded_as_the_torch_backend_rounds_it() -> None:
    """Ties, subnormals, what is too large, infinity and NaN, which is found in its block as ever."""
    steps = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    ties = (steps[1:] + steps[:-1]) / 2
    odd = torch.tensor([449.0, 464.0, 465.0, 1e30, torch.inf, 2.0**-10, 2.0**-10 * 1.01, 1e-30, 0.0])
    values = torch.cat((steps, ties, ties.nextafter(torch.tensor(0.0)), odd))
    values = torch.cat((values, -values, torch.tensor([torch.nan])))
    values = torch.nn.functional.pad(values, (0, -len(values) % 16)).view(-1, 1, 16)
    count = len(values)
    at = torch.arange(count)
    caches = [torch.zeros((count // 16 + 1, LAYERS, 2, 1, 16, 16), device=DEVICE).to(FP8) for _ in range(2)]
    none = np.empty(0, np.int64)
    rows = PagedRows((at // 16).to(DEVICE), (at % 16).to(DEVICE), none.reshape(0, 0), none)
    both: tuple[Any, Any] = (TritonAttention(ONE), TorchAttention())
    for backend, cache in zip(both, caches, strict=True):
        backend.write(rows, cache, values.to(DEVICE), -values.to(DEVICE), LAYER)
    found, wanted = (cache.float() for cache in caches)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert find_spoilt(caches[0], torch.arange(len(caches[0]), device=DEVICE)).sum() == 1


def test_a_rotary_embedding_writes_what_the_backend_would() -> None:
    """Keys and values of a layer of a GPU go from the rotary kernel into the cache, rounded on the way."""
    noise = torch.Generator().manual_seed(4)
    states = (torch.randn((5, 3 * 16), generator=noise) * 300).to(DEVICE)  # a query, a key and a value
    angles = torch.rand((2, 5, 16), generator=noise).to(DEVICE)
    blocks, offsets = torch.tensor([[0, 0, 1, -1, 1], [3, 4, 0, 0, 15]]).to(DEVICE)
    caches = [torch.zeros((2, LAYERS, 2, 1, 16, 16), device=DEVICE).to(FP8) for _ in range(2)]
    apart = states.clone()
    launch_rotary(states, (angles[0], angles[1]), (1, 1), CachePlace(caches[0], LAYER, blocks, offsets))
    launch_rotary(apart, (angles[0], angles[1]), (1, 1))
    key, value = apart.view(5, 3, 16)[:, 1:2], apart.view(5, 3, 16)[:, 2:]
    real = (blocks >= 0).nonzero()[:, 0]
    none = np.empty(0, np.int64)
    rows = PagedRows(blocks[real], offsets[real], none.reshape(0, 0), none)
    TorchAttention().write(rows, caches[1], key[real], value[real], LAYER)
    assert torch.equal(states[:, :16], apart[:, :16])
    assert torch.equal(storage(caches[0]), storage(caches[1]))
    assert (caches[0].float().abs() == 448).any(), "some were too large"


SHAPE = (LAYERS, 2, 2, 16, 8)


def test_the_probe_holds_a_cache_in_fp8_to_the_torch_backend() -> None:
    """The oracle passes; a backend that does not clamp, or that rounds its own rows later, does not."""

    class Late(TorchAttention):
        def attend(self, rows: PagedRows, cache: Tensor, qkv: Any, params: AttentionParams) -> Tensor:
            seen = super().attend(rows, cache, qkv, params)
            storage(cache)[rows.blocks[0], LAYER, 0, 0, rows.offsets[0], 0] += 1
            return seen

    assert find_fault(TorchAttention(), SHAPE, FP8, torch.device("cpu")) is None
    assert "differs from torch's" in str(find_fault(Late(), SHAPE, FP8, torch.device("cpu")))
    if DEVICE.type == "cuda":
        assert find_fault(TritonAttention(MANY), SHAPE, FP8, DEVICE) is None


@pytest.mark.parametrize(("capability", "picked"), [((9, 0), "triton"), ((8, 9), "triton"), ((8, 0), "torch")])
def test_fp8_takes_a_gpu_that_has_it(capability: tuple[int, int], picked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("trinity.stages.attention.probe.find_fault", lambda *given: None)
    kind = CacheKind((LAYERS, 2, sum(capability), 16, 8), FP8, torch.device("cuda", 0))  # obstacles are remembered
    assert pick_backend("auto", kind) == picked
    for name in ("varlen", "flash"):
        with pytest.raises(ConfigError, match="cannot run here"):
            pick_backend(name, kind)
    if picked == "torch":
        with pytest.raises(ConfigError, match=r"compute capability 8\.9 .* and this one has 8\.0"):
            pick_backend("triton", kind)
