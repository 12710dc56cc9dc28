"""Triton's norms, rotary embeddings and gated activations give what transformers' own modules give, roundings included.

On a GPU where there is one, else in Triton's interpreter on the CPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, at the imports below
pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from trinity.stages.kernels.gpu.device_elementwise import (
    DEVICE_DTYPES,
    CachePlace,
    DeviceNorm,
    GateActivation,
    launch_add_norm,
    launch_gate,
    launch_norm,
    launch_rotary,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNTOUCHED = 7.0


def noise(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return found.to(dtype).to(DEVICE)


def assert_same(found: Tensor, wanted: Tensor, most: float = 1e-3, atol: float = 1e-6) -> None:
    """Near in float32; in half precision equal to the bit, but for a share ``most`` that may be the next number.

    A sum in another order, or another library's exp, changes a last bit and so a few roundings. Triton's interpreter
    rounds to bfloat16 by cutting off: there all may be off by a unit for each rounding.
    """
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    eps = torch.finfo(wanted.dtype).eps
    if wanted.dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=atol)
    elif wanted.dtype == torch.bfloat16 and DEVICE.type == "cpu":
        torch.testing.assert_close(found, wanted, rtol=3 * eps, atol=4 * eps * float(wanted.abs().max()))
    else:
        torch.testing.assert_close(found, wanted, rtol=2 * eps, atol=atol)
        assert int((found != wanted).sum()) <= max(1, most * wanted.numel())


NORMS = [(LlamaRMSNorm, True), (Olmo2RMSNorm, False), (HeliumRMSNorm, False)]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DEVICE_DTYPES)
@pytest.mark.parametrize(("kind", "rounds_first"), NORMS, ids=lambda each: getattr(each, "__name__", str(each)))
@pytest.mark.parametrize("width", [200])
def test_a_norm_rounds_as_its_class_does(kind: Any, rounds_first: bool, dtype: torch.dtype, width: int) -> None:
    module = kind(width, eps=1e-5).to(DEVICE, dtype)
    module.weight.copy_(noise(width, dtype=dtype, seed=1))
    norm = DeviceNorm(module.weight, 1e-5, rounds_first)
    for scale in (1.0, 1e-3, 300.0):
        rows, added = noise(5, width, dtype=dtype, scale=scale), noise(5, width, dtype=dtype, seed=2, scale=scale)
        assert_same(launch_norm(rows, norm), module(rows))
        sums = torch.empty_like(rows)
        assert_same(launch_add_norm(rows, added, sums, norm), module(rows + added))
        assert_same(sums, rows + added)
        assert_same(launch_add_norm(rows, added, rows, norm), module(sums))
        assert torch.equal(rows, sums), "in place"
        assert launch_add_norm(rows, added, rows, None) is rows
        assert_same(rows, sums + added)


@torch.inference_mode()
def test_the_order_of_rounding_shows() -> None:
    """The control: with the other formula half precision differs."""
    module = LlamaRMSNorm(256).to(DEVICE, torch.float16)
    module.weight.copy_(noise(256, dtype=torch.float16, seed=1))
    rows = noise(4, 256, dtype=torch.float16)
    other = launch_norm(rows, DeviceNorm(module.weight, module.variance_epsilon, rounds_first=False))
    assert int((other != module(rows)).sum()) > 20


def rotated(states: Tensor, angles: tuple[Tensor, Tensor], queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """By transformers: queries, keys and values [T, heads, width]."""
    width = angles[0].shape[-1]
    query, key, value = states.view(len(states), -1, width).split([queries, keys, keys], 1)
    found = apply_rotary_pos_emb(
        *(each.transpose(0, 1)[None] for each in (query, key)), *(each[None] for each in angles)
    )
    return found[0][0].transpose(0, 1), found[1][0].transpose(0, 1), value


SHAPES = [(4, 2, 16), (3, 1, 20), (9, 9, 8)]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DEVICE_DTYPES)
@pytest.mark.parametrize(("queries", "keys", "width"), SHAPES)
def test_a_rotary_embedding_writes_keys_and_values_into_their_blocks(
    queries: int, keys: int, width: int, dtype: torch.dtype
) -> None:
    """Rows without a block are written nowhere; nothing else of the cache is touched, and queries are turned."""
    rows, layers, layer, height = 6, 3, 1, 4
    states = noise(rows, (queries + 2 * keys) * width, dtype=dtype)
    angles = noise(rows, width, dtype=dtype, seed=1), noise(rows, width, dtype=dtype, seed=2)
    query, key, value = rotated(states.clone(), angles, queries, keys)
    cache = torch.full((5, layers, 2, keys, height, width), UNTOUCHED, dtype=dtype, device=DEVICE)
    wanted = cache.clone()
    places = [(3, 0), (-1, 0), (0, 3), (4, 2), (-1, 1), (4, 3)]
    for row, (block, offset) in enumerate(places):
        if block >= 0:
            wanted[block, layer, 0, :, offset], wanted[block, layer, 1, :, offset] = key[row], value[row]
    blocks, offsets = torch.tensor(places, device=DEVICE).T.contiguous()
    launch_rotary(states, angles, (queries, keys), CachePlace(cache, layer, blocks, offsets))
    assert_same(states.view(rows, -1, width)[:, :queries], query)
    assert torch.equal(cache == UNTOUCHED, wanted == UNTOUCHED)
    assert_same(cache, wanted)


@torch.inference_mode()
@pytest.mark.parametrize(("queries", "keys"), [(4, 2), (0, 2), (4, 0)])
def test_a_rotary_embedding_in_place(queries: int, keys: int) -> None:
    """Without a cache: keys are turned where they are, and values stay."""
    width = 12
    states = noise(5, (queries + 2 * keys) * width, dtype=torch.float32)
    angles = noise(5, width, dtype=torch.float32, seed=1), noise(5, width, dtype=torch.float32, seed=2)
    wanted = torch.cat(rotated(states.clone(), angles, queries, keys), 1)
    launch_rotary(states, angles, (queries, keys))
    assert_same(states, wanted.reshape(5, -1))


ACTIVATIONS = list(zip(GateActivation, ("silu", "gelu", "gelu_pytorch_tanh"), strict=True))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DEVICE_DTYPES)
@pytest.mark.parametrize(("activation", "name"), ACTIVATIONS)
@pytest.mark.parametrize("inner", [1100])
def test_a_gate_rounds_before_its_product(
    activation: GateActivation, name: str, dtype: torch.dtype, inner: int
) -> None:
    module: nn.Module = ACT2FN[name]
    both = noise(3, 2 * inner, dtype=dtype, scale=3.0)
    gate, up = both.chunk(2, -1)
    assert_same(launch_gate(both, activation), module(gate) * up, most=0.1, atol=1e-5)


def test_no_rows_are_no_launch() -> None:
    rows = torch.empty((0, 32), device=DEVICE)
    norm = DeviceNorm(torch.ones(32, device=DEVICE), 1e-6)
    assert launch_norm(rows, norm).shape == launch_add_norm(rows, rows, rows, norm).shape == (0, 32)
    launch_rotary(rows, (rows[:, :8], rows[:, :8]), (2, 1))
    assert launch_gate(rows, GateActivation.SILU).shape == (0, 16)
