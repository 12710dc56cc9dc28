"""Paged attention against a dense oracle that knows nothing of blocks, batches or chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trinity.errors import UnsupportedModel
from trinity.stages.attention.interface import (
    AttentionParams,
    ChunkRows,
    PagedBatch,
    PagedRows,
    build_mask,
    paged_attention,
    read_attention_params,
)
from trinity.stages.attention.torch_reference import TorchAttention

LAYERS, LAYER = 3, 1


@dataclass
class Text:
    """One request: keys and values of every position, and which rows the batch computes."""

    length: int
    rows: int  # the last of them are in the batch; 1 may be a decode row
    decode: bool
    groups: Tensor | None = None


def dense(
    query: Tensor, keys: Tensor, values: Tensor, first: int, params: AttentionParams, groups: Tensor | None
) -> Tensor:
    """Attention of rows at ``first``, ``first`` + 1, ... one row, one head, one key at a time."""
    rows, heads, width = query.shape
    out = torch.zeros(rows, heads, width, dtype=torch.float64)
    for row in range(rows):
        at = first + row
        seen = [key for key in range(len(keys)) if _visible(at, key, params, groups)]
        for head in range(heads):
            held = head * keys.shape[1] // heads
            scores = keys[seen, held].double() @ query[row, head].double() * params.scale
            if params.softcap is not None:
                scores = torch.tanh(scores / params.softcap) * params.softcap
            weights = scores.exp()
            total = weights.sum() + (0.0 if params.sinks is None else params.sinks[head].double().exp())
            out[row, head] = (weights / total) @ values[seen, held].double()
    return out.float()


def _visible(row: int, key: int, params: AttentionParams, groups: Tensor | None) -> bool:
    together = groups is not None and int(groups[row]) >= 0 and int(groups[row]) == int(groups[key])
    near = params.window is None or key > row - params.window
    same_run = params.span is None or key // params.span == row // params.span
    return (key <= row or together) and near and same_run


class Scene:
    """Random texts laid out in random blocks of a cache full of other numbers."""

    def __init__(self, texts: list[Text], heads: tuple[int, int], width: int, height: int, seed: int) -> None:
        self.texts = sorted(texts, key=lambda text: (not text.decode, text.length))
        self.noise = torch.Generator().manual_seed(seed)
        need = [-(-text.length // height) for text in self.texts]
        self.order = torch.randperm(sum(need) + 3, generator=self.noise)
        self.tables = [part[: len(part)] for part in self.order[: sum(need)].split(need)]
        shape = (sum(need) + 3, LAYERS, 2, heads[1], height, width)
        self.cache = torch.randn(shape, generator=self.noise) * 50
        self.keys = [self._normal(text.length, heads[1], width) for text in self.texts]
        self.values = [self._normal(text.length, heads[1], width) for text in self.texts]
        self.queries = [self._normal(text.rows, heads[0], width) for text in self.texts]
        self.height = height
        self._fill_past()

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.noise)

    def _fill_past(self) -> None:
        for text, table, keys, values in zip(self.texts, self.tables, self.keys, self.values, strict=True):
            for at in range(text.length - text.rows):
                block, offset = int(table[at // self.height]), at % self.height
                self.cache[block, LAYER, 0, :, offset] = keys[at]
                self.cache[block, LAYER, 1, :, offset] = values[at]

    def rows(self) -> PagedRows:
        positions = [torch.arange(text.length - text.rows, text.length) for text in self.texts]
        blocks = [table[at // self.height] for table, at in zip(self.tables, positions, strict=True)]
        decodes = [i for i, text in enumerate(self.texts) if text.decode]
        widest = max((len(self.tables[i]) for i in decodes), default=0)
        padded = [np.pad(self.tables[i].numpy(), (0, widest - len(self.tables[i])), "edge") for i in decodes]
        return PagedRows(
            blocks=torch.cat(blocks),
            offsets=torch.cat(positions) % self.height,
            tables=np.array(padded, dtype=np.int64).reshape(len(decodes), widest),
            lengths=np.array([self.texts[i].length for i in decodes], dtype=np.int64),
            chunks=tuple(self._chunks()),
        )

    def _chunks(self) -> list[ChunkRows]:
        chunks, first = [], 0
        for text, table in zip(self.texts, self.tables, strict=True):
            start = text.length - text.rows
            groups = None if text.groups is None else text.groups[start:]
            if not text.decode:
                chunks.append(ChunkRows(first, text.rows, start, table, groups))
            first += text.rows
        return chunks

    def run(self, backend: TorchAttention, params: AttentionParams) -> Tensor:
        fresh = [slice(text.length - text.rows, None) for text in self.texts]
        parts = (self.queries, self._cut(self.keys, fresh), self._cut(self.values, fresh))
        query, key, value = (torch.cat(part) for part in parts)
        return backend.attend(self.rows(), self.cache, (query, key, value), params)

    def _cut(self, tensors: list[Tensor], fresh: list[slice]) -> list[Tensor]:
        return [tensor[part] for tensor, part in zip(tensors, fresh, strict=True)]

    def oracle(self, params: AttentionParams) -> Tensor:
        parts = zip(self.texts, self.queries, self.keys, self.values, strict=True)
        return torch.cat([dense(q, k, v, text.length - text.rows, params, text.groups) for text, q, k, v in parts])


@st.composite
def texts(draw: st.DrawFn, most_rows: int = 40) -> list[Text]:
    found = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 40))
        decode = draw(st.booleans())
        rows = 1 if decode else draw(st.integers(1, min(length, most_rows)))
        grouped = not decode and draw(st.booleans())
        found.append(Text(length, rows, decode, _some_groups(draw, length, length - rows) if grouped else None))
    return found


def _some_groups(draw: st.DrawFn, length: int, start: int) -> Tensor:
    """Images lie wholly within the past or wholly within the chunk."""
    groups = torch.full((length,), -1)
    for number, (low, high) in enumerate(((0, start), (start, length))):
        first = draw(st.integers(low, high))
        groups[first : draw(st.integers(first, high))] = number
    return groups


@st.composite
def asks(draw: st.DrawFn, heads: int = 4) -> AttentionParams:
    sinks = torch.linspace(-1, 2, heads) if draw(st.booleans()) else None
    limit = st.none() | st.integers(1, 48)
    return AttentionParams(LAYER, 0.3, draw(limit), draw(limit), draw(st.sampled_from([None, 2.0])), sinks)


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
    query, value = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 6)
    with pytest.raises(UnsupportedModel, match=r"FakeLayer.*values of \(2, 6\)"):
        paged_attention(FakeLayer(0), query, query[:, :2], value, None, trinity_batch=batch)
    with pytest.raises(UnsupportedModel, match="1 layers"):
        paged_attention(FakeLayer(1), query, query[:, :2], query[:, :2], None, trinity_batch=batch)
    with pytest.raises(UnsupportedModel, match="does not pass keywords on"):
        paged_attention(FakeLayer(0), query, query, query, None)


def test_groups_see_each_other_only_within_the_window() -> None:
    positions = torch.arange(4)
    groups = torch.tensor([0, 0, 0, -1])
    seen = build_mask(positions, positions, AttentionParams(0, 1.0, window=2), (groups, groups))
    assert seen.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
