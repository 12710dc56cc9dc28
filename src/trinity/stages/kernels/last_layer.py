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
from functools import cache
from typing import Any

from torch import Tensor, nn

from trinity.stages.attention.interface import PagedBatch, StopAfterWrite, as_split_attention

_ROWS_AT = {"position_embeddings": -2, "position_ids": -1}  # the axis that counts a batch's rows


class _TwoPassLayer(nn.Module):
    """Base put before a decoder layer's class; ``original_forward`` is that class's forward."""

    original_forward: Callable[..., Any]

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        batch: Any = named.get("trinity_batch")
        picked = None if given or batch is None else _pick_keywords(named, batch, hidden_states.shape[1])
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


def _pick_keywords(named: Mapping[str, Any], batch: PagedBatch, total: int) -> dict[str, Any] | None:
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

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        return hidden_states


def skip_unsampled_rows(text: Any, first: int) -> bool:
    """Make the last layer of the text model ``text`` run its attention and MLP over sampled rows only.

    Returns False and changes nothing if the layer is not as expected: a decoder layer around the attention of that
    index, at least index ``first``, followed only by a norm.
    """
    layers = getattr(text, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not first < len(layers) == text.config.num_hidden_layers:
        return False
    if getattr(getattr(layers[-1], "self_attn", None), "layer_idx", None) != len(layers) - 1:
        return False
    kind: Any = type(layers[-1])
    layers[-1].__class__ = _make_class(_TwoPassLayer, kind)
    return True


def drop_unused_layers(tower: Any, taken: int | Sequence[int]) -> int:
    """Drop the layers of the encoder ``tower`` that no state in ``taken`` depends on, with their weights.

    ``taken`` counts hidden states as transformers does: 0 is the first layer's input, negative ones count from the end.
    Returns the number of layers dropped.
    """
    count: int = tower.config.num_hidden_layers
    found = [each for each in tower.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    last = max(each % (count + 1) for each in ([taken] if isinstance(taken, int) else taken))
    if len(found) != 1 or not last:
        return 0
    for layer in found[0][last:]:
        kind: Any = type(layer)
        layer._modules.clear()
        layer.__class__ = _make_class(_Identity, kind)
    return count - last


@cache
def _make_class(base: Any, kind: Any) -> Any:
    return type(kind.__name__, (base, kind), {"original_forward": kind.forward, "__module__": kind.__module__})
