"""Latent rows: compressed queries meet them as expanded ones meet keys, and only backends that can read them do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trinity.errors import ConfigError, UnsupportedModel
from trinity.stages.attention.backends import pick_backend
from trinity.stages.attention.choice import CacheKind
from trinity.stages.attention.interface import AttentionParams, ChunkRows, PagedBatch, PagedRows, paged_attention
from trinity.stages.attention.latent import expands_latents, find_latent_width, watch_expansions
from trinity.stages.attention.torch_reference import TorchAttention

BLOCK = 16
HEADS, RANK, ROPE, PLAIN, VALUE = 4, 24, 8, 16, 12
CONFIG = SimpleNamespace(
    num_attention_heads=HEADS, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=PLAIN, v_head_dim=VALUE
)


def make_scene(length: int) -> tuple[PagedRows, PagedRows]:
    """A text in blocks 1, 2, ...: all but its last position as a chunk, and that as a decode."""
    table, at = torch.arange(1, 5), torch.arange(length - 1)
    chunk = ChunkRows(0, length - 1, 0, table)
    none = np.empty(0, dtype=np.int64)
    before = PagedRows(table[at // BLOCK], at % BLOCK, np.empty((0, 0), dtype=np.int64), none, (chunk,))
    last = torch.tensor([length - 1])
    return before, PagedRows(table[last // BLOCK], last % BLOCK, table[None].numpy(), np.array([length]))


class Layer(nn.Module):
    """What a latent layer does between its latents and attention; ``rows`` [T, RANK + ROPE]."""

    def __init__(self, name: str = "kv_b_proj") -> None:
        super().__init__()
        self.config, self.layer_idx = CONFIG, 0
        self.add_module(name, nn.Linear(RANK, HEADS * (PLAIN + VALUE), bias=False))
        self.name = name

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        both = getattr(self, self.name)(rows[:, :RANK]).view(len(rows), HEADS, PLAIN + VALUE).transpose(0, 1)
        rotated = rows[None, :, RANK:].expand(HEADS, -1, -1)
        return torch.cat((both[..., :PLAIN], rotated), -1)[None], both[None, ..., PLAIN:]


def expanded(layer: Layer, query: Tensor, rows: Tensor) -> Tensor:
    """The last query's attention over all rows, expanded to heads: [HEADS, VALUE]."""
    key, value = layer.expand(rows)
    scores = (query[0, :, -1:] @ key[0].transpose(1, 2)) * (PLAIN + ROPE) ** -0.5
    return (scores.softmax(-1) @ value[0])[:, 0]


@torch.inference_mode()
@pytest.mark.parametrize("length", [1, BLOCK, 3 * BLOCK + 5])
def test_a_decode_and_a_chunk_read_what_expanded_keys_and_values_give(length: int) -> None:
    torch.manual_seed(length)
    layer, cache = Layer(), torch.zeros((6, 1, 1, 1, BLOCK, RANK + ROPE))
    watch_expansions(layer)
    rows, query = torch.randn(length, RANK + ROPE), torch.randn(1, HEADS, length, PLAIN + ROPE)
    chunks, decode = make_scene(length)
    for paged, part in ((chunks, slice(0, length - 1)), (decode, slice(length - 1, length))):
        if len(paged.blocks):
            key, value = layer.expand(rows[part])
            batch = PagedBatch(paged, cache, TorchAttention())
            seen, _ = paged_attention(layer, query[:, :, part], key, value, None, trinity_batch=batch)
            assert seen.shape == (1, len(paged.blocks), HEADS, VALUE)
            last = part.stop
            wanted = expanded(layer, query[:, :, :last], rows[:last])
            assert torch.allclose(seen[0, -1], wanted, atol=1e-5)
    assert torch.equal(cache[:, 0, 0, 0].flatten(0, 1)[BLOCK : BLOCK + length], rows), "rows lie as they are, once"


def test_the_projection_is_found_by_its_shape() -> None:
    layer, other = Layer("any_name"), Layer()
    other.config = SimpleNamespace(**{**vars(CONFIG), "kv_lora_rank": None})
    assert watch_expansions(nn.ModuleList([layer, other])) == 1
    assert expands_latents(layer.any_name)
    assert not expands_latents(other.kv_b_proj)
    assert find_latent_width(CONFIG) == (RANK, ROPE)
    assert find_latent_width(other.config) is None


@torch.inference_mode()
def test_keys_that_come_from_elsewhere_are_refused() -> None:
    """A kernel that expands by itself would leave the latents of another layer, or of the step before."""
    layer, other, paged = Layer(), Layer(), make_scene(2)[1]
    watch_expansions(nn.ModuleList([layer, other]))
    rows = torch.randn(1, RANK + ROPE)
    key, value = layer.expand(rows)
    batch = PagedBatch(paged, torch.zeros((6, 1, 1, 1, BLOCK, RANK + ROPE)), TorchAttention())
    query = torch.randn(1, HEADS, 1, PLAIN + ROPE)
    other.expand(rows)
    with pytest.raises(UnsupportedModel, match="expands none by a projection"):
        paged_attention(layer, query, key, value, None, trinity_batch=batch)
    layer.expand(rows)
    paged_attention(layer, query, key, value, None, trinity_batch=batch)
    with pytest.raises(UnsupportedModel, match="expands none by a projection"):
        paged_attention(layer, query, key, value, None, trinity_batch=batch)


def test_backends_of_keys_and_values_refuse_latent_rows() -> None:
    kind = CacheKind((2, 1, 1, BLOCK, RANK + ROPE), torch.float32, torch.device("cpu"), HEADS)
    assert pick_backend("auto", kind) == "torch"
    with pytest.raises(ConfigError, match=r"latent rows|on cpu|not installed|without it|build"):
        pick_backend("native", kind)


def test_keys_and_values_are_written_as_ever() -> None:
    """The control: with two parts a cache holds keys, then values."""
    cache, rows = torch.zeros((6, 1, 2, 1, BLOCK, 4)), make_scene(1)[1]
    qkv: Any = (torch.ones(1, 1, 4), torch.full((1, 1, 4), 2.0), torch.full((1, 1, 4), 3.0))
    assert torch.equal(TorchAttention().attend(rows, cache, qkv, AttentionParams(0, 1.0)), qkv[2])
    assert cache[1, 0, :, 0, 0].tolist() == [[2.0] * 4, [3.0] * 4]
