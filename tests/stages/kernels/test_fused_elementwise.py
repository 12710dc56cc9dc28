"""Elementwise kernels and the modules that use them, against torch and transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from support.known_classes import declare_known
from trinity.memory import native
from trinity.stages.kernels import fused_elementwise
from trinity.stages.kernels.fused_elementwise import (
    add_rms_norm,
    apply_rotary_heads,
    apply_rotary_rows,
    fuse_elementwise,
    quick_gelu,
    rms_norm,
    silu_mul,
)
from trinity.stages.kernels.known_sources import LayerPart
from trinity.stages.models import load_model
from trinity.testing.checkpoints import build_checkpoint

if not fused_elementwise.has_fused_kernels():
    pytest.skip(f"no elementwise kernels in the extension: {native.describe()}", allow_module_level=True)

KERNELS = ("best", "avx512", "avx2", "portable")
DTYPES = (torch.float32, torch.bfloat16)
ways = st.tuples(st.sampled_from(KERNELS), st.sampled_from(DTYPES))
widths = st.integers(1, 130) | st.sampled_from([768, 1000])
rows_of = st.integers(1, 40)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 3.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def check(found: Tensor, wanted: Tensor) -> None:
    """bfloat16 to one unit in the last place, of a step before the last perhaps."""
    near = 1e-5 if wanted.dtype == torch.float32 else 1.6e-2
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found.float(), wanted.float(), rtol=near, atol=near / 10)


def plain_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = rows.float()
    return weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)).to(rows.dtype)


def plain_rotary(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    low, high = heads.chunk(2, -1)
    return heads * cosine[:, None] + torch.cat((-high, low), -1) * sine[:, None]


@given(rows_of, widths, ways)
def test_rms_norm(rows: int, width: int, way: tuple[str, torch.dtype]) -> None:
    kernel, dtype = way
    given_rows, weight = drawn(2, rows, width, dtype=dtype), drawn(width, dtype=dtype, seed=1)
    check(rms_norm(given_rows, weight, 1e-5, kernel), plain_norm(given_rows, weight, 1e-5))


@given(rows_of, widths, ways, st.booleans())
def test_add_norm(rows: int, width: int, way: tuple[str, torch.dtype], there: bool) -> None:
    kernel, dtype = way
    states, added, weight = (
        drawn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(((rows, width), (rows, width), (width,)))
    )
    wanted = states + added
    sums = states if there else torch.empty_like(states)
    kept = states.clone()
    normed = add_rms_norm(states, added, sums, (weight, 1e-5), kernel)
    assert torch.equal(sums, wanted)
    check(normed, plain_norm(wanted, weight, 1e-5))
    assert there or torch.equal(states, kept)
    assert add_rms_norm(sums, added, sums, None, kernel) is sums
    assert torch.equal(sums, wanted + added)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_bfloat16_rounds_as_it_should(kernel: str) -> None:
    """But where results are so small that torch's own are too."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[(every > -87) & (every < 1e30)]
    found, wanted = silu_mul(every.clone(), torch.ones_like(every), kernel), nn.functional.silu(every.double())
    normal = wanted.abs() > 1e-37
    assert torch.equal(found[normal], wanted.bfloat16()[normal])
    assert found[~normal].abs().max() <= 1e-37
    every = every[every > -50]
    sharper = 1.702 * every
    wanted = every * torch.sigmoid(sharper.double()).bfloat16()
    normal = wanted.abs() > 1e-37
    assert torch.equal(quick_gelu(every, kernel)[normal], wanted[normal])


@given(rows_of, widths, ways)
def test_silu_mul_and_quick_gelu(rows: int, width: int, way: tuple[str, torch.dtype]) -> None:
    kernel, dtype = way
    gate, up = drawn(rows, width, dtype=dtype, scale=9), drawn(rows, width, dtype=dtype, seed=1)
    check(quick_gelu(gate, kernel), gate * torch.sigmoid(1.702 * gate))
    wanted = nn.functional.silu(gate) * up
    check(silu_mul(gate, up, kernel), wanted)
    check(gate, wanted)


@given(rows_of, st.integers(1, 5), st.integers(1, 70), ways)
def test_rotary(rows: int, heads: int, half: int, way: tuple[str, torch.dtype]) -> None:
    kernel, dtype = way
    together = drawn(1, rows, heads, 2 * half, dtype=dtype)
    cosine, sine = (drawn(1, rows, 2 * half, dtype=dtype, seed=seed) for seed in (1, 2))
    for laid in (together.transpose(1, 2), together.transpose(1, 2).contiguous()):
        check(apply_rotary_heads(laid, cosine, sine, kernel), plain_rotary(laid, cosine, sine))
    wanted = plain_rotary(together.transpose(1, 2), cosine, sine).transpose(1, 2).reshape(rows, -1)
    flat = together.view(rows, -1)
    apply_rotary_rows(flat, cosine[0], sine[0], flat, kernel)
    check(flat, wanted)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_ends_of_the_numbers(kernel: str) -> None:
    ends = torch.tensor([[0.0, -0.0, 1e-30, -1e-30, 87.0, -87.0, 1e4, -1e4, 1e30, -1e30, float("nan")]])
    check_ends(silu_mul(ends.clone(), torch.ones_like(ends), kernel), nn.functional.silu(ends))
    check_ends(quick_gelu(ends, kernel), ends * torch.sigmoid(1.702 * ends))
    assert rms_norm(ends, torch.ones(ends.shape[1]), 1e-6, kernel).isnan().all()


