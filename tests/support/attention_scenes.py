"""Batches of paged attention laid out at random, and the dense oracle of what they come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trinity.stages.attention.interface import (
    AttentionParams,
    ChunkRows,
    PagedRows,
    build_mask,
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


WIDTHS = (1, 7, 16, 32, 33, 64, 72, 80, 96, 128, 160)


def of_chunk(query: Tensor, keys: Tensor, values: Tensor, start: int, params: AttentionParams) -> Tensor:
    """[rows, heads, width] of rows from position ``start`` on, all at once, in float64."""
    group = query.shape[1] // keys.shape[1]
    wide = (
        part.double().transpose(0, 1)
        for part in (query, *(each.repeat_interleave(group, 1) for each in (keys, values)))
    )
    rows, held, weighed = wide
    scores = rows @ held.transpose(1, 2) * params.scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    at = torch.arange(len(keys))
    weights = scores.masked_fill(~build_mask(at[start:], at, params), -torch.inf)
    sinks = torch.full((len(rows), 1, 1), -torch.inf) if params.sinks is None else params.sinks[:, None, None]
    joined = torch.cat((weights, sinks.double().expand(-1, len(query), 1)), 2).softmax(2)
    return (joined[..., :-1] @ weighed).transpose(0, 1).float()


class Layer(nn.Module):
    is_causal = False

    def forward(self, name: str, *given: Any, **named: Any) -> Any:
        default: Any = None
        return ALL_ATTENTION_FUNCTIONS.get_interface(name, default)(self, *given, **named)
