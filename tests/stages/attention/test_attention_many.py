"""Attention of many rows in float32, over the cache and without one, against exact attention of the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from support.attention_scenes import LAYER, WIDTHS, Layer, Scene, Text, asks, of_chunk
from trinity.memory import native
from trinity.stages.attention.interface import AttentionParams
from trinity.stages.attention.native import NativeAttention
from trinity.stages.kernels import encoder_attention
from trinity.stages.kernels.encoder_attention import (
    ATTENTION_FUNCTIONS,
    attend_all,
    has_attend_all,
    pick_attention_functions,
)
from trinity.stages.kernels.fused_elementwise import fuse_elementwise
from trinity.stages.models import load_model
from trinity.testing.checkpoints import build_checkpoint

here = pytest.mark.skipif(
    not has_attend_all(torch.float32), reason=f"no kernel of many rows in float32: {native.describe()}"
)
NEAR: Any = {"rtol": 3e-6, "atol": 3e-6}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    wide = query.double(), key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    return scaled_dot_product_attention(*wide, scale=scale).transpose(1, 2).float()


# ---------------------------------------------------------------- over the cache


def checked(scene: Scene, params: AttentionParams, kernel: str = "many") -> None:
    found = scene.run(NativeAttention(kernel), params)
    parts = zip(scene.texts, scene.queries, scene.keys, scene.values, strict=True)
    wanted = [of_chunk(query, keys, values, text.length - text.rows, params) for text, query, keys, values in parts]
    torch.testing.assert_close(found, torch.cat(wanted), rtol=2e-5, atol=1e-5)


@here
@given(
    st.integers(1, 90),
    st.integers(0, 60),
    st.sampled_from([(1, 1), (2, 1), (3, 3), (5, 1), (8, 2)]),
    st.sampled_from(WIDTHS),
    st.sampled_from([1, 5, 16, 32]),
    asks(),
)
def test_chunks(
    rows: int, before: int, heads: tuple[int, int], width: int, height: int, params: AttentionParams
) -> None:
    sinks = None if params.sinks is None else torch.linspace(-1, 2, heads[0])
    checked(Scene([Text(rows + before, rows, False)], heads, width, height, seed=rows), replace(params, sinks=sinks))


@here
@pytest.mark.parametrize("kernel", ["best", "many"])
def test_more_rows_and_keys_than_are_worked_on_together(kernel: str) -> None:
    """Several pieces of queries and packs of keys, several requests, whose chunks begin anywhere."""
    found = [Text(700, 700, False), Text(900, 300, False), Text(256, 256, False), Text(513, 1, False)]
    checked(Scene(found, (4, 1), 32, 16, seed=0), AttentionParams(LAYER, 0.2), kernel)
    checked(Scene(found, (4, 1), 32, 16, seed=0), AttentionParams(LAYER, 0.2, window=300), kernel)


@here
@pytest.mark.parametrize(("rows", "heads", "width", "others"), [(1, 4, 64, True), (7, 8, 64, True), (40, 4, 64, False)])
def test_few_rows_are_left_to_the_other_kernel(rows: int, heads: int, width: int, others: bool) -> None:
    scene = Scene([Text(90, rows, rows == 1)], (heads, 2), width, 16, seed=3)
    best, many, few = (
        scene.run(NativeAttention(kernel), AttentionParams(LAYER, 0.3)) for kernel in ("best", "many", "avx512")
    )
    torch.testing.assert_close(many, few, **NEAR)
    assert torch.equal(best, few if others else many)
    assert not torch.equal(many, few)


@here
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_any_scale(scale: float) -> None:
    checked(Scene([Text(50, 40, False)], (4, 2), 64, 16, seed=4), AttentionParams(LAYER, scale), "best")


@here
@pytest.mark.parametrize("step", [0.3, -0.3, 5.0])
def test_a_maximum_that_moves_on(step: float) -> None:
    """Scores that rise or fall over several packs of keys."""
    scene = Scene([Text(600, 33, False)], (2, 1), 32, 16, seed=5)
    scene.queries[0][..., 0] = 1
    scene.keys[0][..., 0] = torch.arange(600)[:, None] * step
    scene._fill_past()
    found = scene.run(NativeAttention("many"), AttentionParams(LAYER, 1.0))
    wanted = of_chunk(scene.queries[0], scene.keys[0], scene.values[0], 567, AttentionParams(LAYER, 1.0))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)  # scores of 3,000 are rounded by 1e-4


# ---------------------------------------------------------------- without a cache


@here
@given(
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    st.sampled_from(WIDTHS),
    st.booleans(),
)
def test_every_row_sees_all(
    batch: int, rows: int, keys: int, heads: tuple[int, int], width: int, together: bool
) -> None:
    """With heads of a row together, as linear layers give them, or rows of a head."""
    sizes = [(batch, count, number, width) for count, number in ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]))]
    parts = [drawn(*size, seed=seed).transpose(1, 2) for seed, size in enumerate(sizes)]
    query, key, value = parts if together else [part.contiguous() for part in parts]
    torch.testing.assert_close(attend_all(query, key, value, 0.3), exact(query, key, value, 0.3), rtol=2e-5, atol=1e-5)


@here
@pytest.mark.parametrize(("rows", "keys"), [(577, 577), (1300, 40), (3, 1111)])
def test_images_of_their_true_size(rows: int, keys: int) -> None:
    query, key, value = (
        drawn(1, count, 2, 64, seed=seed).transpose(1, 2) for seed, count in enumerate((rows, keys, keys))
    )
    found, wanted = attend_all(query, key, value, 0.125), exact(query, key, value, 0.125)
    torch.testing.assert_close(found, wanted, **NEAR)
    assert (found - wanted).norm() < 1e-6 * found.norm()


@here
def test_what_a_row_does_not_hold_is_not_read_or_written() -> None:
    """Heads of 20 between others' numbers: NaN beside what is read, and what lies beside the result stays."""
    rows = torch.full((2, 50, 3, 4, 32), torch.nan)
    rows[..., 4:24] = drawn(2, 50, 3, 4, 20)
    query, key, value = (rows[:, :, i, :, 4:24].transpose(1, 2) for i in range(3))
    found = attend_all(query, key, value, 0.2)
    torch.testing.assert_close(found, exact(query, key, value, 0.2), **NEAR)