def check_ends(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found[:, :8], wanted[:, :8], rtol=1e-5, atol=1e-30)
    assert found[0, 8] == wanted[0, 8]
    assert abs(found[0, 9]) <= 1e-7 * 1e30  # e^-88 of it: nothing beside what it was
    assert found[0, 10].isnan()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_rows(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows, weight = drawn(331, 700, dtype=torch.float32), drawn(700, dtype=torch.float32, seed=1)
    check(rms_norm(rows, weight, 1e-6), plain_norm(rows, weight, 1e-6))
    check(quick_gelu(rows), rows * torch.sigmoid(1.702 * rows))


def test_no_row_is_no_work() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert quick_gelu(torch.empty(0, 8)).shape == (0, 8)


# ---------------------------------------------------------------- modules


class NamedRMSNorm(nn.Module):
    def __init__(self, offset: float) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.rand(24) + 1), 1e-6, offset

    def forward(self, hidden_states: Tensor) -> Tensor:
        return plain_norm(hidden_states, self.weight + self.offset, self.eps)


class NamedMLP(nn.Module):
    def __init__(self, act: nn.Module, swapped: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 44), nn.Linear(16, 44)
        self.down_proj, self.act_fn, self.swapped = nn.Linear(44, 16), act, swapped

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        inner: Tensor = self.act_fn(up) * gate if self.swapped else self.act_fn(gate) * up
        found: Tensor = self.down_proj(inner)
        return found


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes above are as if somebody had read them."""
    declare_known(monkeypatch, LayerPart.RMS_NORM, NamedRMSNorm)
    declare_known(monkeypatch, LayerPart.GATED_MLP, NamedMLP)


@torch.inference_mode()
def both(module: nn.Module, width: int, dtype: torch.dtype = torch.float32) -> tuple[int, Tensor, Tensor]:
    """How many modules were swapped, and what the module gave before and after."""
    module = module.to(dtype).requires_grad_(False)
    rows = drawn(1, 7, width, dtype=dtype)
    wanted = module(rows)
    fuse_elementwise(module)
    return fused_elementwise.count_fused(module), module(rows), wanted


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("made", [lambda: NamedRMSNorm(0.0), lambda: NamedMLP(nn.SiLU())])
def test_what_computes_the_same_is_swapped(made: Any, dtype: torch.dtype) -> None:
    module = made()
    kind = type(module)
    count, found, wanted = both(module, 24 if isinstance(module, NamedRMSNorm) else 16, dtype)
    assert count == 1
    assert isinstance(module, kind)
    assert type(module) is not kind
    check(found, wanted)


@pytest.mark.parametrize("made", [lambda: NamedRMSNorm(0.0), lambda: NamedMLP(nn.SiLU())])
def test_what_computes_the_same_but_was_never_read_is_left_alone(made: Any) -> None:
    count, found, wanted = both(made(), 24 if isinstance(made(), NamedRMSNorm) else 16)
    assert count == 0
    assert torch.equal(found, wanted)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    "made", [lambda: NamedRMSNorm(1.0), lambda: NamedMLP(nn.GELU()), lambda: NamedMLP(nn.SiLU(), swapped=True)]
)
def test_what_computes_otherwise_is_left_alone(made: Any) -> None:
    module = made()
    kind = type(module)
    count, found, wanted = both(module, 24 if isinstance(module, NamedRMSNorm) else 16)
    assert count == 0
    assert type(module) is kind
    assert torch.equal(found, wanted)


@pytest.mark.usefixtures("known")
@torch.inference_mode()
def test_rows_that_the_kernels_are_not_for_go_the_plain_way() -> None:
    norm, mlp = NamedRMSNorm(0.0), NamedMLP(nn.SiLU())
    plain = copy.deepcopy(norm), copy.deepcopy(mlp)
    for module in (norm, mlp):
        fuse_elementwise(module)
    gaps = drawn(1, 7, 48, dtype=torch.float32)[..., ::2]
    assert torch.equal(norm(gaps), plain[0](gaps))
    assert torch.equal(norm(gaps.double()), plain[0](gaps.double()))
    assert torch.equal(mlp(gaps[..., :16]), plain[1](gaps[..., :16]))


@pytest.mark.usefixtures("known")
@torch.inference_mode()
def test_many_rows_are_worked_on_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_elementwise, "MLP_TILE", 1)
    module = NamedMLP(nn.SiLU())
    rows = drawn(1, 200, 16, dtype=torch.float32)
    wanted = module(rows)
    fuse_elementwise(module)
    check(module(rows), wanted)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_models_of_transformers(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    config = AutoConfig.from_pretrained(build_checkpoint(family, tmp_path / family)).get_text_config()
    config._attn_implementation = "eager"
    model = AutoModel.from_config(config, dtype=dtype).eval().requires_grad_(False)
    ids = torch.arange(33)[None] % 29 + 3
    with torch.inference_mode():
        wanted = model(ids, use_cache=False).last_hidden_state
        fuse_elementwise(model)
        found = model(ids, use_cache=False).last_hidden_state
    layers = config.num_hidden_layers
    assert (
        fused_elementwise.count_fused(model) >= 4 * layers + 1
    )  # two norms, an MLP and attention in each, and the last norm
    near = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found.float(), wanted.float(), rtol=near, atol=near)


def test_loaded_models_use_them(tmp_path: Path) -> None:
    model = load_model(build_checkpoint("llava", tmp_path), "EPD", dtype="float32")
    assert fused_elementwise.count_fused(model.language)
    assert fused_elementwise.count_fused(model.vision)


def test_without_the_extension_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "extension", None)
    assert not fused_elementwise.has_fused_kernels()
    count, found, wanted = both(NamedMLP(nn.SiLU()), 16)
    assert count == 0
    assert torch.equal(found, wanted)
