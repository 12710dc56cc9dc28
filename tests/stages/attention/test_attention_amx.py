"""Attention in AMX tiles, over the cache and without one, against exact attention of the same bfloat16 numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from support.attention_scenes import LAYER, WIDTHS, Layer, Scene, Text, asks, of_chunk
from support.checkpoint_files import checkpoint
from support.stage_driver import picture, processor_of
from trinity.memory import native
from trinity.request import Request
from trinity.stages.attention.interface import AttentionParams
from trinity.stages.attention.native import NativeAttention, uses_amx_tiles
from trinity.stages.kernels import encoder_attention
from trinity.stages.kernels.encoder_attention import ATTENTION_FUNCTIONS, attend_all, pick_attention_functions
from trinity.stages.kernels.fused_elementwise import fuse_elementwise
from trinity.stages.models import load_model
from trinity.testing.checkpoints import build_checkpoint

here = pytest.mark.skipif(not uses_amx_tiles(64), reason=f"no AMX tiles for bfloat16: {native.describe()}")
NEAR: Any = {"rtol": 8e-3, "atol": 8e-3}  # of values of size 1: results are rounded by 4e-3, weights by as much


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    wide = query.float(), key.float().repeat_interleave(group, 1), value.float().repeat_interleave(group, 1)
    return scaled_dot_product_attention(*wide, scale=scale).transpose(1, 2)


def halved(scene: Scene) -> Scene:
    scene.cache = scene.cache.bfloat16()
    for tensors in (scene.keys, scene.values, scene.queries):
        tensors[:] = [tensor.bfloat16() for tensor in tensors]
    return scene


# ---------------------------------------------------------------- over the cache


def checked(scene: Scene, params: AttentionParams, kernel: str = "many") -> None:
    found = halved(scene).run(NativeAttention(kernel), params)
    parts = zip(scene.texts, scene.queries, scene.keys, scene.values, strict=True)
    wanted = [of_chunk(query, keys, values, text.length - text.rows, params) for text, query, keys, values in parts]
    torch.testing.assert_close(found.float(), torch.cat(wanted), **NEAR)


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
    sinks = None if params.sinks is None else torch.linspace(-1, 2, heads[0]).bfloat16()
    checked(Scene([Text(rows + before, rows, False)], heads, width, height, seed=rows), replace(params, sinks=sinks))


@here
@pytest.mark.parametrize("kernel", ["best", "many"])
def test_more_rows_and_keys_than_are_worked_on_together(kernel: str) -> None:
    """Pieces of 1,024 queries and 256 keys, several requests, whose chunks begin anywhere."""
    found = [Text(700, 700, False), Text(900, 300, False), Text(256, 256, False), Text(513, 1, False)]
    checked(Scene(found, (4, 1), 32, 16, seed=0), AttentionParams(LAYER, 0.2), kernel)
    checked(Scene(found, (4, 1), 32, 16, seed=0), AttentionParams(LAYER, 0.2, window=300), kernel)


@here
@pytest.mark.parametrize(("rows", "tiled"), [(1, False), (3, False), (40, True)])
def test_few_rows_are_left_to_other_instructions(rows: int, tiled: bool) -> None:
    scene = halved(Scene([Text(90, rows, rows == 1)], (4, 2), 64, 16, seed=3))
    found, of_tiles = (scene.run(NativeAttention(kernel), AttentionParams(LAYER, 0.3)) for kernel in ("best", "many"))
    torch.testing.assert_close(found.float(), of_tiles.float(), **NEAR)
    assert torch.equal(found, of_tiles) == tiled


@here
def test_scales_that_tiles_are_not_for() -> None:
    for scale in (0.0, -0.3):
        checked(Scene([Text(50, 40, False)], (4, 2), 64, 16, seed=4), AttentionParams(LAYER, scale), "best")


@here
@pytest.mark.parametrize("step", [0.3, -0.3, 5.0])
def test_a_maximum_that_moves_on(step: float) -> None:
    """Scores that rise or fall over three packs of keys, by less and by more than a maximum may be out of date."""
    scene = Scene([Text(600, 33, False)], (2, 1), 32, 16, seed=5)
    scene.queries[0][..., 0] = 1
    scene.keys[0][..., 0] = torch.arange(600)[:, None] * step
    scene._fill_past()
    checked(scene, AttentionParams(LAYER, 1.0))


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
    torch.testing.assert_close(attend_all(query, key, value, 0.3).float(), exact(query, key, value, 0.3), **NEAR)


@here
@pytest.mark.parametrize(("rows", "keys"), [(577, 577), (1300, 40), (3, 1111)])
def test_images_of_their_true_size(rows: int, keys: int) -> None:
    query, key, value = (
        drawn(1, count, 2, 64, seed=seed).transpose(1, 2) for seed, count in enumerate((rows, keys, keys))
    )
    found = attend_all(query, key, value, 0.125).float()
    torch.testing.assert_close(found, exact(query, key, value, 0.125), **NEAR)
    assert (found - exact(query, key, value, 0.125)).norm() < 0.004 * found.norm()


@here
def test_parts_of_one_product() -> None:
    """Queries, keys and values side by side in rows of one linear layer, and values that lie otherwise."""
    rows = drawn(2, 50, 3, 4, 24)
    query, key, value = (rows[:, :, i].transpose(1, 2) for i in range(3))
    wanted = exact(query, key, value, 0.2)
    torch.testing.assert_close(attend_all(query, key, value, 0.2).float(), wanted, **NEAR)
    torch.testing.assert_close(attend_all(query, key, value.contiguous(), 0.2).float(), wanted, **NEAR)
    gaps = torch.stack((query, query), -1)[..., 0]
    torch.testing.assert_close(attend_all(gaps, key, value, 0.2).float(), wanted, **NEAR)


@here
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_heads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (drawn(2, 300, 4, 64, seed=seed).transpose(1, 2) for seed in range(3))
    alone = attend_all(query, key, value, 0.125)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(attend_all(query, key, value, 0.125), alone)


@here
def test_tiles_of_others_are_set_again() -> None:
    """oneDNN sets tiles of its own between two calls."""
    query, key, value = (drawn(1, 60, 2, 64, seed=seed).transpose(1, 2) for seed in range(3))
    wide = drawn(256, 256)
    before, product = attend_all(query, key, value, 0.125), wide @ wide
    for _ in range(3):
        assert torch.equal(wide @ wide, product)
        assert torch.equal(attend_all(query, key, value, 0.125), before)


@here
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"sizes": (1, 2, 0)}, "no kernel"),
        ({"sizes": (1, -2, 3)}, "attention of"),
        ({"heads": (3, 2)}, "multiple"),
        ({"width": 0}, "attention of"),
        ({"width": 1000}, "no kernel"),
        ({"scale": -1.0}, "no kernel"),
    ],
)
def test_what_there_are_no_tiles_for_is_refused(changed: dict[str, Any], why: str) -> None:
    place = (0, 0, 0)
    given: dict[str, Any] = {"query": place, "keys": place, "values": 0, "out": place, "sizes": (1, 2, 3)}
    given |= {"heads": (2, 2), "width": 8, "bf16": True, "scale": 1.0, "threads": 1}
    with pytest.raises(ValueError, match=why):
        native.extension.attend_all(**(given | changed))


# ---------------------------------------------------------------- in models


def interface(name: str = "sdpa") -> Any:
    functions = pick_attention_functions(Layer.forward, torch.bfloat16)
    return functions.get_interface(name, "default")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of the tiles, that of the check at load aside."""
    encoder_attention.has_attend_all(torch.bfloat16)
    found: list[int] = []

    def counted(query: Tensor, *given: Any) -> Tensor:
        found.append(query.shape[2])
        return attend_all(query, *given)

    monkeypatch.setattr(encoder_attention, "attend_all", counted)
    return found