@here
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_heads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (drawn(2, 300, 4, 64, seed=seed).transpose(1, 2) for seed in range(3))
    alone = attend_all(query, key, value, 0.125)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(attend_all(query, key, value, 0.125), alone)


@here
@pytest.mark.parametrize("changed", [{"sizes": (1, 2, 0)}, {"width": 1000}])
def test_what_there_is_no_kernel_for_is_refused(changed: dict[str, Any]) -> None:
    place = (0, 0, 0)
    given: dict[str, Any] = {"query": place, "keys": place, "values": 0, "out": place, "sizes": (1, 2, 3)}
    given |= {"heads": (2, 2), "width": 8, "bf16": False, "scale": 1.0, "threads": 1}
    with pytest.raises(ValueError, match="no kernel"):
        native.extension.attend_all(**(given | changed))


# ---------------------------------------------------------------- in models


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype of each call of the kernel, those of the check at load aside."""
    for dtype in (torch.float32, torch.bfloat16):
        encoder_attention.has_attend_all(dtype)
    found: list[torch.dtype] = []

    def counted(query: Tensor, *given: Any) -> Tensor:
        found.append(query.dtype)
        return attend_all(query, *given)

    monkeypatch.setattr(encoder_attention, "attend_all", counted)
    return found


@here
@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_dtypes_without_a_kernel_are_left_to_torch(dtype: torch.dtype, calls: list[torch.dtype]) -> None:
    functions = pick_attention_functions(Layer.forward, torch.float32)
    parts = [drawn(1, 20, 2, 64, seed=seed).transpose(1, 2).to(dtype) for seed in range(3)]
    found, _ = functions.get_interface("sdpa", None)(Layer(), *parts, attention_mask=None)
    wanted, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](Layer(), *parts, attention_mask=None)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert calls == [torch.float32] * (dtype is torch.float32)


@here
@torch.inference_mode()
@pytest.mark.parametrize("batches", [(1, 3, 3), (3, 1, 1), (1, 3, 1), (2, 2, 1)])
def test_batches_that_torch_broadcasts_are_left_to_it(batches: tuple[int, int, int], calls: list[torch.dtype]) -> None:
    """Granite Speech asks one batch of queries of several of keys: the kernel would have read beyond their end."""
    functions = pick_attention_functions(Layer.forward, torch.float32)
    parts = [drawn(batch, 20, 2, 64, seed=seed).transpose(1, 2) for seed, batch in enumerate(batches)]
    found, _ = functions.get_interface("sdpa", None)(Layer(), *parts, attention_mask=None)
    wanted, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](Layer(), *parts, attention_mask=None)
    assert found.shape == wanted.shape == (max(batches), 20, 2, 64)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert calls == []
    query, key, value = parts
    with pytest.raises(ValueError, match="batches differ"):
        attend_all(query, key, value, 0.3)


@here
def test_a_check_that_fails_leaves_all_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_attention, "attend_all", lambda *parts: attend_all(*parts) * 1.001)
    assert not has_attend_all.__wrapped__(torch.float32)


def test_an_extension_without_it_leaves_all_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "extension", object())
    assert not has_attend_all.__wrapped__(torch.float32)


@here
@torch.inference_mode()
def test_a_vision_tower_gives_what_it_gave(tmp_path: Path, calls: list[torch.dtype]) -> None:
    config = AutoConfig.from_pretrained(build_checkpoint("llava", tmp_path)).vision_config
    model = AutoModel.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    pixels = drawn(2, 3, config.image_size, config.image_size)
    wanted = model(pixels).last_hidden_state
    fuse_elementwise(model)
    torch.testing.assert_close(model(pixels).last_hidden_state, wanted, rtol=1e-4, atol=1e-5)
    assert calls == [torch.float32] * config.num_hidden_layers


@here
def test_loaded_encoders_take_it(tmp_path: Path) -> None:
    model = load_model(build_checkpoint("llava", tmp_path), "E", dtype="float32")
    layers = [each for each in model.vision.modules() if type(each).__name__.endswith("Attention")]
    assert layers
    for layer in layers:
        assert type(layer).forward.__globals__[ATTENTION_FUNCTIONS] is not ALL_ATTENTION_FUNCTIONS
