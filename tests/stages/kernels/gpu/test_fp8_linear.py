"""Linear layers with FP8 weights in Triton's interpreter: transformers' definition, merged or not, in a whole model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

if torch.cuda.is_available():
    pytest.skip("these models are on the CPU; tests/e2e/test_on_gpu.py has a GPU's", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, at the imports below
pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from support.checkpoint_files import checkpoint
from support.fp8_oracle import Fp8Oracle, hub_kernel, multiply
from support.interpreted_fp8 import exact_fp8
from support.language_stage import PROMPT
from trinity.stages.attention.fp8 import FP8
from trinity.stages.attention.interface import PagedBatch, register_attention
from trinity.stages.kernels.decoder_layers import DecoderAttentionProbe
from trinity.stages.kernels.gpu import fp8_linear
from trinity.stages.kernels.gpu.device_layers import fuse_device_layers, merge_products
from trinity.stages.kernels.gpu.fp8_linear import (
    Fp8Linear,
    Fp8Product,
    can_merge,
    explain_no_fp8_products,
    launch_fp8_product,
    multiply_fp8_in_torch,
    use_fp8_products,
)
from trinity.stages.kernels.probes import make_empty_rows, make_noise
from trinity.stages.kernels.swaps import without_swaps
from trinity.stages.models import loader
from trinity.stages.models.float32_forward import in_float32

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def conversions() -> Iterator[None]:
    with exact_fp8():
        yield


def make_product(outputs: int, inputs: int, block: tuple[int, int], bias: bool = False) -> Fp8Product:
    noise = torch.Generator().manual_seed(outputs)
    weight = (torch.randn((outputs, inputs), generator=noise) * 100).to(FP8)
    scales = torch.rand((-(-outputs // block[0]), inputs // block[1]), generator=noise) + 0.1
    return Fp8Product(weight, scales, torch.randn(outputs, generator=noise) * 100 if bias else None, block[0])


@pytest.mark.parametrize(
    ("count", "outputs", "inputs", "block"),
    [
        (1, 96, 64, (32, 32)),
        (17, 80, 256, (128, 128)),  # an output block that is not whole, two groups
        (70, 130, 128, (64, 32)),  # outputs that are not a multiple of 16
        (0, 32, 32, (32, 32)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_what_transformers_defines(
    count: int, outputs: int, inputs: int, block: tuple[int, int], bias: bool
) -> None:
    product = make_product(outputs, inputs, block, bias)
    sizes = 10.0 ** torch.arange(-2, 2).repeat_interleave(inputs // 4)
    rows = torch.randn((count, inputs), generator=torch.Generator().manual_seed(1)) * sizes
    wanted = multiply(rows, product.weight, product.scales, list(block), torch.float32)
    if product.bias is not None:
        wanted = wanted + product.bias
    torch.testing.assert_close(launch_fp8_product(rows, product), wanted, rtol=1e-5, atol=1e-5 * 1e4)
    found = multiply_fp8_in_torch(rows, product, block)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * 1e4)


def test_groups_of_zeros_and_nan_stay_so() -> None:
    rows = torch.randn((3, 64))
    rows[0, :32], rows[1] = 0.0, 0.0
    rows[2, 40] = torch.nan
    found = launch_fp8_product(rows, make_product(32, 64, (32, 32)))
    assert found[0].isfinite().all()
    assert torch.equal(found[1], torch.zeros(32))
    assert found[2].isnan().all()


def load_part(name: str = "fp8-llama", keep: bool = True) -> Any:
    register_attention()
    part = loader._load_part(checkpoint(name), "language", torch.float32, keep).eval().requires_grad_(False)
    use_fp8_products(part)
    return part


@torch.inference_mode()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    model.set_attn_implementation("sdpa")
    found: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return found


def test_a_model_in_fp8_has_the_logits_of_transformers_own() -> None:
    ids = torch.tensor(PROMPT[:3])
    part, oracle = load_part(), Fp8Oracle(checkpoint("fp8-llama"))
    layers = [each for each in part.modules() if isinstance(each, Fp8Linear)]
    assert len(layers) == 2 * 7
    assert all(each.weight.dtype == FP8 and each.weight_scale_inv.dtype == torch.float32 for each in layers)
    found = logits_of(part, ids)
    with hub_kernel():
        wanted = logits_of(oracle._model, ids)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    widened = logits_of(load_part(keep=False), ids)
    assert (widened - wanted).abs().max() > 1e-3, "a control: rounding of inputs shows"


# ---------------------------------------------------------------- merged, in layers of a GPU


def test_merged_layers_are_held_once_and_give_the_same() -> None:
    part = load_part()
    attention = part.model.layers[0].self_attn
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    rows = torch.randn((5, 64), generator=torch.Generator().manual_seed(2))
    wanted = torch.cat([each(rows) for each in modules], -1)
    merged = merge_products(modules)
    assert torch.equal(merged(rows), wanted)
    assert torch.equal(torch.cat([each(rows) for each in modules], -1), wanted)
    for name in ("weight", "weight_scale_inv"):
        assert len({getattr(each, name).untyped_storage().data_ptr() for each in modules}) == 1
    assert torch.equal(merged.part(slice(64, None))(rows), wanted[:, 64:])
    assert torch.equal(merged.part(slice(0, 64))(rows), wanted[:, :64])


def test_layers_whose_blocks_would_be_cut_are_not_merged() -> None:
    modules = [load_part().model.layers[0].self_attn.q_proj for _ in range(2)]
    assert can_merge(modules)
    modules[0].block_size = modules[1].block_size = (48, 32)
    assert not can_merge(modules)
    modules[0].block_size = (32, 32)
    assert not can_merge(modules)


@torch.inference_mode()
def test_decoder_layers_of_a_gpu_take_fp8_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products are torch's here, which takes a tenth of the interpreter's time."""
    monkeypatch.setattr(
        fp8_linear, "launch_fp8_product", lambda rows, product: multiply_fp8_in_torch(rows, product, (32, 32))
    )
    part = load_part()
    half = part.model.layers[1].self_attn  # in FP8 in part: keys in float32 beside queries in FP8 are two products
    plain = torch.nn.Linear(64, 32, bias=False).requires_grad_(False)
    plain.weight.copy_(half.k_proj.to_dense())
    half.k_proj = plain
    assert fuse_device_layers(part) == 1
    assert not hasattr(part.model.layers[1], "plan"), "it keeps its own code"
    layer = part.model.layers[0]
    assert isinstance(layer.plan._qkv, Fp8Product)
    rows, cosine, sine = (make_noise(3, size, torch.float32, seed) for seed, size in enumerate((64, 16, 16)))
    cache = torch.empty((1, 2, 2, 2, 1, 16), device="meta")
    named: dict[str, Any] = {"position_embeddings": (cosine, sine), "attention_mask": None, "use_cache": False}
    named["trinity_batch"] = PagedBatch(make_empty_rows(), cache, DecoderAttentionProbe())
    found = layer(rows, **named)
    with without_swaps(part):
        wanted = layer(rows, **named)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_in_float32_they_are_what_their_blocks_stand_for() -> None:
    part, ids = load_part(), torch.tensor(PROMPT[:3])
    wanted = logits_of(load_part(keep=False), ids)
    with in_float32(part):
        torch.testing.assert_close(logits_of(part, ids), wanted, rtol=1e-4, atol=1e-4)
    assert all(each.weight.dtype == FP8 for each in part.modules() if isinstance(each, Fp8Linear))