@here
@torch.inference_mode()
@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"scaling": 0.5}, True),
        ({"is_causal": False, "dropout": 0.0, "output_attentions": None}, True),
        ({"is_causal": True}, False),
        ({"attention_mask": torch.ones(1, 1, 20, 20, dtype=torch.bool).tril_()}, False),
        ({"dtype": torch.float64}, False),
    ],
)
def test_what_is_left_to_torch(changed: dict[str, Any], taken: bool, calls: list[int]) -> None:
    named = dict(changed)
    dtype = named.pop("dtype", torch.bfloat16)
    parts = [drawn(1, 20, 2, 64, seed=seed).transpose(1, 2).to(dtype) for seed in range(3)]
    named.setdefault("attention_mask", None)
    found, weights = interface()(Layer(), *parts, **named)
    wanted, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](Layer(), *parts, **named)
    assert found.is_contiguous()
    assert weights is None
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)
    assert len(calls) == taken


@here
def test_gradients_are_left_to_torch(calls: list[int]) -> None:
    parts = [drawn(1, 2, 20, 8).requires_grad_() for _ in range(3)]
    interface()(Layer(), *parts, None)[0].sum().backward()
    assert parts[0].grad is not None
    assert not calls


@here
def test_other_functions_stay_as_they_are() -> None:
    assert interface("eager") == "default"
    assert interface("flex_attention") is ALL_ATTENTION_FUNCTIONS["flex_attention"]
    functions = pick_attention_functions(Layer.forward, torch.bfloat16)
    assert functions.valid_keys() == ALL_ATTENTION_FUNCTIONS.valid_keys()


