"""What no result comes of is left out: rows of the last language layer, layers of an encoder behind the one taken.

Of a prompt only the last token is sampled. In the last layer all the others are there for their keys and values alone:
their queries, their attention, what is projected back and the MLP, more than nine tenths of the layer, end nowhere. So
that layer runs twice: over all rows until its keys and values are in their blocks, then over the rows that are sampled,
which read them as decode rows do. Its code stays transformers' own, both times.

LLaVA takes the states before the encoder's last layer (``vision_feature_layer`` -2), and transformers runs it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor, nn

from trinity.stages.attention.interface import KeysWritten, PagedBatch, halves

_ROWS_AT = {"position_embeddings": -2, "position_ids": -1}  # the axis that counts a batch's rows


class _LastLayer(nn.Module):
    """In front of a decoder layer's class: ``own`` is its forward."""

    own: Callable[..., Any]

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        batch: Any = named.get("trinity_batch")
        picked = None if given or batch is None else _picked(named, batch, hidden_states.shape[1])
        if picked is None:
            return self.own(hidden_states, *given, **named)
        writing = named | {"trinity_batch": replace(batch, half="write")}
        if not len(batch.last):
            return self.own(hidden_states, **writing)  # raises KeysWritten, which ends the whole forward
        with suppress(KeysWritten):
            self.own(hidden_states, **writing)
        return self.own(hidden_states[:, batch.last], **picked)


def _picked(named: Mapping[str, Any], batch: PagedBatch, total: int) -> dict[str, Any] | None:
    """A layer's keywords for the sampled rows alone; None where it must see all, or one of them is not understood."""
    if batch.sampled is None or batch.last is None or halves(batch.backend) is None:
        return None
    found = {"trinity_batch": replace(batch, rows=batch.sampled, half="read")}
    try:
        for name in named.keys() - found.keys():
            found[name] = _rows(named[name], _ROWS_AT.get(name), batch.last, total)
    except ValueError:
        return None
    return found


def _rows(value: Any, axis: int | None, last: Tensor, total: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_rows(each, axis, last, total) for each in value)
    if not isinstance(value, Tensor):
        return value
    if axis is None or value.shape[axis] != total:
        raise ValueError
    return value.index_select(axis, last)


class _Passes(nn.Module):
    """A layer that hands on what it is given."""

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        return hidden_states


def sample_last(text: Any, first: int) -> bool:
    """Let the last of the layers of the text model ``text`` run over sampled rows alone.

    False, and nothing changed, where it is not what is known: a decoder layer around the attention of that number, at
    least number ``first``, whose rows nothing but a norm follows.
    """
    layers = getattr(text, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not first < len(layers) == text.config.num_hidden_layers:
        return False
    if getattr(getattr(layers[-1], "self_attn", None), "layer_idx", None) != len(layers) - 1:
        return False
    kind: Any = type(layers[-1])
    layers[-1].__class__ = _behind(_LastLayer, kind)
    return True


def take_states(tower: Any, taken: int | Sequence[int]) -> int:
    """Leave out layers of the encoder ``tower`` of which no state in ``taken`` is made; how many, weights and all.

    ``taken`` counts hidden states as transformers does: 0 is what the first layer is given, negative ones from the end.
    """
    count: int = tower.config.num_hidden_layers
    found = [each for each in tower.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    last = max(each % (count + 1) for each in ([taken] if isinstance(taken, int) else taken))
    if len(found) != 1 or not last:
        return 0
    for layer in found[0][last:]:
        kind: Any = type(layer)
        layer._modules.clear()
        layer.__class__ = _behind(_Passes, kind)
    return count - last


@cache
def _behind(base: Any, kind: Any) -> Any:
    return type(kind.__name__, (base, kind), {"own": kind.forward, "__module__": kind.__module__})
