"""Paged attention against a dense oracle that knows nothing of blocks, batches or chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.attention_scenes import LAYER, Scene, Text, asks, texts
from trinity.errors import UnsupportedModel
from trinity.stages.attention.interface import (
    AttentionParams,
    ChunkRows,
    PagedBatch,
    PagedRows,
    attending,
    build_mask,
    paged_attention,
    read_attention_params,
)
from trinity.stages.attention.kv_rows import LayerSurvey
from trinity.stages.attention.torch_reference import TorchAttention


@given(texts(), asks(), st.sampled_from([1, 2, 4]), st.sampled_from([4, 16]), st.sampled_from([1 << 30, 1]))
def test_equals_dense_attention(
    found: list[Text], params: AttentionParams, kv: int, height: int, gather_bytes: int
) -> None:
    scene = Scene(found, (4, kv), 8, height, seed=len(found))
    seen = scene.run(TorchAttention(gather_bytes), params)
    torch.testing.assert_close(seen, scene.oracle(params), atol=2e-5, rtol=1e-4)


def test_writes_only_its_own_rows_of_its_own_layer() -> None:
    scene = Scene([Text(21, 1, True), Text(18, 9, False)], (4, 2), 8, 16, seed=0)
    before = scene.cache.clone()
    scene.run(TorchAttention(), AttentionParams(LAYER, 0.3))
    for text, table, keys, values in zip(scene.texts, scene.tables, scene.keys, scene.values, strict=True):
        for at in range(text.length - text.rows, text.length):
            before[table[at // 16], LAYER, 0, :, at % 16] = keys[at]
            before[table[at // 16], LAYER, 1, :, at % 16] = values[at]
    assert torch.equal(scene.cache, before)


def test_blocks_of_others_are_never_read() -> None:
    """NaN in a block of another request must not spread, not even through masked positions."""
    scene = Scene([Text(5, 1, True), Text(60, 1, True), Text(40, 4, False)], (4, 2), 8, 16, seed=1)
    scene.cache[scene.order[-3:]] = torch.nan
    for row, table in enumerate(scene.tables):
        params = AttentionParams(LAYER, 0.3)
        clean = scene.run(TorchAttention(), params)
        spoilt = scene.cache[table].clone()
        scene.cache[table] = torch.nan
        seen = scene.run(TorchAttention(), params)
        scene.cache[table] = spoilt
        own = torch.repeat_interleave(torch.arange(3), torch.tensor([text.rows for text in scene.texts])) == row
        assert torch.equal(seen[~own], clean[~own])
        assert seen[own].isnan().any()


def test_bfloat16_is_close_to_float32() -> None:
    scene = Scene([Text(33, 1, True), Text(30, 12, False)], (4, 2), 16, 16, seed=2)
    exact = scene.oracle(params := AttentionParams(LAYER, 0.25))
    scene.cache = scene.cache.bfloat16()
    for tensors in (scene.keys, scene.values, scene.queries):
        tensors[:] = [tensor.bfloat16() for tensor in tensors]
    torch.testing.assert_close(scene.run(TorchAttention(), params).float(), exact, atol=0.05, rtol=0.05)


def test_one_backend_serves_batches_of_every_size_in_turn() -> None:
    backend = TorchAttention()
    for length in (40, 3, 65, 17):
        scene = Scene([Text(length, 1, True), Text(length, length // 2 + 1, False)], (4, 2), 8, 16, seed=length)
        params = AttentionParams(LAYER, 0.3)
        torch.testing.assert_close(scene.run(backend, params), scene.oracle(params), atol=2e-5, rtol=1e-4)


class FakeConfig:
    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


class FakeLayer:
    def __init__(self, index: int, **fields: object) -> None:
        self.layer_idx, self.config = index, FakeConfig(**fields)


@pytest.mark.parametrize(
    ("layer", "asked", "window", "span"),
    [
        (FakeLayer(0), {"sliding_window": 7}, 7, None),
        (FakeLayer(0, layer_types=["full_attention"], sliding_window=9), {}, None, None),
        (FakeLayer(1, layer_types=["full_attention", "sliding_attention"], sliding_window=9), {}, 9, None),
        (FakeLayer(0, layer_types=["chunked_attention"], attention_chunk_size=5), {}, None, 5),
    ],
)
def test_a_layer_says_what_it_sees(
    layer: FakeLayer, asked: dict[str, int], window: int | None, span: int | None
) -> None:
    params = read_attention_params(layer, 16, asked)
    assert (params.window, params.span, params.scale, params.layer) == (window, span, 0.25, layer.layer_idx)


def test_a_layer_of_another_shape_is_refused_by_name() -> None:
    cache = torch.zeros(2, 1, 2, 2, 16, 8)
    rows = PagedRows(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), np.ones((0, 0)), np.ones(0))
    batch = PagedBatch(rows, cache, TorchAttention())
    query, value = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 9)
    with pytest.raises(UnsupportedModel, match=r"FakeLayer.*values of \(2, 9\)"):
        paged_attention(FakeLayer(0), query, query[:, :2], value, None, trinity_batch=batch)
    with pytest.raises(UnsupportedModel, match="1 layers"):
        paged_attention(FakeLayer(1), query, query[:, :2], query[:, :2], None, trinity_batch=batch)
    with pytest.raises(UnsupportedModel, match="does not pass keywords on"):
        paged_attention(FakeLayer(0), query, query, query, None)


def test_a_keyword_that_is_not_known_is_refused_by_name_and_never_ignored() -> None:
    place = torch.zeros(1, dtype=torch.long)
    rows = PagedRows(place, place, np.ones((0, 0)), np.ones(0), (ChunkRows(0, 1, 0, place),))
    batch = PagedBatch(rows, torch.zeros(2, 1, 2, 2, 16, 8), TorchAttention())
    query, key = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 8)
    ordinary: dict[str, Any] = {"scaling": 0.5, "dropout": 0.0, "position_bias": None}
    for serving in (batch, LayerSurvey()):  # as it loads, and as it runs
        with attending(serving):
            paged_attention(FakeLayer(0), query, key, key, None, **ordinary)
            further = {**ordinary, "position_bias": torch.zeros(1), "sinks": torch.zeros(4)}
            with pytest.raises(UnsupportedModel, match="FakeLayer gives its attention position_bias, sinks, and"):
                paged_attention(FakeLayer(0), query, key, key, None, **further)


def test_groups_see_each_other_only_within_the_window() -> None:
    positions = torch.arange(4)
    groups = torch.tensor([0, 0, 0, -1])
    seen = build_mask(positions, positions, AttentionParams(0, 1.0, window=2), (groups, groups))
    assert seen.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
