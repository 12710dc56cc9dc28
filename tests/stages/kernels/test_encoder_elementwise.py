"""Layer norms and tabulated activations, and the modules that use them, against torch and transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.activations import ACT2FN

from trinity.memory import native
from trinity.stages.kernels import encoder_layers as parts
from trinity.stages.kernels.encoder_layers import add_layer_norm, apply_table, fuse_encoder_elementwise, layer_norm
from trinity.stages.kernels.fused_elementwise import count_fused
from trinity.stages.models import load_model
from trinity.testing.checkpoints import build_checkpoint

if not parts.has_encoder_kernels():
    pytest.skip(f"no kernels of encoders in the extension: {native.describe()}", allow_module_level=True)

KERNELS = ("best", "avx2", "portable")
DTYPES = (torch.float32, torch.bfloat16)
ways = st.tuples(st.sampled_from(KERNELS), st.sampled_from(DTYPES))
widths = st.integers(2, 130) | st.sampled_from([384, 1000])
NUMBERS = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
ACTIVATIONS = ("quick_gelu", "gelu", "gelu_pytorch_tanh", "silu", "relu")


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 3.0, around: float = 0.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale + around).to(dtype)


def check(found: Tensor, wanted: Tensor) -> None:
    """bfloat16 to one unit in the last place."""
    near = 2e-5 if wanted.dtype == torch.float32 else 1.6e-2
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found.float(), wanted.float(), rtol=near, atol=near)


@given(st.integers(1, 40), widths, ways, st.sampled_from([0.0, 50.0]))
def test_layer_norm(rows: int, width: int, way: tuple[str, torch.dtype], around: float) -> None:
    kernel, dtype = way
    states = drawn(2, rows, width, dtype=dtype, around=around)
    weight, bias = drawn(width, dtype=dtype, seed=1), drawn(width, dtype=dtype, seed=2)
    exact = nn.functional.layer_norm(states.double(), (width,), weight.double(), bias.double(), 1e-5)
    found = layer_norm(states, weight, bias, 1e-5, kernel)
    assert (found.double() - exact).abs().max() < (1e-4 if dtype == torch.float32 else 2**-7) * exact.abs().max()


@given(st.integers(1, 40), widths, ways)
def test_a_sum_and_its_layer_norm(rows: int, width: int, way: tuple[str, torch.dtype]) -> None:
    kernel, dtype = way
    states, added = drawn(2, rows, width, dtype=dtype), drawn(2, rows, width, dtype=dtype, seed=3)
    weight, bias = drawn(width, dtype=dtype, seed=1), drawn(width, dtype=dtype, seed=2)
    kept, total, found = states.clone(), states + added, torch.empty_like(states)
    add_layer_norm(states, added, (weight, bias, 1e-5), found, kernel)
    assert torch.equal(added, total)
    assert torch.equal(states, kept)
    assert torch.equal(found, layer_norm(total, weight, bias, 1e-5, kernel))
    check(found, nn.functional.layer_norm(total, (width,), weight, bias, 1e-5))


@given(st.integers(0, 9), st.integers(1, 70), st.sampled_from(KERNELS))
def test_a_table_is_read_for_every_row(rows: int, width: int, kernel: str) -> None:
    table = torch.cat([NUMBERS.flip(0), NUMBERS[:1]])
    states = NUMBERS[torch.randint(1 << 16, (rows, width), generator=torch.Generator().manual_seed(width))]
    wanted = (0xFFFF - (states.view(torch.int16).int() & 0xFFFF)).to(torch.int16)
    assert torch.equal(apply_table(states, table, torch.empty_like(states), kernel).view(torch.int16), wanted)
    assert apply_table(states, table, states, kernel) is states
    assert torch.equal(states.view(torch.int16), wanted)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_last_entry_of_a_table(kernel: str) -> None:
    table = torch.cat([NUMBERS, NUMBERS[:1]])
    last = NUMBERS[-1:].expand(16).contiguous()
    assert torch.equal(
        apply_table(last, table, torch.empty_like(last), kernel).view(torch.int16), last.view(torch.int16)
    )


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_rows(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    states, weight, bias = (drawn(*shape, dtype=torch.bfloat16) for shape in ((331, 700), (700,), (700,)))
    check(layer_norm(states, weight, bias, 1e-6), nn.functional.layer_norm(states, (700,), weight, bias, 1e-6))
    table = torch.cat([NUMBERS, NUMBERS[:1]])
    assert torch.equal(apply_table(states, table, torch.empty_like(states)), states)


# ---------------------------------------------------------------- modules


@torch.inference_mode()
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_bfloat16_are_their_own_to_the_bit(name: str) -> None:
    plain: Any = ACT2FN[name]
    model: Any = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(plain)).bfloat16()
    fuse_encoder_elementwise(model.requires_grad_(False))
    assert count_fused(model) == 1
    assert isinstance(model[1], type(plain))
    states = drawn(3, 7, 97, dtype=torch.bfloat16)
    assert torch.equal(model[1](states), plain(states))
    found, wanted = model[1](NUMBERS), plain(NUMBERS)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))


@torch.inference_mode()
@pytest.mark.parametrize("made", [lambda: nn.Softmax(-1), lambda: nn.PReLU(), lambda: nn.GLU()])
def test_what_is_no_function_of_one_number_is_left_alone(made: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), made()).bfloat16().requires_grad_(False)
    fuse_encoder_elementwise(model)
    assert count_fused(model) == 0


@torch.inference_mode()
def test_equal_activations_share_a_table() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.GELU(), nn.GELU("tanh")).bfloat16().requires_grad_(False)
    fuse_encoder_elementwise(model)
    tables: list[Any] = [model[place].table for place in (1, 2, 3)]
    assert tables[0] is tables[1]
    assert tables[0] is not tables[2]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norms_of_modules(dtype: torch.dtype) -> None:
    model: Any = nn.Sequential(nn.LayerNorm(24), nn.LayerNorm((3, 24)), nn.LayerNorm(24, elementwise_affine=False))
    model.append(nn.LayerNorm(24, bias=False)).to(dtype).requires_grad_(False)
    model[0].weight.copy_(drawn(24, dtype=dtype))
    model[0].bias.copy_(drawn(24, dtype=dtype, seed=1))
    plain = copy.deepcopy(model)
    fuse_encoder_elementwise(model)
    assert [type(each) is nn.LayerNorm for each in model] == [False, True, True, True]
    states = drawn(5, 3, 24, dtype=dtype, seed=2)
    check(model[0](states), plain[0](states))
    gaps = drawn(5, 3, 48, dtype=dtype)[..., ::2]
    assert torch.equal(model[0](gaps), plain[0](gaps))
    assert torch.equal(model(states), model[3](model[2](model[1](model[0](states)))))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [(4, 4), (6, 3), (1, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_over_patches(dtype: torch.dtype, kernel: tuple[int, int], bias: bool) -> None:
    plain = nn.Conv2d(3, 10, kernel, stride=kernel, bias=bias, padding="valid").to(dtype).requires_grad_(False)
    model = nn.Sequential(copy.deepcopy(plain))
    fuse_encoder_elementwise(model)
    assert count_fused(model) == 1
    high, wide = kernel
    shapes: list[tuple[int, ...]] = [(2, 3, 4 * high, 5 * wide), (3, 3, high, 3 * wide)]
    for images in [*shapes, (2, 3, 4 * high + 1, 5 * wide), (3, 2 * high, wide * 2)]:
        pixels = drawn(*images, dtype=dtype, scale=1.0)
        check(model(pixels), plain(pixels))


@pytest.mark.parametrize(
    "named", [{"stride": 2}, {"padding": 1}, {"groups": 3}, {"dilation": 2}, {"stride": (4, 2), "kernel_size": (4, 4)}]
)
def test_other_convolutions_are_left_alone(named: Any) -> None:
    model = nn.Sequential(nn.Conv2d(**{"in_channels": 3, "out_channels": 6, "kernel_size": 4, "stride": 4, **named}))
    fuse_encoder_elementwise(model.requires_grad_(False))
    assert count_fused(model) == 0


def test_gradients_go_the_plain_way() -> None:
    model = nn.Sequential(nn.LayerNorm(24), nn.GELU()).bfloat16()
    fuse_encoder_elementwise(model)
    states = drawn(3, 24, dtype=torch.bfloat16).requires_grad_()
    model[0](states).sum().backward()
    assert states.grad is not None
    states.grad = None
    model[1](states).sum().backward()
    assert states.grad is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loaded_encoders_use_them(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = build_checkpoint("llava", tmp_path)
    model = load_model(directory, "E", dtype=dtype)
    kinds = [type(each) for each in model.vision.modules()]
    assert sum(issubclass(kind, parts.FusedLayerNorm) for kind in kinds) >= 3
    assert any(issubclass(kind, parts.TableActivation) for kind in kinds) == (dtype == "bfloat16")
    image = {"pixel_values": torch.rand(1, 3, *2 * [model.config.vision_config.image_size])}
    count = (model.config.vision_config.image_size // model.config.vision_config.patch_size) ** 2
    (found,) = model.encode("image", [image], [count])
    for each in model.vision.modules():
        if isinstance(each, parts.FusedLayerNorm | parts.TableActivation):
            monkeypatch.setattr(each, "forward", each.original_forward)
    (wanted,) = model.encode("image", [image], [count])
    near = 1e-5 if dtype == "float32" else 5e-2
    assert (found - wanted).abs().max() < near * wanted.abs().max()


def test_without_the_extension_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "extension", None)
    model = nn.Sequential(nn.LayerNorm(24), nn.GELU()).bfloat16().requires_grad_(False)
    fuse_encoder_elementwise(model)
    assert count_fused(model) == 0