# ---------------------------------------------------------------- admission


def test_a_cpu_has_no_such_kernels() -> None:
    assert explain_no_fp8_products(CPU, torch.float32) == "its kernels are for GPUs, and this is cpu"


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False)])
def test_a_gpu_is_asked_for_fp8_and_its_kernels_are_tried(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    tried: list[Any] = []
    monkeypatch.setattr(fp8_linear, "_find_product_fault", lambda *given: tried.append(given))
    found = explain_no_fp8_products(torch.device("cuda", 0), torch.bfloat16)
    assert ("8.9" in str(found), bool(tried)) == (refused, not refused)


@pytest.mark.slow
def test_kernels_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, in the interpreter: the probe accepts the kernels, and not those that forget a scale or fail."""
    find: Any = fp8_linear._find_product_fault.__wrapped__
    assert find(CPU, torch.float32) is None

    def forgetful(rows: Tensor, product: Fp8Product) -> Tensor:
        return launch_fp8_product(rows, Fp8Product(product.weight, product.scales * 1.02, product.bias, product.block))

    monkeypatch.setattr(fp8_linear, "launch_fp8_product", forgetful)
    assert "differs from torch's by" in str(find(CPU, torch.float32))

    def failing(rows: Tensor, product: Fp8Product) -> Tensor:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(fp8_linear, "launch_fp8_product", failing)
    assert "no kernel image" in str(find(CPU, torch.float32))
