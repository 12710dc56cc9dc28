"""Rows of the KV cache: what it holds of a token in one layer, surveyed on the model itself, and what is fitted to it.

One shape serves all layers. A layer with fewer KV heads has each of them several times, as if more query heads had
asked for one of their own; narrower keys, values and queries end in zeros, which change no product.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from trinity.errors import UnsupportedModel


class KvRow(NamedTuple):
    """A token in one layer: ``parts`` x ``heads`` x ``width`` numbers.

    ``parts`` is 2, a key and a value for each KV head, or 1, a latent row, of one head.
    """

    parts: int
    heads: int
    width: int


@dataclass(slots=True)
class LayerSurvey:
    """Stands in for a ``PagedBatch``: notes the layers that attend, and attends to nothing."""

    layers: list[int] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def note(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Note a layer's keys and values [1, heads, T, width]; returns zeros as attention would."""
        self.layers.append(layer)
        self.heads += [key.shape[1], value.shape[1]]
        self.widths += [key.shape[3], value.shape[3]]
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))


def find_kv_row(survey: LayerSurvey, layers: int, latent: KvRow | None) -> KvRow:
    """Find the row that serves all ``layers`` of a model; ``latent``: its row if it caches latents.

    Raises ``UnsupportedModel`` if a layer does not attend through transformers' attention interface, or does so several
    times.
    """
    if not survey.layers:
        raise UnsupportedModel("its attention does not go through transformers' attention interface")
    repeated = sorted(layer for layer, times in Counter(survey.layers).items() if times > 1)
    if repeated:
        raise UnsupportedModel(f"layer {repeated[0]} attends several times, and the cache has one place for each layer")
    if max(survey.layers) >= layers:
        raise UnsupportedModel(f"layer {max(survey.layers)} attends, and its config says that there are {layers}")
    return latent or KvRow(2, lcm(*survey.heads), max(survey.widths))


def fit_rows(query: Tensor, key: Tensor, value: Tensor, row: KvRow) -> tuple[Tensor, Tensor, Tensor] | None:
    """Fit a layer's [1, heads, T, width] to a cache of ``row``; None if they do not go into it."""
    heads = (key.shape[1], value.shape[1])
    if any(row.heads % each for each in heads) or query.shape[1] % row.heads:
        return None
    if max(key.shape[3], value.shape[3]) > row.width:
        return None
    more = (row.heads // each for each in heads)
    key, value = (_repeat(part, times) for part, times in zip((key, value), more, strict=True))
    query, key, value = (_widen(part, row.width) for part in (query, key, value))
    return query, key, value


def _repeat(part: Tensor, times: int) -> Tensor:
    return part if times == 1 else part.repeat_interleave(times, 1)


def _widen(part: Tensor, width: int) -> Tensor:
    return part if part.shape[3] == width else pad(part, (0, width - part.shape[3]))
