"""Backends for GPUs without a GPU: the probe on sound and broken ones; flash kernels by a stand-in."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.attention_libraries import paged
from support.attention_scenes import LAYER, LAYERS, Scene, Text
from trinity.errors import ConfigError
from trinity.stages.attention import backends
from trinity.stages.attention.backends import BACKENDS, make_backend, pick_backend
from trinity.stages.attention.choice import CacheKind
from trinity.stages.attention.gpu import flash as attention_flash
from trinity.stages.attention.gpu.flash import (
    FlashAttention,
    call_flash_attn,
    call_torch_varlen,
    varlen_supports_block_tables,
)
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.attention.probe import find_fault
from trinity.stages.attention.torch_reference import TorchAttention

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = (LAYERS, 2, 2, 16, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_oracle_passes_its_own_probe(dtype: torch.dtype) -> None:
    assert find_fault(TorchAttention(), SHAPE, dtype, CPU) is None


class Broken(TorchAttention):
    """Right but for one thing."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        if self.how == "raises":
            raise RuntimeError("no kernel image is available for execution on the device")
        if self.how == "window" and params.window is not None:
            params = AttentionParams(params.layer, params.scale, params.window + 1, softcap=params.softcap)
        if self.how == "softcap":
            params = AttentionParams(params.layer, params.scale, params.window)
        how, self.how = self.how, ""  # its own halves are whole here
        seen = super().attend(rows, cache, qkv, params)
        self.how = how
        if self.how == "one row":
            seen[3:4] += 0.01
        if self.how == "joins parts" and rows.decodes and rows.lengths.max() > 128:
            seen *= 1.5
        if self.how == "nan":
            seen[0, 0, 0] = torch.nan
        if self.how == "writes beside":
            cache[0, 0, 0, 0, 0, 0] += 1
        return seen

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        super().write(rows, cache, key, value, layer)
        if self.how == "writes half":
            cache[rows.blocks[-1], layer, 1, :, rows.offsets[-1]] = 0

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        seen = super().read(rows, cache, query, params)
        if self.how == "reads another row":
            seen = seen.roll(1, 0)
        return seen


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raises", "fails on this machine: RuntimeError: no kernel image"),
        ("window", "differs from torch's"),
        ("softcap", "differs from torch's"),
        ("one row", "differs from torch's by 1.0e-02"),
        ("joins parts", "differs from torch's"),
        ("nan", "differs from torch's by inf"),
        ("writes beside", "differs from torch's by 1.0e\\+00"),
        ("writes half", "differs from torch's"),
        ("reads another row", "differs from torch's"),
    ],
)
def test_a_wrong_backend_is_found_out(how: str, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(find_fault(Broken(how), SHAPE, torch.float32, CPU))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch saw a GPU; what is tried there is tried here on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name="a GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(backends, "_known", {})
    monkeypatch.setenv("TRINITY_CACHE", "off")
    from trinity.stages.attention import probe

    monkeypatch.setattr(
        probe, "find_fault", lambda backend, shape, dtype, device: find_fault(backend, shape, dtype, CPU)
    )


def kind(dtype: torch.dtype = torch.bfloat16, rows: int = 16) -> CacheKind:
    return CacheKind((2, 2, 2, rows, 8), dtype, CUDA)


def test_without_a_gpu_each_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    for name in ("triton", "flash3", "flashinfer", "varlen", "flash"):
        with pytest.raises(ConfigError, match=f"attention='{name}' cannot run here: there is no GPU"):
            pick_backend(name, kind())
        with pytest.raises(ConfigError, match=f"attention='{name}' cannot run here: it is a kernel for GPUs"):
            make_backend(name, SHAPE, torch.float32, CPU)
    assert pick_backend("auto", kind()) == "torch"


def test_what_is_missing_is_named(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    monkeypatch.setattr(attention_flash, "varlen_supports_block_tables", lambda: False)
    for name, why in {
        "triton": r"triton is not installed: pip install 'trinity-epd\[cuda\]'",
        "varlen": "takes a block table from torch 2.12 on",
        "flash": "the package flash-attn is not installed",
        "flash3": "flash_attn_interface. is not installed",
        "flashinfer": "flashinfer-python is not installed",
        "native": "it is a kernel for CPUs",
    }.items():
        with pytest.raises(ConfigError, match=why):
            pick_backend(name, kind())
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    with pytest.raises(
        ConfigError, match="flash-attn takes blocks of 256 tokens, and these have 16: set kv_block_size"
    ):
        pick_backend("flash", kind())
    with pytest.raises(ConfigError, match=r"bfloat16 and float16, and the cache holds torch.float32"):
        pick_backend("flash", kind(torch.float32, rows=512))
    with pytest.raises(ConfigError, match=r"float16, and the cache holds torch.float64"):
        pick_backend("triton", kind(torch.float64))
    assert pick_backend("auto", kind(torch.float64)) == "torch"


@pytest.mark.parametrize("how", ["raises", "one row"])
def test_auto_passes_over_one_that_is_wrong_here_and_says_so(
    gpu: None, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []

    def make(name: str) -> Any:
        def one(kind: CacheKind) -> Any:
            made.append(name)
            return Broken(how if name == "bad" else "")

        return backends._gpu_backend(name, lambda kind: None, one)

    monkeypatch.setattr(backends, "BACKENDS", {name: make(name) for name in ("bad", "good")})
    asked = kind(torch.float32)
    with caplog.at_level(logging.INFO, "trinity"):
        for _ in range(2):
            make_backend("auto", asked.shape, asked.dtype, asked.device)
    assert made == ["bad", "good", "good", "good"], "each is tried once per kind of cache"
    assert sum("attention backend bad is not used" in line for line in caplog.messages) == 1
    assert "attention on cuda:0, torch.float32: good" in caplog.messages


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for flash-attn and for torch's varlen function, and which of them was called."""
    called: list[str] = []

    def flash(
        q: Tensor, k: Tensor, v: Tensor, begins: Tensor, starts: Tensor, most: int, longest: int, **how: Any
    ) -> Tensor:
        called.append("flash")
        assert how["causal"]
        assert int(starts[0]) == 0
        lengths = starts.diff()
        assert (most, longest) == (int(begins.diff().max()), int(lengths.max()))
        return paged(
            q, (k, v), begins, lengths.int(), how["block_table"],
            scale=how["softmax_scale"], window=how["window_size"], softcap=how["softcap"],
        )  # fmt: skip

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, begins: Tensor, starts: None, most: int, longest: int, **how: Any
    ) -> Tensor:
        called.append("varlen")
        assert how["enable_gqa"] == (q.shape[1] != k.shape[2])
        return paged(
            q, (k, v), begins, how["seqused_k"], how["block_table"], scale=how["scale"], window=how["window_size"]
        )

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    from torch.nn.attention import varlen as theirs

    monkeypatch.setattr(theirs, "varlen_attn", varlen)
    return called


PARAMS = {
    "full": AttentionParams(LAYER, 0.3),
    "window": AttentionParams(LAYER, 0.3, window=7),
    "softcap": AttentionParams(LAYER, 0.3, softcap=2.0),
    "span": AttentionParams(LAYER, 0.3, span=9),
    "sinks": AttentionParams(LAYER, 0.3, sinks=torch.tensor([0.5, 1.0, -1.0, 2.0])),
}


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("which", ["flash", "varlen"])
def test_flash_kernels_are_asked_for_what_they_can_do(libraries: list[str], which: str, params: str) -> None:
    backend = FlashAttention(call_flash_attn, True) if which == "flash" else FlashAttention(call_torch_varlen, False)
    served = params in ("full", "window") or (params, which) == ("softcap", "flash")
    for heads in ((4, 2), (4, 4)):
        scene = Scene([Text(21, 1, True), Text(3, 1, True), Text(40, 11, False), Text(18, 18, False)], heads, 8, 16, 0)
        torch.testing.assert_close(
            scene.run(backend, PARAMS[params]), scene.oracle(PARAMS[params]), atol=2e-5, rtol=1e-4
        )
    assert libraries == ([which] * 2 if served else [])


@pytest.mark.parametrize("which", ["flash", "varlen"])
def test_flash_kernels_read_what_is_written(libraries: list[str], which: str) -> None:
    """Both halves apart: twice for each of the probe's batches that a kernel serves, once for each of its long rows."""
    backend = FlashAttention(call_flash_attn, True) if which == "flash" else FlashAttention(call_torch_varlen, False)
    assert find_fault(backend, SHAPE, torch.float32, CPU) is None
    assert libraries == [which] * (10 if which == "flash" else 6), "torch's has no softcap"


def test_groups_are_left_to_torch(libraries: list[str]) -> None:
    groups = torch.full((40,), -1)
    groups[30:36] = 0
    scene = Scene([Text(40, 20, False, groups)], (4, 2), 8, 16, seed=1)
    seen = scene.run(FlashAttention(call_flash_attn, True), PARAMS["full"])
    torch.testing.assert_close(seen, scene.oracle(PARAMS["full"]), atol=2e-5, rtol=1e-4)
    assert libraries == []


def test_this_torch_says_whether_it_takes_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    assert varlen_supports_block_tables() is (torch.__version__ >= "2.12")
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value: None)
    assert not varlen_supports_block_tables()
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    monkeypatch.delattr(torch.nn.attention, "varlen")
    assert not varlen_supports_block_tables()


def test_every_backend_has_a_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "trinity.stages.attention.gpu.triton", SimpleNamespace(TritonAttention=TorchAttention)
    )  # type: ignore[arg-type]
    for name in ("triton", "varlen", "flash", "torch"):
        assert isinstance(BACKENDS[name].make(kind()), TorchAttention)