def test_what_is_no_attention_layer_keeps_its_functions() -> None:
    assert pick_attention_functions(Layer.forward, torch.float16) is None
    assert pick_attention_functions(np.array, torch.bfloat16) is None
    assert pick_attention_functions(interface.__code__, torch.bfloat16) is None
    assert pick_attention_functions(drawn, torch.bfloat16) is None


def test_without_the_extension_there_are_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "extension", None)
    assert not uses_amx_tiles(64)
    assert not encoder_attention.has_attend_all.__wrapped__(torch.bfloat16)


@here
def test_loaded_encoders_take_them(tmp_path: Path) -> None:
    model = load_model(build_checkpoint("llava", tmp_path), "E", dtype="bfloat16")
    layers = [each for each in model.vision.modules() if type(each).__name__.endswith("Attention")]
    assert layers
    for layer in layers:
        assert type(layer).forward.__globals__[ATTENTION_FUNCTIONS] is not ALL_ATTENTION_FUNCTIONS


@here
@torch.inference_mode()
def test_a_vision_tower_gives_what_it_gave(tmp_path: Path, calls: list[int]) -> None:
    config = AutoConfig.from_pretrained(build_checkpoint("llava", tmp_path)).vision_config
    model = AutoModel.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    pixels = drawn(2, 3, config.image_size, config.image_size)
    wanted = model(pixels).last_hidden_state
    fuse_elementwise(model)
    found = model(pixels).last_hidden_state
    assert len(calls) == config.num_hidden_layers
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.1, atol=0.1)


@here
@pytest.mark.parametrize("name", ["llava_next", "qwen2_5_vl", "gemma3", "minicpmv4_6"])
def test_encoders_of_families_give_what_they_gave(name: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    images = [picture(0, 60, 80), picture(1, 130, 90)]
    made = processor_of(name).process(Request("<image><image>", images=images))
    model = load_model(checkpoint(name), "E", dtype="bfloat16")
    counts = [span.tokens for span in made.work.media]
    found = model.encode("image", made.inputs, counts)
    taken = len(calls)
    monkeypatch.setattr(encoder_attention, "fits_kernel", lambda *parts: False)
    for ours, plain in zip(found, model.encode("image", made.inputs, counts), strict=True):
        assert (ours - plain).abs().max() < 0.02 * plain.abs().max()
    assert taken
    assert len(calls) == taken
