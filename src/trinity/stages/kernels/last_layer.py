"""Skips work that no output depends on: unsampled rows of the last layer, unused encoder layers.

Only a prompt's last token is sampled. The last layer needs all other rows only for their keys and values: their
queries, attention, output projection and MLP, over nine tenths of the layer, affect nothing. So that layer runs twice:
over all rows until its keys and values are in their blocks, then over the sampled rows, which read them as decode rows
do. Both times the code is transformers' own.

LLaVA takes the states before the encoder's last layer (``vision_feature_layer`` -2); transformers runs that layer
anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trinity.stages.attention.interface import (
    AttentionParams,
    PagedBatch,
    PagedRows,
    StopAfterWrite,
    as_split_attention,
)
from trinity.stages.kernels.admission import is_known_module
from trinity.stages.kernels.known_sources import LayerPart
from trinity.stages.kernels.probes import is_close, list_positions, make_empty_rows, make_noise
from trinity.stages.kernels.swaps import put_before

_ROWS_AT = {"position_embeddings": -2, "position_ids": -1}  # the axis that counts a batch's rows


class TwoPassLayer(nn.Module):
    """Base put before a decoder layer's class; ``original_forward`` is that class's forward."""

    original_forward: Callable[..., Any]

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        batch: Any = named.get("trinity_batch")
        picked = None if given or batch is None else pick_keywords(named, batch, hidden_states.shape[1])
        if picked is None:
            return self.original_forward(hidden_states, *given, **named)
        writing = named | {"trinity_batch": replace(batch, half="write")}
        if not len(batch.last):
            return self.original_forward(
                hidden_states, **writing
            )  # raises StopAfterWrite, which ends the model's forward
        with suppress(StopAfterWrite):
            self.original_forward(hidden_states, **writing)
        return self.original_forward(hidden_states[:, batch.last], **picked)


def pick_keywords(named: Mapping[str, Any], batch: PagedBatch, total: int) -> dict[str, Any] | None:
    """Return a layer's keywords for the sampled rows alone; None if it needs all rows or a keyword is unknown."""
    if batch.sampled is None or batch.last is None or as_split_attention(batch.backend) is None:
        return None
    found = {"trinity_batch": replace(batch, rows=batch.sampled, half="read")}
    try:
        for name in named.keys() - found.keys():
            found[name] = _select_rows(named[name], _ROWS_AT.get(name), batch.last, total)
    except ValueError:
        return None
    return found


def _select_rows(value: Any, axis: int | None, last: Tensor, total: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_select_rows(each, axis, last, total) for each in value)
    if not isinstance(value, Tensor):
        return value
    if axis is None or value.shape[axis] != total:
        raise ValueError
    return value.index_select(axis, last)


class _Identity(nn.Module):
    """Layer that returns its input."""

    irreversible = True

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        return hidden_states


def skip_unsampled_rows(text: Any, first: int) -> bool:
    """Make the last layer of the text model ``text`` run its attention and MLP over sampled rows only.

    Returns False and changes nothing if the layer is not as expected: a known decoder layer around the attention of
    that index, at least index ``first``, in a model known to follow it only by a norm, which on a probe of near and far
    positions gives the same in two passes as in one.
    """
    layers = getattr(text, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not first < len(layers) == text.config.num_hidden_layers:
        return False
    if getattr(getattr(layers[-1], "self_attn", None), "layer_idx", None) != len(layers) - 1:
        return False
    layer: Any = layers[-1]
    kind: Any = type(layer)
    if not _is_known_split(text, layer):
        return False
    layer.__class__ = put_before(TwoPassLayer, kind)
    alike = _splits_alike(layer, kind)
    if not alike:
        layer.__class__ = kind
    return alike


def _is_known_split(text: Any, layer: Any) -> bool:
    known = {text: LayerPart.SPLIT_MODEL, layer: LayerPart.SPLIT_LAYER, layer.self_attn: LayerPart.SPLIT_ATTENTION}
    inner = {each: known.get(each, LayerPart.EACH_ROW) for each in layer.modules()}
    return all(is_known_module(part, module) for module, part in {**inner, **known}.items())


class _SplitProbe:
    """Stands in for split attention: each row sees its query and the mean of all keys and values written."""

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        self.write(rows, cache, *qkv[1:], params.layer)
        return self.read(rows, cache, qkv[0], params)

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        self.seen = [each.float().mean((0, 1)) for each in (key, value)]

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        return (query.float() * self.seen[0] + self.seen[1]).to(query.dtype)


@torch.inference_mode()
def _splits_alike(layer: Any, kind: Any) -> bool:
    """Tell if ``layer`` gives sampled rows the same in two passes as in one, with a stand-in for attention."""
    attention, weight = layer.self_attn, layer.input_layernorm.weight
    try:
        positions = torch.tensor(list_positions(attention.config))
        last = torch.arange(1, len(positions), 3)
        rows, cosine, sine = (
            make_noise(len(positions), size, weight.dtype, seed)
            for seed, size in enumerate((len(weight), attention.head_dim, attention.head_dim))
        )
        heads = attention.k_proj.out_features // attention.head_dim
        cache = torch.empty((1, attention.layer_idx + 1, 2, heads, 1, attention.head_dim), device="meta")
        batch = PagedBatch(make_empty_rows(), cache, _SplitProbe(), make_empty_rows(), last)
        named = {"position_embeddings": (cosine, sine), "position_ids": positions[None], "attention_mask": None}
        wanted = kind.forward(layer, rows, **named, trinity_batch=replace(batch, sampled=None, last=None))
        found = layer.forward(rows, **named, trinity_batch=batch)
    except Exception:  # not a layer as expected: leave it alone
        return False
    return is_close(found, wanted[:, last], max(1e-5, 4 * torch.finfo(weight.dtype).eps))


def drop_unused_layers(tower: Any, taken: int | Sequence[int]) -> int:
    """Drop the layers of the encoder ``tower`` that no state in ``taken`` depends on, with their weights.

    ``taken`` counts hidden states as transformers does: 0 is the first layer's input, negative ones count from the end.
    Returns the number of layers dropped.
    """
    count: int = tower.config.num_hidden_layers
    found = [each for each in tower.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    last = max(each % (count + 1) for each in ([taken] if isinstance(taken, int) else taken))
    if len(found) != 1 or not last or not _is_known_tower(tower, found[0]):
        return 0
    for layer in found[0][last:]:
        kind: Any = type(layer)
        while children := dict(layer.named_children()):  # one that has several names comes by one at a time
            for name in children:
                delattr(layer, name)
        layer.__class__ = put_before(_Identity, kind)
    return count - last


def _is_known_tower(tower: Any, layers: nn.ModuleList) -> bool:
    around = [each for each in tower.modules() if each is not layers and any(one is layers for one in each.modules())]
    return all(is_known_module(LayerPart.TOWER, each) for each in around)
